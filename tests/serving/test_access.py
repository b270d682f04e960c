"""Who may have how much of the queue, what is counted and logged of requests, and by which name."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator

import httpx
import pytest
from http_running import COMPLETIONS, MODEL, Running, error_of, running
from tiny_llm import tiny_llm

from jspec import QueueFull
from jspec.cli import main
from jspec.serving import command
from jspec.serving.auth import Tokens
from jspec.serving.http import calls as http_calls
from jspec.serving.http.server import Options
from jspec.serving.service import Policy
from jspec.serving.shares import ShareFull, Shares

FIELDS = {"model": MODEL, "prompt": "the cat", "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
  with running(tiny_llm("ngram"), tokens=["attacker", "innocent"]) as running_server:
    yield running_server


@pytest.fixture(autouse=True)
def nothing_leaks(served):
  yield
  served.service.policy, served.service.shares = Policy(), Shares()
  served.wait_until_idle()


def post(served: Running, key: str = "innocent", path: str = COMPLETIONS, headers=(), **fields):
  return httpx.post(served.url + path, json=FIELDS | fields, timeout=60, trust_env=False,
                    headers={"Authorization": f"Bearer {key}", **dict(headers)})


def refusals(served: Running) -> dict[tuple[str, str], float]:
  rows = served.service.metrics.registry.collect()
  return {(s.labels["status"], s.labels["reason"]): s.value for row in rows for s in row.samples
          if s.name == "jspec:refusals_total" and s.labels["door"] == "http"}


# ------------------------------------------------------------------------------------------ shares


def test_shares_are_each_clients_own_and_given_back():
  shares = Shares(max_outputs=3, max_tokens=100)
  with shares.request("a", 2) as take:
    take(60)
    with pytest.raises(ShareFull, match="3 outputs"), shares.request("a", 2):
      pass
    with pytest.raises(ShareFull, match="100 tokens"), shares.request("a", 1) as more:
      more(41)
    with shares.request("b", 3) as others:
      others(100)
    with shares.request("a", 1) as more:
      more(40)
  with shares.request("a", 3) as take:
    take(100)
  with pytest.raises(ValueError, match="4 outputs, more than the 3"), shares.request("a", 4):
    pass
  assert not shares._held


def test_without_bounds_nobody_is_refused():
  shares = Shares()
  with shares.request("a", 10**6) as take:
    take(10**9)


def test_one_key_cannot_fill_the_queue(served):
  served.service.shares = Shares(max_outputs=4)
  before = refusals(served)
  with served.held() as go_on, concurrent.futures.ThreadPoolExecutor(8) as pool:
    flood = [pool.submit(post, served, "attacker", n=2) for _ in range(2)]
    served.wait_for(lambda: served.service.engine.num_requests == 2)
    for stream in (False, True):
      refused = post(served, "attacker", stream=stream)
      error = error_of(refused, 429)
      assert refused.headers["Retry-After"] == "1"
      assert (error["type"], error["code"]) == ("rate_limit_error", "client_queue_full")
    assert "5 outputs" in error_of(post(served, "attacker", n=5), 400)["message"]  # never fits
    other = pool.submit(post, served, "innocent", n=4)
    served.wait_for(lambda: served.service.engine.num_requests == 3)
    go_on.set()
    assert [f.result().status_code for f in (*flood, other)] == [200] * 3
  assert post(served, "attacker", n=4).status_code == 200  # all was given back
  assert refusals(served)["429", "client_queue_full"] == before.get(
      ("429", "client_queue_full"), 0) + 2


def test_tokens_in_the_queue_are_bounded_by_prompt_and_longest_answer(served):
  tokens = len(served.service.engine.llm.encode(FIELDS["prompt"])) + FIELDS["max_tokens"]
  served.service.shares = Shares(max_tokens=2 * tokens)
  with served.held() as go_on, concurrent.futures.ThreadPoolExecutor(4) as pool:
    held = pool.submit(post, served, "attacker", n=2)
    served.wait_for(lambda: served.service.engine.num_requests == 1)
    assert f"{2 * tokens} tokens" in error_of(post(served, "attacker", max_tokens=1),
                                              429)["message"]
    other = pool.submit(post, served, "innocent")
    served.wait_for(lambda: served.service.engine.num_requests == 2)
    go_on.set()
    assert [held.result().status_code, other.result().status_code] == [200, 200]
  assert error_of(post(served, "attacker", n=3), 400)


def test_keys_are_told_apart_without_being_told():
  tokens = Tokens(["first", "second"])
  names = [tokens.client(f"Bearer {token}") for token in ("first", "second")]
  assert len(set(names)) == 2 and all(re.fullmatch("[0-9a-f]{16}", str(n)) for n in names)
  assert tokens.client("Bearer third") is None and Tokens([]).client("Bearer first") is None


def test_two_keys_halve_the_queue_unless_the_operator_says_otherwise():
  parse = lambda *flags: main.build_parser().parse_args(["serve", *flags])
  share = command._share
  assert share(parse("--max-queue", "100", "--max-num-seqs", "8"), ("a", "b")) == 54
  assert share(parse(), ("a",)) is None and share(parse(), ()) is None
  assert share(parse("--max-queue-per-client", "3"), ()) == 3


def test_a_priority_is_for_clients_only_where_the_operator_says_so(served):
  for stream in (False, True):
    error = error_of(post(served, priority=-1, stream=stream), 400)
    assert error["param"] == "priority" and "--scheduling-policy fcfs" in error["message"]
  assert post(served, priority=0).status_code == 200
  served.service.policy = Policy(client_priority=True)
  assert post(served, priority=-1).status_code == 200


# ------------------------------------------------------------------------------- names, log, counts


def test_a_request_keeps_its_name_or_gets_one(served):
  given = {"X-Request-Id": "gateway:42/a"}
  assert post(served, headers=given.items()).headers["X-Request-Id"] == "gateway:42/a"
  assert post(served, "wrong", headers=given.items()).headers["X-Request-Id"] == "gateway:42/a"
  made = [post(served, headers=h).headers["X-Request-Id"] for h in (
      (), (("X-Request-Id", "a" * 129),), (("X-Request-Id", "a b"),))]
  assert len(set(made)) == 3 and all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
  assert httpx.get(served.url + "/none", trust_env=False).headers["X-Request-Id"]


def test_the_access_log_has_a_line_for_each_request_without_keys_and_texts(served, caplog):
  caplog.set_level(logging.INFO, logger="jspec.serving.access")
  post(served, prompt="secret prompt", headers=[("X-Request-Id", "me")])
  post(served, path="/v1/none%0a?key=secret", headers=[("X-Request-Id", "me")])
  for path in ("/health", "/ping", "/metrics"):
    httpx.get(served.url + path, trust_env=False)
  served.wait_for(lambda: len(caplog.records) >= 2)
  lines = [r.message for r in caplog.records if r.name == "jspec.serving.access"]
  assert len(lines) == 2
  seconds = r"seconds=\d+\.\d{3} request_id=me"
  assert re.fullmatch(rf"http client=127.0.0.1 method=POST path={COMPLETIONS} status=200 {seconds}",
                      lines[0])
  assert "status=404" in lines[1] and "\n" not in lines[1] and "secret" not in "".join(lines)
  caplog.clear()
  served.service.policy = Policy(access_log=False)
  door = served.open()
  httpx.get(f"http://127.0.0.1:{door.port}/v1/models", trust_env=False)
  served.run(door.drain(0))
  assert not [r for r in caplog.records if r.name == "jspec.serving.access"]


def test_refusals_are_counted_by_status_and_reason(served, caplog):
  before = refusals(served)
  for _ in range(30):
    post(served, "wrong")
  post(served, max_tokens=-1)
  post(served, model="other")
  post(served, prompt="a" * 10**5)
  post(served, path="/none")
  httpx.get(served.url + COMPLETIONS, trust_env=False,
            headers={"Authorization": "Bearer innocent"})
  assert {key: value - before.get(key, 0) for key, value in refusals(served).items()
          if value != before.get(key, 0)} == {
      ("401", "invalid_api_key"): 30, ("400", "invalid"): 1, ("404", "model_not_found"): 1,
      ("400", "context_length_exceeded"): 1, ("404", "not_found"): 1, ("405", "method"): 1}
  lines = lambda: [r for r in caplog.records if r.message.startswith("refused ")]
  served.wait_for(lambda: any("http/401/invalid_api_key=" in r.message for r in lines()))
  assert len(lines()) <= 12  # of 35


def test_a_stream_begins_while_its_request_waits(served, monkeypatch):
  monkeypatch.setattr(http_calls, "COMMENT_AFTER", 0.05)
  monkeypatch.setattr(http_calls, "COMMENT_EVERY", 0.05)
  llm = served.service.engine.llm
  headers = {"Authorization": "Bearer innocent"}
  with contextlib.ExitStack() as stack:
    client = stack.enter_context(httpx.Client(base_url=served.url, trust_env=False, timeout=60))
    stack.enter_context(served.paused(lambda: time.sleep(0.02)))
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(8))
    long = [pool.submit(post, served, max_tokens=80, n=llm.max_num_seqs)]
    served.wait_for(lambda: served.service.engine.stats().num_running == llm.max_num_seqs)
    with client.stream("POST", COMPLETIONS, json=FIELDS | {"stream": True},
                       headers=headers) as response:
      lines = response.iter_lines()
      assert response.status_code == 200
      assert [next(lines) for _ in range(4)] == [": queued", ""] * 2
      assert served.service.engine.stats().num_waiting == 1 and not long[0].done()
      rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[0][6:])["object"] == "text_completion"
    with monkeypatch.context() as patch:  # what the engine's own thread refuses keeps its status
      patch.setattr(llm.engine, "add", lambda request: int("needs 99 pages"))
      assert "99 pages" in error_of(post(served, stream=True), 400)["message"]
    # Who leaves while waiting leaves nothing behind.
    long.append(pool.submit(post, served, max_tokens=80, n=llm.max_num_seqs))
    served.wait_for(lambda: served.service.engine.stats().num_running == llm.max_num_seqs)
    with client.stream("POST", COMPLETIONS, json=FIELDS | {"stream": True},
                       headers=headers) as response:
      assert next(response.iter_lines()) == ": queued"
    served.wait_for(lambda: served.service.engine.stats().num_waiting == 0)
    assert [one.result().status_code for one in long] == [200, 200]


def test_a_full_share_is_a_full_queue_to_whoever_asks_for_that():
  assert issubclass(ShareFull, QueueFull) and Options().limits.max_connections == 2048
