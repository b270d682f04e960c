"""What a newcomer meets first, on whichever system."""

from __future__ import annotations

import asyncio
import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from unittest import mock

import huggingface_hub
import jax
import pytest

from jspec.bench import report
from jspec.checkpoints import hub
from jspec.cli import endings
from jspec.engine import placement
from jspec.serving import server

ROOT = pathlib.Path(__file__).parents[2]
# Windows has none of these.
POSIX_MODULES = ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "readline", "syslog")
POSIX_NAMES = {
  "os": ("getloadavg", "sched_getaffinity", "geteuid", "getuid", "getgid", "fork", "setsid", "nice",
         "killpg", "getpgid", "uname", "sysconf", "statvfs", "chown", "mkfifo", "O_DIRECTORY"),
  "signal": ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGCHLD",
             "alarm", "setitimer", "pthread_sigmask"),
  "socket": ("SO_REUSEPORT", "AF_UNIX", "socketpair", "send_fds"),
}
# All modules are imported twice: at first with what they import from elsewhere, which is not
# ours to judge, then themselves alone, without what is not everywhere.
IMPORTS = textwrap.dedent("""
    import importlib, pathlib, sys
    modules, names = {modules!r}, {names!r}
    ours = [".".join(path.with_suffix("").parts).removesuffix(".__init__")
            for folder in ("jspec", "serving", "training")
            for path in sorted(pathlib.Path(folder).rglob("*.py")) if path.stem != "__main__"
            and "configs" not in path.parts]
    for name in ours:
      importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in
                 ("jspec", "serving", "training") and not name.endswith("_pb2")]:
      del sys.modules[name]
    for name in modules:
      sys.modules[name] = None
    for module, attributes in names.items():
      for attribute in attributes:
        vars(importlib.import_module(module)).pop(attribute, None)
    for name in ours:
      importlib.import_module(name)
    print(len(ours))
""")


