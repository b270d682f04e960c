"""Runs several engines on the same prompts, in turn, so that the machine's moods hit all alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jspec.outputs import SpeculativeStats, raise_failure
from jspec.sampling_params import SamplingParams

WARM_UP_TOKENS = 8
LOOP_WINDOW, LOOP_NGRAM = 64, 16


class Sample(NamedTuple):
  """One request, as one engine served it once. Times are seconds since the batch began."""

  token_ids: tuple[int, ...]
  first_token: float
  finished: float
  stats: SpeculativeStats = SpeculativeStats()


class Engine(NamedTuple):
  """What is timed: a function of a batch of prompts and a token limit."""

  name: str
  generate: Callable[[list[list[int]], int], list[Sample]]


class Group(NamedTuple):
  """Prompts that run as one batch."""

  task: str
  prompts: list[list[int]]


class Run(NamedTuple):
  seconds: float
  samples: list[Sample]

  @property
  def tokens(self) -> int:
    return sum(len(sample.token_ids) for sample in self.samples)


class Result(NamedTuple):
  """All runs of one group, by engine, in the order they were made."""

  group: Group
  runs: dict[str, list[Run]]

  def median(self, engine: str) -> Run:
    """The run of median duration (the faster of two middle ones)."""
    runs = self.runs[engine]
    middle = statistics.median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)

  @property
  def loops(self) -> list[bool]:
    """Per request: whether any engine's text loops."""
    medians = [self.median(name).samples for name in self.runs]
    return [any(is_loop(sample.token_ids) for sample in samples)
            for samples in zip(*medians, strict=True)]


def is_loop(token_ids: Sequence[int]) -> bool:
  """Whether some 16 tokens in a row occur twice among the last 64 of an output.

  Small models under greedy decoding fall into such loops, which n-gram drafts then predict
  perfectly: they flatter the acceptance and say nothing about text that is of use.
  """
  tail = tuple(token_ids[-LOOP_WINDOW:])
  grams = [tail[i:i + LOOP_NGRAM] for i in range(len(tail) - LOOP_NGRAM + 1)]
  return len(set(grams)) < len(grams)


def llm_engine(name: str, llm: Any, params: SamplingParams) -> Engine:
  """A jspec.LLM as something to time."""
  def generate(prompts: list[list[int]], max_tokens: int) -> list[Sample]:
    limited = dataclasses.replace(params, max_tokens=max_tokens,
                                  min_tokens=min(params.min_tokens, max_tokens))
    outputs = llm.generate(prompts, limited)
    for output in outputs:
      raise_failure(output)
    return [Sample(output.token_ids, output.timing.first_token, output.timing.finished,
                   output.speculation) for output in outputs]

  return Engine(name, generate)


def make_groups(tasks: Sequence[str], prompts: Sequence[list[int]], size: int) -> list[Group]:
  """Batches of prompts of one task; what is left over of each task shares batches, as "mixed"."""
  groups, rest = [], []
  for task in dict.fromkeys(tasks):
    members = [ids for name, ids in zip(tasks, prompts, strict=True) if name == task]
    whole = len(members) - len(members) % size
    groups += [Group(task, members[i:i + size]) for i in range(0, whole, size)]
    rest += members[whole:]
  groups += [Group("mixed", rest[i:i + size]) for i in range(0, len(rest), size)]
  return groups


def run_interleaved(engines: Sequence[Engine], groups: Sequence[Group], max_tokens: int,
                    repeats: int, progress: Callable[[int, int], None] | None = None
                    ) -> list[Result]:
  """Times every engine on every group, `repeats` times, one after another.

  The order rotates from run to run, so no engine always comes first. A short untimed pass over
  all groups comes before, so no compilation is timed.
  """
  for group in groups:
    for engine in engines:
      engine.generate(group.prompts, min(WARM_UP_TOKENS, max_tokens))
  results = []
  for number, group in enumerate(groups):
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for repeat in range(repeats):
      first = (number + repeat) % len(engines)
      for engine in (*engines[first:], *engines[:first]):
        start = time.perf_counter()
        samples = engine.generate(group.prompts, max_tokens)
        runs[engine.name].append(Run(time.perf_counter() - start, samples))
    results.append(Result(group, runs))
    if progress is not None:
      progress(number + 1, len(groups))
  return results
