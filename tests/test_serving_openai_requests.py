"""OpenAI's requests, without a server: every field is applied or refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny_llm import byte_tokenizer

from jspec import Logprob, SamplingParams
from serving.openai_answers import ChatAnswer
from serving.openai_api import MAX_CHOICES, ChatRequest, CompletionRequest, TokenizeRequest
from serving.openai_errors import MAX_MESSAGE, Refused, invalid, refusal

TEXT = {"prompt": "a"}
USER = {"messages": [{"role": "user", "content": "a"}]}
VALUES = dict(  # other than the defaults, for every field that there is
    n=2, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=7, repetition_penalty=1.5,
    presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={5: 1.0}, bad_words=["the"],
    min_tokens=2, max_tokens=9, stop=["x"], stop_token_ids=[4], include_stop_str_in_output=True,
    ignore_eos=True, logprobs=3, num_speculative_tokens=1, skip_special_tokens=False)


def parse(kind, **fields):
  return kind.model_validate(json.loads(json.dumps({"model": "m", **fields})))


def test_every_sampling_parameter_passes_through():
  names = {f.name for f in dataclasses.fields(SamplingParams)}
  assert names == set(VALUES)
  params = SamplingParams(**VALUES)
  assert all(getattr(params, name) != getattr(SamplingParams(), name) for name in names)
  assert parse(CompletionRequest, prompt="a", **VALUES).call().params == params
  chat = VALUES | {"logprobs": True, "top_logprobs": 3}
  assert parse(ChatRequest, **USER, **chat).call([1]).params == params


def test_defaults_are_openais_and_null_is_a_field_left_out():
  nulls = dict.fromkeys(VALUES)
  for fields in ({}, nulls):
    call = parse(CompletionRequest, prompt="a", **fields).call()
    assert call.params == SamplingParams(temperature=1.0, max_tokens=16)
    assert (call.priority, call.stream, call.include_usage, call.echo) == (0, False, False, False)
    chat = parse(ChatRequest, **USER, **fields).call([1])
    assert chat.params == SamplingParams(temperature=1.0, max_tokens=None)
  assert parse(CompletionRequest, prompt="a", priority=-3).call().priority == -3


@pytest.mark.parametrize("kind, own", [(CompletionRequest, TEXT), (ChatRequest, USER)])
def test_what_is_not_done_is_refused_only_where_it_asks_for_something(kind, own):
  for name, values in kind.asks_nothing.items():
    for value in values:
      parse(kind, **own, **{name: value})
    refused = refused_by(kind, **own, **{name: [{"something": 1}]})
    assert refused.body["error"]["param"] == name and "not supported" in str(refused)


def refused_by(kind, **fields) -> Refused:
  """As the HTTP server answers."""
  try:
    request = parse(kind, **fields)
    request.call(*[[1]] * (kind is ChatRequest))
  except Refused as error:
    return error
  except ValueError as error:
    return invalid([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])
  raise AssertionError(f"{fields} was taken")


REFUSALS = [  # kind, fields, param, part of the message
  (CompletionRequest, TEXT | {"best_of": 2}, "best_of", "must equal n=1"),
  (CompletionRequest, TEXT | {"echo": True, "logprobs": 0}, "echo", "not supported together"),
  (CompletionRequest, TEXT | {"n": MAX_CHOICES + 1}, "n", "more than the 1024 choices"),
  (CompletionRequest, {"prompt": ["a"] * 600, "n": 2}, "n", "600 prompts times n=2"),
  (CompletionRequest, TEXT | {"logprobs": 21}, "logprobs", "0..20"),
  (CompletionRequest, TEXT | {"stream_options": {"include_usage": True}}, "stream_options",
   "only allowed with stream"),
  (CompletionRequest, TEXT | {"stop": ["x"] * 65}, "stop", "at most 64"),
  (CompletionRequest, TEXT | {"nonsense": None}, "nonsense", "no such field"),
  (CompletionRequest, {"prompt": []}, "prompt", "not an empty one"),
  (CompletionRequest, {"prompt": ["a", [1]]}, "prompt", "must be a string"),
  (CompletionRequest, {"prompt": [True]}, "prompt", "must be a string"),
  (CompletionRequest, {}, "prompt", "required"),
  (ChatRequest, USER | {"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
  (ChatRequest, USER | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
  (ChatRequest, USER | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one of them"),
  (ChatRequest, USER | {"max_completion_tokens": 0}, "max_completion_tokens", "1"),
  (ChatRequest, {"messages": []}, "messages", "at least 1"),
  (ChatRequest, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "'system'"),
  (ChatRequest, {"messages": [{"role": "user", "content": None}]}, "messages[0].content",
   "must be a string"),
  (ChatRequest, {"messages": USER["messages"] + [{"role": "user"}]}, "messages[1].content",
   "required"),
  (ChatRequest, {"messages": [{"role": "user", "content": "a", "name": "Al"}]}, "messages[0].name",
   "not supported"),
  (ChatRequest, {"messages": [{"role": "user", "content": [
      {"type": "text", "text": "a", "x": 1}]}]}, "messages[0].content", "nothing but"),
]


@pytest.mark.parametrize("kind, fields, param, part", REFUSALS,
                         ids=[f"{r[2]}-{r[3][:12]}" for r in REFUSALS])
def test_a_refusal_names_the_field(kind, fields, param, part):
  refused = refused_by(kind, **fields)
  assert refused.status == 400
  assert refused.body["error"]["param"] == param and part in refused.body["error"]["message"]


def test_parts_of_a_message_are_its_lines_and_a_developer_is_the_system():
  request = parse(ChatRequest, messages=[
      {"role": "developer", "content": [{"type": "text", "text": "a"},
                                        {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None,
       "function_call": None, "tool_calls": None}])
  assert request.conversation == [{"role": "system", "content": "a\nb"},
                                  {"role": "assistant", "content": "c"}]


def test_tokenizing_takes_a_prompt_or_messages_and_only_their_fields():
  assert parse(TokenizeRequest, prompt="a", add_special_tokens=False).conversation is None
  for fields, param in ((TEXT | USER, "prompt"), ({}, "prompt"),
                        (TEXT | {"add_generation_prompt": True}, "add_generation_prompt"),
                        (USER | {"add_special_tokens": True}, "add_special_tokens")):
    with pytest.raises(Refused) as error:
      parse(TokenizeRequest, **fields).conversation  # noqa: B018
    assert error.value.body["error"]["param"] == param


def test_impossible_tokens_have_openais_number():
  """JSON has no infinity."""
  call = parse(ChatRequest, **USER, logprobs=True, top_logprobs=1).call([1])
  answer = ChatAnswer(call, "m", byte_tokenizer())
  [entry] = answer._logprobs([{5: Logprob(-float("inf"), 64, "c")}])["content"]
  assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_errors_are_short_and_tell_no_secrets(caplog):
  long = refusal(ValueError("seed " + "9" * 10_000))
  assert len(long.body["error"]["message"]) < MAX_MESSAGE + 10
  bug = refusal(RuntimeError("/etc/passwd"))
  assert bug.status == 500 and "passwd" not in json.dumps(bug.body)
  assert "passwd" in caplog.text  # the log has it all
