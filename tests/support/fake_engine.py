"""An engine that answers by rote."""

from __future__ import annotations

import asyncio
import types

from jspec import (
  CompletionOutput,
  EngineStats,
  RequestOutput,
)


class FakeEngine:
  """Answers "ab", its b after `go` was set; or raises `error`."""

  def __init__(self):
    self.llm = types.SimpleNamespace(max_model_len=96, get_metrics=list)
    self.is_healthy = True
    self.error: Exception | None = None
    self.go = asyncio.Event()
    self.left = 0  # requests that ended before their b

  def stats(self):
    return EngineStats()

  async def deltas(self, prompt, params, *, request_id, priority, cache_salt, admit, queued):
    if self.error:
      raise self.error
    if queued:
      queued()
    yield RequestOutput(request_id, prompt, (1,), (CompletionOutput(0, "a", (3,)),))
    try:
      await self.go.wait()
    except asyncio.CancelledError:
      self.left += 1
      raise
    done = CompletionOutput(0, "b", (4,), "length")
    yield RequestOutput(request_id, prompt, (1,), (done,), finished=True)
