"""Tensors of a file that torch.save wrote, read without torch and without running its pickle.

The format since torch 1.6: a zip archive, nothing compressed, with a pickle (data.pkl) of the
object and one entry per storage (data/<key>). The pickle names storages by persistent ids.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.tensors import KINDS, StoredTensor, WeightsError
from jspec.config.checks import check_int, first_bytes

_STORAGES = {"FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16",
             "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32",
             "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL"}  # kinds in KINDS
_MAX_AXES = 8
MAX_PICKLE = 64 * 2**20  # bytes
_LOCAL_HEADER = 30  # bytes before the name in a zip entry, the lengths of name and extra last
_LEGACY_MAGIC, _LEGACY_MAGIC_AT = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", 2  # a pickled number
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257


class _Storage(NamedTuple):
  dtype: np.dtype
  key: str


def read_torch_file(file: pathlib.Path) -> dict[str, StoredTensor]:
  """The tensors of a state dict, by name; views of the mapped file, read when they are used."""
  if not file.is_file():
    raise WeightsError(f"{file}: no such file")
  first_bytes(file)
  if not zipfile.is_zipfile(file):
    raise WeightsError(_not_a_zip(file))
  try:
    with zipfile.ZipFile(file) as archive:
      entries = {info.filename: info for info in archive.infolist()}
      if len(entries) < len(archive.infolist()):
        raise WeightsError(f"{file} is damaged: it has an entry twice")
      pickles = [name for name in entries if name.split("/")[1:] == ["data.pkl"]]
      if len(pickles) != 1:
        raise WeightsError(f"{file} is a zip archive, but torch.save's have a data.pkl")
      root = pickles[0].removesuffix("data.pkl")
      order = _whole(file, archive, root + "byteorder") if root + "byteorder" in entries else b""
      if order not in (b"", b"little"):
        raise WeightsError(f"{file} was written on a big-endian machine, which is not supported")
      content = _whole(file, archive, pickles[0])
  except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
    raise WeightsError(f"{file} is damaged: {error}") from None
  _check_opcodes(file, content)
  return _Unpickler(file, content, root, entries).state_dict()


def _whole(file: pathlib.Path, archive: zipfile.ZipFile, name: str) -> bytes:
  """An entry that is read as a whole: as torch.save writes it, it cannot grow while it is read."""
  entry = archive.getinfo(name)
  if entry.compress_type != zipfile.ZIP_STORED:
    raise WeightsError(f"{file}: its {name} is compressed, which torch.save never does")
  if entry.file_size > MAX_PICKLE:
    raise WeightsError(f"{file}: its {name} has {entry.file_size} bytes, for names and shapes "
                       f"{MAX_PICKLE} are the most that is read")
  return archive.read(name)


def _check_opcodes(file: pathlib.Path, content: bytes) -> None:
  """Refuses numbers in a pickle that make the unpickler reserve memory for what is not there."""
  try:
    for opcode, argument, position in pickletools.genops(content):
      # The memo is an array as long as the largest index: an index per byte read is plenty.
      if "PUT" in opcode.name and int(argument or 0) > (position or 0):
        raise WeightsError(f"{file}: its pickle is damaged: memo {argument} at byte {position}")
  except WeightsError:
    raise
  except Exception as error:  # a damaged pickle raises nearly anything
    raise WeightsError(f"{file}: its pickle is damaged: {error}") from None


def _not_a_zip(file: pathlib.Path) -> str:
  with open(file, "rb") as stream:
    start = stream.read(_TAR_MAGIC_AT + len(_TAR_MAGIC))
  if start[_LEGACY_MAGIC_AT:].startswith(_LEGACY_MAGIC) or start[_TAR_MAGIC_AT:] == _TAR_MAGIC:
    return (f"{file} is in the format of torch before 1.6, which jspec doesn't read: load it with "
            "torch and save it again, best as safetensors")
  return f"{file} is truncated or was not written by torch.save"


class _Unpickler(pickle.Unpickler):
  """Knows what a dict of tensors is made of, and refuses every other name."""

  def __init__(self, file: pathlib.Path, content: bytes, root: str,
               entries: dict[str, zipfile.ZipInfo]):
    super().__init__(io.BytesIO(content))
    self.size = file.stat().st_size
    self.file, self.root, self.entries = file, root, entries

  def state_dict(self) -> dict[str, StoredTensor]:
    try:
      tensors = self.load()
      if not isinstance(tensors, dict):
        raise WeightsError(f"{self.file} holds no dict of tensors but a {type(tensors).__name__}")
      for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
          raise WeightsError(f"{self.file}: entry {name!r} is not a tensor but a "
                             f"{type(tensor).__name__}")
      return dict(tensors)
    except WeightsError:
      raise
    except Exception as error:  # a damaged pickle raises nearly anything
      raise WeightsError(f"{self.file}: its pickle is damaged: {error}") from None

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) == ("collections", "OrderedDict"):
      return OrderedDict
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
      return self._tensor
    if (module, name) == ("torch._utils", "_rebuild_parameter"):
      return self._parameter
    if module == "torch" and name in _STORAGES:
      return name
    raise WeightsError(f"{self.file}: its pickle asks for {module}.{name}, which is not needed for "
                       "tensors and was not run")

  def persistent_load(self, pid: Any) -> _Storage:
    kind, storage, key, _, size = pid
    check_int("the size of a storage", size, 0)
    if kind != "storage" or storage not in _STORAGES:
      raise WeightsError(f"{self.file}: its pickle refers to {kind!r} {storage!r}")
    dtype, entry = KINDS[_STORAGES[storage]], self.entries.get(f"{self.root}data/{key}")
    if entry is None or entry.compress_type != zipfile.ZIP_STORED:
      what = "missing" if entry is None else "compressed, which torch.save never does"
      raise WeightsError(f"{self.file}: storage {key} is {what}")
    if entry.file_size < size * dtype.itemsize:
      raise WeightsError(f"{self.file}: storage {key} has {entry.file_size} bytes, {size} numbers "
                         f"of {dtype} need {size * dtype.itemsize}")
    if self._start(entry) + entry.file_size > self.size:
      raise WeightsError(f"{self.file} is truncated: storage {key} does not lie within it")
    return _Storage(dtype, f"{self.root}data/{key}")

  def _tensor(self, storage: _Storage, offset: int, shape: Any, strides: Any,
              *unused: Any) -> StoredTensor:
    """torch._utils._rebuild_tensor_v2; strides and offset in numbers, not bytes."""
    del unused  # whether it needs gradients, and hooks
    shape, strides = tuple(shape), tuple(strides)
    for number in (offset, *shape, *strides):
      check_int("each number of a tensor's place", number, 0)
    if len(shape) > _MAX_AXES:
      raise WeightsError(f"{self.file}: a tensor has {len(shape)} axes, at most {_MAX_AXES} are "
                         "supported")
    available = self.entries[storage.key].file_size // storage.dtype.itemsize
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= available:
      raise WeightsError(f"{self.file}: a tensor of shape {shape}, strides {strides} and offset "
                         f"{offset} does not lie within its storage of {available} numbers")
    return StoredTensor(storage.dtype, shape, lambda: self._read(storage, offset, shape, strides))

  def _start(self, entry: zipfile.ZipInfo) -> int:
    """Where the entry's content begins, after its header and its name."""
    with open(self.file, "rb") as stream:
      stream.seek(entry.header_offset + _LOCAL_HEADER - 4)
      name, extra = struct.unpack("<HH", stream.read(4))
    return entry.header_offset + _LOCAL_HEADER + name + extra

  def _parameter(self, tensor: StoredTensor, *unused: Any) -> StoredTensor:
    del unused
    return tensor

  def _read(self, storage: _Storage, offset: int, shape: tuple[int, ...],
            strides: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:
      return np.zeros(shape, storage.dtype)
    entry = self.entries[storage.key]
    count = entry.file_size // storage.dtype.itemsize
    mapped = np.memmap(self.file, storage.dtype, "r", self._start(entry), (count,))
    return np.lib.stride_tricks.as_strided(
        mapped[offset:], shape, [n * storage.dtype.itemsize for n in strides], writeable=False)
