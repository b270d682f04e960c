"""Tensors on disk: what a leaf of a parameter tree is made of, and safetensors files.

A leaf names one or more stored tensors and a function that joins them, so that a format may keep
numbers and their scales, or the parts of a matrix, apart.
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

from jspec.config.checks import check_int, first_bytes, inside, parse_json, read_json, shown
from jspec.model.params import Path

T = TypeVar("T")

# The kinds of numbers that are read, by the names of safetensors.
KINDS = {kind: np.dtype(dtype) for kind, dtype in {
  "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
  "I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}.items()}
FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library


class WeightsError(ValueError):
  """A checkpoint that is damaged or does not fit its config; the message names the tensor."""


class StoredTensor(NamedTuple):
  """One tensor of a file, not yet read."""

  dtype: np.dtype
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]
  stored: np.dtype | None = None  # on disk, where that is another


def as_it_is(array: np.ndarray) -> np.ndarray:
  return array


class Part(NamedTuple):
  name: str  # of a stored tensor
  shape: tuple[int, ...]  # that it must have: matrices are (out, in)


class Leaf(NamedTuple):
  """A leaf of a parameter tree on disk."""

  parts: tuple[Part, ...]
  join: Callable[..., np.ndarray] = as_it_is  # the parts' arrays, in their order -> the leaf

  def read(self, tensors: Mapping[str, StoredTensor]) -> np.ndarray:
    return self.join(*(tensors[part.name].read() for part in self.parts))


def check_leaves(where: str, what: str, leaves: Mapping[Path, Leaf],
                 tensors: Mapping[str, StoredTensor], harmless: Callable[[str], bool]) -> None:
  """Refuses missing, misshapen, integer and unknown tensors by name.

  Args:
    what: the model or head is, for messages.
    harmless: whether a tensor may stay unused.
  """
  parts = [part for leaf in leaves.values() for part in leaf.parts]
  missing = list(dict.fromkeys(part.name for part in parts if part.name not in tensors))
  if missing:
    raise WeightsError(f"{where}: missing {some(missing)}")
  for name, shape in parts:
    if tensors[name].shape != shape:
      raise WeightsError(f"{where}: tensor {shown(name)} has shape {tensors[name].shape}, "
                         f"the config needs {shape}")
  for leaf in leaves.values():
    name = leaf.parts[0].name
    if len(leaf.parts) == 1 and tensors[name].dtype.kind in "iub":
      raise WeightsError(f"{where}: tensor {shown(name)} holds {tensors[name].dtype} numbers, "
                         "not floating-point ones")
  used = {part.name for part in parts}
  extra = [name for name in tensors if name not in used and not harmless(name)]
  if extra:
    raise WeightsError(f"{where}: {what} has no {some(extra)}")


def some(names: list[str]) -> str:
  rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return f"tensor {', '.join(map(shown, names[:3]))}{rest}"


def progress_bar(items: Collection[Any], label: str, progress: bool | None) -> Iterable[Any]:
  """`items` with a bar on stderr: if asked for, or by default on a terminal."""
  shown = sys.stderr.isatty() if progress is None else progress
  return tqdm.tqdm(items, desc=label, disable=not shown, file=sys.stderr, leave=False)


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
      raise WeightsError(f"{file}: missing {some(missing)}, which the index says it has")
    own = {name: tensor for name, tensor in tensors.items() if names is None or name in names}
    twice = sorted(joined.keys() & own.keys())
    if twice:
      raise WeightsError(f"{file}: {some(twice)} is in another file, too, and no index says which "
                         "one counts")
    joined.update(own)
  return joined


def read_safetensors(file: pathlib.Path, kinds: Collection[str] = tuple(KINDS),
                     ) -> dict[str, StoredTensor]:
  """The tensors of one file, each checked to be of those kinds and to lie wholly inside the file.

  They are views of the mapped file: pages are read when they are used.
  """
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
  return {name: _tensor(file, name, entry, 8 + length, size, kinds)
          for name, entry in header.items() if name != "__metadata__"}


def _tensor(file: pathlib.Path, name: str, entry: Any, start: int, size: int,
            kinds: Collection[str]) -> StoredTensor:
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
  if kind not in kinds:
    raise WeightsError(f"{file}: tensor {shown(name)} has dtype {kind}; supported: "
                       f"{', '.join(kinds)}")
  dtype, shape = KINDS[kind], tuple(shape)
  if end - begin != math.prod(shape) * dtype.itemsize:
    raise WeightsError(f"{file}: tensor {shown(name)} spans {end - begin} bytes, {kind} {shape} "
                       f"needs {math.prod(shape) * dtype.itemsize}")
  if start + end > size:
    raise WeightsError(f"{file} is truncated: tensor {shown(name)} ends at byte {start + end}, "
                       f"the file at {size}")

  def read() -> np.ndarray:
    if 0 in shape:
      return np.zeros(shape, dtype)
    return np.memmap(file, dtype, "r", start + begin, shape)

  return StoredTensor(dtype, shape, read)


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
