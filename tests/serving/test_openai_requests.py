"""OpenAI's requests, without a server: every field is applied or refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny_llm import byte_tokenizer

from jspec import FieldError, Logprob, PromptTooLong, SamplingParams
from jspec.serving.openai.answers import ChatAnswer
from jspec.serving.openai.api import MAX_CHOICES, CompletionRequest
from jspec.serving.openai.chat import ChatRequest, DetokenizeRequest, TokenizeRequest
from jspec.serving.openai.errors import MAX_MESSAGE, Refused, invalid, refusal
from jspec.serving.openai.responses import ResponsesRequest
from jspec.serving.service import Conversation

TEXT = {"prompt": "a"}
USER = {"messages": [{"role": "user", "content": "a"}]}
INPUT = {"input": "a"}
KINDS = [(CompletionRequest, TEXT), (ChatRequest, USER), (ResponsesRequest, INPUT)]
VALUES = dict(  # other than the defaults, for every field that there is
    n=2, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=7, repetition_penalty=1.5,
    presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={5: 1.0}, bad_words=["the"],
    allowed_token_ids=[3, 9],
    min_tokens=2, max_tokens=9, stop=["x"], stop_token_ids=[4], include_stop_str_in_output=True,
    ignore_eos=True, logprobs=3, prompt_logprobs=2, num_speculative_tokens=1,
    skip_special_tokens=False,
    truncate_prompt_tokens=4)
# Spelled in another way, or of no use, in /v1/responses.
OTHERWISE = {"n", "max_tokens", "logprobs", "prompt_logprobs"}


def parse(kind, strict=False, **fields):
  return kind.model_validate(json.loads(json.dumps(fields)), context={"strict": strict})


def call_of(request, **defaults):
  prompt = () if isinstance(request, CompletionRequest) else ([1],)
  return request.call(*prompt, defaults)


def test_every_sampling_parameter_passes_through():
  names = {f.name for f in dataclasses.fields(SamplingParams)}
  assert names == set(VALUES)
  params = SamplingParams(**VALUES)
  assert all(getattr(params, name) != getattr(SamplingParams(), name) for name in names)
  assert call_of(parse(CompletionRequest, prompt="a", **VALUES)).params == params
  chat = VALUES | {"logprobs": True, "top_logprobs": 3}
  assert call_of(parse(ChatRequest, **USER, **chat)).params == params
  same = {name: value for name, value in VALUES.items() if name not in OTHERWISE}
  respond = parse(ResponsesRequest, **INPUT, **same, max_output_tokens=9, top_logprobs=3,
                  include=["message.output_text.logprobs"])
  assert call_of(respond).params == SamplingParams(**same, max_tokens=9, logprobs=3)


def test_defaults_are_openais_and_null_is_a_field_left_out():
  nulls = dict.fromkeys(VALUES)
  for fields in ({}, nulls):
    call = call_of(parse(CompletionRequest, prompt="a", **fields))
    assert call.params == SamplingParams(temperature=1.0, max_tokens=16)
    assert (call.priority, call.stream, call.include_usage, call.echo) == (0, False, False, None)
    for kind, own in KINDS[1:]:
      call = call_of(parse(kind, **own, **fields))
      assert call.params == SamplingParams(temperature=1.0, max_tokens=None)
  assert call_of(parse(CompletionRequest, prompt="a", priority=-3)).priority == -3


DEFAULTS = dict(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)


@pytest.mark.parametrize("kind, own", KINDS)
def test_the_models_defaults_are_those_of_fields_that_are_left_out(kind, own):
  def values(**fields):
    params = call_of(parse(kind, **own, **fields), **DEFAULTS).params
    return {name: getattr(params, name) for name in DEFAULTS}

  assert values() == values(**dict.fromkeys(DEFAULTS)) == DEFAULTS
  assert values(temperature=0, top_k=-1) == DEFAULTS | {"temperature": 0, "top_k": 0}
  neutral = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
  assert values(**neutral) == neutral


@pytest.mark.parametrize("given, seed", [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (-1, None),
                                         (-2, 2**63 - 2), (-2**63, 0)])
def test_any_64_bit_number_is_a_seed(given, seed):
  """As in vLLM; and -1 is none there."""
  for kind, own in KINDS:
    assert call_of(parse(kind, **own, seed=given)).params.seed == seed


@pytest.mark.parametrize("kind, own", KINDS)
def test_what_is_not_done_is_refused_only_where_it_asks_for_something(kind, own):
  for strict in (False, True):
    for name, values in kind.asks_nothing.items():
      for value in values:
        parse(kind, strict, **own, **{name: value})
      refused = refused_by(kind, strict, **own, **{name: [{"something": 1}]})
      assert refused.body["error"]["param"] == name and "not supported" in str(refused)


ASKING = ["response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
          "structured_outputs", "use_beam_search", "tools", "lora_request", "logits_processors"]


@pytest.mark.parametrize("kind, own", KINDS)
def test_what_would_change_the_answer_is_never_passed_over(kind, own):
  """The names that vLLM and OpenAI have for what is not done here."""
  for name in ASKING:
    value = True if name.startswith("use") else {"type": "object"}
    value = [value] if name in ("tools", "logits_processors") else value
    assert refused_by(kind, **own, **{name: value}).body["error"]["param"] == name


@pytest.mark.parametrize("kind, own", KINDS)
def test_names_that_nobody_knows_pass_unless_the_server_is_strict(kind, own):
  assert call_of(parse(kind, **own, nonsense={"a": [1]})) == call_of(parse(kind, **own))
  refused = refused_by(kind, True, **own, nonsense=None)
  assert refused.body["error"]["param"] == "nonsense" and "no such field" in str(refused)


def test_fields_of_messages_that_nobody_knows_pass_unless_the_server_is_strict():
  message = {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "y": 1}
  assert parse(ChatRequest, messages=[message]).messages[0].plain == {"role": "user",
                                                                      "content": "a"}
  assert refused_by(ChatRequest, True, messages=[message]).body["error"]["param"] == "messages[0].y"
  del message["y"]
  refused = refused_by(ChatRequest, True, messages=[message])
  assert refused.body["error"]["param"] == "messages[0].content" and "'x'" in str(refused)


def refused_by(kind, strict=False, **fields) -> Refused:
  """As the HTTP server answers."""
  try:
    request = parse(kind, strict, **fields)
    if kind is TokenizeRequest:
      request.conversation  # noqa: B018
    else:
      if kind is not CompletionRequest:
        request.conversation  # noqa: B018
      call_of(request)
  except Refused as error:
    return error
  except ValueError as error:
    return invalid(error.errors())
  raise AssertionError(f"{fields} was taken")


CALLED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "b", "name": "f"}]
REFUSALS = [  # kind, fields, param, part of the message
  (CompletionRequest, TEXT | {"best_of": 2}, "best_of", "must equal n=1"),
  (CompletionRequest, TEXT | {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "streamed"),
  (CompletionRequest, TEXT | {"n": MAX_CHOICES + 1}, "n", "more than the 1024 choices"),
  (CompletionRequest, {"prompt": ["a"] * 600, "n": 2}, "n", "600 prompts times n=2"),
  (CompletionRequest, TEXT | {"logprobs": 21}, "logprobs", "0..20"),
  (CompletionRequest, TEXT | {"stream_options": {"include_usage": True}}, "stream_options",
   "only allowed with stream"),
  (CompletionRequest, TEXT | {"stop": ["x"] * 65}, "stop", "at most 64"),
  (CompletionRequest, TEXT | {"cache_salt": ""}, "cache_salt", "at least 1"),
  (CompletionRequest, {"prompt": []}, "prompt", "not an empty one"),
  (CompletionRequest, {"prompt": ["a", [1]]}, "prompt", "must be a string"),
  (CompletionRequest, {"prompt": [True]}, "prompt", "must be a string"),
  (CompletionRequest, {}, "prompt", "required"),
  (ChatRequest, USER | {"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
  (ChatRequest, USER | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
  (ChatRequest, USER | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one of them"),
  (ChatRequest, {"messages": []}, "messages", "at least 1"),
  (ChatRequest, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'system'"),
  (ChatRequest, {"messages": [{"role": "user", "content": None}]}, "messages[0].content",
   "must be a string"),
  (ChatRequest, {"messages": USER["messages"] + [{"role": "user"}]}, "messages[1].content",
   "must be a string"),
  (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
   "messages[0].content", "only text is supported"),
  (ChatRequest, {"messages": [CALLED[1] | {"role": "user"}]}, "messages[0].tool_calls",
   "of the role assistant"),
  (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{"function": {
      "name": "f", "arguments": "{"}}]}]}, "messages[0].tool_calls[0]", "a JSON object"),
  (ChatRequest, USER | {"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools",
   "not supported"),
  (ChatRequest, USER | {"tool_choice": "required"}, "tool_choice", "not supported"),
  (ChatRequest, USER | {"add_generation_prompt": True, "continue_final_message": True},
   "continue_final_message", "exclude each other"),
  (ResponsesRequest, INPUT | {"previous_response_id": "resp_1"}, "previous_response_id",
   "not supported"),
  (ResponsesRequest, INPUT | {"store": True}, "store", "not supported"),
  (ResponsesRequest, INPUT | {"text": {"format": {"type": "json_object"}}}, "text.format",
   "not supported"),
  (ResponsesRequest, INPUT | {"reasoning": {"effort": "high"}}, "reasoning.effort",
   "not supported"),
  (ResponsesRequest, INPUT | {"include": ["file_search_call.results"]}, "include", "not supported"),
  (ResponsesRequest, INPUT | {"top_logprobs": 1}, "top_logprobs", "only allowed with include"),
  (ResponsesRequest, INPUT | {"max_output_tokens": -1}, "max_output_tokens", "-1"),
  (ResponsesRequest, {"input": []}, "input", "not an empty one"),
  (ResponsesRequest, {"input": [{"type": "function_call", "name": "f"}]}, "input",
   "'function_call' is not supported"),
  (TokenizeRequest, TEXT | USER, "prompt", "either prompt or messages"),
  (TokenizeRequest, {}, "prompt", "either prompt or messages"),
  (TokenizeRequest, TEXT | {"add_generation_prompt": True}, "add_generation_prompt", "messages"),
  (TokenizeRequest, USER | {"add_special_tokens": True}, "add_special_tokens", "with a prompt"),
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
  assert request.conversation == Conversation([{"role": "system", "content": "a\nb"},
                                               {"role": "assistant", "content": "c"}])


def test_what_clients_add_to_messages_is_taken_and_what_templates_know_is_passed_on():
  """Also by a strict server: these are fields of OpenAI's, vLLM's and other servers' messages."""
  request = parse(ChatRequest, True, messages=[
      {"role": "user", "content": "a", "name": "Al", "type": "text", "id": "msg_1",
       "status": "completed", "cache_control": {"type": "ephemeral"}},
      {"role": "assistant", "content": "b", "reasoning_content": "c"},
      {"role": "assistant", "content": "b", "reasoning": "d"}, *CALLED[1:]])
  called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
  assert request.conversation.messages == [
      {"role": "user", "content": "a", "name": "Al"},
      {"role": "assistant", "content": "b", "reasoning_content": "c"},
      {"role": "assistant", "content": "b", "reasoning_content": "d"},
      {"role": "assistant", "content": "", "tool_calls": called},
      {"role": "tool", "content": "b", "tool_call_id": "1", "name": "f"}]


