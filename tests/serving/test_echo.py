"""Log-probabilities of prompts over HTTP: echoed as in completions, and in vLLM's own shape."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from http_running import COMPLETIONS, Running, running
from tiny_llm import with_tokenizer
from tiny_tokenizers import TOKENIZERS

from jspec import LLM, SamplingParams

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "the cat"}]
GREEDY = dict(temperature=0, max_tokens=10, ignore_eos=True, skip_special_tokens=False)
near = functools.partial(pytest.approx, abs=1e-4)  # a batch rounds in another way


@pytest.fixture(scope="module", params=TOKENIZERS)
def server(request) -> Iterator[Running]:
  with with_tokenizer(request.param, "ngram") as llm, running(llm) as server:
    yield server


@pytest.fixture(scope="module")
def llm(server) -> LLM:
  return server.service.engine.llm


PROMPT = "the cat é and the hat"


@pytest.fixture(scope="module")
def written(server, llm) -> dict:
  """Ten tokens after the prompt, with what was known of each when it was generated."""
  answer = server.post(COMPLETIONS, prompt=PROMPT, **GREEDY, logprobs=2, return_token_ids=True)
  [choice] = answer.json()["choices"]
  return choice


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_what_was_generated_has_the_same_log_probabilities(server, llm, written, stream):
  """Read back as a prompt, and no token generated: as lm-evaluation-harness asks."""
  ids = llm.encode(PROMPT) + written["token_ids"]
  fields = dict(prompt=ids, echo=True, logprobs=2, max_tokens=0, temperature=0)
  if stream:
    parts = [c["choices"][0] for c in server.chunks(COMPLETIONS, **fields)]
    got = parts[0]["logprobs"]
    text, end = "".join(p["text"] for p in parts), parts[-1]["finish_reason"]
  else:
    answer = server.post(COMPLETIONS, **fields).json()
    [choice] = answer["choices"]
    got, text, end = choice["logprobs"], choice["text"], choice["finish_reason"]
    assert answer["usage"]["completion_tokens"] == 0
  assert text == PROMPT + written["text"] and end == "length"
  assert len(got["tokens"]) == len(ids)
  assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
  assert got["tokens"][-10:] == written["logprobs"]["tokens"]
  assert got["token_logprobs"][-10:] == near(written["logprobs"]["token_logprobs"])
  for top, own in zip(got["top_logprobs"][-10:], written["logprobs"]["top_logprobs"], strict=True):
    assert top == near(own)
  for token, at in zip(got["tokens"], got["text_offset"], strict=True):
    shown = token if at else token.lstrip()  # a space before the text is not in it
    assert not token.isascii() or "<0x" in token or text[at:].startswith(shown)


def test_an_echo_joins_the_prompts_log_probabilities_and_the_texts(server, llm, written):
  fields = dict(prompt=PROMPT, **GREEDY, echo=True, logprobs=2, n=2)
  for choice in server.post(COMPLETIONS, **fields).json()["choices"]:
    got, count = choice["logprobs"], len(llm.encode(PROMPT))
    assert choice["text"] == PROMPT + written["text"]
    assert {len(values) for values in got.values()} == {count + 10}
    assert got["tokens"][count:] == written["logprobs"]["tokens"]
    assert got["token_logprobs"][count:] == near(written["logprobs"]["token_logprobs"])
    offsets = [at + len(PROMPT) for at in written["logprobs"]["text_offset"]]
    assert got["text_offset"][count:] == offsets
  joined: dict[str, list] = {name: [] for name in got}
  for chunk in server.chunks(COMPLETIONS, **fields | {"n": 1}):
    for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
      joined[name] += values
  assert joined["text_offset"] == got["text_offset"] and joined["tokens"] == got["tokens"]


def test_prompt_logprobs_have_vllms_shape(server, llm):
  [out] = llm_generate(server, PROMPT, SamplingParams(prompt_logprobs=1, max_tokens=1))
  ids = llm.encode(PROMPT)
  rows = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=1, prompt_logprobs=1).json()[
      "choices"][0]["prompt_logprobs"]
  assert rows[0] is None and len(rows) == len(ids)
  for row, token, own in zip(rows[1:], ids[1:], out.prompt_logprobs[1:], strict=True):
    assert row.keys() == {str(t) for t in own} and set(row[str(token)]) == {
        "logprob", "rank", "decoded_token"}
    assert row[str(token)]["logprob"] == near(own[token].logprob)
    assert min(entry["rank"] for entry in row.values()) == 1
  chat = server.post(CHAT, messages=USER, max_tokens=1, prompt_logprobs=0).json()
  assert len(chat["prompt_logprobs"]) == len(llm.encode_chat(USER))
  assert [len(row) for row in chat["prompt_logprobs"][1:]] == [1] * (
      len(chat["prompt_logprobs"]) - 1)


def llm_generate(server: Running, prompt: str, params: SamplingParams) -> list:
  """By the engine's own interface for programs."""
  async def whole():
    return [await server.service.complete(prompt, params)]

  return server.run(whole())
