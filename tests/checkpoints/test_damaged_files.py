"""Whatever a file holds: it is loaded, or refused with a sentence."""

from __future__ import annotations

import functools
import json
import pickle
import struct
import zipfile

import gguf_files
import head_checkpoints as hc
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import CONFIG, LLAMA, random_tensors, save
from damaged import FEW, JSON, outcome
from hypothesis import given
from hypothesis import strategies as st

from jspec.checkpoints import hub, load_head, tensors, torch_file
from jspec.checkpoints.gguf import gguf_config, read_gguf
from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.tensors import WeightsError
from jspec.checkpoints.weights import load_params, safetensors_source
from jspec.config.checks import inside, read_json
from jspec.drafters.suffix_store import SuffixStore
from jspec.text.tokenizer_files import gguf_tokenizer, load_tokenizer

# ------------------------------------------------------------------ safetensors


@functools.cache
def header_and_data():
  content = safetensors.numpy.save(random_tensors(CONFIG))
  size = int.from_bytes(content[:8], "little")
  return json.loads(content[8:8 + size]), content[8 + size:]


def write_header(folder, header) -> None:
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  (folder / "model.safetensors").write_bytes(
      len(text).to_bytes(8, "little") + text + header_and_data()[1])


@FEW
@given(st.data())
def test_any_safetensors_header_is_read_or_refused(tmp_path_factory, data):
  folder, header = tmp_path_factory.mktemp("headers"), header_and_data()[0]
  name = data.draw(st.sampled_from(sorted(header)))
  key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
  value = data.draw(JSON | st.lists(st.integers(-9, 99), min_size=2, max_size=3))
  changed = value if key is None or name == "__metadata__" else {**header[name], key: value}
  write_header(folder, {**header, name: changed})
  outcome(load_params, folder, CONFIG)


@pytest.mark.parametrize("entry", [
  {"dtype": "F32", "shape": [32], "data_offsets": ["0", "128"]},
  {"dtype": "F32", "shape": [32], "data_offsets": [0, 128, 256]},
  {"dtype": ["F32"], "shape": [32], "data_offsets": [0, 128]},
  {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, 7, None, {"dtype": "F32"}])
def test_a_damaged_header_entry_is_named(entry, tmp_path):
  write_header(tmp_path, {**header_and_data()[0], "model.norm.weight": entry})
  with pytest.raises(WeightsError, match="header is damaged: tensor model.norm.weight is"):
    load_params(tmp_path, CONFIG)


def test_deep_json_is_damage_and_no_recursion_error(tmp_path):
  deep = b"[" * 100_000
  write_header(tmp_path, deep)
  with pytest.raises(WeightsError, match="header is damaged"):
    load_params(tmp_path, CONFIG)
  (tmp_path / "config.json").write_bytes(deep)
  with pytest.raises(ValueError, match="config.json is damaged"):
    hub.read_config(tmp_path)


def test_a_header_beyond_the_bound_is_not_read(tmp_path, monkeypatch):
  write_header(tmp_path, header_and_data()[0])
  monkeypatch.setattr(tensors, "_MAX_HEADER", 100)
  with pytest.raises(WeightsError, match="its header would have .* bytes, 100 are the most"):
    load_params(tmp_path, CONFIG)


def test_a_tensor_that_a_header_has_twice_is_refused(tmp_path):
  text = json.dumps(header_and_data()[0])
  write_header(tmp_path, (text[:-1] + ', "model.norm.weight": ' + json.dumps(
      header_and_data()[0]["model.norm.weight"]) + "}").encode())
  with pytest.raises(WeightsError, match="damaged: it has 'model.norm.weight' twice"):
    load_params(tmp_path, CONFIG)


# ------------------------------------------------------------------ an index


def sharded(folder, stale=False, **changes):
  """Two shards with an index; stale: the second has another copy of the first's embedding."""
  tensors = random_tensors(CONFIG)
  names = sorted(tensors)
  parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  weight_map = {name: file for file, part in parts.items() for name in part}
  embed = "model.embed_tokens.weight"
  other = next(file for file in parts if file != weight_map[embed])
  for file, part in parts.items():
    own = {name: tensors[name] for name in part}
    if stale and file == other:
      own[embed] = -tensors[embed]
    save(folder, own, file)
  index = {"weight_map": {**weight_map, **changes}}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return tensors[embed]


def test_of_a_tensor_in_two_shards_the_index_decides(tmp_path):
  assert sorted(random_tensors(CONFIG)).index("model.embed_tokens.weight") % 2 == 1  # in the later
  want = sharded(tmp_path, stale=True)
  np.testing.assert_array_equal(load_params(tmp_path, CONFIG)["embed"], want)
  index = tmp_path / "model.safetensors.index.json"
  weight_map = json.loads(index.read_text())["weight_map"]
  swapped = {**weight_map, "model.embed_tokens.weight": "a.safetensors"}
  index.write_text(json.dumps({"weight_map": swapped}))
  np.testing.assert_array_equal(load_params(tmp_path, CONFIG)["embed"], -want)
  index.unlink()
  with pytest.raises(WeightsError, match="b.safetensors: tensor model.embed_tokens.weight is in "
                     "another file, too, and no index says which one counts"):
    load_params(tmp_path, CONFIG)


def test_of_a_heads_tensor_in_two_files_the_index_decides(tmp_path):
  for i, file in enumerate(("a.safetensors", "b.safetensors")):
    save(tmp_path, {"0.0.linear.weight": np.full((2, 2), i, np.float32)}, file)
  for i, file in enumerate(("a.safetensors", "b.safetensors")):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"0.0.linear.weight": file}}))
    found = load_head.read_head_files(tmp_path).tensors
    np.testing.assert_array_equal(found["0.0.linear.weight"].read(), np.full((2, 2), i))


