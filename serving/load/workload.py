"""What a load test asks and when: prompts, lengths and arrivals, all from one seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

Messages = Sequence[Mapping[str, str]]

_WORDS = ("time person year way day thing man world life hand part child eye woman place work week "
          "case point company number group problem fact water river stone paper light garden "
          "winter bread street letter music window teacher doctor engine harbour").split()


@dataclasses.dataclass(frozen=True)
class Lengths:
  """A distribution over whole numbers, written fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.

  A lone number is fixed. A log-normal is cut at 8 times its median.
  """

  kind: str
  values: tuple[float, ...]

  @classmethod
  def parse(cls, text: str) -> Lengths:
    """ValueError says what is allowed."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
      values = tuple(map(float, numbers))
    except ValueError:
      values = ()
    wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
    whole = values if kind != "lognormal" else values[:1]
    if (wanted is None or len(values) != wanted or not all(math.isfinite(v) for v in values)
        or any(v < 1 or v != int(v) for v in whole) or values[-1] < 0
        or (kind == "uniform" and values[0] > values[1])):
      raise ValueError(f"{text!r} is not a distribution of lengths: allowed are N, fixed:N, "
                       "uniform:LOW:HIGH and lognormal:MEDIAN:SIGMA, with whole numbers >= 1")
    return cls(kind, values)

  def draw(self, rng: random.Random) -> int:
    if self.kind == "fixed":
      return int(self.values[0])
    if self.kind == "uniform":
      return rng.randint(int(self.values[0]), int(self.values[1]))
    median, sigma = self.values
    return max(1, round(min(8 * median, rng.lognormvariate(math.log(median), sigma))))


@dataclasses.dataclass(frozen=True)
class Planned:
  """One request. A client with `leaves_after` goes away when it has seen that many messages."""

  messages: Messages
  max_tokens: int
  temperature: float
  seed: int
  ignore_eos: bool
  leaves_after: int | None = None
  cold: bool = False  # its prompt is new to the prefix cache, whatever was asked before


@dataclasses.dataclass(frozen=True)
class Workload:
  """How requests are drawn.

  Args:
    prompts: one is drawn for each request; Lengths are those of prompts made of random words.
    system_words: of a system message that all requests of a seed begin with; 0 for none.
    leaving: share of the clients that go away before their answer is complete.
    warm: prompts that come again may be found in the prefix cache. Those with a system message in
      common may anyway.
  """

  prompts: Sequence[Messages] | Lengths = Lengths("uniform", (16, 128))
  output_tokens: Lengths = Lengths("uniform", (16, 96))
  system_words: int = 0
  temperature: float = 0.0
  ignore_eos: bool = False
  leaving: float = 0.0
  seed: int = 0
  warm: bool = False

  def requests(self, run: str) -> Iterator[Planned]:
    """Without end, and the same whenever the seed and the name of the run are the same."""
    rng = random.Random(f"{self.seed} {run}")
    shared = words(self.system_words, random.Random(self.seed))
    system: Messages = [{"role": "system", "content": shared}] if shared else []
    for i in itertools.count():
      if isinstance(self.prompts, Lengths):
        messages: Messages = [{"role": "user", "content": words(self.prompts.draw(rng), rng)}]
      else:
        messages = rng.choice(self.prompts)
      tokens, leaves = self.output_tokens.draw(rng), rng.random() < self.leaving
      yield Planned([*system, *messages], tokens, self.temperature, i, self.ignore_eos,
                    rng.randint(1, max(1, tokens // 2)) if leaves else None,
                    cold=not (self.warm or shared))


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
  """Times of a Poisson process of `rate` per second, from 0 to `seconds`."""
  times, at = [], rng.expovariate(rate)
  while at < seconds:
    times.append(at)
    at += rng.expovariate(rate)
  return times


def words(count: int, rng: random.Random) -> str:
  return " ".join(rng.choices(_WORDS, k=count))
