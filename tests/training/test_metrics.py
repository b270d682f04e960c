"""Metrics of training: rows survive a kill, event files are what TensorBoard reads."""

from __future__ import annotations

import json
import math
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.training.log import metrics, tensorboard
from jspec.training.log.metrics import Log


def rows(folder):
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_hold_what_was_written(tmp_path, capsys):
  with Log(tmp_path / "new" / "folder", stdout=False) as log:
    log.write(10, {"loss": jnp.float32(2.5), "accuracy_1": 0.25})
    log.write(10, {"loss": np.float64(3.0), "bad": float("nan")}, "eval")
    written = rows(tmp_path / "new" / "folder")  # at once, not when it is closed
  assert [{k: v for k, v in row.items() if k != "time"} for row in written] == [
      {"step": 10, "kind": "train", "loss": 2.5, "accuracy_1": 0.25},
      {"step": 10, "kind": "eval", "loss": 3.0, "bad": None}]
  assert capsys.readouterr().out == ""


def test_a_resumed_run_drops_later_rows_and_one_that_was_cut_short(tmp_path):
  with Log(tmp_path, stdout=False) as log:
    for step in range(0, 50, 10):
      log.write(step, {"loss": step})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 50, "ki')
  with Log(tmp_path, stdout=False, resumed=20) as log:
    assert [row["step"] for row in rows(tmp_path)] == [0, 10, 20]
    log.write(30, {"loss": -1.0})
  assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(0, 0), (10, 10), (20, 20),
                                                                   (30, -1)]
  Log(tmp_path, stdout=False).close()  # a new run
  assert rows(tmp_path) == []


def test_a_spoilt_row_in_the_middle_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
  with pytest.raises(ValueError, match='metrics.jsonl:2 is no JSON: {"ste'):
    metrics.read(tmp_path / "metrics.jsonl")


def test_lines_on_the_terminal_are_short_and_stand_under_each_other(tmp_path, capsys):
  with Log(tmp_path, jsonl=False, num_steps=8000) as log:
    log.write(5, {"loss": 12.34567, "learning_rate": 3e-5, "tokens": 4096})
    log.write(1200, {"loss": float("nan"), "learning_rate": 0.001, "tokens": 8192})
  lines = capsys.readouterr().out.splitlines()
  assert lines == ["   5/8000 train  loss 12.35     learning_rate 3.00e-05  tokens 4096",
                   "1200/8000 train  loss nan       learning_rate 0.001     tokens 8192"]
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value, text", [
  (0.0, "0"), (-2.0, "-2"), (0.98765, "0.9877"), (12345.678, "1.23e+04"), (0.00012, "1.20e-04"),
  (1e9, "1.00e+09"), (math.inf, "inf")])
def test_numbers_have_four_digits_at_most(value, text):
  assert metrics.short(value) == text and len(text) <= 8


def test_what_is_no_scalar_and_a_reserved_name_are_refused(tmp_path):
  with Log(tmp_path, stdout=False) as log:
    with pytest.raises(ValueError, match="metric loss must be a scalar"):
      log.write(1, {"loss": jnp.ones(3)})
    with pytest.raises(ValueError, match="a metric cannot be named step"):
      log.write(1, {"step": 3})
  assert rows(tmp_path) == []


@pytest.mark.parametrize("content, crc", [
  (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43),
  (bytes(range(32)), 0x46DD794E), (bytes(range(31, -1, -1)), 0x113FDB5C)])
def test_checksums_are_those_of_rfc_3720(content, crc):
  assert tensorboard.crc32c(content) == crc


