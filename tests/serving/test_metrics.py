"""What a scrape shows is what happened: names, counts, times, ends."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re
import types

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_llm import greedy, tiny_llm

from jspec import (
  AsyncLLM,
  CompletionOutput,
  EngineStats,
  QueueFull,
  RequestOutput,
  SamplingParams,
  SpeculativeStats,
  Timing,
)
from jspec.engine.metrics import metrics_of
from jspec.serving import metrics
from jspec.serving.metrics import Metrics
from jspec.serving.service import Service

# vLLM's documentation, "Production Metrics" and "Metrics" of its V1 engine: kind, labels beside
# model_name and engine. What vLLM has for LoRA, CUDA graphs and the like has nothing to show here.
VLLM = {
  "vllm:num_requests_running": ("gauge", ()),
  "vllm:num_requests_waiting": ("gauge", ()),
  "vllm:kv_cache_usage_perc": ("gauge", ()),
  "vllm:prefix_cache_queries": ("counter", ()),
  "vllm:prefix_cache_hits": ("counter", ()),
  "vllm:num_preemptions": ("counter", ()), "vllm:corrupted_requests": ("counter", ()),
  "vllm:prompt_tokens": ("counter", ()),
  "vllm:generation_tokens": ("counter", ()),
  "vllm:request_success": ("counter", ("finished_reason",)),
  "vllm:spec_decode_num_drafts": ("counter", ()),
  "vllm:spec_decode_num_draft_tokens": ("counter", ()),
  "vllm:spec_decode_num_accepted_tokens": ("counter", ()),
  "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", ("position",)),
  "vllm:request_prompt_tokens": ("histogram", ()),
  "vllm:request_prefill_kv_computed_tokens": ("histogram", ()),
  "vllm:request_generation_tokens": ("histogram", ()),
  "vllm:request_max_num_generation_tokens": ("histogram", ()),
  "vllm:request_params_n": ("histogram", ()),
  "vllm:request_params_max_tokens": ("histogram", ()),
  "vllm:time_to_first_token_seconds": ("histogram", ()),
  "vllm:time_per_output_token_seconds": ("histogram", ()),
  "vllm:inter_token_latency_seconds": ("histogram", ()),
  "vllm:request_time_per_output_token_seconds": ("histogram", ()),
  "vllm:e2e_request_latency_seconds": ("histogram", ()),
  "vllm:request_queue_time_seconds": ("histogram", ()),
  "vllm:request_prefill_time_seconds": ("histogram", ()),
  "vllm:request_decode_time_seconds": ("histogram", ()),
  "vllm:request_inference_time_seconds": ("histogram", ()),
}
OURS = {"jspec:request_errors", "jspec:failed_requests", "jspec:refusals",
        "jspec:spec_decode_draft_acceptance_rate",
        "jspec:spec_decode_mean_acceptance_length", "jspec:spec_decode_acceptance_length",
        "jspec:spec_decode_draft_length"}
STATS = EngineStats(
    num_running=3, num_waiting=5, num_pages=8, num_free_pages=2, prefix_queries=700,
    prefix_hits=300, num_preemptions=11, prompt_tokens=900, generation_tokens=400,
    speculation=SpeculativeStats(
        num_steps=14, num_drafts=10, num_draft_tokens=20, num_accepted_tokens=7,
        num_generated_tokens=21, accepted_histogram=(5, 3, 2), drafted_histogram=(4, 0, 10)))


def fake_metrics(stats: EngineStats = STATS) -> Metrics:
  engine = types.SimpleNamespace(stats=lambda: stats, llm=types.SimpleNamespace(
      max_model_len=96, get_metrics=lambda: metrics_of(stats)))
  return Metrics(engine, "tiny")


def families(metrics: Metrics) -> dict:
  return {family.name: family
          for family in text_string_to_metric_families(metrics.render()[0].decode())}


def scrape(metrics: Metrics) -> collections.Counter:
  """(name, the labels' values beside model_name and engine) -> value."""
  out = collections.Counter()
  for family in families(metrics).values():
    for sample in family.samples:
      labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
      out[sample.name.removeprefix("jspec:"), *labels.values()] = sample.value
  return out


def gained(metrics: Metrics, before: collections.Counter) -> dict:
  return {key: value - before[key] for key, value in scrape(metrics).items()}


def delta(*lengths: int, done: str | None = None, first: float = 0.0, admitted: float = 0.0,
             cached: int = 0) -> RequestOutput:
  outputs = tuple(CompletionOutput(i, "", tuple(range(length)), done)
                  for i, length in enumerate(lengths))
  return RequestOutput("0", None, tuple(range(10)), outputs, done is not None,
                       Timing(first_token=first, admitted=admitted), cached)


@pytest.fixture
def clock(monkeypatch) -> types.SimpleNamespace:
  now = types.SimpleNamespace(seconds=100.0)
  monkeypatch.setattr(metrics, "time",
                      types.SimpleNamespace(perf_counter=lambda: now.seconds))
  return now


# ------------------------------------------------------------------ the scrape


def test_names_kinds_and_labels_are_vllms_with_another_prefix():
  found = families(fake_metrics())
  for name, (kind, labels) in VLLM.items():
    family = found[name.replace("vllm:", "jspec:")]
    assert family.type == kind, name
    suffixes = {"counter": ("_total",), "gauge": ("",)}.get(kind, ("_bucket", "_sum", "_count"))
    for suffix in suffixes:
      samples = [s for s in family.samples if s.name == family.name + suffix]
      bucket = {"le"} if suffix == "_bucket" else set()
      assert samples, family.name + suffix
      for sample in samples:
        assert set(sample.labels) == {"model_name", "engine", *labels, *bucket}, name
        assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"


def test_nothing_is_exported_that_the_table_does_not_name():
  names = {name for name in families(fake_metrics())
           if name.startswith("jspec:") and not name.endswith("_created")}
  assert names == {name.replace("vllm:", "jspec:") for name in VLLM} | OURS


@pytest.mark.parametrize("name, count, first, last", [
  ("time_to_first_token_seconds", 22, 0.001, 2560), ("inter_token_latency_seconds", 19, 0.01, 80),
  ("request_time_per_output_token_seconds", 19, 0.01, 80), ("request_params_n", 5, 1, 20),
  ("e2e_request_latency_seconds", 21, 0.3, 7680), ("request_generation_tokens", 6, 1, 50),
])
def test_buckets_are_vllms(name, count, first, last):
  bounds = [float(s.labels["le"]) for s in families(fake_metrics())[f"jspec:{name}"].samples
            if s.name.endswith("_bucket")]
  assert len(bounds) == count + 1 and bounds == sorted(bounds)
  assert (bounds[0], bounds[-2], bounds[-1]) == (first, last, float("inf"))


def test_a_scrape_is_in_prometheus_text_format_and_describes_the_process():
  body, content_type = fake_metrics().render()
  assert content_type.startswith("text/plain; version=")
  for family in text_string_to_metric_families(body.decode()):
    assert family.documentation and family.type != "unknown"
    assert all(re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", s.name) for s in family.samples)
  assert b"python_info{" in body and b"process_resident_memory_bytes " in body


def test_the_engines_counters_are_read_at_the_scrape():
  now = scrape(fake_metrics())
  expected = {"num_requests_running": 3, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.75,
              "prefix_cache_queries_total": 700, "prefix_cache_hits_total": 300,
              "num_preemptions_total": 11, "prompt_tokens_total": 900,
              "generation_tokens_total": 400, "spec_decode_num_drafts_total": 10,
              "spec_decode_num_draft_tokens_total": 20,
              "spec_decode_num_accepted_tokens_total": 7,
              "spec_decode_draft_acceptance_rate": 0.35,
              "spec_decode_mean_acceptance_length": 1.7}
  assert {name: now[name,] for name in expected} == expected


def test_histograms_of_speculation_add_up_to_its_counters():
  now = scrape(fake_metrics())
  name = "spec_decode_num_accepted_tokens_per_pos_total"
  assert (now[name, "0"], now[name, "1"]) == (5, 2) and (name, "2") not in now
  bounds = ("1.0", "2.0", "3.0", "+Inf")
  assert [now["spec_decode_acceptance_length_bucket", le] for le in bounds] == [5, 8, 10, 10]
  assert now["spec_decode_acceptance_length_sum",] == 7 + 10  # accepted and one for each draft
  bounds = ("0.0", "1.0", "2.0", "+Inf")
  assert [now["spec_decode_draft_length_bucket", le] for le in bounds] == [4, 4, 14, 14]
  assert now["spec_decode_draft_length_sum",] == 20
  assert now["spec_decode_draft_length_count",] == 14


def test_an_engine_that_has_done_nothing_can_be_scraped():
  now = scrape(fake_metrics(EngineStats()))
  assert now["spec_decode_acceptance_length_count",] == 0
  assert now["spec_decode_draft_acceptance_rate",] == 0
  for reason in ("stop", "length", "abort", "error"):  # a rate needs the 0 before the first 1
    assert ("request_success_total", reason) in now


# ------------------------------------------------------------------------ times


def test_latency_counts_tokens_not_deltas(clock):
  metrics = fake_metrics()
  with metrics.request(SamplingParams(max_tokens=8)) as observe:
    clock.seconds += 1.0
    observe(delta(3, first=0.7, admitted=0.2, cached=4))  # two tokens came after the first one
    clock.seconds += 1.0
    observe(delta(4, first=0.7, admitted=0.2, cached=4))  # four tokens in a second
    clock.seconds += 0.5
    observe(delta(1, done="length", first=0.7, admitted=0.2, cached=4))
  now = scrape(metrics)
  for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
    assert now[f"{name}_count",] == 8 - 1
    assert now[f"{name}_bucket", "0.1"] == 0 and now[f"{name}_bucket", "0.15"] == 2
    assert now[f"{name}_bucket", "0.3"] == 6 and now[f"{name}_bucket", "0.5"] == 7
    assert now[f"{name}_sum",] == pytest.approx(2.5 - 0.7)
  sums = {"time_to_first_token": 0.7, "e2e_request_latency": 2.5, "request_queue_time": 0.2,
          "request_prefill_time": 0.5, "request_decode_time": 1.8, "request_inference_time": 2.3,
          "request_time_per_output_token": 1.8 / 7}
  for name, seconds in sums.items():
    assert now[f"{name}_seconds_count",] == 1
    assert now[f"{name}_seconds_sum",] == pytest.approx(seconds), name
  lengths = {"request_prompt_tokens": 10, "request_prefill_kv_computed_tokens": 6,
             "request_generation_tokens": 8, "request_max_num_generation_tokens": 8,
             "request_params_n": 1, "request_params_max_tokens": 8}
  assert {name: now[f"{name}_sum",] for name in lengths} == lengths


def test_each_of_n_outputs_has_its_own_first_token(clock):
  metrics = fake_metrics()
  with metrics.request(SamplingParams()) as observe:
    clock.seconds += 1.0
    observe(delta(1, 0, first=1.0))
    clock.seconds += 2.0
    observe(delta(1, 1, done="stop", first=1.0))
  now = scrape(metrics)
  assert now["time_to_first_token_seconds_count",] == 2
  assert now["time_to_first_token_seconds_sum",] == pytest.approx(1.0 + 3.0)
  assert now["inter_token_latency_seconds_count",] == (2 - 1) + (1 - 1)
  assert now["request_success_total", "stop"] == 2
  assert now["request_params_n_sum",] == 2 and now["request_params_n_count",] == 1
  assert now["request_max_num_generation_tokens_sum",] == 2
  assert now["request_time_per_output_token_seconds_count",] == 1  # one token has no time between


# ------------------------------------------------------------------------- ends


@pytest.mark.parametrize("deltas, left", [([], 1), ([(2,)], 1), ([(2, 3)], 2)])
def test_a_request_that_is_left_counts_as_an_abort(deltas, left):
  metrics = fake_metrics()

  async def reader():
    with metrics.request(SamplingParams()) as observe:
      for lengths in deltas:
        observe(delta(*lengths))
      yield

  async def leave():
    stream = reader()
    await anext(stream)
    await stream.aclose()

  async def cancel():
    with metrics.request(SamplingParams()) as observe:
      for lengths in deltas:
        observe(delta(*lengths))
      await asyncio.sleep(60)

  async def both():
    await leave()
    task = asyncio.create_task(cancel())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

  asyncio.run(both())
  now = scrape(metrics)
  assert now["request_success_total", "abort"] == 2 * left
  assert sum(now["request_success_total", r] for r in ("stop", "length", "error")) == 0
  assert now["e2e_request_latency_seconds_count",] == 0  # latencies are those of whole answers


@pytest.mark.parametrize("error", [ValueError("no"), QueueFull("later"), KeyError("bug")])
def test_a_request_that_fails_counts_as_an_error_of_its_kind(error):
  metrics = fake_metrics()
  with pytest.raises(type(error)), metrics.request(SamplingParams()):
    raise error
  now = scrape(metrics)
  assert now["request_success_total", "error"] == 1 and now["request_success_total", "abort"] == 0
  assert now["request_errors_total", type(error).__name__] == 1


def test_an_output_that_ends_before_its_neighbour_is_counted_once():
  metrics = fake_metrics()
  early = delta(4, done="stop").outputs[0]
  with metrics.request(SamplingParams()) as observe:
    for length in (4, 2, 2):  # and then somebody leaves
      late = dataclasses.replace(early, index=1, token_ids=tuple(range(length)), finish_reason=None)
      observe(dataclasses.replace(delta(4), outputs=(early, late)))
      early = CompletionOutput(0, "", ())
  now = scrape(metrics)
  assert now["request_success_total", "stop"] == now["request_success_total", "abort"] == 1
  assert now["request_generation_tokens_count",] == 1
  assert now["request_generation_tokens_sum",] == 4


def test_a_reader_that_leaves_after_the_end_has_not_aborted():
  metrics = fake_metrics()
  with pytest.raises(GeneratorExit), metrics.request(SamplingParams()) as observe:
    observe(delta(4, 4, done="stop"))
    raise GeneratorExit
  now = scrape(metrics)
  assert now["request_success_total", "stop"] == 2 and now["request_success_total", "abort"] == 0


# -------------------------------------------------------------- a real engine


@pytest.fixture(scope="module")
def service():
  engine = AsyncLLM(tiny_llm("ngram"))
  yield Service(engine, "tiny", Metrics(engine, "tiny"))
  asyncio.run(engine.shutdown())


async def until_idle(service: Service) -> None:
  async with asyncio.timeout(60):
    while service.engine.stats().num_running or service.engine.stats().num_waiting:
      await asyncio.sleep(0.01)


def test_counts_are_what_the_requests_outputs_say(service):
  before = scrape(service.metrics)
  asked = [("the hen and the hen", greedy(max_tokens=24, ignore_eos=True)), ([5], greedy()),
           ("an ant on the", SamplingParams(n=2, seed=3, max_tokens=12)),
           ("a hat. a hat. a hat", SamplingParams(seed=1, max_tokens=9, stop=["e"])),
           ([3, 4] * 20, greedy(max_tokens=20, ignore_eos=True))]

  async def run():
    outputs = await asyncio.gather(*(service.complete(*pair) for pair in asked))
    await until_idle(service)
    return outputs

  outputs = asyncio.run(run())
  now = gained(service.metrics, before)
  each = [out for output in outputs for out in output.outputs]
  tokens = sum(len(out.token_ids) for out in each)
  assert now["generation_tokens_total",] == now["request_generation_tokens_sum",] == tokens
  assert now["inter_token_latency_seconds_count",] == tokens - len(each)
  for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds",
               "request_generation_tokens", "request_prompt_tokens", "request_queue_time_seconds"):
    assert now[f"{name}_count",] == len(each)
  assert now["request_params_n_count",] == len(asked)
  assert now["prompt_tokens_total",] == now["request_prompt_tokens_sum",] == sum(
      len(output.prompt_token_ids) * len(output.outputs) for output in outputs)
  for reason, count in collections.Counter(out.finish_reason for out in each).items():
    assert now["request_success_total", reason] == count
  spec = sum((output.speculation for output in outputs), SpeculativeStats())
  assert spec.num_accepted_tokens > 0
  assert now["spec_decode_num_drafts_total",] == spec.num_drafts
  assert now["spec_decode_num_draft_tokens_total",] == spec.num_draft_tokens
  assert now["spec_decode_num_accepted_tokens_total",] == spec.num_accepted_tokens
  assert sum(value for key, value in now.items() if key[0].endswith("_per_pos_total")
             ) == spec.num_accepted_tokens
  assert now["spec_decode_draft_length_count",] == spec.num_steps


def test_who_leaves_a_running_request_is_counted_once_and_frees_its_slot(service):
  before = scrape(service.metrics)

  async def run():
    stream = service.stream([3, 4] * 10, greedy(max_tokens=60, ignore_eos=True))
    await anext(stream)
    running = scrape(service.metrics)["num_requests_running",]
    await stream.aclose()
    await until_idle(service)
    return running

  assert asyncio.run(run()) == 1
  now = gained(service.metrics, before)
  assert now["request_success_total", "abort"] == 1
  assert sum(v for key, v in now.items() if key[0] == "request_success_total") == 1
  assert scrape(service.metrics)["kv_cache_usage_perc",] == 0


def test_a_refused_request_is_counted_once(service):
  before = scrape(service.metrics)
  with pytest.raises(ValueError):
    asyncio.run(service.complete([5] * 97, greedy()))  # longer than max_model_len
  now = gained(service.metrics, before)
  assert now["request_success_total", "error"] == now["request_errors_total", "ValueError"] == 1
  assert sum(v for key, v in now.items() if key[0] == "request_success_total") == 1