def test_all_modules_can_be_imported_without_what_only_posix_has():
  done = subprocess.run(
      [sys.executable, "-c", IMPORTS.format(modules=POSIX_MODULES, names=POSIX_NAMES)], cwd=ROOT,
      capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 100


def test_no_module_uses_what_only_posix_has_unasked():
  """getattr with a default, or an import where it is caught, is how to ask."""
  uses = re.compile("|".join(rf"\b{module}\.(?:{'|'.join(names)})\b"
                             for module, names in POSIX_NAMES.items()))
  found = [f"{path}: {hit.group()}" for folder in ("jspec", "serving", "training")
           for path in sorted((ROOT / folder).rglob("*.py"))
           for hit in uses.finditer(path.read_text(encoding="utf-8"))]
  assert not found


def test_a_benchmark_does_without_load_and_memory_where_the_system_does_not_tell(monkeypatch):
  assert report.peak_memory_mib() > 1 and report.environment(["jspec"])["machine"]["load_average"]
  monkeypatch.delattr(os, "getloadavg")
  monkeypatch.setitem(sys.modules, "resource", None)
  assert report.peak_memory_mib() is None
  assert report.environment(["jspec"])["machine"]["load_average"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_hears_signals_where_asyncio_takes_none(number):
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

  async def main():
    def refuse(*_):
      raise NotImplementedError

    asyncio.get_running_loop().add_signal_handler = refuse
    stop = server.on_signal()
    assert not stop.is_set()
    signal.raise_signal(number)
    await asyncio.wait_for(stop.wait(), 30)

  try:
    asyncio.run(main())
  finally:
    for n, handler in before.items():
      signal.signal(n, handler)


def test_nobody_is_told_to_install_another_project():
  """PyPI's jspec is not this one, and a jspec-jax there would not be ours either."""
  kinds = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".tf", "Makefile", "Dockerfile")
  files = [path for folder in ("jspec", "serving", "training", "scripts", "docs")
           for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
  files = [path for path in files if path.is_file() and path.name.endswith(kinds)]
  wrong = re.compile(r"\binstall\s+(?:-\S+\s+)*[\\\"']*jspec(?:-jax)?(?![\w/-])")
  for text in ('pip install "jspec[serve]"', "uv pip install -U jspec\n", "pip install jspec==1",
               "pip install 'jspec-jax[train]'"):
    assert wrong.search(text)
  assert not wrong.search("pip install '.[serve]'")
  assert not wrong.search("pip install dist/jspec_jax-0.1.0-py3-none-any.whl")
  assert len(files) > 100
  assert not [f"{path}: {hit.group()}" for path in files
              for hit in wrong.finditer(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("words", [
  ("jspec", "generate", "hi"), ("jspec", "train", "--config", "training/configs/demo.toml")])
def test_ctrl_c_while_it_starts_is_one_sentence_and_130(words, tmp_path):
  """Here while jax is imported, which a file in its place makes take as long as it likes."""
  (tmp_path / "jax.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
  process = subprocess.Popen(
      [sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
  assert process.stdout.readline() == "importing\n"
  process.send_signal(signal.SIGINT)
  _, told = process.communicate(timeout=60)
  lines = [line for line in told.splitlines() if line and not line.startswith("[loading")]
  assert process.returncode == 130 and lines == ["jspec: interrupted"]


def test_the_installed_command_is_the_one_that_catches_ctrl_c():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  assert project["scripts"] == {"jspec": "jspec.__main__:main"}


def test_ctrl_c_raises_again_once_all_is_imported():
  before = signal.getsignal(signal.SIGINT)
  with endings.importing():
    assert signal.getsignal(signal.SIGINT) is not before
  assert signal.getsignal(signal.SIGINT) is before
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell's background
  try:
    with endings.importing():
      assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error, code, told", [
  (ValueError("a\nb"), 2, "it: error: a b\n"), (KeyboardInterrupt(), 130, "\nit: stopped\n"),
  (OSError(28, "No space left on device", "/x"), 2, "it: error: /x: No space left on device\n"),
  (BrokenPipeError(), 141, "")])
def test_what_a_user_can_bring_about_is_one_sentence_and_a_code(capfd, error, code, told):
  def run():
    raise error

  kept = os.dup(1)
  try:
    assert endings.ended("it", run, "stopped") == code
  finally:
    os.dup2(kept, 1)
    os.close(kept)
  assert capfd.readouterr().err == told


def test_a_help_that_nobody_reads_to_its_end_is_no_fault():
  process = subprocess.Popen([sys.executable, "-m", "jspec", "serve", "--help"], cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  process.stdout.close()
  # argparse itself passes over what it cannot write.
  assert process.wait(timeout=60) in (0, 141) and process.stderr.read() == b""
  process.stderr.close()


def test_caches_that_may_not_be_written_to_are_one_sentence(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  blocked = tmp_path / "file"  # where a folder should be: also for root, who may write anywhere
  before = jax.config.values["jax_compilation_cache_dir"]
  try:
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.warns(UserWarning, match="can't be kept in .*Not a directory.*compiles anew"):
      placement.use_compilation_cache(blocked / "compiled")
    assert jax.config.values["jax_compilation_cache_dir"] is None
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  with pytest.raises(ValueError, match="can't be stored in .*/file: .*File exists"):
    hub.resolve("smollm2-135m-instruct", blocked)
  failed = OSError(errno.ENOSPC, "No space left on device", "/cache/x")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=failed))
  with pytest.raises(ValueError, match=r"'org/model' can't be stored in the Hugging Face cache "
                     r"\(/cache/x\): No space left on device$"):
    hub.resolve("org/model")
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setattr(pathlib.Path, "expanduser", mock.Mock(side_effect=RuntimeError))
  with pytest.raises(ValueError, match="there is no home folder .*--cache-dir"):
    hub.cache_folder(None)
