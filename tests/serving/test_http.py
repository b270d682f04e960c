"""The HTTP door on the wire: events, errors, limits, keys, disconnects, drain."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pathlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from http_running import COMPLETIONS, JSON, MODEL, Running, error_of, running
from tiny_llm import tiny_llm

from jspec import CompletionOutput, RequestOutput
from jspec.engine.request import Request
from jspec.serving.http.server import Options

USER = [{"role": "user", "content": "the cat"}]
LONG = dict(prompt="the cat", temperature=0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
  with running(tiny_llm("ngram")) as server:
    yield server


@pytest.fixture(autouse=True)
def nothing_leaks(server):
  yield
  server.wait_until_idle()


@contextlib.contextmanager
def another_door(server: Running, **options) -> Iterator[httpx.Client]:
  door = server.open(**options)
  try:
    with httpx.Client(base_url=f"http://127.0.0.1:{door.port}", trust_env=False,
                      verify=False, timeout=60) as client:
      client.door = door
      yield client
  finally:
    server.run(door.drain(0))


def slow(server: Running):
  """So that a request is certainly running when a test interferes with it."""
  return server.paused(lambda: time.sleep(0.02))


def aborted(server: Running) -> int:
  return dict(server.service.engine.stats().finished).get("abort", 0)


# ------------------------------------------------------------------------------------------ events


def events(content: bytes) -> list[dict]:
  """The JSON of each event; fails unless the bytes are events, the last one [DONE]."""
  assert content.isascii() and content.endswith(b"\n\n")
  # Comments are of requests that wait, and of those that are first and compile.
  *blocks, done = [block for block in content.removesuffix(b"\n\n").split(b"\n\n")
                   if block != b": queued"]
  assert done == b"data: [DONE]"
  assert all(block.startswith(b"data: {") and b"\n" not in block for block in blocks)
  return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def test_a_chat_stream_is_well_formed(server):
  with server.in_step():
    response = server.post("/v1/chat/completions", messages=USER, seed=1, max_tokens=12, n=2,
                           stream=True, stream_options={"include_usage": True})
  assert response.headers["content-type"].startswith("text/event-stream")
  assert response.headers["cache-control"] == "no-cache"
  *chunks, last = events(response.content)
  for index in (0, 1):
    own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
    assert own[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(c["delta"]) == {"content"} for c in own[1:-1]) and len(own) > 3
    assert own[-1]["delta"] == {} and own[-1]["finish_reason"] in ("stop", "length")
    assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
  assert {c["object"] for c in [*chunks, last]} == {"chat.completion.chunk"}
  assert len({(c["id"], c["created"]) for c in [*chunks, last]}) == 1
  assert all(c["usage"] is None for c in chunks)
  assert last["choices"] == [] and last["usage"]["total_tokens"] > last["usage"]["prompt_tokens"]


def test_characters_are_whole_in_every_event(server):
  """Commas and the two halves of é are most of what is generated."""
  bias = {str(t): 9.0 for t in server.service.engine.llm.tokenizer.encode(",é")}
  fields = dict(prompt="he", logit_bias=bias, seed=2, max_tokens=40, ignore_eos=True)
  with server.in_step():
    chunks = events(server.post(COMPLETIONS, **fields, stream=True).content)
  pieces = [c["choices"][0]["text"] for c in chunks]
  whole = server.post(COMPLETIONS, **fields).json()["choices"][0]["text"]
  assert "".join(pieces) == whole and "é" in whole
  assert 10 < len(pieces) < 40


def test_any_text_survives_events(server, monkeypatch):
  """Also what looks like the end of a line to some clients, and never half of a character."""
  pieces = ["日", "🎉", "\u2028", "\x85", "\r\n\n", "data: [DONE]\n\n", '"\\', "\ufeff", "é"]

  async def spoken(*arguments, **options):
    for i, piece in enumerate(pieces):
      last = i == len(pieces) - 1
      new = CompletionOutput(0, piece, (1,), "stop" if last else None)
      yield RequestOutput("x", None, (1,), (new,), last)

  monkeypatch.setattr(server.service, "stream", spoken)
  with server.client() as client, client.stream("POST", COMPLETIONS, json={
      "model": MODEL, "prompt": "a", "stream": True}) as response:
    lines = [line for line in response.iter_lines() if line]
  assert lines.pop() == "data: [DONE]"
  assert [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines] == pieces


def test_an_error_in_mid_stream_is_an_event_and_the_end(server, monkeypatch):
  stream = server.service.stream

  async def breaks(*arguments, **options):
    async with contextlib.aclosing(stream(*arguments, **options)) as deltas:
      yield await anext(deltas)
    raise RuntimeError("secret")

  monkeypatch.setattr(server.service, "stream", breaks)
  response = server.post(COMPLETIONS, **LONG, stream=True)
  assert response.status_code == 200
  *_, last, end = response.content.split(b"\n\n")
  assert end == b"" and b"[DONE]" not in response.content
  assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "internal_error"


# ------------------------------------------------------------------------------------------ limits


def test_a_prompt_of_ten_megabytes_is_too_large(server):
  error = error_of(server.post(COMPLETIONS, prompt="a" * 10 * 2**20), 413)
  assert "4194304 bytes" in error["message"]


def test_the_limit_holds_for_bodies_with_and_without_a_length(server):
  body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1, "user": "u" * 900}).encode()

  def in_chunks(content: bytes) -> Iterator[bytes]:
    yield from (content[i:i + 100] for i in range(0, len(content), 100))

  with another_door(server, max_body_bytes=len(body)) as client:
    for form in (lambda content: content, in_chunks):
      assert client.post(COMPLETIONS, content=form(body), headers=JSON).status_code == 200
      response = client.post(COMPLETIONS, content=form(body + b" "), headers=JSON)
      assert error_of(response, 413)["code"] == "request_too_large"


def test_a_key_opens_what_it_should(server):
  good, bad = {"Authorization": "Bearer sesame"}, {"Authorization": "Bearer simsim"}
  with another_door(server, tokens=("other", "sesame")) as client:
    for path in ("/health", "/metrics"):
      assert client.get(path).status_code == 200
    for path in ("/v1/models", "/version", "/nowhere"):
      for headers in ({}, bad, {"Authorization": "sesame"}, {"Authorization": "Basic sesame"}):
        response = client.get(path, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/models", headers=good).status_code == 200
    assert client.post(COMPLETIONS, headers=good, json={
        "model": MODEL, "prompt": "a", "max_tokens": 1}).status_code == 200
    error_of(client.post(COMPLETIONS, content=b"a" * 10**6, headers=bad), 401)


def test_hundreds_of_idle_connections_stop_nobody(server):
  with contextlib.ExitStack() as stack:
    for i in range(300):
      idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.door.port)))
      if i % 3 == 1:
        idle.sendall(b"POST /v1/completions HT")
      if i % 3 == 2:
        idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    assert server.post(COMPLETIONS, prompt="the cat", max_tokens=3).status_code == 200


def test_a_body_that_does_not_come_is_given_up(server, monkeypatch):
  monkeypatch.setattr("jspec.serving.http.server.BODY_TIMEOUT", 0.1)
  with another_door(server) as client, socket.create_connection(
      ("127.0.0.1", client.door.port), timeout=30) as late:
    late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    answer = b"".join(iter(lambda: late.recv(4096), b""))  # the server closes, too
  assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive" in answer


# --------------------------------------------------------------------------------- disconnects, end


def test_leaving_a_stream_frees_slot_and_pages(server):
  before = aborted(server)
  with slow(server), server.client() as client, client.stream(
      "POST", COMPLETIONS, json={"model": MODEL, "stream": True, "n": 2, **LONG}) as response:
    next(response.iter_bytes())
    assert server.service.engine.stats().num_running == 2
    server.wait_for(lambda: aborted(server) == before + 2)


@pytest.mark.parametrize("prompt", ["the cat", ["the cat", "the hat", "on"]])
def test_leaving_without_a_stream_frees_them_too(server, prompt):
  before, count = aborted(server), 1 if isinstance(prompt, str) else len(prompt)
  with slow(server):
    body = json.dumps({"model": MODEL, **LONG | {"prompt": prompt}}).encode()
    with socket.create_connection(("127.0.0.1", server.door.port)) as connection:
      connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/"
                         b"json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
      server.wait_for(lambda: server.service.engine.stats().num_running == count)
    server.wait_for(lambda: aborted(server) == before + count)


def test_leaving_while_waiting_for_a_slot_ends_the_wait(server):
  engine = server.service.engine
  with server.held():
    for timeout in (0.3, 0.3):
      with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + COMPLETIONS, json={"model": MODEL, **LONG}, timeout=timeout,
                   trust_env=False)
    server.wait_for(lambda: engine.num_requests == 0)


def test_health_is_ok_while_requests_are_taken(server):
  with server.client() as client:
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    metrics = client.get("/metrics")
  content, kind = server.service.metrics.render()
  assert metrics.headers["content-type"] == kind and f'model_name="{MODEL}"' in metrics.text


def test_a_drain_lets_streams_end_and_refuses_new_requests(server):
  with another_door(server) as client, server.held() as go_on:
    fields = {"model": MODEL, "stream": True, **LONG}
    streamed, drained = [], []
    reader = threading.Thread(target=lambda: streamed.append(
        client.post(COMPLETIONS, json=fields, timeout=60).content))
    reader.start()
    server.wait_for(lambda: server.service.engine.num_requests == 1)
    drain = threading.Thread(target=lambda: drained.append(server.run(client.door.drain(60))))
    drain.start()
    server.wait_for(lambda: client.get("/health").status_code == 503)
    error = error_of(client.post(COMPLETIONS, json=fields), 503)
    assert "shutting down" in error["message"]
    assert client.get("/metrics").status_code == 200  # until the end
    assert not drained and server.post("/tokenize", prompt="a").status_code == 200  # other door
    go_on.set()
    reader.join()
    drain.join()
    assert drained == [True] and events(streamed[0])[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
      client.get("/health")


def test_what_does_not_end_in_time_is_cut_and_told_so(server):
  with another_door(server) as client, slow(server):
    fields = {"model": MODEL, **LONG}
    whole: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: whole.append(client.post(COMPLETIONS, json=fields)))
    waiting.start()
    with client.stream("POST", COMPLETIONS, json=fields | {"stream": True}) as response:
      parts = response.iter_bytes()
      content = next(parts)
      server.wait_for(lambda: server.service.engine.num_requests == 2)
      assert server.run(client.door.drain(0.1)) is False
      content += b"".join(parts)
    waiting.join()
  last = content.removesuffix(b"\n\n").split(b"\n\n")[-1]
  assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the server was stopped"
  assert "stopped" in error_of(whole[0], 503)["message"]


class Breaking:
  """An engine whose step fails."""

  def __init__(self, engine):
    self.drafter, self.stats, self.add = engine.drafter, engine.stats, lambda request: None
    self.busy = False

  def step(self, *arguments):
    raise RuntimeError("secret")


def test_a_dead_engine_is_unhealthy_and_says_so(server):
  llm = copy.copy(server.service.engine.llm)
  llm.engine = Breaking(llm.engine)
  with running(llm) as dead:
    for _ in range(2):  # the one that finds out, and one that comes later
      error = error_of(dead.post(COMPLETIONS, prompt="a"), 503)
      assert "engine has stopped" in error["message"] and "secret" not in str(error)
    error_of(httpx.get(dead.url + "/health", trust_env=False), 503)


def test_a_request_that_fails_is_told_so_and_the_server_goes_on(server, monkeypatch):
  push = Request.push

  def failing(request, new):
    if request.params.seed == 77 and len(request.tokens) == 3:
      raise KeyError("boom")
    push(request, new)

  monkeypatch.setattr(Request, "push", failing)
  fields = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
  error = error_of(server.post(COMPLETIONS, seed=77, **fields), 500)
  assert (error["type"], error["code"]) == ("server_error", "request_failed")
  assert error["message"].startswith("the request failed: KeyError")
  events = server.post(COMPLETIONS, seed=77, stream=True, **fields).text.split("\n\n")
  assert json.loads(events[-2].removeprefix("data: ")) == {"error": error}
  assert server.post(COMPLETIONS, seed=78, **fields).json()["usage"]["completion_tokens"] == 8
  with server.client() as client:
    text = client.get("/metrics").text
    assert client.get("/health").status_code == 200
  labels = f'{{engine="0",model_name="{MODEL}"'
  assert f"jspec:failed_requests_total{labels}}} 2.0" in text
  assert f'jspec:request_errors_total{labels[:1]}engine="0",error="RequestFailed"' in text


# --------------------------------------------------------------------------------- tokens, options


def test_tokens_and_back_as_the_tokenizer_has_it(server):
  llm = server.service.engine.llm
  ids = llm.tokenizer.encode("the cat é")
  got = server.post("/tokenize", prompt="the cat é", return_token_strs=True).json()
  assert (got["tokens"], got["count"], got["max_model_len"]) == (ids, len(ids), llm.max_model_len)
  assert [llm.tokenizer.backend.token_to_id(t) for t in got["token_strs"]] == ids
  assert server.post("/tokenize", prompt="a").json()["token_strs"] is None
  for opening in (True, False):
    got = server.post("/tokenize", messages=USER, add_generation_prompt=opening).json()
    assert got["tokens"] == llm.encode_chat(USER, opening)
  chat = llm.encode_chat(USER)
  assert server.post("/detokenize", tokens=chat).json() == {
      "prompt": "<|user|>the cat<|end|><|bot|>"}
  for token in (-1, 64, 2**70):
    assert error_of(server.post("/detokenize", tokens=[token]), 400)["param"].startswith("tokens")


BAD_OPTIONS = [({"port": -1}, "port must be"), ({"max_body_bytes": 0}, "max_body_bytes must be"),
               ({"tokens": ("",)}, "token 0"), ({"ssl_keyfile": "k"}, "go together"),
               ({"ssl_certfile": "no", "ssl_keyfile": "no"}, "must be a certificate")]


@pytest.mark.parametrize("options, message", BAD_OPTIONS, ids=[o[1][:12] for o in BAD_OPTIONS])
def test_bad_options_are_refused_at_once(options, message):
  with pytest.raises(ValueError, match=message):
    Options(**options)


def test_keys_are_not_shown_and_a_taken_port_is_named(server):
  options = Options(tokens=("sesame",))
  assert "sesame" not in repr(options) and dataclasses.replace(options, port=1).tokens
  with pytest.raises(OSError, match=f"cannot listen on port {server.door.port} of 127.0.0.1"):
    server.open(port=server.door.port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls(server, tmp_path: pathlib.Path):
  key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
  subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
                  "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
                  "-out", str(certificate)], check=True, capture_output=True)
  door = server.open(ssl_certfile=certificate, ssl_keyfile=key)
  context = ssl.create_default_context(cafile=str(certificate))
  url = f"127.0.0.1:{door.port}/v1/models"
  assert httpx.get(f"https://{url}", verify=context, trust_env=False).status_code == 200
  with pytest.raises(httpx.TransportError):
    httpx.get(f"http://{url}", trust_env=False)
  server.run(door.drain(0))