def test_a_record_is_framed_as_tensorflow_does():
  """The masked checksums of an empty record's length (eight zero bytes) and of no content."""
  zeros = 0x8C28B28A  # crc32c of eight zero bytes
  mask = lambda crc: ((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF
  assert tensorboard.record(b"") == bytes(8) + struct.pack("<II", mask(zeros), 0xA282EAD8)


def records(path):
  content = path.read_bytes()
  while content:
    length, check = struct.unpack_from("<QI", content)
    body = content[12:12 + length]
    assert check == tensorboard.masked(tensorboard.crc32c(content[:8]))
    assert struct.unpack_from("<I", content, 12 + length)[0] == tensorboard.masked(
        tensorboard.crc32c(body))
    yield body
    content = content[16 + length:]


def fields(message):
  """Protocol buffer wire format -> [(field number, value)]."""
  at, found = 0, []

  def varint():
    nonlocal at
    value = shift = 0
    while True:
      byte = message[at]
      at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
      if byte < 0x80:
        return value

  while at < len(message):
    tag = varint()
    if tag & 7 == 0:
      value = varint()
    else:
      size = {1: 8, 5: 4}.get(tag & 7) or varint()
      value, at = message[at:at + size], at + size
    found.append((tag >> 3, value))
  return found


def scalars(path):
  """[(step, tag, value)] of an event file, read by its specification."""
  found = []
  for event in map(dict, map(fields, records(path))):
    for _, value in fields(event.get(5, b"")):
      parts = dict(fields(value))
      found.append((event[2], parts[1].decode(), struct.unpack("<f", parts[2])[0]))
  return found


def test_event_files_hold_version_steps_tags_and_values(tmp_path):
  with Log(tmp_path, stdout=False, jsonl=False, tensorboard=True) as log:
    log.write(3, {"loss": 1.5, "accuracy_1": 0.25})
    log.write(100_000, {"loss": float("inf")}, "eval")
  path, = tmp_path.iterdir()
  assert "tfevents" in path.name
  first = dict(fields(next(records(path))))
  assert first[3] == b"brain.Event:2" and struct.unpack("<d", first[1])[0] > 1.7e9
  assert scalars(path) == [(3, "train/loss", 1.5), (3, "train/accuracy_1", 0.25),
                           (100_000, "eval/loss", math.inf)]


def test_a_resumed_run_tells_tensorboard_to_forget_later_steps(tmp_path):
  Log(tmp_path, stdout=False, tensorboard=True).close()
  with Log(tmp_path, stdout=False, tensorboard=True, resumed=20) as log:
    log.write(30, {"loss": 1.0})
  old, new = sorted(tmp_path.glob("*tfevents*"))
  assert len(list(records(old))) == 1
  _, start, _ = map(dict, map(fields, records(new)))
  assert start[2] == 21 and fields(start[7]) == [(1, 1)]  # SessionLog.START


def test_curves_are_grouped_by_metric(tmp_path):
  with Log(tmp_path, stdout=False) as log:
    for step in (1, 2):
      log.write(step, {"loss": 3.0 / step, "accuracy_1": 0.5, "accuracy_2": 0.1 * step})
    log.write(2, {"loss": float("nan"), "accuracy_1": 0.7}, "eval")
  assert metrics.curves(metrics.read(tmp_path / "metrics.jsonl")) == {
      "loss": {"train loss": ([1, 2], [3.0, 1.5])},
      "accuracy": {"train accuracy_1": ([1, 2], [0.5, 0.5]),
                   "train accuracy_2": ([1, 2], [0.1, 0.2]), "eval accuracy_1": ([2], [0.7])}}


def test_a_picture_is_drawn_or_matplotlib_asked_for(tmp_path, monkeypatch):
  pytest.importorskip("matplotlib")
  with Log(tmp_path, stdout=False) as log:
    with pytest.raises(ValueError, match="metrics.jsonl has no metrics to draw"):
      metrics.plot(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    log.write(1, {"loss": 1.0, "a": 1, "b": 2, "c": 3})
  metrics.plot(tmp_path / "metrics.jsonl", tmp_path / "a.png")
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(ValueError, match="needs matplotlib, which .* extra 'bench'"):
    metrics.plot(tmp_path / "metrics.jsonl", tmp_path / "b.png")