@pytest.mark.parametrize("file, message", [
  ("../../etc/passwd", "weight_map must name files of its own folder, got '../../etc/passwd'"),
  ("/etc/passwd", "must name files of its own folder, got '/etc/passwd'"),
  (7, "must name files of its own folder, got 7"), (None, "folder, got None"),
  ("", "folder, got ''"), ("a\0", "folder, got "), ("..\\..\\x", "folder, got "),
  ("c.safetensors", "file c.safetensors is listed in .* but missing"),
])
def test_an_index_names_files_of_its_folder(file, message, tmp_path):
  sharded(tmp_path, extra=file)
  with pytest.raises(WeightsError, match=message):
    load_params(tmp_path, CONFIG)


def test_an_index_may_point_at_links_that_lead_elsewhere(tmp_path):
  """As in Hugging Face's cache: snapshots hold links to blobs."""
  blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
  blobs.mkdir(), snapshot.mkdir()
  want = sharded(blobs)
  for file in blobs.iterdir():
    (snapshot / file.name).symlink_to(file)
  np.testing.assert_array_equal(load_params(snapshot, CONFIG)["embed"], want)
  assert inside(snapshot, "deeper/x", "it") == snapshot / "deeper/x"


def test_an_index_that_promises_what_a_file_lacks_is_refused(tmp_path):
  sharded(tmp_path, **{"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"})
  with pytest.raises(WeightsError, match="missing tensor .*, which the index says it has"):
    load_params(tmp_path, CONFIG)
  for content in ({"weight_map": [1]}, {}, {"weight_map": None}):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(WeightsError, match="index.json"):
      load_params(tmp_path, CONFIG)


# ------------------------------------------------------------------ GGUF


@functools.cache
def gguf_bytes(folder):
  path = gguf_files.random_model(folder / "whole.gguf", "llama", ("output.weight",))[0]
  return path.read_bytes()


@FEW
@given(st.data())
def test_any_gguf_header_is_read_or_refused(tmp_path_factory, data):
  content = bytearray(gguf_bytes(tmp_path_factory.getbasetemp()))
  header = content.index(b"output.weight")
  for _ in range(data.draw(st.integers(1, 3))):
    at = data.draw(st.integers(4, header + 60))
    content[at] = data.draw(st.sampled_from([0, 1, 9, 127, 255]) | st.integers(0, 255))
  path = tmp_path_factory.mktemp("gguf") / "m.gguf"
  path.write_bytes(bytes(content[:data.draw(st.sampled_from([None, None, header, 40]))]))
  outcome(lambda: gguf_config(read_gguf(path)))


