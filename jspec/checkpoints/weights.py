"""Checkpoint tensors -> the parameter tree of model/transformer.py, one tensor at a time.

A file format adds to `param_shapes` a name for each leaf and a way to read it (`TensorSource`);
`build_params` does the rest.
"""

from __future__ import annotations

import json
import math
import pathlib
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import tqdm

from jspec.checkpoints.families import FAMILIES
from jspec.config import DTYPES, ModelConfig
from jspec.config.checks import check_int, first_bytes, inside, parse_json, read_json, shown
from jspec.model.params import Params, Path, Place, insert, on_device, param_shapes

T = TypeVar("T")

_SAFETENSORS_DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32),
                       "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
_HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".attn.masked_bias")


class WeightsError(ValueError):
  """A checkpoint that is damaged or does not fit its config; the message names the tensor."""


class TensorSource(NamedTuple):
  """A checkpoint on disk; matrices are (out, in) in every format we read."""

  where: str  # for messages
  names: Mapping[Path, str]  # leaf -> tensor name
  shapes: Mapping[str, tuple[int, ...]]  # every tensor in the checkpoint
  read: Callable[[Path, str], np.ndarray]  # in the shape that checkpoint_shape gives
  harmless: Callable[[str], bool]  # may this tensor stay unused?


def checkpoint_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  """The shape of every leaf on disk: matrices are (out, in), positions may begin later."""
  shapes, offset = param_shapes(config), FAMILIES[config.family].position_offset
  for path, shape in shapes.items():
    if path[-1] == "w":
      shapes[path] = shape[::-1]
    elif path == ("positions",):
      shapes[path] = (shape[0] + offset, shape[1])
  return shapes


def hf_names(config: ModelConfig, prefix: str | None = None) -> dict[Path, str]:
  """Leaf -> tensor name in a Hugging Face checkpoint of this family."""
  family = FAMILIES[config.family]
  prefix = family.prefixes[0] if prefix is None else prefix
  names: dict[Path, str] = {}
  for path in param_shapes(config):
    ending = "bias" if path[-1] in ("b", "bias") else "weight"
    if path[0] == "layers":
      names[path] = f"{prefix}layers.{path[1]}.{family.layer_names[str(path[2])]}.{ending}"
    elif path[0] == "head":
      names[path] = "lm_head.weight"
    else:
      names[path] = f"{prefix}{family.outer_names[str(path[0])]}.{ending}"
  return names


def hf_norm_offset(config: ModelConfig, path: Path) -> float:
  """What to add to a stored norm weight, for families that keep w of the factor 1 + w."""
  return FAMILIES[config.family].norm_offset if path[-1] == "scale" else 0.0


def load_params(source: str | pathlib.Path | Iterable[str | pathlib.Path], config: ModelConfig,
                dtype: str = "float32", progress: bool | None = None,
                place: Place | None = None) -> Params:
  """The parameter tree from safetensors: a folder, a file, or the list of shards.

  Args:
    progress: show a progress bar on stderr; None means only on a terminal.
    place: where each parameter goes; the default device if None.
  """
  return build_params(safetensors_source(source, config), config, dtype, progress, place)


def build_params(source: TensorSource, config: ModelConfig, dtype: str = "float32",
                 progress: bool | None = None, place: Place | None = None) -> Params:
  """Checks every tensor against the config, then reads them one by one."""
  if dtype not in DTYPES:
    raise ValueError(f"{dtype=} is not one of {', '.join(DTYPES)}")
  check_tensors(source, config)
  params: Params = {"layers": [{} for _ in range(config.num_layers)]}
  bar = progress_bar(source.names.items(), "loading weights", progress)
  for path, name in bar:
    array = source.read(path, name)
    if path == ("positions",):
      array = array[FAMILIES[config.family].position_offset:]
    if path[-1] == "w":
      array = array.T
    is_norm = len(path) > 1 and str(path[-2]).endswith("norm")
    # Always a copy of our own: JAX must not alias a mapped file that may change under it.
    array = np.array(array, dtype=_numpy_dtype("float32" if is_norm else dtype), order="C")
    insert(params, path, (place or on_device)(path, array))
  return params


