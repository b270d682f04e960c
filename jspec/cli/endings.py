"""How a command ends: one sentence and an exit code for whatever a user can bring about."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # exit codes; the last two are 128 + signal


def ended(name: str, run: Callable[[], int], interrupted: str = "interrupted",
          refused: tuple[type[Exception], ...] = (ValueError,)) -> int:
  """The exit code of `run`.

  Args:
    name: begins the sentences. interrupted: what is said after Ctrl-C.
    refused: exceptions whose text is the sentence; OSError is one in any case.
  """
  quit_at_ctrl_c(False)
  try:
    try:
      return run()
    finally:  # also after --help, which ends by SystemExit
      sys.stdout.flush()  # here, so that a closed pipe is noticed here
  except KeyboardInterrupt:
    print(f"\n{name}: {interrupted}", file=sys.stderr)
    return INTERRUPTED
  except BrokenPipeError:  # the reader, such as `head`, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
  except OSError as error:  # a full disk, a folder that may not be written to
    what = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    print(f"{name}: error: {' '.join(what.split())}", file=sys.stderr)
    return BAD_INPUT
  except refused as error:
    print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD_INPUT


def quit_at_ctrl_c(yes: bool) -> None:
  """Whether Ctrl-C ends the process on the spot, while there is nothing to clean up.

  While jax is imported an exception would not do: one that comes in a garbage collector's callback
  is ignored.
  """
  usual, mine = (signal.default_int_handler, _quit)[::1 if yes else -1]
  if threading.current_thread() is threading.main_thread() and (
      signal.getsignal(signal.SIGINT) is usual):  # else somebody has decided otherwise
    signal.signal(signal.SIGINT, mine)


@contextlib.contextmanager
def importing() -> Iterator[None]:
  """quit_at_ctrl_c for as long as something slow is imported."""
  quit_at_ctrl_c(True)
  try:
    yield
  finally:
    quit_at_ctrl_c(False)


def _quit(*_: Any) -> NoReturn:
  os.write(2, b"\njspec: interrupted\n")
  os._exit(INTERRUPTED)
