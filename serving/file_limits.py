"""How many files and connections this process may have open."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

MOST = 65_536  # what we ask for: more than any server here needs
OWN = 160  # of the model, the devices, the log, and for saying goodbye to refused connections
LEAST = 8  # connections of a door, however few files there may be


def raise_limit() -> int:
  """Raises the limit as far as the system lets us without its operator; what it is then."""
  resource = _resource()
  if resource is None:
    return MOST  # as on Windows, where sockets are no files
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  unlimited = resource.RLIM_INFINITY
  wanted = MOST if hard == unlimited else min(hard, MOST)
  if soft != unlimited and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = wanted
  return MOST if soft == unlimited else soft


def _resource() -> Any:
  """POSIX's module, where there is one."""
  try:
    return importlib.import_module("resource")
  except ImportError:
    return None


def connections(wanted: Sequence[int], limit: int) -> list[int]:
  """How many connections each door can have of those it wants, with `limit` files in all."""
  room = max(0, limit - OWN)
  if sum(wanted) <= room:
    return list(wanted)
  return [max(min(LEAST, one), one * room // sum(wanted)) for one in wanted]