def _numpy_dtype(dtype: str) -> np.dtype:
  return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def progress_bar(items: Collection[Any], label: str, progress: bool | None) -> Iterable[Any]:
  """`items` with a bar on stderr: if asked for, or by default on a terminal."""
  shown = sys.stderr.isatty() if progress is None else progress
  return tqdm.tqdm(items, desc=label, disable=not shown, file=sys.stderr, leave=False)


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
  """Refuses missing, unknown and misshapen tensors by name."""
  needed = {source.names[path]: shape for path, shape in checkpoint_shapes(config).items()}
  missing = [name for name in needed if name not in source.shapes]
  if missing:
    raise WeightsError(f"{source.where}: missing {_some(missing)}")
  for name, shape in needed.items():
    if source.shapes[name] != shape:
      raise WeightsError(f"{source.where}: tensor {shown(name)} has shape {source.shapes[name]}, "
                         f"the config needs {shape}")
  extra = [name for name in source.shapes if name not in needed and not source.harmless(name)]
  if extra:
    raise WeightsError(f"{source.where}: a {config.family} model with this config has no "
                       f"{_some(extra)}")


def _some(names: list[str]) -> str:
  rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return f"tensor {', '.join(map(shown, names[:3]))}{rest}"


def safetensors_source(source: str | pathlib.Path | Iterable[str | pathlib.Path],
                       config: ModelConfig) -> TensorSource:
  """A Hugging Face checkpoint as a TensorSource; reads headers only."""
  if isinstance(source, (str, pathlib.Path)):
    where, shards = str(source), safetensors_shards(pathlib.Path(source))
  else:
    shards = [Shard(pathlib.Path(file)) for file in source]
    where = str(shards[0].file.parent) if shards else "no files given"
  tensors = join_shards(shards, _read_header)
  family = FAMILIES[config.family]
  embed = f"{family.outer_names['embed']}.weight"
  prefix = next((p for p in family.prefixes if p + embed in tensors), family.prefixes[0])
  names = hf_names(config, prefix)
  head = prefix.removesuffix("model.") + "lm_head.weight"
  if ("head", "w") in names and "lm_head.weight" not in tensors and head in tensors:
    names["head", "w"] = head

  def read(path: Path, name: str) -> np.ndarray:
    array = tensors[name].read()
    offset = hf_norm_offset(config, path)
    return array.astype(np.float32) + np.float32(offset) if offset else array

  def harmless(name: str) -> bool:
    tied_head = config.tie_embeddings and name in ("lm_head.weight", head)
    return tied_head or name.startswith(family.harmless) or name.endswith(_HARMLESS_ENDINGS)

  return TensorSource(where, names, {name: t.shape for name, t in tensors.items()}, read, harmless)


class Shard(NamedTuple):
  """A file of a checkpoint, and which of its tensors count: None, all of them."""

  file: pathlib.Path
  names: frozenset[str] | None = None


def safetensors_shards(path: pathlib.Path) -> list[Shard]:
  """The files of a checkpoint, by its index where there is one."""
  if path.is_file():
    return [Shard(path)]
  index = path / "model.safetensors.index.json"
  if index.is_file():
    return indexed_shards(index)
  files = sorted(path.glob("*.safetensors"))
  if not files:
    raise WeightsError(f"{path}: no .safetensors file; jspec reads safetensors and GGUF only")
  return [Shard(file) for file in files]


def indexed_shards(index: pathlib.Path) -> list[Shard]:
  """What an index says: which file has each tensor. A file that is absent is an error."""
  try:
    weight_map = read_json(index)["weight_map"]
    where = f"{index}: weight_map"
    if not isinstance(weight_map, dict):
      raise ValueError(f"{where} must be an object")
    files: dict[pathlib.Path, set[str]] = {}
    for name, file in weight_map.items():
      files.setdefault(inside(index.parent, file, where), set()).add(name)
  except KeyError:
    raise WeightsError(f"{index} is damaged: it has no weight_map") from None
  except ValueError as error:
    raise WeightsError(str(error)) from None
  absent = sorted(file.name for file in files if not file.is_file())
  if absent:
    raise WeightsError(f"{index.parent}: file {', '.join(absent)} is listed in {index.name} but "
                       "missing")
  return [Shard(file, frozenset(names)) for file, names in sorted(files.items())]


