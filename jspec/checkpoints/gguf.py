"""A GGUF file -> ModelConfig, parameter tree and tokenizer metadata.

The header is read here, dequantisation is the `gguf` package's: its reader needs 9 s for the
header of a 262144-token vocabulary and can't say where a truncated file ends.
"""

from __future__ import annotations

import functools
import math
import pathlib
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from jspec.checkpoints.families import FAMILIES
from jspec.checkpoints.hf_config import model_config_from_gguf
from jspec.checkpoints.tensors import StoredTensor, WeightsError, as_it_is
from jspec.checkpoints.weights import TensorSource, build_params, model_leaves
from jspec.config import ModelConfig
from jspec.config.checks import check_int, first_bytes, shown
from jspec.model.params import Params, Path, Placer, param_shapes

T = TypeVar("T")
SUPPORTED_QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K",
                           "Q6_K")
_PLAIN_DTYPES = {"F32": np.float32, "F16": np.float16}
_ROWS_AT_ONCE = 8192  # dequantising makes several temporaries: bound them
_MAX_AXES, _MAX_ALIGNMENT = 8, 2**20
_ROPE_FREQS = "rope_freqs.weight"

_OUTER_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}

_SCALARS = {GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H",
            GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i",
            GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?", GGUFValueType.UINT64: "Q",
            GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d"}


class GGUFTensor(NamedTuple):
  kind: GGMLQuantizationType
  shape: tuple[int, ...]  # numpy order: the last axis is contiguous
  offset: int  # from the start of the file


class GGUFFile(NamedTuple):
  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, GGUFTensor]


class _Cursor:
  """Reads little-endian values off a buffer; running out of it is a WeightsError."""

  def __init__(self, path: pathlib.Path, buffer: np.ndarray):
    self.path, self.buffer, self.offset = path, buffer, 0

  def take(self, size: int) -> bytes:
    end = self.offset + size
    if end > len(self.buffer):
      raise WeightsError(f"{self.path} is truncated: its header goes beyond byte "
                         f"{len(self.buffer)}")
    chunk = self.buffer[self.offset:end].tobytes()
    self.offset = end
    return chunk

  def unpack(self, code: str) -> Any:
    return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

  def text(self) -> str:
    return self.take(self.unpack("Q")).decode("utf-8", errors="replace")

  def value(self, kind: GGUFValueType) -> Any:
    if kind == GGUFValueType.STRING:
      return self.text()
    if kind != GGUFValueType.ARRAY:
      return self.unpack(_SCALARS[kind])
    item, count = GGUFValueType(self.unpack("I")), self.unpack("Q")
    if item == GGUFValueType.ARRAY:
      raise ValueError("arrays of arrays are not supported")
    if item in _SCALARS:
      dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
      return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
    return [self.value(item) for _ in range(count)]


def read_gguf(path: str | pathlib.Path) -> GGUFFile:
  """The header of a GGUF file, every tensor checked to lie wholly inside the file."""
  path = pathlib.Path(path)
  if not path.is_file():
    raise WeightsError(f"{path}: no such file")
  size = path.stat().st_size
  if not first_bytes(path).startswith(b"GGUF") or size < 24:
    raise WeightsError(f"{path} is not a GGUF file")
  cursor = _Cursor(path, np.memmap(path, np.uint8, "r"))
  cursor.take(4)
  version = cursor.unpack("I")
  if version not in (2, 3):
    raise WeightsError(f"{path}: GGUF version {version} is not supported; supported: 2, 3 "
                       "(little-endian)")
  tensor_count, pair_count = cursor.unpack("Q"), cursor.unpack("Q")
  try:
    metadata = _once(path, "key", (
        (cursor.text(), cursor.value(GGUFValueType(cursor.unpack("I"))))
        for _ in range(pair_count)))
  except ValueError as error:
    raise error if isinstance(error, WeightsError) else WeightsError(
      f"{path}: the GGUF metadata is damaged: {error}") from None
  entries = _once(path, "tensor", (_tensor_entry(cursor) for _ in range(tensor_count)))
  alignment = check_int(f"{path}: general.alignment", metadata.get("general.alignment", 32), 1,
                        _MAX_ALIGNMENT)
  data = -(-cursor.offset // alignment) * alignment
  tensors = {}
  for name, (kind, shape, offset) in entries.items():
    tensors[name] = tensor = GGUFTensor(_known_kind(path, name, kind), shape, data + offset)
    block = GGML_QUANT_SIZES[tensor.kind][0]
    if not shape or shape[-1] % block:
      raise WeightsError(f"{path}: tensor {shown(name)} has shape {shape}, {tensor.kind.name} "
                         f"needs rows of a multiple of {block} numbers")
    if tensor.offset + _num_bytes(tensor) > size:
      raise WeightsError(f"{path} is truncated: tensor {shown(name)} ends at byte "
                         f"{tensor.offset + _num_bytes(tensor)}, the file at {size}")
  return GGUFFile(path, metadata, tensors)


def _once(path: pathlib.Path, what: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
  found: dict[str, T] = {}
  for name, value in pairs:
    if name in found:
      raise WeightsError(f"{path}: the {what} {name} is there twice")
    found[name] = value
  return found


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, tuple[int, ...], int]]:
  name, num_axes = cursor.text(), cursor.unpack("I")
  if num_axes > _MAX_AXES:
    raise WeightsError(f"{cursor.path}: tensor {shown(name)} has {num_axes} axes, at most "
                       f"{_MAX_AXES} are supported")
  shape = tuple(cursor.unpack("Q") for _ in range(num_axes))[::-1]
  return name, (cursor.unpack("I"), shape, cursor.unpack("Q"))


