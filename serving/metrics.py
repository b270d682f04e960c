"""Prometheus metrics of a server: vLLM's names, labels and buckets under the prefix `jspec:`.

What the engine counts is read from it when a scrape asks; what clients wait for is measured here,
around their requests. As in vLLM each of a prompt's n outputs counts as a request of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
  CounterMetricFamily,
  GaugeMetricFamily,
  HistogramMetricFamily,
  Metric,
)
from prometheus_client.registry import Collector

from jspec import AsyncLLM, RequestOutput, SamplingParams
from jspec.serving.log_lines import Tally

LOG = logging.getLogger(__name__)
LABELS = ("model_name", "engine")
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
             10.0, 20.0, 40.0, 80.0)
PER_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
               120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
FINISHED_REASONS = ("stop", "length", "abort", "error")
# There from the start, with 0.
ERRORS = ("ValueError", "QueueFull", "ShareFull", "Draining", "EngineDead", "RequestFailed")


class Metrics:
  """Counters and histograms of one server, in a registry of their own."""

  def __init__(self, engine: AsyncLLM, model_name: str):
    self.engine, self.model_name = engine, model_name
    self.registry = CollectorRegistry()
    self.registry.register(_EngineCollector(engine, (model_name, "0")))
    prometheus_client.ProcessCollector(registry=self.registry)
    prometheus_client.PlatformCollector(registry=self.registry)
    prometheus_client.GCCollector(registry=self.registry)
    lengths = one_two_five(engine.llm.max_model_len)
    self.success = self._counter("request_success", "Requests that ended, by how.",
                                 "finished_reason", FINISHED_REASONS)
    self.errors = self._counter("request_errors", "Requests refused or failed, by exception.",
                                "error", ERRORS)
    self._refusals = Counter("jspec:refusals", "Requests and connections refused, by door.",
                             (*LABELS, "door", "status", "reason"), registry=self.registry)
    self._tally = Tally(LOG, "refused")
    self.first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN)
    # Two names for the same: the first is what dashboards made for older vLLM ask for.
    self.per_token = [self._histogram("time_per_output_token_seconds", PER_TOKEN),
                      self._histogram("inter_token_latency_seconds", PER_TOKEN)]
    self.mean_per_token = self._histogram("request_time_per_output_token_seconds", PER_TOKEN)
    self.latency = self._histogram("e2e_request_latency_seconds", PER_REQUEST)
    self.queue_time = self._histogram("request_queue_time_seconds", PER_REQUEST)
    self.prefill_time = self._histogram("request_prefill_time_seconds", PER_REQUEST)
    self.decode_time = self._histogram("request_decode_time_seconds", PER_REQUEST)
    self.inference_time = self._histogram("request_inference_time_seconds", PER_REQUEST)
    self.prompt_tokens = self._histogram("request_prompt_tokens", lengths)
    self.computed_tokens = self._histogram("request_prefill_kv_computed_tokens", lengths)
    self.generation_tokens = self._histogram("request_generation_tokens", lengths)
    self.longest = self._histogram("request_max_num_generation_tokens", lengths)
    self.params_n = self._histogram("request_params_n", (1, 2, 5, 10, 20))
    self.params_max_tokens = self._histogram("request_params_max_tokens", lengths)

  def _histogram(self, name: str, buckets: Iterable[float]) -> Histogram:
    text = f"Histogram of {name.removesuffix('_seconds').replace('_', ' ')}."
    return Histogram(f"jspec:{name}", text, LABELS, registry=self.registry,
                     buckets=tuple(buckets)).labels(self.model_name, "0")

  def _counter(self, name: str, text: str, label: str,
               values: Iterable[str]) -> Callable[[str], Counter]:
    counter = Counter(f"jspec:{name}", text, (*LABELS, label), registry=self.registry)
    child = lambda value: counter.labels(self.model_name, "0", value)
    for value in values:
      child(value)
    return child

  def refused(self, door: str, status: int | str, reason: str) -> None:
    """Counts it, and logs it once a second at most. All three are of a few values each."""
    self.count_refusal(door, status, reason)
    self._tally.note(f"{door}/{status}/{reason}")

  def count_refusal(self, door: str, status: int | str, reason: str) -> None:
    self._refusals.labels(self.model_name, "0", door, str(status), reason).inc()

  @contextlib.contextmanager
  def request(self, params: SamplingParams) -> Iterator[Callable[[RequestOutput], None]]:
    """Around a request; call the result with each of its deltas.

    A request that ends by an exception counts as an error, one that is left as an abort: once for
    each output not finished yet, once in all where no delta had come.
    """
    request = _Request(self, params)
    reason = "abort"
    try:
      yield request.observe
    except Exception as error:  # not a cancellation and not GeneratorExit: those are aborts
      reason = "error"
      kind = ValueError if isinstance(error, ValueError) else type(error)
      self.errors(kind.__name__).inc()
      raise
    finally:
      for _ in range(request.unfinished):
        self.success(reason).inc()

  def render(self) -> tuple[bytes, str]:
    """The exposition for a scrape, and its content type."""
    return prometheus_client.generate_latest(self.registry), prometheus_client.CONTENT_TYPE_LATEST


@dataclasses.dataclass
class _Progress:
  """What has been counted of an output."""

  tokens: int = 0
  first: float = 0.0  # when its first token came
  last: float = 0.0  # when the last one counted came
  finished: bool = False


class _Request:
  def __init__(self, metrics: Metrics, params: SamplingParams):
    self._metrics, self._params = metrics, params
    self._start = time.perf_counter()
    self._outputs: dict[int, _Progress] = {}

  @property
  def unfinished(self) -> int:
    if not self._outputs:
      return 1
    return sum(not seen.finished for seen in self._outputs.values())

  def observe(self, delta: RequestOutput) -> None:
    now = time.perf_counter()
    # A delta may bring more than the first token, which the engine then saw before us.
    first = min(now, self._start + delta.timing.first_token)
    if any(seen.tokens for seen in self._outputs.values()):
      first = now  # the engine's time is that of the request's first output, which this is not
    for out in delta.outputs:
      seen = self._outputs.setdefault(out.index, _Progress())
      self._count_tokens(seen, len(out.token_ids), first, now)
      if out.finish_reason is not None:
        seen.finished = True
        self._metrics.success(out.finish_reason).inc()
        self._count_finished(seen, delta, now)
    if delta.finished:
      self._metrics.params_n.observe(len(delta.outputs))
      self._metrics.longest.observe(max(seen.tokens for seen in self._outputs.values()))

  def _count_tokens(self, seen: _Progress, new: int, first: float, now: float) -> None:
    seen.tokens += new
    if new and new == seen.tokens:
      self._metrics.first_token.observe(first - self._start)
      seen.first = seen.last = first
      new -= 1
    # Per token, not per delta: a step that emits k tokens in a second takes 1/k for each.
    for _ in range(new):
      for histogram in self._metrics.per_token:
        histogram.observe((now - seen.last) / new)
    if new:
      seen.last = now

  def _count_finished(self, seen: _Progress, last: RequestOutput, now: float) -> None:
    metrics, prompt_tokens = self._metrics, len(last.prompt_token_ids)
    admitted = self._start + last.timing.admitted
    if not seen.tokens:  # then all of it was reading the prompt
      seen.first = seen.last = now
    metrics.queue_time.observe(last.timing.admitted)
    metrics.prefill_time.observe(max(0.0, seen.first - admitted))
    metrics.decode_time.observe(seen.last - seen.first)
    metrics.inference_time.observe(max(0.0, seen.last - admitted))
    metrics.latency.observe(now - self._start)
    metrics.prompt_tokens.observe(prompt_tokens)
    metrics.computed_tokens.observe(prompt_tokens - last.num_cached_tokens)
    metrics.generation_tokens.observe(seen.tokens)
    if seen.tokens > 1:
      metrics.mean_per_token.observe((seen.last - seen.first) / (seen.tokens - 1))
    if self._params.max_tokens is not None:  # what a client asks beyond what fits means nothing
      room = metrics.engine.llm.max_model_len - prompt_tokens
      metrics.params_max_tokens.observe(min(self._params.max_tokens, room))


class _EngineCollector(Collector):
  """An engine's statistics at the moment of a scrape."""

  def __init__(self, engine: AsyncLLM, labels: tuple[str, str]):
    self._engine, self._labels = engine, labels

  def collect(self) -> Iterator[Metric]:
    family: Any
    metric: Any
    for metric in self._engine.llm.get_metrics():
      if metric.kind == "vector":
        family = CounterMetricFamily(metric.name, metric.help, labels=(*LABELS, "position"))
        for position, value in enumerate(metric.values):
          family.add_metric((*self._labels, str(position)), value)
      else:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=LABELS)
        family.add_metric(self._labels, metric.value)
      yield family
    speculation = self._engine.stats().speculation
    accepted, drafted = speculation.accepted_histogram, speculation.drafted_histogram
    yield self._histogram("spec_decode_acceptance_length",
                          "Drafting steps by tokens emitted: those accepted and one more.",
                          accepted, least=1)
    yield self._histogram("spec_decode_draft_length", "Steps by draft tokens verified.",
                          drafted, least=0)

  def _histogram(self, name: str, text: str, counts: tuple[int, ...], least: int) -> Metric:
    """counts: steps by length, from `least` on."""
    upto = list(itertools.accumulate(counts, initial=0))
    buckets = [(str(float(least + i)), total) for i, total in enumerate(upto[1:])]
    histogram = HistogramMetricFamily(f"jspec:{name}", text, labels=LABELS)
    histogram.add_metric(self._labels, [*buckets, ("+Inf", upto[-1])],
                         sum(count * (least + i) for i, count in enumerate(counts)))
    return histogram


def one_two_five(largest: int) -> list[int]:
  """1, 2, 5, 10, 20, ... up to `largest`."""
  steps = (m * 10**e for e in itertools.count() for m in (1, 2, 5))
  return list(itertools.takewhile(lambda step: step <= largest, steps))
