"""A drafting head on disk: its config.json, its tensors' names and shapes, and what it is."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.hub import read_config
from jspec.checkpoints.tensors import (
  Shard,
  StoredTensor,
  WeightsError,
  indexed_shards,
  join_shards,
  read_safetensors,
  safetensors_shards,
)
from jspec.checkpoints.torch_file import read_torch_file

METHODS = ("medusa", "mlp_speculator", "eagle", "eagle3")
SCALE_ENDING = "_scale"  # of an int8 tensor i8[out, in]: f32[out], what each row is multiplied by

# Names in config.json, as they are spelt in speculators_model_type, model_type and architectures
# (lower case, without what every architecture ends in).
_BY_CONFIG = {
  "medusa": "medusa", "mlp_speculator": "mlp_speculator", "mlpspeculator": "mlp_speculator",
  "eagle": "eagle", "eagle3": "eagle3", "llamaforcausallmeagle3": "eagle3",
  "eagle3llamaforcausallm": "eagle3",
  "dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark", "qwen3dspark": "dspark",
  "domino": "domino", "peagle": "peagle", "mtp": "mtp", "hydra": "hydra",
}
_ENDINGS = re.compile("(draftmodel|speculator|pretrainedmodel|model)$")
# Tensor names that only one method has, the most telling first.
_BY_TENSOR = tuple((method, re.compile(pattern)) for method, pattern in (
  ("mtp", r"mtp\.|mtp_layers\.|.*\.(eh_proj|enorm|hnorm)\."),
  ("dflash2", r"candidate_selector\."), ("dspark", r"markov_head\."), ("domino", r"prefix_gru\."),
  ("peagle", r"mask_hidden$"), ("dflash", r"hidden_norm\.weight$"),
  ("hydra", r"hydra|.*\.res_connection\."),
  ("eagle3", r"midlayer\.|layers\.0\.hidden_norm\."), ("eagle", r"fc\.weight$"),
  ("mlp_speculator", r"(speculator\.)?(emb|proj|ln)\.\d+\.weight$"),
  ("medusa", r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$")))


class HeadFiles(NamedTuple):
  """What is read of a head before its weights are."""

  where: str  # for messages
  config: Mapping[str, Any]  # config.json; empty where there is none
  tensors: Mapping[str, StoredTensor]


def read_head_files(path: pathlib.Path) -> HeadFiles:
  """The headers of a head's folder, or of one file and the config.json beside it."""
  folder = path if path.is_dir() else path.parent
  config = read_config(folder) if (folder / "config.json").exists() else {}
  tensors = join_shards(_shards(path), _read_tensors)
  return HeadFiles(str(path), config, join_scales(str(path), tensors))


def join_scales(where: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
  """Every int8 tensor that has its rows' scales beside it, as the float32 numbers it stands for."""
  joined = dict(tensors)
  for name, rows in tensors.items():
    scale = tensors.get(name + SCALE_ENDING)
    if scale is None or rows.dtype != np.int8:
      continue
    if scale.dtype != np.float32 or scale.shape != rows.shape[:1]:
      raise WeightsError(f"{where}: tensor {name}{SCALE_ENDING} has shape {scale.shape} and dtype "
                         f"{scale.dtype}, {name} needs {rows.shape[:1]} and float32")
    del joined[name + SCALE_ENDING]
    joined[name] = StoredTensor(np.dtype(np.float32), rows.shape, _product(rows, scale), rows.dtype)
  return joined


def _product(rows: StoredTensor, scale: StoredTensor) -> Callable[[], np.ndarray]:
  def read() -> np.ndarray:
    factor = np.asarray(scale.read()).reshape(-1, *(1,) * (len(rows.shape) - 1))
    return np.asarray(rows.read()).astype(np.float32) * factor
  return read


def _read_tensors(file: pathlib.Path) -> dict[str, StoredTensor]:
  return read_safetensors(file) if file.suffix == ".safetensors" else read_torch_file(file)


def _shards(path: pathlib.Path) -> list[Shard]:
  """Safetensors before torch files; the heads' own file before the model they were trained with."""
  if path.is_file():
    if path.suffix not in (".safetensors", ".bin", ".pt"):
      raise WeightsError(f"{path} is not a .safetensors, .bin or .pt file")
    return [Shard(path)]
  own = [path / f"medusa_lm_head{suffix}" for suffix in (".safetensors", ".pt")]
  own = [file for file in own if file.is_file()]
  if own:
    return [Shard(own[0])]
  if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
    return safetensors_shards(path)
  index = path / "pytorch_model.bin.index.json"
  if index.is_file():
    return indexed_shards(index)
  files = sorted(path.glob("pytorch_model*.bin"))
  if files:
    return [Shard(file) for file in files]
  files = sorted(path.glob("*.pt"))
  if len(files) == 1:
    return [Shard(files[0])]
  what = f"{len(files)} .pt files: name one of them" if files else (
    "no .safetensors, pytorch_model.bin or .pt file")
  raise WeightsError(f"{path} has {what}")


def kind_of_head(files: HeadFiles) -> str | None:
  """Which method's head this is, among them some that jspec doesn't run; None: no head at all."""
  by_config, by_tensor = _by_config(files.config), _by_tensor(files.tensors)
  for kind in (by_config, by_tensor):
    if kind is not None and kind not in METHODS:
      return kind
  # EAGLE-1's tensors do not tell it from others, EAGLE-3's do.
  return "eagle3" if by_tensor == "eagle3" else by_config or by_tensor


def _by_config(config: Mapping[str, Any]) -> str | None:
  speculators = config.get("speculators_model_type")
  if speculators is not None:
    kind = _BY_CONFIG.get(str(speculators))
    return f"speculators {speculators}" if kind in (None, "eagle", "medusa") else kind
  architectures = config.get("architectures")
  for name in (config.get("model_type"), *(
      architectures if isinstance(architectures, list) else ())):
    text = str(name).lower()
    kind = _BY_CONFIG.get(text) or _BY_CONFIG.get(_ENDINGS.sub("", text))
    if kind is not None:
      return kind
  if "dflash_config" in config:
    return "dflash"
  if "hydra_num_heads" in config:
    return "hydra"
  return "eagle3" if "draft_vocab_size" in config or "eagle_config" in config else None


def _by_tensor(names: Collection[str]) -> str | None:
  bare = [name.removeprefix("model.") for name in names]
  return next((method for method, pattern in _BY_TENSOR
               if any(pattern.match(name) for name in bare)), None)
