"""What each client has in the server, so that no one has it all."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

from jspec import QueueFull


class ShareFull(QueueFull):
  """A client has as much waiting and running as it may; others can still come."""


class Shares:
  """Of the event loop's thread.

  Args:
    max_outputs, max_tokens: that one client may have waiting or running; None: no bound. Tokens
      are those of prompts and the most that each answer may have.
  """

  def __init__(self, max_outputs: int | None = None, max_tokens: int | None = None):
    self._most = {"outputs": max_outputs, "tokens": max_tokens}
    self._held: collections.Counter[tuple[str, str]] = collections.Counter()

  @contextlib.contextmanager
  def request(self, client: str, num_outputs: int) -> Iterator[Callable[[int], None]]:
    """Around a request; call the result with its tokens once they are known.

    Raises ShareFull, also from that call, and ValueError for what would never fit.
    """
    took: list[tuple[str, int]] = []

    def take(what: str, count: int) -> None:
      most = self._most[what]
      if most is not None and count > most:
        raise ValueError(f"the request is of {count} {what}, more than the {most} that one client "
                         "may have here")
      if most is not None and self._held[client, what] + count > most:
        raise ShareFull(f"one client may have {most} {what} waiting and running, and with these it "
                        f"would have {self._held[client, what] + count}; try again later")
      self._held[client, what] += count
      took.append((what, count))

    try:
      take("outputs", num_outputs)
      yield lambda count: take("tokens", count)
    finally:
      for what, count in took:
        self._held[client, what] -= count
        if not self._held[client, what]:
          del self._held[client, what]