@FEW
@given(st.data())
def test_any_gguf_metadata_is_a_model_and_a_tokenizer_or_a_sentence(tmp_path_factory, data):
  file = read_gguf(gguf_files.random_model(
      tmp_path_factory.mktemp("metadata") / "m.gguf", "llama", ("output.weight",))[0])
  keys = [*file.metadata, "llama.rope.freq_base", "llama.rope.scaling.factor",
          "llama.rope.scaling.type", "llama.attention.key_length", "tokenizer.ggml.model",
          "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.merges",
          "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.pre"]
  changes = data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=4))
  metadata = {**file.metadata, **changes}
  outcome(lambda: gguf_config(file._replace(metadata=metadata)))
  outcome(gguf_tokenizer, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"],
                           "tokenizer.ggml.merges": ["a b"], **metadata})


def gguf_with(path, key: str, kind: int, value: bytes):
  """A file of one pair and no tensor."""
  path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) +
                   key.encode() + struct.pack("<I", kind) + value)
  return path


@pytest.mark.parametrize("key, kind, value, message", [
  ("general.alignment", 4, struct.pack("<I", 0), "general.alignment must be in 1.*, got 0"),
  ("general.alignment", 8, struct.pack("<Q", 2) + b"32", "must be an integer .*, got '32'"),
  ("x", 9, struct.pack("<IQ", 9, 1) * 5000, "metadata is damaged: arrays of arrays"),
  ("x", 77, b"", "metadata is damaged"),
])
def test_a_damaged_gguf_header_says_so(key, kind, value, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    read_gguf(gguf_with(tmp_path / "m.gguf", key, kind, value))


@pytest.mark.parametrize("key, value, message", [
  ("attention.head_count", 0, "llama.attention.head_count must be in 1.*, got 0"),
  ("attention.head_count", [4, 4], r"must be an integer .*, got \[4, 4\]"),
  ("block_count", 2**40, "llama.block_count must be in 1..10000, got 1099511627776"),
])
def test_damaged_gguf_metadata_is_named(key, value, message, tmp_path):
  file = read_gguf(gguf_files.random_model(tmp_path / "m.gguf", "llama")[0])
  with pytest.raises(ValueError, match=message):
    gguf_config(file._replace(metadata={**file.metadata, f"llama.{key}": value}))


def test_what_a_gguf_file_has_twice_is_refused(tmp_path):
  pair = struct.pack("<Q", 1) + b"a" + struct.pack("<IB", 0, 7)
  (tmp_path / "k.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * pair)
  with pytest.raises(WeightsError, match="k.gguf: the key a is there twice"):
    read_gguf(tmp_path / "k.gguf")
  tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 0)
  (tmp_path / "t.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * tensor + bytes(64))
  with pytest.raises(WeightsError, match="t.gguf: the tensor t is there twice"):
    read_gguf(tmp_path / "t.gguf")


# ------------------------------------------------------------------ torch files, past outputs


def torch_zip(file, content: bytes, compression=zipfile.ZIP_STORED):
  with zipfile.ZipFile(file, "w", compression) as archive:
    archive.writestr("a/data.pkl", content)
  return file


def test_a_deflated_pickle_is_refused_before_it_grows(tmp_path):
  bomb = torch_zip(tmp_path / "bomb.bin", b"\0" * 2**22, zipfile.ZIP_DEFLATED)
  assert bomb.stat().st_size < 2**14
  with pytest.raises(WeightsError, match="data.pkl is compressed, which torch.save never does"):
    torch_file.read_torch_file(bomb)


def test_a_pickle_beyond_the_bound_is_not_read(tmp_path, monkeypatch):
  monkeypatch.setattr(torch_file, "MAX_PICKLE", 100)
  with pytest.raises(WeightsError, match="data.pkl has 101 bytes, .* 100 are the most"):
    torch_file.read_torch_file(torch_zip(tmp_path / "a.bin", b"\0" * 101))
  assert torch_file.read_torch_file(torch_zip(tmp_path / "b.bin", pickle.dumps({}, 2))) == {}


@pytest.mark.parametrize("opcodes", [
  b"\x80\x02}r\xff\xff\xff\x7f.",  # LONG_BINPUT 2**31 - 1: a memo of 16 GiB
  b"\x80\x02}p99999999999\n.", b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00."])  # BYTEARRAY8
def test_numbers_in_a_pickle_reserve_no_memory(opcodes, tmp_path):
  with pytest.raises(WeightsError, match="its pickle is damaged"):
    torch_file.read_torch_file(torch_zip(tmp_path / "a.bin", opcodes))


@pytest.mark.parametrize("place, message", [
  ((0.5, (2,), (1,)), "its pickle is damaged: each number of a tensor's place must be"),
  ((0, ("2",), (1,)), "its pickle is damaged: each number of a tensor's place must be"),
  ((0, (1,) * 9, (1,) * 9), "a tensor has 9 axes, at most 8 are supported"),
  ((3, (2,), (1,)), "does not lie within its storage of 4 numbers")])
def test_a_torch_tensor_lies_in_its_storage_or_is_refused(place, message, tmp_path):
  file = tmp_path / "pytorch_model.bin"
  hc.write_torch(file, {"a": hc.View(np.arange(4, dtype=np.float32), *place)})
  with pytest.raises(WeightsError, match=message):
    torch_file.read_torch_file(file)


def test_an_archive_with_an_entry_twice_is_refused(tmp_path):
  file = torch_zip(tmp_path / "a.bin", pickle.dumps({}, 2))
  with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
    archive.writestr("a/data.pkl", pickle.dumps({"b": 1}, 2))
  with pytest.raises(WeightsError, match="is damaged: it has an entry twice"):
    torch_file.read_torch_file(file)


def test_past_outputs_are_bounded_in_bytes():
  store = SuffixStore(10**6, 8, 4, 16, max_bytes=40_000)
  held = lambda: sum(a.itemsize * len(a) for a in (store._token, *store._before))
  rng = np.random.default_rng(0)
  for size in [50] * 200 + [100_000, 3]:
    store.add(rng.integers(0, 1000, size).tolist())
    assert held() <= 40_000
  last = list(range(2000, 2030))
  store.add(last)
  assert store.passages(last[:10]) == [last[2:18]]
  with pytest.raises(ValueError, match="max_bytes=10 must be at least"):
    SuffixStore(1, 8, 4, 16, max_bytes=10)


# ------------------------------------------------------------------ placeholders


@pytest.mark.parametrize("content, message", [
  (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n", "git-lfs pointer"),
  (b"\n <!DOCTYPE html><html><body>Sign in</body></html>", "is an HTML page"),
  (b"<HTML lang='en'>", "is an HTML page"),
])
def test_pointers_and_web_pages_are_called_by_their_name(content, message, tmp_path):
  files = {name: tmp_path / name for name in (
      "config.json", "model.safetensors", "m.gguf", "h.bin", "tokenizer.json")}
  for file in files.values():
    file.write_bytes(content)
  readers = {
      "config.json": lambda: read_json(files["config.json"]), "m.gguf": lambda: read_gguf(
          files["m.gguf"]), "model.safetensors": lambda: safetensors_source(tmp_path, CONFIG),
      "h.bin": lambda: torch_file.read_torch_file(files["h.bin"]),
      "tokenizer.json": lambda: load_tokenizer(tmp_path)}
  files["config.json"].write_bytes(content)
  for name, read in readers.items():
    if name == "tokenizer.json":
      files["config.json"].write_text("{}")
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
      read()
  with pytest.raises(ValueError, match=message):
    load_head.read_head_files(files["model.safetensors"])


def test_what_is_not_damaged_is_loaded(tmp_path):
  """Else every test above could pass by refusing everything."""
  write_header(tmp_path, header_and_data()[0])
  assert load_params(tmp_path, CONFIG) and gguf_bytes(tmp_path)
  assert gguf_config(read_gguf(tmp_path / "whole.gguf")) and model_config_from_hf(LLAMA) == CONFIG
