"""TensorBoard's event files, written without TensorFlow.

A file is a sequence of TFRecords, each an Event protocol buffer (tensorflow/core/util/event.proto,
tensorflow/core/framework/summary.proto). Scalars only.
"""

from __future__ import annotations

import os
import pathlib
import struct
import time
from collections.abc import Mapping

# Event's fields: wall_time 1, step 2, file_version 3, summary 5, session_log 7;
# Summary's: value 1; Summary.Value's: tag 1, simple_value 2; SessionLog's: status 1.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_START = 1  # SessionLog.START


def _crc_table() -> tuple[int, ...]:
  table = []
  for value in range(256):
    for _ in range(8):
      value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, reflected
    table.append(value)
  return tuple(table)


_TABLE = _crc_table()


class EventFile:
  """One event file in a folder, which may have others: TensorBoard reads them in turn."""

  def __init__(self, folder: str | os.PathLike, resumed: int | None = None):
    """Args: resumed: tells TensorBoard to forget what earlier files say of later steps."""
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # Names are read in their order; a nanosecond tells a run from the one taken up after it.
    self._file = (path / f"events.out.tfevents.{time.time_ns():020d}").open("xb")
    self._event(_field(3, _BYTES, b"brain.Event:2"))
    if resumed is not None:
      start = _field(1, _VARINT, _varint(_START))
      self._event(_field(2, _VARINT, _varint(resumed + 1)) + _field(7, _BYTES, start))

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    values = b"".join(_field(1, _BYTES, _field(1, _BYTES, tag.encode())
                             + _field(2, _FIXED32, struct.pack("<f", value)))
                      for tag, value in scalars.items())
    self._event(_field(2, _VARINT, _varint(step)) + _field(5, _BYTES, values))

  def close(self) -> None:
    self._file.close()

  def _event(self, fields: bytes) -> None:
    self._file.write(record(_field(1, _FIXED64, struct.pack("<d", time.time())) + fields))
    self._file.flush()


def record(content: bytes) -> bytes:
  """A TFRecord: length, its checksum, content, its checksum; all little-endian."""
  length = struct.pack("<Q", len(content))
  checksum = lambda part: struct.pack("<I", masked(crc32c(part)))
  return length + checksum(length) + content + checksum(content)


def crc32c(content: bytes) -> int:
  """CRC-32 with Castagnoli's polynomial (RFC 3720, appendix B.4)."""
  crc = 0xFFFFFFFF
  for byte in content:
    crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
  return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
  """As TFRecords store it: checksums of what holds checksums would be weak."""
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _field(number: int, kind: int, content: bytes) -> bytes:
  length = _varint(len(content)) if kind == _BYTES else b""
  return _varint(number << 3 | kind) + length + content


def _varint(value: int) -> bytes:
  out = b""
  while value > 0x7F:
    out += bytes([value & 0x7F | 0x80])
    value >>= 7
  return out + bytes([value])
