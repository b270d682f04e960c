"""OpenAI's interface: the real client gets what LLM gives; requests are applied or refused."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from http_running import MODEL, Running, running
from tiny_llm import with_tokenizer
from tiny_tokenizers import TOKENIZERS, continuation

from jspec import RequestOutput, SamplingParams

HALVES = {"32": 9.0, "33": 9.0, "34": 9.0}  # a comma and the two of é
LONG = dict(temperature=0.0, max_tokens=30, ignore_eos=True)
CASES = {  # prompt, fields
  "greedy": ("the cat", LONG),
  "seeded": ("abc abc abc", dict(seed=4, max_tokens=20)),
  "defaults": ("he", dict(seed=8)),
  "penalized": ("on the hat", dict(seed=3, temperature=0.8, top_p=0.9, presence_penalty=0.5,
                                   frequency_penalty=0.3, logit_bias={"5": 2.0}, max_tokens=20)),
  "extras": ("in the hat", dict(seed=1, top_k=8, min_p=0.01, repetition_penalty=1.2, min_tokens=5,
                                bad_words=["the"], stop_token_ids=[7], num_speculative_tokens=2,
                                skip_special_tokens=False, ignore_eos=True, max_tokens=20)),
  "characters": ("he", dict(seed=2, logit_bias=HALVES, max_tokens=40, ignore_eos=True)),
  "several": ("er", dict(seed=20, n=3, max_tokens=12)),
  "logprobs": ("the cat", dict(seed=5, logprobs=3, max_tokens=16, ignore_eos=True)),
}
TALKS = {
  "short": [{"role": "user", "content": "the cat"}],
  "long": [{"role": "system", "content": "and on"}, {"role": "user", "content": "he"},
           {"role": "assistant", "content": "hat"}, {"role": "user", "content": "in"}],
}
near = functools.partial(pytest.approx, abs=1e-4)  # a batch rounds in another way
VLLM = ("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words", "stop_token_ids",
        "num_speculative_tokens", "skip_special_tokens", "ignore_eos",
        "include_stop_str_in_output")


@dataclasses.dataclass
class Expected:
  """What LLM answered before the server took its engine."""

  texts: dict[str, RequestOutput]
  talks: dict[str, RequestOutput]
  stopped: dict[bool, RequestOutput]  # by include_stop_str_in_output
  stop: str
  filled: int  # tokens of a chat answer that may be as long as fits


@pytest.fixture(scope="module", params=TOKENIZERS)
def llm(request):
  with with_tokenizer(request.param, "ngram") as llm:
    yield llm


@pytest.fixture(scope="module")
def expected(llm) -> Expected:
  params = [SamplingParams(**fields) for _, fields in CASES.values()]
  outs = llm.generate([prompt for prompt, _ in CASES.values()], params)
  texts = dict(zip(CASES, outs, strict=True))
  talks = dict(zip(TALKS, llm.chat(list(TALKS.values()), SamplingParams(
      seed=6, max_tokens=20, logprobs=2)), strict=True))
  stop = texts["greedy"].text[5:8]
  stopped = {keep: llm.generate("the cat", SamplingParams(
      **LONG, stop=stop, include_stop_str_in_output=keep))[0] for keep in (False, True)}
  [filled] = llm.chat(TALKS["short"], SamplingParams(temperature=0, max_tokens=None,
                                                      ignore_eos=True))
  return Expected(texts, talks, stopped, stop, len(filled.token_ids))


@pytest.fixture(scope="module")
def server(llm, expected) -> Iterator[Running]:
  with running(llm) as server:
    yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
  with server.openai() as client:
    yield client


def split(fields: dict) -> dict:
  """vLLM's fields where the client takes fields that OpenAI does not have."""
  return {**{k: v for k, v in fields.items() if k not in VLLM},
          "extra_body": {k: v for k, v in fields.items() if k in VLLM}}


# ------------------------------------------------------------------------ answers, by real clients


@pytest.mark.parametrize("case", CASES)
def test_a_completion_is_what_llm_generates(client, expected, case):
  prompt, fields = CASES[case]
  out = expected.texts[case]
  answer = client.completions.create(model=MODEL, prompt=prompt, **split(fields))
  assert answer.object == "text_completion" and answer.model == MODEL
  assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
      (o.index, o.text, o.finish_reason) for o in out.outputs]
  assert answer.usage.prompt_tokens == len(out.prompt_token_ids)
  assert answer.usage.completion_tokens == sum(len(o.token_ids) for o in out.outputs)
  assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("case", CASES)
def test_streamed_pieces_join_to_the_same(client, expected, case):
  prompt, fields = CASES[case]
  out = expected.texts[case]
  texts, ends = [""] * len(out.outputs), [None] * len(out.outputs)
  pieces = 0
  for chunk in client.completions.create(model=MODEL, prompt=prompt, stream=True, **split(fields)):
    assert chunk.usage is None and len(chunk.choices) == 1
    [choice] = chunk.choices
    assert ends[choice.index] is None
    texts[choice.index] += choice.text
    ends[choice.index] = choice.finish_reason
    pieces += 1
  assert texts == [o.text for o in out.outputs] and pieces > len(texts)
  assert ends == [o.finish_reason for o in out.outputs]