def test_how_a_template_is_to_write_a_conversation():
  tools = [{"type": "function", "function": {"name": "f"}}]
  for fields, told in (
      ({}, {}), ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
      ({"continue_final_message": True},
       {"add_generation_prompt": False, "continue_final_message": True}),
      ({"chat_template_kwargs": {"enable_thinking": False}},
       {"chat_template_kwargs": {"enable_thinking": False}}),
      ({"tools": tools, "tool_choice": "none"}, {"tools": tools})):
    plain = [{"role": "user", "content": "a"}]
    assert parse(ChatRequest, **USER, **fields).conversation == Conversation(plain, **told)


def test_a_response_has_instructions_and_messages():
  for given in ("b", [{"role": "user", "content": "b"}],
                [{"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "b"}]}]):
    request = parse(ResponsesRequest, input=given, instructions="a", store=False,
                    text={"format": {"type": "text"}}, reasoning={"effort": None})
    assert request.conversation == Conversation([{"role": "system", "content": "a"},
                                                 {"role": "user", "content": "b"}])


HUGE = (10**310, -10**310, 2**63, -2**63 - 1)


@pytest.mark.parametrize("kind, own", [*KINDS, (DetokenizeRequest, {"tokens": [1]})])
def test_numbers_have_bounds(kind, own):
  """Python's integers have none, and 1e400 is infinite."""
  numeric = {name: field for name, field in kind.model_fields.items()
             if any(word in str(field.annotation) for word in ("int", "float"))}
  assert kind is DetokenizeRequest or {"temperature", "seed", "logit_bias"} < set(numeric)
  for name, field in numeric.items():
    for value in (*HUGE, 1e400, -1e400):
      if "float" in str(field.annotation) and abs(value) < 2**64:
        continue
      shaped = [value] if "list" in str(field.annotation) else value
      shaped = {"5": value} if "dict" in str(field.annotation) else shaped
      refused = refused_by(kind, **own | {name: shaped})
      assert refused.status == 400 and refused.body["error"]["param"].startswith(name)


def test_impossible_tokens_have_openais_number():
  """JSON has no infinity."""
  call = call_of(parse(ChatRequest, **USER, logprobs=True, top_logprobs=1))
  answer = ChatAnswer(call, "m", byte_tokenizer())
  [entry] = answer.logprobs([{5: Logprob(-float("inf"), 64, "c")}])["content"]
  assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_a_refusal_is_about_the_field_it_has_whatever_its_sentence_begins_with():
  about = lambda error: refusal(error, "input", "messages").body["error"]
  assert about(FieldError("seed", "n is a sentence"))["param"] == "seed"
  assert about(FieldError("prompt", "seed is a sentence"))["param"] == "input"
  assert about(ValueError("seed is a sentence"))["param"] == "messages"
  long = PromptTooLong("prompt", "seed is a sentence")
  assert (about(long)["param"], about(long)["code"]) == ("input", "context_length_exceeded")
  assert about(ValueError("the prompt has 9 tokens"))["code"] is None


def test_errors_are_short_and_tell_no_secrets(caplog):
  long = refusal(ValueError("seed " + "9" * 10_000))
  assert len(long.body["error"]["message"]) < MAX_MESSAGE + 10
  bug = refusal(RuntimeError("/etc/passwd"))
  assert bug.status == 500 and "passwd" not in json.dumps(bug.body)
  assert "passwd" in caplog.text  # the log has it all
