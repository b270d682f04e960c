"""Prometheus metrics of a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jspec import AsyncLLM, RequestOutput


class Metrics:
  """Counters and histograms of one server, in a registry of their own."""

  def __init__(self, engine: AsyncLLM, model_name: str):
    self.engine, self.model_name = engine, model_name

  @contextlib.contextmanager
  def request(self) -> Iterator[Callable[[RequestOutput], None]]:
    """Around a request; call the result with each of its snapshots."""
    yield lambda output: None

  def render(self) -> tuple[bytes, str]:
    """The exposition for a scrape, and its content type."""
    return b"", "text/plain"