def test_the_case_of_characters_has_some_of_several_tokens(expected):
  """Else nothing could have been split; and what is no character stays one replacement."""
  text = expected.texts["characters"].text
  assert "é" in text and len(text) < len(expected.texts["characters"].token_ids)


@pytest.mark.parametrize("talk", TALKS)
def test_a_chat_is_what_llm_chats(client, expected, talk):
  out = expected.talks[talk]
  answer = client.chat.completions.create(model=MODEL, messages=TALKS[talk], seed=6,
                                          max_completion_tokens=20)
  [choice] = answer.choices
  assert answer.object == "chat.completion" and choice.message.role == "assistant"
  assert (choice.message.content, choice.finish_reason) == (out.text, out.finish_reason)
  assert answer.usage.prompt_tokens == len(out.prompt_token_ids)


def test_the_async_client_streams_a_chat_with_usage(server, expected):
  async def read():
    async with httpx.AsyncClient(trust_env=False) as transport:
      client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=transport)
      stream = await client.chat.completions.create(
          model=MODEL, messages=TALKS["long"], seed=6, max_tokens=20, stream=True,
          stream_options={"include_usage": True})
      return [chunk async for chunk in stream]

  *chunks, last = asyncio.run(read())
  out = expected.talks["long"]
  assert chunks[0].choices[0].delta.role == "assistant" and len({c.id for c in chunks}) == 1
  assert "".join(c.choices[0].delta.content or "" for c in chunks) == out.text
  assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, out.finish_reason]
  assert last.choices == [] and last.usage.completion_tokens == len(out.token_ids)
  assert last.usage.prompt_tokens == len(out.prompt_token_ids)


def test_many_async_requests_at_once_each_get_their_own(server, expected):
  async def read():
    async with httpx.AsyncClient(trust_env=False, timeout=60) as transport:
      client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=transport)
      return await asyncio.gather(*(
          client.completions.create(model=MODEL, prompt=prompt, **split(fields))
          for prompt, fields in CASES.values()))

  for answer, out in zip(asyncio.run(read()), expected.texts.values(), strict=True):
    assert [c.text for c in answer.choices] == [o.text for o in out.outputs]
  server.wait_until_idle()


def test_a_chat_goes_on_for_as_long_as_fits(client, expected):
  answer = client.chat.completions.create(model=MODEL, messages=TALKS["short"], temperature=0,
                                          extra_body={"ignore_eos": True})
  assert answer.usage.completion_tokens == expected.filled > 60
  assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(client, expected, keep, stream):
  answer = client.completions.create(
      model=MODEL, prompt="the cat", stop=[expected.stop, "qqqqq"], stream=stream,
      **split(LONG | {"include_stop_str_in_output": keep}))
  parts = [chunk.choices[0] for chunk in answer] if stream else answer.choices
  text = "".join(part.text for part in parts)
  assert text == expected.stopped[keep].text and text.endswith(expected.stop) == keep
  assert parts[-1].finish_reason == "stop" and parts[-1].stop_reason == expected.stop


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_and_token_ids(client, expected, llm, stream):
  prompts = ["the cat", "the cat and", "the cat"]
  given = [llm.tokenizer.encode(prompt) for prompt in prompts]
  for form in (prompts, given):
    answer = client.completions.create(model=MODEL, prompt=form, stream=stream, n=2, **split(LONG))
    texts = dict.fromkeys(range(6), "")
    for choice in ([chunk.choices[0] for chunk in answer] if stream else answer.choices):
      texts[choice.index] += choice.text
    for i in (0, 1, 4, 5):
      assert texts[i] == expected.texts["greedy"].text
    assert texts[2] == texts[3] != texts[0]
  [one] = client.completions.create(model=MODEL, prompt=given[0], **split(LONG)).choices
  assert one.text == expected.texts["greedy"].text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(client, expected, llm, stream):
  text = "the cat" + expected.texts["greedy"].text
  for prompt in ("the cat", llm.tokenizer.encode("the cat")):
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, stream=stream,
                                       **split(LONG))
    parts = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(part.text for part in parts) == text


def test_logprobs_of_a_completion(client, expected):
  prompt, fields = CASES["logprobs"]
  out = expected.texts["logprobs"].outputs[0]
  [choice] = client.completions.create(model=MODEL, prompt=prompt, **split(fields)).choices
  got = choice.logprobs
  assert len(got.tokens) == len(out.token_ids)
  for i, row in enumerate(out.logprobs):
    sampled = row[out.token_ids[i]]
    assert got.tokens[i] == sampled.decoded_token
    assert got.token_logprobs[i] == near(sampled.logprob)
    assert got.top_logprobs[i] == near({lp.decoded_token: lp.logprob for lp in row.values()})
  whole = [i for i, token in enumerate(got.tokens) if token.isascii() and "<" not in token]
  assert len(whole) > 8
  for i in whole:  # a token's offset is where it lies in the text
    assert choice.text[got.text_offset[i]:].startswith(got.tokens[i])
  streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(
      model=MODEL, prompt=prompt, stream=True, **split(fields))]
  joined = lambda name: sum((getattr(part, name) for part in streamed if part), [])
  assert joined("tokens") == got.tokens and joined("text_offset") == got.text_offset
  assert joined("token_logprobs") == near(got.token_logprobs)


