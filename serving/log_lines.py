"""How the server's log reads: fields in lines, and things that happen often told seldom."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
from typing import Any

SECONDS = 1.0  # between two lines of a tally


def fields(**values: Any) -> str:
  """name=value for a log line; values with spaces in quotes."""
  def shown(value: Any) -> str:
    if isinstance(value, float):
      return f"{value:.3f}"
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\n') else text

  return " ".join(f"{name}={shown(value)}" for name, value in values.items())


class Tally:
  """Warnings, a line a second at most: how often each thing has happened since the last line.

  The first is told at once. Of the event loop's thread.
  """

  def __init__(self, log: logging.Logger, text: str):
    self._log, self._text = log, text
    self._counts: collections.Counter[str] = collections.Counter()
    self._pause: asyncio.TimerHandle | None = None

  def note(self, what: str) -> None:
    """what: one of a few names."""
    self._counts[what] += 1
    if self._pause is None:
      self._tell()

  def _tell(self) -> None:
    self._pause = None
    if self._counts:
      self._log.warning("%s %s", self._text, fields(**self._counts))
      self._counts.clear()
      self._pause = asyncio.get_running_loop().call_later(SECONDS, self._tell)
