"""/v1/responses: OpenAI's own client gets what LLM chats, whole and as OpenAI's events."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import openai
import pytest
from http_running import MODEL, Running, error_of, running
from tiny_llm import tiny_llm

from jspec import RequestOutput, SamplingParams
from jspec.serving.openai.responses import LOGPROBS

TALK = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "hat"},
        {"role": "user", "content": "in"}]
FIELDS = dict(model=MODEL, input=TALK, instructions="and on", temperature=0.8, max_output_tokens=12,
              extra_body={"seed": 6})
near = functools.partial(pytest.approx, abs=1e-4)
# In order, as OpenAI's reference has them; those of the text come once for each piece.
EVENTS = ["response.created", "response.in_progress", "response.output_item.added",
          "response.content_part.added", "response.output_text.delta", "response.output_text.done",
          "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def expected() -> RequestOutput:
  [out] = tiny_llm("ngram").chat([{"role": "system", "content": "and on"}, *TALK], SamplingParams(
      seed=6, temperature=0.8, max_tokens=12, logprobs=2))
  return out


@pytest.fixture(scope="module")
def server(expected) -> Iterator[Running]:
  with running(tiny_llm("ngram")) as server:
    yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
  with server.openai() as client:
    yield client


def test_a_response_is_what_llm_chats(client, expected):
  answer = client.responses.create(**FIELDS, metadata={"a": "b"})
  assert answer.output_text == expected.text and answer.object == "response"
  [message] = answer.output
  assert (message.type, message.role, message.content[0].type) == (
      "message", "assistant", "output_text")
  cut = expected.finish_reason == "length"
  assert answer.status == message.status == ("incomplete" if cut else "completed")
  assert (answer.incomplete_details is not None) == cut
  usage = answer.usage
  assert usage.input_tokens == len(expected.prompt_token_ids)
  assert usage.output_tokens == len(expected.token_ids)
  assert usage.total_tokens == usage.input_tokens + usage.output_tokens
  assert (answer.instructions, answer.max_output_tokens, answer.temperature, answer.metadata) == (
      "and on", 12, 0.8, {"a": "b"})
  assert answer.error is None and answer.previous_response_id is None and answer.store is False


def test_an_end_of_the_models_own_completes_it(client):
  answer = client.responses.create(model=MODEL, input="a", extra_body={"logit_bias": {"0": 100}})
  assert answer.status == answer.output[0].status == "completed"
  assert answer.incomplete_details is None and answer.output_text == ""


def test_a_string_is_a_users_message(client):
  same = [client.responses.create(model=MODEL, input=given, temperature=0, max_output_tokens=8)
          for given in ("the cat", [{"role": "user", "content": "the cat"}])]
  assert same[0].output_text == same[1].output_text != ""
  assert same[0].usage.input_tokens == same[1].usage.input_tokens


def test_answers_go_back_in_as_they_came(client):
  first = client.responses.create(model=MODEL, input="the cat", temperature=0, max_output_tokens=8)
  again = client.responses.create(
      model=MODEL, temperature=0, max_output_tokens=8,
      input=[{"role": "user", "content": "the cat"}, *(o.model_dump() for o in first.output),
             {"role": "user", "content": "and"}])
  assert again.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_events_come_in_openais_order_and_join_to_the_text(server, client, expected):
  with server.in_step():
    events = list(client.responses.create(**FIELDS, stream=True))
  *names, last = [event.type for event in events]
  assert list(dict.fromkeys(names)) == EVENTS
  assert last == ("response.incomplete" if expected.finish_reason == "length"
                  else "response.completed")
  assert [names.count(name) for name in EVENTS if not name.endswith("delta")] == [1] * 7
  assert [event.sequence_number for event in events] == list(range(len(events)))
  deltas = [event for event in events if event.type == "response.output_text.delta"]
  assert "".join(delta.delta for delta in deltas) == expected.text and len(deltas) > 2
  done = {event.type: event for event in events}
  assert done["response.output_text.done"].text == expected.text
  assert done["response.content_part.done"].part.text == expected.text
  assert done["response.output_item.done"].item.content[0].text == expected.text
  final = events[-1].response
  assert final.output_text == expected.text
  assert final.usage.output_tokens == len(expected.token_ids)
  ids = {final.output[0].id, *(d.item_id for d in deltas),
         done["response.output_item.added"].item.id}
  assert len(ids) == 1
  assert {e.response.id for e in events if hasattr(e, "response")} == {final.id}


def test_the_clients_helper_for_streams_understands_them(client, expected):
  with client.responses.stream(**FIELDS) as stream:
    text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
  assert text == expected.text


def test_every_event_has_its_name_on_the_wire(server):
  body = server.post("/v1/responses", input="a", max_output_tokens=2, stream=True).text
  blocks = body.removesuffix("\n\n").split("\n\n")
  assert blocks[0].startswith("event: response.created\ndata: {\"type\":\"response.created\",")
  for block in blocks:
    name, data = block.split("\n")
    assert f'"type":"{name.removeprefix("event: ")}"' in data and data.startswith("data: {")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_where_they_are_included(client, expected, stream):
  answer = client.responses.create(**FIELDS, include=[LOGPROBS], top_logprobs=2, stream=stream)
  if stream:
    entries = [entry for event in answer if event.type == "response.output_text.delta"
               for entry in event.logprobs]
  else:
    entries = answer.output[0].content[0].logprobs
  assert len(entries) == len(expected.token_ids)
  for entry, token, row in zip(entries, expected.token_ids, expected.outputs[0].logprobs,
                               strict=True):
    assert entry.token == row[token].decoded_token and entry.logprob == near(row[token].logprob)
    assert [t.logprob for t in entry.top_logprobs] == near(
        sorted((lp.logprob for lp in row.values()), reverse=True)[:2])


def test_what_would_need_a_memory_is_refused(client):
  for field, value in (("previous_response_id", "resp_1"), ("store", True), ("background", True),
                       ("conversation", "conv_1")):
    with pytest.raises(openai.BadRequestError, match="not supported") as error:
      client.responses.create(**FIELDS, **{field: value})
    assert error.value.param == field
  with pytest.raises(openai.NotFoundError):
    client.responses.retrieve("resp_1")


def test_a_failure_in_the_middle_is_an_event(server, monkeypatch):
  stream = server.service.stream

  async def broken(*arguments, **options):
    async for item in stream(*arguments, **options):
      yield item
      raise RuntimeError("secret")

  monkeypatch.setattr(server.service, "stream", broken)
  body = server.post("/v1/responses", input="a", max_output_tokens=30, stream=True).text
  last = body.removesuffix("\n\n").split("\n\n")[-1]
  assert last.startswith("event: error\n") and '"code":"internal_error"' in last
  assert "secret" not in body
  error_of(server.post("/v1/responses", input="a"), 500)
  monkeypatch.undo()
  server.wait_until_idle()
