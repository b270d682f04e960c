"""The fields that vLLM's clients add to OpenAI's, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_running import COMPLETIONS, MODEL, Running, running
from tiny_llm import tiny_llm

from jspec import LLM

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "the cat"}]
GREEDY = dict(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
  with running(tiny_llm("ngram")) as server:
    yield server


@pytest.fixture(scope="module")
def llm(server) -> LLM:
  return server.service.engine.llm


@pytest.mark.parametrize("path, own", [(COMPLETIONS, {"prompt": "the cat"}),
                                       (CHAT, {"messages": USER})])
def test_usage_in_every_chunk_grows_to_the_last_one(server, path, own):
  options = {"include_usage": True, "continuous_usage_stats": True}
  with server.in_step():
    got = server.chunks(path, **own, **GREEDY, n=2, stream_options=options)
  counts = [chunk["usage"]["completion_tokens"] for chunk in got]
  assert counts == sorted(counts) and len(set(counts)) > 3 and counts[-1] == 20
  assert len({chunk["usage"]["prompt_tokens"] for chunk in got}) == 1
  assert all(c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"]
             + c["usage"]["completion_tokens"] for c in got)
  assert got[-1]["choices"] == [] and all(chunk["choices"] for chunk in got[:-1])
  without = server.chunks(path, **own, **GREEDY, stream_options={
      "continuous_usage_stats": True})  # as in vLLM: a way to include usage, which is not asked
  assert not any("usage" in chunk for chunk in without)


def test_token_ids_of_a_completion(server, llm):
  ids = llm.tokenizer.encode("the cat")
  fields = dict(prompt="the cat", **GREEDY, n=2, return_token_ids=True)
  choices = server.post(COMPLETIONS, **fields).json()["choices"]
  for choice in choices:
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 10
    assert llm.decode(choice["token_ids"]) == choice["text"]
  streamed = [c["choices"][0] for c in server.chunks(COMPLETIONS, **fields)]
  for index in (0, 1):
    own = [c for c in streamed if c["index"] == index]
    assert own[0]["prompt_token_ids"] == ids and not any("prompt_token_ids" in c for c in own[1:])
    assert sum((c.get("token_ids", []) for c in own), []) == choices[index]["token_ids"]


def test_token_ids_of_a_chat(server, llm):
  fields = dict(messages=USER, **GREEDY, return_token_ids=True)
  answer = server.post(CHAT, **fields).json()
  assert answer["prompt_token_ids"] == llm.encode_chat(USER)
  [choice] = answer["choices"]
  assert llm.decode(choice["token_ids"]) == choice["message"]["content"]
  first, *rest = server.chunks(CHAT, **fields)
  assert first["prompt_token_ids"] == answer["prompt_token_ids"]
  assert not any("prompt_token_ids" in chunk for chunk in rest)
  ids = sum((c["choices"][0].get("token_ids", []) for c in [first, *rest]), [])
  assert ids == choice["token_ids"]


def test_tokens_of_log_probabilities_by_their_ids(server):
  same = dict(**GREEDY, return_token_ids=True, return_tokens_as_token_ids=True)
  [choice] = server.post(COMPLETIONS, prompt="the cat", logprobs=1, **same).json()["choices"]
  names = [f"token_id:{i}" for i in choice["token_ids"]]
  assert choice["logprobs"]["tokens"] == names
  assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"],
                                              strict=True))
  [choice] = server.post(CHAT, messages=USER, logprobs=True, top_logprobs=1,
                         **same).json()["choices"]
  content = choice["logprobs"]["content"]
  assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
  assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)


def test_a_request_needs_no_model_and_may_have_a_name(server):
  with server.client() as client:
    answer = client.post(CHAT, json={"messages": USER, **GREEDY, "request_id": "mine"}).json()
    assert (answer["model"], answer["id"]) == (MODEL, "chatcmpl-mine")
    for path in ("/tokenize", COMPLETIONS):
      assert client.post(path, json={"prompt": "a"}).status_code == 200


def test_what_clients_add_changes_no_answer(server):
  message = {"role": "user", "content": "the cat", "name": "Al", "id": "1", "type": "message",
             "cache_control": {"type": "ephemeral"}}
  plain = server.post(CHAT, messages=USER, **GREEDY).json()
  decked = server.post(CHAT, messages=[message], **GREEDY, nonsense=1, tools=[], lora_request=None,
                       response_format={"type": "text"}, guided_json=None).json()
  assert decked["choices"] == plain["choices"] and decked["usage"] == plain["usage"]


def test_more_tokens_than_fit_are_counted_as_those_that_fit(server, llm):
  """Else one request of 2**62 tokens would be the histogram's sum for ever."""
  def total() -> float:
    text = server.service.metrics.render()[0].decode()
    [line] = [x for x in text.splitlines()
              if x.startswith("jspec:request_params_max_tokens_sum")]
    return float(line.split()[-1])

  before = total()
  answer = server.post(COMPLETIONS, prompt="the cat", temperature=0, max_tokens=2**62).json()
  assert total() - before == llm.max_model_len - answer["usage"]["prompt_tokens"]


def test_special_tokens_are_left_out_of_a_prompt_on_request(server, llm, monkeypatch):
  """The tiny tokenizer adds none, so it is told to encode with its own way of saying so."""
  monkeypatch.setattr(llm, "encode", lambda text, special=True: [5, 6] if special else [6])
  for fields, count in (({}, 2), ({"add_special_tokens": True}, 2),
                        ({"add_special_tokens": False}, 1)):
    answer = server.post(COMPLETIONS, prompt="a", max_tokens=1, echo=True, **fields).json()
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["choices"][0]["text"].startswith("a")


def test_a_prompt_that_is_cut_is_counted_and_echoed_as_it_was_read(server, llm):
  ids = llm.encode("the cat and the hat")
  same = dict(temperature=0, max_tokens=6, ignore_eos=True)
  for prompt in ("the cat and the hat", ids):
    answer = server.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=3, echo=True, **same)
    short = server.post(COMPLETIONS, prompt=ids[-3:], echo=True, **same).json()
    assert answer.json()["choices"] == short["choices"]
    assert answer.json()["usage"]["prompt_tokens"] == 3
  long = server.post(COMPLETIONS, prompt="a" * 200, truncate_prompt_tokens=-1, max_tokens=1)
  assert long.json()["usage"]["prompt_tokens"] == llm.max_model_len - 1
  chat = server.post(CHAT, messages=USER, truncate_prompt_tokens=2, return_token_ids=True, **same)
  assert chat.json()["prompt_token_ids"] == llm.encode_chat(USER)[-2:]
