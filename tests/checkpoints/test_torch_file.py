"""Files of torch.save, written here opcode by opcode: read exactly, and nothing of them is run."""

from __future__ import annotations

import os
import pickle
import tarfile
import zipfile

import head_checkpoints as hc
import ml_dtypes
import numpy as np
import pytest

from jspec.checkpoints.tensors import WeightsError
from jspec.checkpoints.torch_file import read_torch_file


def saved(tmp_path, tensors):
  file = tmp_path / "pytorch_model.bin"
  hc.write_torch(file, tensors)
  return file


def pickled(tmp_path, content, storages=()):
  file = tmp_path / "pytorch_model.bin"
  hc.write_zip(file, content, list(storages))
  return file


def refused(file) -> str:
  with pytest.raises(WeightsError) as error:
    read_torch_file(file)
  assert str(file) in str(error.value) and "\n" not in str(error.value)
  return str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64,
                                   np.int32, np.int8, np.uint8, np.bool_])
def test_every_dtype_and_shape_comes_back(dtype, tmp_path):
  arrays = {name: (np.arange(np.prod(shape)).reshape(shape) % 3).astype(dtype)
            for name, shape in (("a", (3, 4)), ("b.weight", (5,)), ("c", ()), ("d", (2, 1, 3)),
                                ("empty", (0, 3)))}
  tensors = read_torch_file(saved(tmp_path, arrays))
  assert list(tensors) == list(arrays)
  for name, array in arrays.items():
    tensor = tensors[name]
    assert (tensor.dtype, tensor.shape) == (array.dtype, array.shape)
    read = tensor.read()
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_strides_and_offsets_into_a_shared_storage(tmp_path):
  storage = np.arange(60, dtype=np.float32)
  grid = storage.reshape(6, 10)
  tensors = read_torch_file(saved(tmp_path, {
    "whole": hc.View(storage, 0, (6, 10), (10, 1)),
    "transposed": hc.View(storage, 0, (10, 6), (1, 10)),
    "part": hc.View(storage, 12, (3, 3), (10, 3)), "number": hc.View(storage, 59, (), ()),
    "repeated": hc.View(storage, 7, (4, 2), (0, 1)), "other": np.ones(2, np.int64)}))
  for name, expected in {"whole": grid, "transposed": grid.T, "part": grid[1:4, 2:9:3],
                         "number": grid[5, 9], "repeated": np.tile(grid[0, 7:9], (4, 1)),
                         "other": np.ones(2)}.items():
    np.testing.assert_array_equal(tensors[name].read(), expected)


def test_a_tensor_is_a_view_of_the_mapped_file(tmp_path):
  view = read_torch_file(saved(tmp_path, {"a": np.ones((2, 3), np.float32)}))["a"].read()
  assert not view.flags.owndata and not view.flags.writeable
  base = view
  while not isinstance(base, np.memmap):
    base = base.base
  assert base.mode == "r"


@pytest.mark.parametrize("offset, shape, strides", [
  (0, (7,), (1,)), (1, (6,), (1,)), (0, (2, 3), (4, 1)), (-1, (2,), (1,)), (0, (2,), (-1,)),
  (0, (-2,), (1,)), (6, (), ()), (0, (2, 2), (1,)), (0, (2**31 - 1, 2), (2**31 - 1, 1))])
def test_tensors_beyond_their_storage_are_refused(offset, shape, strides, tmp_path):
  view = hc.View(np.arange(6, dtype=np.float32), offset, shape, strides)
  message = refused(saved(tmp_path, {"a": view}))
  assert "does not lie within its storage of 6 numbers" in message or "damaged" in message


def test_parameters_are_tensors(tmp_path):
  storages = []
  tensor = hc.tensor_opcodes(np.arange(3, dtype=np.float32), storages)
  parameter = (b"ctorch._utils\n_rebuild_parameter\n" + pickle.MARK + tensor + pickle.NEWTRUE
               + b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.TUPLE
               + pickle.REDUCE)
  file = pickled(tmp_path, b"\x80\x02" + pickle.EMPTY_DICT + hc.text_opcodes("a") + parameter
                 + pickle.SETITEM + pickle.STOP, storages)
  np.testing.assert_array_equal(read_torch_file(file)["a"].read(), [0, 1, 2])


class Evil:
  def __init__(self, call, *arguments):
    self.reduced = call, arguments

  def __reduce__(self):
    return self.reduced


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call, name", [(os.system, "system"), (eval, "eval"), (exec, "exec"),
                                        (getattr, "getattr"), (__import__, "__import__")])
