"""Timed runs -> the numbers of the report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jspec.bench.runner import Result, Run, Sample
from jspec.outputs import SpeculativeStats

PLAIN, SPECULATIVE = "plain", "speculative"


def summarise(results: Sequence[Result], max_tokens: int, greedy: bool,
              end_ids: Iterable[int] = ()) -> dict[str, Any]:
  """Everything measured: all groups, those without loops, each task, each group."""
  ends = frozenset(end_ids)
  sound = [result for result in results if not any(result.loops)]
  tasks = dict.fromkeys(result.group.task for result in results)
  return {
    "all": block(results, max_tokens, greedy, ends),
    "without_loops": block(sound, max_tokens, greedy, ends) if sound else None,
    "tasks": {task: block([r for r in results if r.group.task == task], max_tokens, greedy, ends)
              for task in tasks},
    "tasks_without_loops": {
      task: block([r for r in sound if r.group.task == task], max_tokens, greedy, ends)
      for task in dict.fromkeys(result.group.task for result in sound)},
    "groups": [_group_row(result) for result in results],
  }


def block(results: Sequence[Result], max_tokens: int, greedy: bool,
          end_ids: frozenset[int] = frozenset()) -> dict[str, Any]:
  """The metrics of some groups, every group by its run of median duration."""
  names = list(results[0].runs)
  medians = {name: [result.median(name) for result in results] for name in names}
  engines = {name: engine_metrics(runs, max_tokens) for name, runs in medians.items()}
  speed = engines[PLAIN]["tokens_per_s"]
  decode = engines[PLAIN]["decode_tokens_per_s"]
  for metrics in engines.values():
    metrics["ratio"] = _over(metrics["tokens_per_s"], speed)
    metrics["decode_ratio"] = _over(metrics["decode_tokens_per_s"], decode)
  if greedy:
    for name in names:
      engines[name]["identical_to_plain"] = _identical(medians[PLAIN], medians[name], end_ids)
  return {"requests": sum(len(result.group.prompts) for result in results),
          "groups": len(results),
          "prompt_tokens": sum(len(ids) for result in results for ids in result.group.prompts),
          "looping_requests": sum(sum(result.loops) for result in results),
          "engines": engines}


def engine_metrics(runs: Sequence[Run], max_tokens: int) -> dict[str, Any]:
  """Speed, latencies and acceptance of one engine.

  tokens_per_s counts prefill time, decode_tokens_per_s only the time after a batch's last first
  token, and only tokens after the first. Latencies are medians over requests;
  latency_s is what max_tokens tokens take, from TTFT and TPOT where an output ended sooner.
  """
  samples = [sample for run in runs for sample in run.samples]
  tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
  decoding = sum(run.seconds - max(s.first_token for s in run.samples) for run in runs)
  tpot = [_tpot(sample) for sample in samples if len(sample.token_ids) > 1]
  latency = [sample.first_token + (max_tokens - 1) * _tpot(sample) for sample in samples
             if len(sample.token_ids) > 1 or max_tokens == 1]
  stats = sum((sample.stats for sample in samples), SpeculativeStats())
  return {
    "tokens": tokens,
    "seconds": seconds,
    "tokens_per_s": _over(tokens, seconds),
    "decode_tokens_per_s": _over(tokens - len(samples), decoding),
    "ttft_s": statistics.median(sample.first_token for sample in samples),
    "tpot_s": statistics.median(tpot) if tpot else None,
    "latency_s": statistics.median(latency) if latency else None,
    "cached_tokens": sum(sample.cached_tokens for sample in samples),  # of the prompts
    "steps": stats.num_steps,
    "drafted_tokens": stats.num_draft_tokens,
    "accepted_tokens": stats.num_accepted_tokens,
    "acceptance_rate": stats.acceptance_rate,
    "acceptance_per_position": list(stats.acceptance_per_position),
    "mean_acceptance_length": stats.mean_acceptance_length,  # tokens per step that drafted
    "tokens_per_step": stats.tokens_per_step,  # over all steps
    "drafting_share": _over(stats.num_drafts, stats.num_steps),
  }


def _tpot(sample: Sample) -> float:
  """Time per output token after the first."""
  return (sample.finished - sample.first_token) / max(1, len(sample.token_ids) - 1)


def _over(a: float | None, b: float | None) -> float | None:
  return a / b if a is not None and b else None


def _identical(runs: Sequence[Run], others: Sequence[Run], end_ids: frozenset[int]) -> int:
  """Requests with the same tokens, up to an end token that only one engine keeps."""
  def text(sample: Sample) -> tuple[int, ...]:
    ids = sample.token_ids
    return ids[:-1] if ids and ids[-1] in end_ids else ids

  return sum(text(a) == text(b) for run, other in zip(runs, others, strict=True)
             for a, b in zip(run.samples, other.samples, strict=True))


def _group_row(result: Result) -> dict[str, Any]:
  return {
    "task": result.group.task,
    "prompt_tokens": [len(ids) for ids in result.group.prompts],
    "loops": result.loops,
    "engines": {name: {"seconds": [run.seconds for run in runs],
                       "tokens": result.median(name).tokens,
                       "cached_tokens": [s.cached_tokens for s in result.median(name).samples],
                       "ttft_s": [s.first_token for s in result.median(name).samples]}
                for name, runs in result.runs.items()},
  }
