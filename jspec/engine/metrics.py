"""What an engine has done, as vLLM's LLM.get_metrics has it: names, kinds and values."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from jspec.outputs import EngineStats


@dataclasses.dataclass(frozen=True)
class Metric:
  name: str
  help: str
  kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class Counter(Metric):
  kind = "counter"
  value: int


@dataclasses.dataclass(frozen=True)
class Gauge(Metric):
  kind = "gauge"
  value: float


@dataclasses.dataclass(frozen=True)
class Vector(Metric):
  """A counter for each of a few places."""

  kind = "vector"
  values: list[int]


def metrics_of(stats: EngineStats) -> list[Metric]:
  """Named as on the server's /metrics; acceptance by position as a vector."""
  spec = stats.speculation
  accepted = spec.accepted_histogram
  per_position = list(itertools.accumulate(reversed(accepted[1:])))[::-1]
  counters = {
    "prompt_tokens": ("Prompt tokens of requests that have got a slot.", stats.prompt_tokens),
    "generation_tokens": ("Tokens generated.", stats.generation_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
    "num_preemptions": ("Requests that lost their pages and were computed anew.",
                        stats.num_preemptions),
    "corrupted_requests": ("Requests that ended because their logits were NaN or infinite.",
                           stats.corrupted_requests),
    "failed_requests": ("Requests that were taken and could not be answered.",
                        dict(stats.finished).get("error", 0)),
    "spec_decode_num_drafts": ("Steps that verified draft tokens, over all slots.",
                               spec.num_drafts),
    "spec_decode_num_draft_tokens": ("Draft tokens verified.", spec.num_draft_tokens),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted; bonus tokens are not counted.",
                                        spec.num_accepted_tokens)}
  gauges = {
    "num_requests_running": ("Requests in slots.", stats.num_running),
    "num_requests_waiting": ("Requests waiting for a slot.", stats.num_waiting),
    "kv_cache_usage_perc": ("Share of the KV cache's pages in use, 0 to 1.", stats.kv_cache_usage),
    "spec_decode_draft_acceptance_rate": ("Accepted / verified draft tokens since the start.",
                                          spec.acceptance_rate),
    "spec_decode_mean_acceptance_length": ("Tokens per drafting step since the start.",
                                           spec.mean_acceptance_length)}
  return [*(Counter(f"jspec:{name}", *row) for name, row in counters.items()),
          *(Gauge(f"jspec:{name}", *row) for name, row in gauges.items()),
          Vector("jspec:spec_decode_num_accepted_tokens_per_pos",
                 "Draft tokens accepted, by position in the draft.", per_position)]
