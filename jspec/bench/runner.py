"""Runs several engines on the same prompts, in turn, so that the machine's moods hit all alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
import uuid
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
  cached_tokens: int = 0  # of the prompt, found in the prefix cache


class Engine(NamedTuple):
  """What is timed: a function of a batch of prompts and a token limit."""

  name: str
  generate: Callable[[list[list[int]], int], list[Sample]]
  forget: Callable[[], Any] = lambda: None  # what it knows of prompts that it has seen


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


def cold(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
  """The prompts, such that none finds anything in the prefix cache, of another or of its own."""
  return [{"prompt_token_ids": ids, "cache_salt": uuid.uuid4().hex} for ids in prompts]


def llm_engine(name: str, llm: Any, params: SamplingParams, warm: bool = False) -> Engine:
  """A jspec.LLM as something to time.

  warm: prompts are found in the prefix cache, and drafters that learn from outputs may have seen
    the very ones. Else every prompt is new to it.
  """
  def generate(prompts: list[list[int]], max_tokens: int) -> list[Sample]:
    limited = dataclasses.replace(params, max_tokens=max_tokens,
                                  min_tokens=min(params.min_tokens, max_tokens))
    outputs = llm.generate(prompts if warm else cold(prompts), limited)
    for output in outputs:
      raise_failure(output)
    return [Sample(output.token_ids, output.timing.first_token, output.timing.finished,
                   output.speculation, output.num_cached_tokens) for output in outputs]

  return Engine(name, generate) if warm else Engine(name, generate, llm.reset_prefix_cache)


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
  """Times every engine on every group, in `repeats` passes over all groups.

  The order rotates from run to run, so no engine always comes first. A short untimed pass comes
  before, so no compilation is timed. Each pass begins with engines that have forgotten the last.
  """
  for group in groups:
    for engine in engines:
      engine.generate(group.prompts, min(WARM_UP_TOKENS, max_tokens))
  results = [Result(group, {engine.name: [] for engine in engines}) for group in groups]
  for repeat in range(repeats):
    for engine in engines:
      engine.forget()
    for number, (group, runs) in enumerate(results):
      first = (number + repeat) % len(engines)
      for engine in (*engines[first:], *engines[:first]):
        start = time.perf_counter()
        samples = engine.generate(group.prompts, max_tokens)
        runs[engine.name].append(Run(time.perf_counter() - start, samples))
      if progress is not None:
        progress(repeat * len(groups) + number + 1, repeats * len(groups))
  return results
