"""What the parts of device_check.py share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setup:
  """What a part needs to know."""

  platform: str  # "gpu" | "tpu": whose kernels
  smoke: bool  # tiny shapes, kernels interpreted, on CPU
  quick: bool
  model: str
  layers: int  # of Llama-3.1-8B, whose whole depth takes long to compile

  def attend(self, backend: str) -> Callable:
    from jspec.model import attention
    return attention.choose("cpu" if self.smoke else self.platform, backend, interpret=self.smoke)

  def backends(self) -> tuple[str, ...]:
    """In order of preference. Mosaic GPU's interpreter takes minutes even for tiny shapes."""
    from jspec.model import attention
    names = attention.PREFERENCE[self.platform]
    return tuple(n for n in names if n != "mosaic_gpu") if self.smoke else names


class Clock:
  """The time that is left for a part. Says what it had no time for."""

  def __init__(self, seconds: float):
    self.end, self.dropped = time.monotonic() + seconds, list[str]()

  def each(self, items: Iterable[Any], name: Callable[[Any], str]) -> Iterator[Any]:
    for item in items:
      if time.monotonic() < self.end:
        yield item
      else:
        self.dropped.append(name(item))


def say(text: str) -> None:
  print(text, flush=True)
