"""Data parallelism: engines with the same weights on different devices, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jspec.engine.loop import MAX_STEPS, Engine
from jspec.engine.request import Request
from jspec.outputs import EngineStats


class Replicas:
  """Several engines as one: each request goes to the one with the fewest."""

  def __init__(self, engines: Sequence[Engine]):
    self.engines = tuple(engines)
    # Alike in all of them, but for the devices; slots and pages are those of one engine. Requests
    # without a seed bring a number each, of one count for all: no two draw alike.
    self.drafter, self.config = engines[0].drafter, engines[0].config
    self._home: dict[Request, Engine] = {}

  @property
  def busy(self) -> bool:
    return any(e.busy for e in self.engines)

  def warm_up(self) -> Iterator[str]:
    for engine in self.engines:
      yield from engine.warm_up()

  def stats(self) -> EngineStats:
    return sum((e.stats() for e in self.engines[1:]), self.engines[0].stats())

  def add(self, request: Request) -> None:
    engine = min(self.engines, key=lambda e: e.num_requests)
    engine.add(request)
    self._home[request] = engine

  def abort(self, request: Request) -> None:
    engine = self._home.pop(request, None)  # None: it was never taken
    if engine is not None:
      engine.abort(request)

  def fail(self, request: Request, reason: str) -> None:
    self._home.pop(request, self.engines[0]).fail(request, reason)

  def forget(self) -> None:
    for engine in self.engines:
      engine.forget()

  def step(self, num_steps: int = MAX_STEPS, batch: bool = False) -> list[Request]:
    """Engine.step of all of them: their devices work at the same time."""
    busy = [e for e in self.engines if e.busy]
    for engine in busy:
      engine.start(num_steps, batch)
    changed = [request for engine in busy for request in engine.collect()]
    for request in changed:
      if request.finished:
        self._home.pop(request, None)
    return changed
