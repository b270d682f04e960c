"""The load generator: what it asks, when, and whether its figures add up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import random
import statistics
import threading
import types

import grpc
import httpx
import numpy as np
import pytest
from tiny_llm import tiny_llm

from jspec import AsyncLLM
from jspec.serving.http import server as http_server
from jspec.serving.load import report as load_report
from jspec.serving.load.client import (
  GrpcDoor,
  HttpDoor,
  Progress,
  Record,
  ask,
  closed_loop,
  open_loop,
  totals,
)
from jspec.serving.load.workload import Lengths, Planned, Workload, arrivals
from jspec.serving.metrics import Metrics
from jspec.serving.rpc import server as grpc_server
from jspec.serving.service import Service
from scripts import load

GOALS = load_report.Goals(ttft=0.5, tpot=0.15)
REQUEST = Planned([{"role": "user", "content": "a b"}], 8, 0.0, 0, False)


class FakeDoor:
  """Answers with one text per token. `script` says what happens instead to the i-th request."""

  def __init__(self, script=None, pause: float = 0.0):
    self.script, self.pause = script or {}, pause
    self.asked: list[Planned] = []
    self.running = self.most = self.closed = 0

  async def stream(self, planned: Planned):
    what = self.script.get(len(self.asked))
    self.asked.append(planned)
    self.running += 1
    self.most = max(self.most, self.running)
    try:
      for i in range(planned.max_tokens):
        await asyncio.sleep(self.pause)
        if what == "refused":
          raise RuntimeError("no")
        if what == "ends early" and i == 1:
          return
        yield Progress(True)
      yield Progress(False, "length", len(planned.messages), planned.max_tokens)
    finally:
      self.running -= 1
      self.closed += 1


# -------------------------------------------------------------------- workload


@pytest.mark.parametrize("text, low, mean, high", [
  ("7", 7, 7, 7), ("fixed:7", 7, 7, 7), ("uniform:3:9", 3, 6, 9),
  ("lognormal:20:0.5", 1, 20 * math.exp(0.125), 160),
])
def test_lengths_have_the_distribution_that_was_asked_for(text, low, mean, high):
  rng = random.Random(0)
  drawn = [Lengths.parse(text).draw(rng) for _ in range(4000)]
  assert low <= min(drawn) and max(drawn) <= high
  # Standard deviations are at most 12, so a mean of 4,000 strays by 1 with probability 1e-7.
  assert abs(statistics.mean(drawn) - mean) < 1


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1.5", "uniform:3", "uniform:9:3", "fixed:a",
                                  "lognormal:0:1", "lognormal:9:-1", "fixed:inf", "gamma:2:3"])
def test_other_lengths_are_refused(text):
  with pytest.raises(ValueError, match="not a distribution of lengths: allowed are"):
    Lengths.parse(text)


def test_a_seed_and_a_run_determine_the_requests():
  plan = Workload(system_words=5, leaving=0.5, seed=3)

  def first(plan, run, count=50):
    stream = plan.requests(run)
    return [next(stream) for _ in range(count)]

  assert first(plan, "a") == first(plan, "a")
  assert first(plan, "a") != first(plan, "b")
  assert first(plan, "a") != first(dataclasses.replace(plan, seed=4), "a")
  both = first(plan, "a") + first(plan, "b")
  assert len({r.messages[0]["content"] for r in both}) == 1  # what prefix caching can find again
  assert len({r.messages[1]["content"] for r in both}) == len(both)
  assert 20 <= sum(r.leaves_after is not None for r in both) <= 80
  assert all(1 <= r.leaves_after <= r.max_tokens for r in both if r.leaves_after is not None)


def test_prompts_are_drawn_from_those_given():
  prompts = [[{"role": "user", "content": text}] for text in "abc"]
  stream = Workload(prompts).requests("a")
  assert {next(stream).messages[0]["content"] for _ in range(60)} == set("abc")


def test_arrivals_are_a_poisson_process():
  times = arrivals(5.0, 1000.0, random.Random(1))
  gaps = np.diff([0.0, *times])
  assert times == sorted(times) and times[-1] < 1000
  assert abs(len(times) - 5000) < 5 * math.sqrt(5000)  # five standard deviations
  assert abs(gaps.std() / gaps.mean() - 1) < 0.08  # exponential gaps; regular ones would have 0
  assert times == arrivals(5.0, 1000.0, random.Random(1))


# ----------------------------------------------------------------------- asking


def test_every_arrival_has_a_record_and_none_is_lost():
  door, times = FakeDoor(pause=0.001), arrivals(100.0, 0.5, random.Random(2))
  records = asyncio.run(open_loop(door, Workload(seed=2).requests("x"), times, 30.0))
  assert [r.due for r in records] == times
  assert all(r.completed and r.sent >= r.due and r.due < r.first <= r.last for r in records)
  assert [r.output_tokens for r in records] == [p.max_tokens for p in door.asked]
  assert door.most > 1  # an open loop waits for nobody


def test_a_closed_loop_never_has_more_clients_than_asked_for():
  door = FakeDoor(pause=0.001)
  records = asyncio.run(closed_loop(door, Workload().requests("x"), 3, 30.0, requests=20))
  assert len(records) == len(door.asked) == 20 and door.most == 3
  assert door.asked == [p for p, _ in zip(Workload().requests("x"), range(20), strict=False)]


def test_what_goes_wrong_is_told_apart():
  script = {0: "refused", 1: "ends early"}

  async def run():
    door = FakeDoor(script, pause=0.001)
    records = [await ask(door, REQUEST, 0.0, 0.0, timeout) for timeout in (9, 9, 0.003, 9)]
    leaving = dataclasses.replace(REQUEST, leaves_after=2)
    return [*records, await ask(door, leaving, 0.0, 0.0, 9)], door

  (refused, early, late, fine, left), door = asyncio.run(run())
  assert refused.error == "RuntimeError" and not refused.lost
  assert early.lost and not early.completed and early.error is None
  assert late.error == "timeout" and not late.lost
  assert fine.completed and (fine.prompt_tokens, fine.output_tokens) == (1, 8)
  assert left.left and not (left.completed or left.lost or left.error)
  assert door.closed == 5 and door.running == 0  # a client that leaves closes its stream


def over_http(respond, raw: bool = False, planned: Planned | None = None):
  async def run():
    client = httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(respond))
    door = HttpDoor(client, "m", raw)
    async with contextlib.aclosing(door.stream(planned or REQUEST)) as stream:
      return [progress async for progress in stream]

  return asyncio.run(run())


def events(*bodies) -> httpx.Response:
  lines = [f"data: {json.dumps(body)}\n\n" for body in bodies] + ["data: [DONE]\n\n"]
  return httpx.Response(200, text="".join(lines))


def test_http_asks_for_usage_and_reads_it():
  bodies = []

  def respond(request):
    bodies.append(json.loads(request.content))
    return events({"choices": [{"delta": {"role": "assistant", "content": ""}}]},
                  {"choices": [{"delta": {"content": "é"}, "finish_reason": None}]},
                  {"choices": [{"delta": {}, "finish_reason": "stop"}]},
                  {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}})

  assert over_http(respond) == [Progress(False), Progress(True), Progress(False),
                                Progress(False, "stop", 3, 9)]
  assert bodies == [{
      "model": "m", "max_tokens": 8, "temperature": 0.0, "seed": 0, "ignore_eos": False,
      "stream": True, "stream_options": {"include_usage": True},
      "messages": [{"role": "user", "content": "a b"}]}]


def test_prompts_are_new_to_the_server_unless_they_are_to_be_warm_or_begin_alike():
  planned = [next(Workload(**fields).requests("a"))
             for fields in ({}, {"warm": True}, {"system_words": 3})]
  assert [one.cold for one in planned] == [True, False, False]
  salts = []

  def respond(request):
    salts.append(json.loads(request.content).get("cache_salt"))
    return events({"choices": []})

  for one in [planned[0], *planned]:
    over_http(respond, planned=one)
  assert salts[0] and salts[1] and salts[0] != salts[1] and salts[2:] == [None, None]


def test_grpc_says_the_same():
  asked = []

  class Call:
    __aiter__ = lambda self: self
    cancel = lambda self: None

    async def __anext__(self):
      raise StopAsyncIteration

  async def run():
    async with grpc.aio.insecure_channel("localhost:1") as channel:
      door = GrpcDoor(channel)
      door._stub = types.SimpleNamespace(
          Generate=lambda request, metadata: asked.append(request) or Call())
      for cold in (True, True, False):
        planned = dataclasses.replace(REQUEST, cold=cold)
        assert [progress async for progress in door.stream(planned)] == []

  asyncio.run(run())
  assert asked[0].cache_salt and asked[1].cache_salt not in ("", asked[0].cache_salt)
  assert not asked[2].HasField("cache_salt")


def test_http_refusals_and_errors_in_a_stream_are_errors():
  with pytest.raises(httpx.HTTPStatusError, match="429"):
    over_http(lambda request: httpx.Response(429))
  with pytest.raises(Exception, match="server_error in the stream"):
    over_http(lambda request: events({"error": {"type": "server_error"}}))


def test_prometheus_text_is_summed_over_labels():
  text = '# HELP a b\n# TYPE a counter\na{x="1"} 2\na{x="2 {"} 3.5\nb 1e3\n'
  assert totals(text) == {"a": 5.5, "b": 1000.0}


# ---------------------------------------------------------------------- figures


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count):
  values = np.random.default_rng(count).exponential(size=count).tolist()
  found = load_report.percentiles(values)
  for percent in load_report.PERCENTILES:
    assert found[f"p{percent}"] == pytest.approx(np.percentile(values, percent), rel=1e-12)
  assert found["mean"] == pytest.approx(np.mean(values))
  assert load_report.percentiles([]) is None


def test_the_summary_adds_up():
  records = [
    Record(0.0, 0.01, 0.2, 1.1, 5, 10, "length"),  # 0.2 s, 0.1 s per token: good
    Record(1.0, 1.0, 1.6, 1.8, 5, 3, "stop"),  # first token too late
    Record(2.0, 2.0, 2.1, 3.1, 5, 6, "stop"),  # 0.2 s per token: too slow
    Record(3.0, 3.0, 3.4, 3.4, 5, 1, "stop"),  # one token: good
    Record(3.5, 3.5, None, 3.6, error="HTTP 429"),
    Record(3.5, 3.5, None, 3.6, error="HTTP 429"),
    Record(4.0, 4.0, 4.1, 4.5),  # ended without an end
    Record(4.0, 4.2, 4.3, 5.0, left=True),
  ]
  samples = [(0.0, {"memory_bytes": 100.0, "drafts": 1.0, "draft_tokens": 10.0,
                    "accepted_tokens": 4.0, "running": 0.0}),
             (9.0, {"memory_bytes": 110.0, "drafts": 5.0, "draft_tokens": 30.0,
                    "accepted_tokens": 14.0, "running": 1.0})]
  found = load_report.summary(records, samples, GOALS)
  assert (found["requests"], found["completed"], found["left"], found["lost"]) == (8, 4, 1, 1)
  assert found["errors"] == {"HTTP 429": 2}
  assert found["requests"] == (found["completed"] + found["left"] + found["lost"]
                               + sum(found["errors"].values()))
  assert found["output_tokens"] == 20 and found["output_tokens_per_s"] == 20 / 5.0
  assert found["goodput"] == 2 / 7 and found["good_requests_per_s"] == 2 / 5.0
  assert found["ttft_s"]["p50"] == pytest.approx(np.percentile([0.2, 0.6, 0.1, 0.4], 50))
  assert found["tpot_s"]["p90"] == pytest.approx(np.percentile([0.1, 0.1, 0.2], 90))
  assert found["e2e_s"]["mean"] == pytest.approx((1.1 + 0.8 + 1.1 + 0.4) / 4)
  assert found["sent_late_s"] == pytest.approx(0.2)
  assert found["acceptance_rate"] == 10 / 20 and found["mean_acceptance_length"] == 1 + 10 / 4
  assert found["memory_bytes"] == [(0.0, 100.0), (9.0, 110.0)]
  assert not found["idle_after"]


def test_a_run_in_which_nothing_worked_has_figures_too():
  found = load_report.summary([Record(0.0, 0.0, None, 1.0, error="timeout")], [(0.0, {})], GOALS)
  assert found["goodput"] == found["output_tokens_per_s"] == 0 and found["ttft_s"] is None
  row = load_report.table([{"speculation": "on", "kind": "rate", "level": 2.0, **found}])
  assert row.splitlines()[1].split()[:2] == ["on", "2/s"]


def test_the_plot_has_a_curve_for_every_mode(tmp_path):
  good = load_report.summary([Record(0.0, 0.0, 0.2, 1.1, 5, 10, "stop")], [(0.0, {})], GOALS)
  fine = load_report.summary([Record(0.0, 0.0, 0.1, 0.9, 5, 10, "stop")], [(0.0, {})], GOALS)
  bad = load_report.summary([Record(0.0, 0.0, None, 1.0, error="timeout")], [(0.0, {})], GOALS)
  runs = [{"speculation": mode, "kind": "rate", "level": level, **found}
          for mode in ("on", "off") for level, found in ((1.0, good), (1.0, fine), (2.0, bad))]
  load_report.plot(runs, "title", tmp_path / "plot.png")
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------- the script


@pytest.mark.parametrize("flags, words", [
  (["--rate", "1"], "give --url or --grpc"),
  (["--url", "http://x", "--compare", "--rate", "1"], "give --url or --grpc"),
  (["--url", "http://x", "--over", "grpc", "--rate", "1"], "--over grpc needs that door's address"),
  (["--url", "http://x", "--rate", "0"], "must be > 0"),
  (["--url", "http://x", "--concurrency", "1", "--leaving", "1"], "--leaving in [0, 1)"),
  (["--url", "http://x", "--rate", "1", "--requests", "3"], "goes with --concurrency"),
  (["--url", "http://x", "--rate", "1", "--prompts", "x", "--prompt-words", "3"], "not both"),
  (["--url", "http://x", "--rate", "1", "--plot", "no-such-folder/x.png"], "doesn't exist"),
  (["--url", "http://x", "--rate", "1", "--prompts", "no-such-file"], "can't read no-such-file"),
])
def test_what_cannot_be_done_is_refused_before_anything_is_sent(capsys, flags, words):
  assert load.main(flags) == 2
  out, err = capsys.readouterr()
  assert words in err and err.count("\n") == 1 and not out


def test_nobody_there_is_one_sentence(capsys):
  assert load.main(["--url", "http://127.0.0.1:1", "--rate", "1"]) == 2
  assert "load.py: error: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def addresses():
  """The tiny model behind both doors: flags for its URL and for its gRPC address."""
  engine = AsyncLLM(tiny_llm("ngram"))
  service = Service(engine, "tiny", Metrics(engine, "tiny"))
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever)
  thread.start()
  call = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)
  http = call(http_server.start(service, http_server.Options(port=0)))
  grpc = call(grpc_server.start(service, grpc_server.Options(port=0)))
  yield ["--url", f"http://127.0.0.1:{http.port}"], ["--grpc", f"127.0.0.1:{grpc.port}"]
  call(http.drain(5.0))
  call(grpc.drain(5.0))
  call(engine.shutdown())
  loop.call_soon_threadsafe(loop.stop)
  thread.join()


@pytest.mark.parametrize("door, level, raw", [
  ("http", ["--rate", "20", "40", "--duration", "0.5"], []),
  ("grpc", ["--concurrency", "1", "6", "--requests", "12"], []),
  ("http", ["--concurrency", "3", "--requests", "9"], ["--raw"]),
  ("grpc", ["--rate", "20", "--duration", "0.3"], ["--raw"]),
])
def test_the_figures_of_a_real_server_add_up(addresses, tmp_path, capsys, door, level, raw):
  url, grpc = addresses
  where = [*url, *grpc, "--over", door] if raw else url if door == "http" else grpc
  code = load.main([*where, *level, *raw, "--prompt-words", "uniform:2:4", "--output-tokens",
                    "uniform:4:16", "--leaving", "0.2", "--json", str(tmp_path / "load.json")])
  report = json.loads((tmp_path / "load.json").read_text())
  out = capsys.readouterr().out.splitlines()
  levels = [float(word) for word in itertools.takewhile(str.isdigit, level[1:])]
  assert code == 0 and len(out) == 1 + len(levels) and out[0].split()[0] == "speculation"
  assert [run["level"] for run in report["runs"]] == levels
  for run in report["runs"]:
    assert run["errors"] == {} and run["lost"] == 0 and run["idle_after"]
    assert run["requests"] == run["completed"] + run["left"] > 0
    assert run["completed"] <= run["output_tokens"] <= 16 * run["completed"]
    assert 0 <= run["acceptance_rate"] <= 1 and run["ttft_s"]["p99"] <= run["e2e_s"]["p99"]
    assert bool(run["memory_bytes"]) == (door == "http" or bool(raw))
  if "--requests" in level:
    assert {run["requests"] for run in report["runs"]} == {int(level[-1])}


def test_a_comparison_gives_the_same_load_to_servers_of_its_own(addresses, tmp_path, monkeypatch):
  started, stopped = [], []

  class Process:
    url, grpc = addresses[0][1], addresses[1][1]
    __enter__ = lambda self: self
    __exit__ = lambda self, *_: None

    def __init__(self, flags):
      started.append(flags)

    def stop(self):
      stopped.append(self)
      return 0

  monkeypatch.setattr(load, "ServerProcess", Process)
  assert load.main(["--compare", "--serve", "--model x", "--speculation", "--spec-tokens 3",
                    "--concurrency", "2", "--requests", "4", "--repeats", "2", "--prompt-words",
                    "3", "--output-tokens", "8", "--json", str(tmp_path / "load.json")]) == 0
  own = ["--port", "0", "--grpc-port", "0", "--model", "x"]
  assert started == [[*own, "--spec-tokens", "3"], [*own, "--no-speculation"],
                     [*own, "--dynamic-speculation", "--spec-tokens", "3"]]
  report = json.loads((tmp_path / "load.json").read_text())
  assert report["exit_codes"] == {"on": 0, "off": 0, "dynamic": 0} and len(stopped) == 3
  runs = report["runs"]
  assert [(run["speculation"], run["repeat"]) for run in runs] == [
      (mode, repeat) for repeat in (0, 1) for mode in ("on", "off", "dynamic")]
  for repeat in (0, 1):
    assert len({(run["requests"], run["prompt_tokens"], run["output_tokens"])
                for run in runs if run["repeat"] == repeat}) == 1
