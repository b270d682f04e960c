"""What the signals that stop a program do to one that has something to save first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, Any], Any]) -> Iterator[None]:
  """SIGINT, also where a shell's background has turned it off, and SIGTERM go to the handler.

  They stay as they are in other threads than the main one: only that may have handlers.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for number, handler_before in before.items():
      signal.signal(number, handler_before)
