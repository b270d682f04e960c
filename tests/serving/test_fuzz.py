"""Any JSON in any field: taken, or refused in a short sentence; never an exception."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest
from pydantic import ValidationError

from jspec.serving.http.gate import to_json
from jspec.serving.openai.api import CompletionRequest
from jspec.serving.openai.chat import ChatRequest, DetokenizeRequest, Message, TokenizeRequest
from jspec.serving.openai.errors import Refused, invalid
from jspec.serving.openai.responses import ResponsesRequest

KINDS = [(CompletionRequest, {"prompt": "a"}), (DetokenizeRequest, {"tokens": [1]}),
         (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
         (ResponsesRequest, {"input": "a"}), (TokenizeRequest, {"prompt": "a"})]
WORDS = ["", "a", "\ud800", "none", "auto", "text", "message", "user", "assistant", "tool", "{a}"]
NUMBERS = [0, 1, -1, 2, 64, 2**63, -2**63, 10**310, -10**310, 0.5, float("nan"), float("inf")]
KEYS = [*WORDS, "type", "role", "content", "name", "function", "arguments", "format", "effort"]
values = st.recursive(
    st.sampled_from([*WORDS, *NUMBERS, None, True, False]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(KEYS), inner, max_size=4), max_leaves=8)


def outcome(kind, body: dict, strict: bool) -> bytes | None:
  """What the door answers to a body that it refuses, None where it would go on."""
  try:
    try:
      request = kind.model_validate(body, context={"strict": strict})
    except ValidationError as error:
      raise invalid(error.errors(include_url=False)) from None
    if hasattr(request, "conversation"):
      request.conversation  # noqa: B018
    if hasattr(request, "call"):
      request.call(*[[1]] * (kind is not CompletionRequest), {})
  except Refused as error:
    assert error.status == 400
    return to_json(error.body)
  return None


def deep(levels: int, inner: object = 1) -> object:
  for _ in range(levels):
    inner = [inner]
  return inner


@pytest.mark.parametrize("kind, good", KINDS)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_json_is_taken_or_refused_shortly(kind, good, data):
  names = st.sampled_from([*kind.model_fields, *kind.asks_nothing, "nonsense", "\ud800"])
  body = good | data.draw(st.dictionaries(names, values, max_size=3))
  if kind is ChatRequest and data.draw(st.booleans()):
    fields = st.sampled_from([*Message.model_fields, *Message.asks_nothing, "\ud800"])
    body["messages"] = [{"role": "assistant"} | data.draw(st.dictionaries(fields, values))]
  refused = outcome(kind, json.loads(json.dumps(body)), data.draw(st.booleans()))
  assert refused is None or len(refused) < 3000


@pytest.mark.parametrize("kind, good", KINDS)
def test_json_nested_as_deeply_as_python_reads_it_is_taken_or_refused(kind, good):
  for name in [*kind.model_fields, *kind.asks_nothing]:
    for value in (deep(900), {"a": deep(900)}, [{"a": deep(900)}]):
      refused = outcome(kind, good | {name: value}, False)
      assert refused is None or len(refused) < 3000