def test_logprobs_of_a_chat(client, expected):
  out = expected.talks["short"].outputs[0]
  fields = dict(model=MODEL, messages=TALKS["short"], seed=6, max_tokens=20, logprobs=True,
                top_logprobs=2)
  [choice] = client.chat.completions.create(**fields).choices
  content = choice.logprobs.content
  assert len(content) == len(out.token_ids)
  for entry, token, row in zip(content, out.token_ids, out.logprobs, strict=True):
    assert entry.token == row[token].decoded_token
    assert entry.logprob == near(row[token].logprob)
    top = sorted(row.values(), key=lambda lp: -lp.logprob)[:2]
    assert [t.token for t in entry.top_logprobs] == [lp.decoded_token for lp in top]
    assert [t.logprob for t in entry.top_logprobs] == near([lp.logprob for lp in top])
  streamed = []
  for chunk in client.chat.completions.create(**fields, stream=True):
    streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
  assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in content]
  plain = client.chat.completions.create(**fields | {"top_logprobs": None}).choices[0]
  assert [e.top_logprobs for e in plain.logprobs.content] == [[]] * len(content)


def test_the_bytes_of_tokens_join_to_the_text(llm, expected):
  """Also of tokens that are less than a character."""
  out = expected.texts["characters"]
  spelled = b"".join(llm.tokenizer.token_bytes(t) for t in out.token_ids
                     if t not in llm.tokenizer.special_ids)
  assert spelled.decode(errors="replace") == out.text
  assert [llm.tokenizer.token_bytes(t) for t in continuation(llm.tokenizer, "é日")] == [
      b"\xc3", b"\xa9", b"\xe6", b"\x97", b"\xa5"]


def test_usage_counts_drafts_as_predictions(server, client):
  before = server.service.engine.stats().speculation
  answer = client.completions.create(model=MODEL, prompt=["abc abc abc", "the the the"], n=2,
                                     **split(LONG))
  after = server.service.engine.stats().speculation
  details = answer.usage.completion_tokens_details
  drafted = after.num_draft_tokens - before.num_draft_tokens
  accepted = after.num_accepted_tokens - before.num_accepted_tokens
  assert drafted > 0
  assert details.accepted_prediction_tokens == accepted
  assert details.rejected_prediction_tokens == drafted - accepted


def test_models_are_the_one_that_is_served(client, llm):
  [model] = client.models.list().data
  assert model.id == MODEL and model == client.models.retrieve(MODEL)
  assert model.max_model_len == llm.max_model_len
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("gpt-4")


def test_the_clients_errors_are_of_the_right_class(server, client):
  create = client.completions.create
  with pytest.raises(openai.BadRequestError) as error:
    create(model=MODEL, prompt="a", temperature=-1)
  assert error.value.param == "temperature" and error.value.type == "invalid_request_error"
  with pytest.raises(openai.NotFoundError) as error:
    create(model="gpt-4", prompt="a")
  assert error.value.code == "model_not_found" and error.value.param == "model"
  with pytest.raises(openai.BadRequestError, match="only text is supported") as error:
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://x"}}]}])
  assert error.value.param == "messages[0].content"
  with pytest.raises(openai.BadRequestError) as error:
    client.chat.completions.create(model=MODEL, messages=TALKS["short"], tools=[
        {"type": "function", "function": {"name": "f"}}])
  assert error.value.param == "tools"
  door = server.open(tokens=("sesame",))
  with httpx.Client(trust_env=False) as transport:
    other = openai.OpenAI(base_url=f"http://127.0.0.1:{door.port}/v1", api_key="simsim",
                          http_client=transport)
    with pytest.raises(openai.AuthenticationError):
      other.models.list()
    assert other.with_options(api_key="sesame").models.list().data[0].id == MODEL
  server.run(door.drain(0))


def test_a_full_queue_is_a_rate_limit(server, client, monkeypatch):
  engine = server.service.engine
  monkeypatch.setattr(engine, "max_waiting", 1)
  count = 1 + engine.llm.max_num_seqs
  with server.held() as go_on, ThreadPoolExecutor(count) as threads:
    waiting = [threads.submit(server.post, "/v1/completions", prompt="the cat")
               for _ in range(count)]
    server.wait_for(lambda: engine.num_requests == count)
    for prompt in ("a", ["a", "the"]):
      with pytest.raises(openai.RateLimitError, match="try again later") as error:
        client.completions.create(model=MODEL, prompt=prompt)
      assert error.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.BadRequestError, match="more than the 5 requests"):
      client.completions.create(model=MODEL, prompt=["a"] * 6)
    assert engine.num_requests == count
    go_on.set()
    assert [future.result().status_code for future in waiting] == [200] * count
  server.wait_until_idle()
