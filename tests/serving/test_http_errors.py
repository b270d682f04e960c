"""The HTTP door's refusals: always in OpenAI's shape, with the field's name, before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from http_running import COMPLETIONS, JSON, MODEL, Running, error_of, running
from tiny_llm import tiny_llm

from jspec.serving.openai.api import CompletionRequest
from jspec.serving.openai.chat import ChatRequest, DetokenizeRequest, TokenizeRequest
from jspec.serving.openai.responses import ResponsesRequest

USER = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
  with running(tiny_llm("ngram")) as server:
    yield server
    assert server.service.engine.stats().prompt_tokens == 0  # nothing was ever begun


BODIES = {
  "not JSON": b"{", "nothing": b"", "a list": b"[]", "a number": b"5", "no UTF-8": b'{"a": "\xff"}',
  "deep": b"[" * 200_000, "digits": b'{"seed": ' + b"9" * 5000 + b"}", "null": b"null",
  "two": b"{} {}",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_malformed_body_is_refused(server, path, name):
  with server.client() as client:
    error = error_of(client.post(path, content=BODIES[name], headers=JSON), 400)
  assert error["type"] == "invalid_request_error" and "body" in error["message"]


def test_a_body_of_another_type_is_refused(server):
  with server.client() as client:
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
      response = client.post(COMPLETIONS, content=b"{}", headers={"Content-Type": kind})
      assert "Content-Type: application/json" in error_of(response, 400)["message"]


ROUTES = [(COMPLETIONS, CompletionRequest, {"prompt": "a"}),
          ("/v1/chat/completions", ChatRequest, {"messages": USER}),
          ("/v1/responses", ResponsesRequest, {"input": "a"}),
          ("/tokenize", TokenizeRequest, {"prompt": "a"}),
          ("/detokenize", DetokenizeRequest, {"tokens": [1]})]


@pytest.mark.parametrize("path, kind, good", ROUTES, ids=[r[0] for r in ROUTES])
def test_a_value_of_the_wrong_type_names_its_field(server, path, kind, good):
  for name, field in kind.model_fields.items():
    error = error_of(server.post(path, **good | {name: [[None]]}), 400)
    assert error["param"].startswith(name), name
    value = 1.5 if "bool" in str(field.annotation) else True
    error = error_of(server.post(path, **good | {name: value}), 400)
    assert error["param"].startswith(name), name


BAD_VALUES = [  # refused by jspec itself: field, value
  ("temperature", -1), ("temperature", 1e400), ("top_p", 0), ("top_p", 2), ("min_p", -0.1),
  ("n", 0), ("n", 10**9), ("n", 10**310), ("seed", 2**63), ("seed", 10**310),
  ("presence_penalty", 3),
  ("frequency_penalty", -3), ("repetition_penalty", 0), ("max_tokens", -1), ("max_tokens", 10**310),
  ("temperature", 10**310), ("top_k", 10**310), ("prompt", [10**310]),
  ("cache_salt", ""), ("logprobs", 21),
  ("logit_bias", {"x": 1}), ("logit_bias", {"64": 1}), ("logit_bias", {"5": 1e99}),
  ("stop", [""]), ("stop", "\udc80"), ("stop_token_ids", [64]), ("stop_token_ids", [-1]),
  ("min_tokens", 17), ("bad_words", ["q" * 9]), ("bad_words", [""]), ("bad_words", ["\ud800"]),
  ("top_k", -2),
  ("num_speculative_tokens", 99), ("prompt", ""), ("prompt", "a" * 96), ("prompt", [64]),
  ("prompt", ["a", ""]), ("prompt", [[1], [64]]), ("prompt", "\ud800"),
  ("logit_bias", {"5": 10**400}),
]


@pytest.mark.parametrize("name, value", BAD_VALUES, ids=[f"{n}-{v!r:.12}" for n, v in BAD_VALUES])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_before_anything_is_sent(server, name, value, stream):
  error = error_of(server.post(COMPLETIONS, stream=stream, **{"prompt": "a", name: value}), 400)
  assert error["param"].startswith(name)


def test_errors_of_a_conversation_are_about_its_messages(server):
  for content, param, code in (("a" * 96, "messages", "context_length_exceeded"),
                               ("\ud800", "messages[0].content", None)):
    messages = [{"role": "user", "content": content}]
    error = error_of(server.post("/v1/chat/completions", messages=messages), 400)
    assert (error["param"], error["code"]) == (param, code)


def test_a_prompt_that_is_too_long_has_the_code_that_gateways_look_for(server):
  for long in ("a" * 96, "a" * 10_000, [5] * 96, ["a", "a" * 96]):  # tokens, characters
    error = error_of(server.post(COMPLETIONS, prompt=long), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
  error = error_of(server.post("/v1/responses", input="a" * 96), 400)
  assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
  for prompt in ("", [64]):
    assert error_of(server.post(COMPLETIONS, prompt=prompt), 400)["code"] is None


@pytest.mark.parametrize("content", [
  {f"x{i}": i for i in range(100_000)} | {"prompt": 5}, {"messages": [5] * 500_000},
  {"prompt": [None] * 500_000}, {"prompt": "a", "stop": ["x"] * 500_000},
  {"prompt": "a", "stop_token_ids": ["x"] * 500_000},
  {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}},
], ids=["fields", "messages", "prompt", "stop", "stop_token_ids", "logit_bias"])
def test_a_million_mistakes_have_a_short_answer(server, content):
  path = "/v1/chat/completions" if "messages" in content else COMPLETIONS
  assert error_of(server.post(path, **content), 400)["param"]


def test_unknown_paths_methods_and_models(server):
  with server.client() as client:
    error_of(client.get("/v1/embeddings"), 404)
    error_of(client.get("/docs"), 404)
    response = client.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(client.post("/health"), 405)
    assert error_of(client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
  for path, _, good in ROUTES:
    error = error_of(server.post(path, **good | {"model": "gpt-4"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_a_strict_server_refuses_names_that_nobody_knows(server):
  policy = server.service.policy
  try:
    server.service.policy = dataclasses.replace(policy, strict=True)
    for path, _, good in ROUTES:
      error = error_of(server.post(path, **good, nonsense=1), 400)
      assert error["param"] == "nonsense" and "no such field" in error["message"]
  finally:
    server.service.policy = policy


def test_an_internal_error_tells_nothing(server, monkeypatch, caplog):
  def broken(*arguments, **options):
    raise RuntimeError("secret")

  for where, name, path in ((server.service.metrics, "render", "/metrics"),
                            (server.service, "stream", COMPLETIONS)):
    monkeypatch.setattr(where, name, broken)
    with server.client() as client:
      response = client.post(path, json={"model": MODEL, "prompt": "a"}) if (
          path == COMPLETIONS) else client.get(path)
    assert "secret" not in str(error_of(response, 500)) and "secret" in caplog.text
    caplog.clear()