def test_other_calls_are_refused_by_name_and_not_run(call, name, protocol, tmp_path):
  run = tmp_path / "run"
  argument = f"touch {run}" if call is os.system else f"open({str(run)!r}, 'w')"
  content = pickle.dumps({"a": Evil(call, argument)}, protocol)
  message = refused(pickled(tmp_path, content))
  assert f".{name}, which is not needed for tensors and was not run" in message
  assert not run.exists()
  pickle.loads(pickle.dumps(Evil(os.system, f"touch {run}")))
  assert run.exists()  # as an ordinary unpickler would have


@pytest.mark.parametrize("content", [
  b"(S'touch run'\nios\nsystem\n.",  # INST
  b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x09touch run\x85R.",  # STACK_GLOBAL
  b"(cos\nsystem\nS'touch run'\no.",  # OBJ
  b"\x80\x04\x8c\x0bcollections\x8c\x0fOrderedDict.pop\x93)R.",  # a dotted name
  b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00x\x85R."])
def test_every_way_to_name_a_call_is_refused(content, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert "was not run" in refused(pickled(tmp_path, content))
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content, words", [
  (b"\x80\x02K\x03.", "holds no dict of tensors but a int"),
  (b"\x80\x02}X\x01\x00\x00\x00aK\x03s.", "entry 'a' is not a tensor but a int"),
  (b"\x80\x02}K\x01K\x03s.", "entry 1 is not a tensor"),
  (b"\x80\x02}X\x01\x00\x00\x00a", "its pickle is damaged"), (b"", "its pickle is damaged"),
  (b"\x80\x02K\x03Q.", "its pickle is damaged"),
  (b"ctorch\nShortStorage\n.", "torch.ShortStorage, which is not needed"),
  (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "its pickle is damaged")])
def test_damaged_pickles_are_refused(content, words, tmp_path):
  assert words in refused(pickled(tmp_path, content))


def test_damaged_archives_are_refused(tmp_path):
  file = saved(tmp_path, {"a": np.ones(100, np.float32)})
  whole = file.read_bytes()
  for size in (0, 10, len(whole) // 2, len(whole) - 10):
    file.write_bytes(whole[:size])
    assert "is truncated or was not written by torch.save" in refused(file)
  with zipfile.ZipFile(file, "w") as archive:
    archive.writestr("x/version", "3")
  assert "torch.save's have a data.pkl" in refused(file)
  file.unlink()
  assert "no such file" in refused(file)


@pytest.mark.parametrize("entry, change, words", [
  ("data/0", lambda content: None, "storage 0 is missing"),
  ("data/0", lambda content: content[:-1], "storage 0 has 23 bytes, 6 numbers of float32 need 24"),
  ("byteorder", lambda content: b"big", "big-endian")])
def test_archives_that_do_not_hold_what_they_say_are_refused(entry, change, words, tmp_path):
  file = saved(tmp_path, {"a": np.arange(6, dtype=np.float32)})
  with zipfile.ZipFile(file) as archive:
    contents = {name: archive.read(name) for name in archive.namelist()}
  name = f"{file.stem}/{entry}"
  contents[name] = change(contents[name])
  with zipfile.ZipFile(file, "w") as archive:
    for name, content in contents.items():
      if content is not None:
        archive.writestr(name, content)
  assert words in refused(file)


def test_compressed_archives_are_refused(tmp_path):
  file = saved(tmp_path, {"a": np.zeros(600, np.float32)})
  with zipfile.ZipFile(file) as archive:
    contents = {name: archive.read(name) for name in archive.namelist()}
  with zipfile.ZipFile(file, "w") as archive:
    for name, content in contents.items():
      archive.writestr(name, content, zipfile.ZIP_DEFLATED if "/data/" in name else None)
  assert "storage 0 is compressed" in refused(file)


def test_the_formats_before_torch_1_6_are_named(tmp_path):
  file = tmp_path / "pytorch_model.bin"
  magic = 0x1950A86A20F9469CFC6C  # the first of several pickles, the protocol number follows
  file.write_bytes(pickle.dumps(magic, 2) + pickle.dumps(1001, 2))
  assert "is in the format of torch before 1.6" in refused(file)
  (tmp_path / "pickle").write_bytes(b"x")
  with tarfile.open(file, "w") as archive:
    archive.add(tmp_path / "pickle", "pickle")
  assert "is in the format of torch before 1.6" in refused(file)
