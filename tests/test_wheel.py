"""The wheel, installed in an environment that knows nothing of this checkout, does it all."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile

import jax
import pytest
from tiny_llm import tiny_model

import jspec
from jspec.training.export.write import export

ROOT = pathlib.Path(__file__).parent.parent
BUILT = (".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site")  # and .git
VERSIONED = f"jspec_jax-{jspec.__version__}"
TOP = {"jspec", f"{VERSIONED}.dist-info"}
DATA = ("jspec/py.typed", "jspec/compile_check/baseline.json", "jspec/serving/rpc/jspec.proto",
        "jspec/checkpoints/shipped_heads/smollm2-135m-instruct-eagle3/model.safetensors",
        "jspec/serving/deploy/kubernetes/base/kustomization.yaml",
        "jspec/training/configs/demo.toml")


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
  """What a command prints; fails with what it says. It keeps programs where the tests do."""
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  kept = jax.config.values["jax_compilation_cache_dir"]
  environment |= {"JAX_COMPILATION_CACHE_DIR": str(kept)} if kept else {}
  done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True,
                        env=environment)
  assert done.returncode == 0, done.stderr
  return done.stdout


def build(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """The wheel of a checkout or an sdist, by what is installed here."""
  run(sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation",
      "--wheel-dir", folder, source, cwd=folder)
  (wheel,) = folder.glob("*.whl")
  return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
  """A copy, since a build leaves things behind; what is linked there is linked here."""
  copy = tmp_path_factory.mktemp("source") / "checkout"
  return shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*BUILT))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> pathlib.Path:
  return build(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
  """Of an environment with the wheel, and with what it needs from the environment of the tests.

  That one's own .pth files, an editable jspec's among them, are not read.
  """
  folder = tmp_path_factory.mktemp("environment")
  venv.create(folder)
  paths = {"base": str(folder), "platbase": str(folder)}
  found = pathlib.Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
  run(sys.executable, "-m", "pip", "--python", found, "install", "--no-index", "--no-deps", wheel,
      cwd=folder)
  needed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
  own = pathlib.Path(sysconfig.get_path("purelib", "venv", paths))
  (own / "needed.pth").write_text("\n".join(needed) + "\n")
  return found


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> str:
  folder, model = tmp_path_factory.mktemp("model"), tiny_model()
  model.tokenizer.save(folder)
  export(folder / "tiny", model.config, model.params, model.config, model.name, dtype="float32",
         tokenizer=folder)
  return str(folder / "tiny")


def contents(wheel: pathlib.Path) -> dict[str, bytes]:
  with zipfile.ZipFile(wheel) as archive:
    return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_all_of_jspec_with_what_lies_beside_it_and_nothing_else(checkout, wheel):
  found = contents(wheel)
  assert wheel.name == f"{VERSIONED}-py3-none-any.whl"
  assert {name.partition("/")[0] for name in found} == TOP
  expected = set()
  for folder, inside in (("jspec", "jspec"), ("serving", "jspec/serving"),
                         ("training", "jspec/training")):
    top = checkout / folder
    expected |= {f"{inside}/{path.relative_to(top).as_posix()}" for path in top.rglob("*")
                 if path.is_file()}
  assert set(DATA) < expected and len(expected) > 200
  assert {name for name in found if name.startswith("jspec/")} == expected


def test_a_wheel_of_the_sdist_has_the_same_files(checkout, wheel, tmp_path):
  run(sys.executable, "-c",
      f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})",
      cwd=checkout)
  again = contents(build(tmp_path / f"{VERSIONED}.tar.gz", tmp_path))
  assert again == contents(wheel)


def test_it_is_the_wheel_that_is_imported(python, tmp_path):
  names = "jspec", "jspec.serving", "jspec.training"
  said = run(python, "-c", "import importlib\n"
             f"for name in {names}: print(importlib.import_module(name).__file__)", cwd=tmp_path)
  assert len(said.split()) == 3
  assert all(pathlib.Path(file).is_relative_to(python.parent.parent) for file in said.split())
  for name in ("serving", "training"):  # are nobody's at the top
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec"
               f"({name!r}))", cwd=tmp_path) == "None\n"
  assert run(python.parent / "jspec", "--version", cwd=tmp_path) == f"jspec {jspec.__version__}\n"


def test_it_lists_models_and_an_embedded_one_writes(python, tmp_path):
  assert "smollm2-135m-instruct" in run(python.parent / "jspec", "models", cwd=tmp_path)
  said = run(python.parent / "jspec", "generate", "--raw", "One, two, three,", "--temperature", "0",
             "--max-tokens", "4", "--max-model-len", "64", "--no-speculation", cwd=tmp_path)
  assert "four" in said


def test_it_serves(python, tiny_folder, tmp_path):
  code = """
    import json, sys, urllib.request
    from jspec.serving.process import ServerProcess

    flags = ["--model", sys.argv[1], "--port", "0", "--grpc-port", "0", "--max-num-seqs", "2",
             "--max-model-len", "64", "--no-speculation"]
    with ServerProcess(flags) as server:
      body = {"model": "tiny", "prompt": "the", "max_tokens": 3, "ignore_eos": True}
      asked = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
      print(urllib.request.urlopen(asked, timeout=60).read().decode())
      assert server.stop() == 0
    """
  said = run(python, "-c", textwrap.dedent(code), tiny_folder, cwd=tmp_path)
  assert json.loads(said.splitlines()[0])["usage"]["completion_tokens"] == 3


def test_it_trains(python, tiny_folder, tmp_path):
  rows = [{"prompt": f"the {a}", "response": f"an {a} and the {a}."} for a in "abcdefgh"]
  (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
  (tmp_path / "run.toml").write_text(textwrap.dedent(f"""
    target = {json.dumps(tiny_folder)}
    method = "medusa"
    output = "run"
    steps = 2
    options = {{num_heads = 1}}
    data = {{conversations = ["texts.jsonl"], validation = 0.0, max_length = 32, rows = 2}}
    """))
  run(python.parent / "jspec", "train", "--config", "run.toml", cwd=tmp_path)
  assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
  assert (tmp_path / "run" / "head" / "config.json").is_file()