def join_shards(shards: Iterable[Shard],
                read: Callable[[pathlib.Path], Mapping[str, T]]) -> dict[str, T]:
  """The tensors of all shards. The index decides: another file's copy of a tensor is let be."""
  joined: dict[str, T] = {}
  for file, names in shards:
    tensors = read(file)
    missing = sorted(set() if names is None else names - tensors.keys())
    if missing:
      raise WeightsError(f"{file}: missing {_some(missing)}, which the index says it has")
    own = {name: tensor for name, tensor in tensors.items() if names is None or name in names}
    twice = sorted(joined.keys() & own.keys())
    if twice:
      raise WeightsError(f"{file}: {_some(twice)} is in another file, too, and no index says which "
                         "one counts")
    joined.update(own)
  return joined


class _Tensor(NamedTuple):
  file: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int

  def read(self) -> np.ndarray:
    """The tensor as a view of the mapped file: pages are read when they are used."""
    if 0 in self.shape:
      return np.zeros(self.shape, self.dtype)
    return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def _read_header(file: pathlib.Path) -> dict[str, _Tensor]:
  """The tensors of one safetensors file, each checked to lie wholly inside the file."""
  if not file.is_file():
    raise WeightsError(f"{file}: no such file")
  size = file.stat().st_size
  length = int.from_bytes(first_bytes(file)[:8], "little")
  if size < 8 or length > size - 8:
    raise WeightsError(f"{file} is truncated or not safetensors: {size} bytes cannot hold "
                       f"its header of {length}")
  if length > _MAX_HEADER:
    raise WeightsError(f"{file} is not safetensors: its header would have {length} bytes, "
                       f"{_MAX_HEADER} are the most")
  with open(file, "rb") as stream:
    stream.seek(8)
    try:
      header = parse_json(stream.read(length), unique=True)
    except ValueError as error:
      raise WeightsError(f"{file}: the safetensors header is damaged: {error}") from None
  if not isinstance(header, dict):
    raise WeightsError(f"{file}: the safetensors header is damaged: not a JSON object")
  return {name: _tensor(file, name, entry, 8 + length, size)
          for name, entry in header.items() if name != "__metadata__"}


def _tensor(file: pathlib.Path, name: str, entry: Any, start: int, size: int) -> _Tensor:
  """One entry of a header, as a tensor that lies wholly inside the file; start: of its data."""
  try:
    kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or not isinstance(shape, list):
      raise TypeError
    for number in (*shape, begin, end):
      check_int("number", number, 0)
  except (KeyError, TypeError, ValueError):
    raise WeightsError(f"{file}: the safetensors header is damaged: tensor {shown(name)} is "
                       f"{reprlib.repr(entry)}, not a dtype, a shape and two data_offsets"
                       ) from None
  if kind not in _SAFETENSORS_DTYPES:
    raise WeightsError(f"{file}: tensor {shown(name)} has dtype {kind}; supported: "
                       f"{', '.join(_SAFETENSORS_DTYPES)}")
  dtype, shape = _SAFETENSORS_DTYPES[kind], tuple(shape)
  if end - begin != math.prod(shape) * dtype.itemsize:
    raise WeightsError(f"{file}: tensor {shown(name)} spans {end - begin} bytes, {kind} {shape} "
                       f"needs {math.prod(shape) * dtype.itemsize}")
  if start + end > size:
    raise WeightsError(f"{file} is truncated: tensor {shown(name)} ends at byte {start + end}, "
                       f"the file at {size}")
  return _Tensor(file, dtype, shape, start + begin)


def write_safetensors(file: pathlib.Path, shapes: Mapping[str, tuple[int, ...]],
                      read: Callable[[str], np.ndarray], progress: bool | None = None) -> None:
  """Writes float32 tensors one by one, so that a conversion never holds a whole model."""
  header, offset = {}, 0
  for name, shape in shapes.items():
    end = offset + 4 * math.prod(shape)
    header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
  text += b" " * (-(8 + len(text)) % 64)  # tensors start aligned
  with open(file, "wb") as stream:
    stream.write(len(text).to_bytes(8, "little") + text)
    for name in progress_bar(list(shapes), "converting weights", progress):
      array = np.ascontiguousarray(read(name), np.float32)
      if array.shape != shapes[name]:
        raise WeightsError(f"tensor {shown(name)} has shape {array.shape}, not {shapes[name]}")
      stream.write(array.data)
