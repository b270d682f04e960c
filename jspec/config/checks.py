"""What comes from outside, files and arguments, checked before anything is made of it. No jax."""

from __future__ import annotations

import collections
import json
import pathlib
import reprlib
from collections.abc import Iterable
from typing import Any

_LFS = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")


class FieldError(ValueError):
  """A value that is refused, or what it asks for. `field` holds it, as the user names it."""

  def __init__(self, field: str, message: str):
    super().__init__(field, message)
    self.field = field

  def __str__(self) -> str:
    return self.args[1]


class PromptTooLong(FieldError):
  """A prompt that does not fit max_model_len, whatever else is asked for."""


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
  """The integer; ValueError for anything else, True and 1.0 included, and outside low..high."""
  allowed = f">= {low}" if high is None else f"in {low}..{high}"
  if isinstance(value, bool) or not isinstance(value, int):
    raise FieldError(name, f"{name} must be an integer {allowed}, got {reprlib.repr(value)}")
  if value < low or (high is not None and value > high):
    raise FieldError(name, f"{name} must be {allowed}, got {reprlib.repr(value)}")
  return value


def check_number(name: str, value: Any, low: float, high: float, above: bool = False) -> float:
  """The finite number in [low, high]; above: low itself is refused, too."""
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not (
      low < value <= high if above else low <= value <= high):
    raise FieldError(name, f"{name} must be a number in {'(' if above else '['}{low:g}, "
                           f"{high:g}], got {reprlib.repr(value)}")
  return float(value)


def check_flag(name: str, value: Any) -> bool:
  if not isinstance(value, bool):
    raise FieldError(name, f"{name} must be true or false, got {reprlib.repr(value)}")
  return value


def check_mapping(name: str, value: Any) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise FieldError(name, f"{name} must be an object, got {reprlib.repr(value)}")
  return value


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """The JSON object in a file; ValueError says what else it is, FileNotFoundError if it is not."""
  try:
    text = file.read_bytes()
  except FileNotFoundError:
    raise
  except OSError as error:
    raise ValueError(f"can't read {file}: {error.strerror}") from None
  _refuse_placeholder(file, text)
  try:
    content = parse_json(text)
  except ValueError as error:
    raise ValueError(f"{file} is damaged: {error}") from None
  if not isinstance(content, dict):
    raise ValueError(f"{file} is damaged: not a JSON object")
  return content


def parse_json(text: str | bytes, unique: bool = False) -> Any:
  """Any JSON value; ValueError for anything else, and what is nested too deeply.

  unique: an object that has a key twice is refused, too; else the last one counts.
  """
  if isinstance(text, bytes):
    text = text.decode("utf-8")
  try:
    return json.loads(text, object_pairs_hook=_unique if unique else None)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
    raise ValueError(f"it has {reprlib.repr(twice)} twice")
  return found


def first_bytes(file: pathlib.Path) -> bytes:
  """At most 64; ValueError for a file that is something else in its place."""
  with open(file, "rb") as stream:
    start = stream.read(64)
  _refuse_placeholder(file, start)
  return start


def _refuse_placeholder(file: pathlib.Path, start: bytes) -> None:
  """Names what downloads leave in place of a file."""
  if start.startswith(_LFS):
    raise ValueError(f"{file} is a git-lfs pointer, not the file that it stands for: run "
                     "`git lfs pull` in its folder")
  if start.lstrip()[:16].lower().startswith(_HTML):
    raise ValueError(f"{file} is an HTML page: the download brought a page to read, perhaps one "
                     "to log in, and not the file")


def inside(folder: pathlib.Path, name: Any, where: str) -> pathlib.Path:
  """The file of that name below the folder; ValueError for one that leads out of it.

  Links are not followed: Hugging Face's cache keeps its files elsewhere.
  """
  parts = pathlib.PurePosixPath(name.replace("\\", "/")).parts if isinstance(name, str) else ()
  if not parts or pathlib.PurePath(name).is_absolute() or ".." in parts or "\0" in name:
    raise ValueError(f"{where} must name files of its own folder, got {reprlib.repr(name)}")
  return folder / name


def shown(name: str) -> str:
  """A name from a file, for a message: of one line, without what would steer a terminal."""
  return name if name.isprintable() and len(name) <= 120 else reprlib.repr(name)


def listed(names: Iterable[str]) -> str:
  return ", ".join(repr(name) for name in names)