def _known_kind(path: pathlib.Path, name: str, kind: int) -> GGMLQuantizationType:
  known = {item.value: item.name for item in GGMLQuantizationType}
  if known.get(kind) not in SUPPORTED_QUANTISATIONS:
    raise WeightsError(f"{path}: tensor {shown(name)} is quantised as "
                       f"{known.get(kind, f'type {kind}')}; "
                       f"supported: {', '.join(SUPPORTED_QUANTISATIONS)}")
  return GGMLQuantizationType(kind)


def _num_bytes(tensor: GGUFTensor) -> int:
  block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
  return math.prod(tensor.shape) // block * block_bytes


def read_tensor(file: GGUFFile, name: str) -> np.ndarray:
  """One tensor, dequantised to float32."""
  tensor = file.tensors[name]
  if 0 in tensor.shape:
    return np.zeros(tensor.shape, np.float32)
  if tensor.kind.name in _PLAIN_DTYPES:
    dtype = np.dtype(_PLAIN_DTYPES[tensor.kind.name]).newbyteorder("<")
    return np.asarray(np.memmap(file.path, dtype, "r", tensor.offset, tensor.shape), np.float32)
  rows = math.prod(tensor.shape[:-1])
  raw = np.memmap(file.path, np.uint8, "r", tensor.offset, (rows, _num_bytes(tensor) // rows))
  flat = np.empty((rows, tensor.shape[-1]), np.float32)
  for begin in range(0, rows, _ROWS_AT_ONCE):
    part = slice(begin, begin + _ROWS_AT_ONCE)
    flat[part] = dequantize(np.asarray(raw[part]), tensor.kind)
  return flat.reshape(tensor.shape)


def gguf_config(file: GGUFFile) -> ModelConfig:
  """The ModelConfig of an opened GGUF file."""
  factors = read_tensor(file, _ROPE_FREQS) if _ROPE_FREQS in file.tensors else None
  return model_config_from_gguf(file.metadata, file.tensors.keys(), factors)


def gguf_names(config: ModelConfig) -> dict[Path, str]:
  """Leaf -> tensor name in a GGUF file."""
  names: dict[Path, str] = {}
  layer_names = FAMILIES[config.family].gguf_layer_names
  for path in param_shapes(config):
    ending = "bias" if path[-1] in ("b", "bias") else "weight"
    if path[0] == "layers":
      names[path] = f"blk.{path[1]}.{layer_names[str(path[2])]}.{ending}"
    else:
      names[path] = f"{_OUTER_NAMES[str(path[0])]}.{ending}"
  return names


def gguf_source(file: GGUFFile, config: ModelConfig) -> TensorSource:
  """A GGUF file as a TensorSource, q and k in the order that model/transformer.py rotates."""
  heads = {"q": config.num_heads, "k": config.num_kv_heads}
  permuted = FAMILIES[config.family].gguf_rotates_pairs

  def join(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    if not permuted or path[0] != "layers" or path[2] not in heads:
      return as_it_is
    return functools.partial(pairs_to_halves, num_heads=heads[str(path[2])])

  tensors = {name: StoredTensor(np.dtype(np.float32), tensor.shape,
                                functools.partial(read_tensor, file, name))
             for name, tensor in file.tensors.items()}
  return TensorSource(str(file.path), tensors, model_leaves(config, gguf_names(config), join),
                      lambda name: name == _ROPE_FREQS)


def pairs_to_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows of a q or k as llama.cpp has Llama's: rotated in adjacent pairs there, in halves by us."""
  pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def load_gguf(file: GGUFFile, dtype: str = "float32",
              progress: bool | None = None,
              placer: Placer | None = None) -> tuple[ModelConfig, Params]:
  """Config and parameter tree of an opened GGUF file. placer: see hub.load_model."""
  config = gguf_config(file)
  held, place = placer(config) if placer else (config, None)
  return held, build_params(gguf_source(file, config), config, dtype, progress, place)
