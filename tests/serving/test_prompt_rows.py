"""How log-probabilities of a prompt are written, without a server: from outputs made by hand."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_tokenizers import TOKENIZERS, byte_tokenizer

from jspec import CompletionOutput, Logprob, RequestOutput, SamplingParams
from jspec.serving.openai.answers import ChatAnswer, CompletionAnswer
from jspec.serving.openai.api import Call

TOKENIZER = byte_tokenizer()
GIVEN = "he é"  # four tokens: "he", a space, and the two halves of é
IDS = tuple(TOKENIZER.encode(GIVEN))
NAMES = [TOKENIZER.token_text(t) for t in IDS]
INF = float("inf")


def row(token: int, value: float, rank: int = 1, *others: tuple[int, float, int]) -> dict:
  return {t: Logprob(v, r, TOKENIZER.token_text(t))
          for t, v, r in ((token, value, rank), *others)}


ROWS = (None, row(IDS[1], -1.5, 2, (5, -0.5, 1)), row(IDS[2], -INF, 64, (5, -0.1, 1)),
        row(IDS[3], -0.25))
NEXT = row(4, -0.75)


def output(end: str = "stop") -> RequestOutput:
  text = TOKENIZER.decode([4])
  out = CompletionOutput(0, text, (4,), end, logprobs=(NEXT,))
  return RequestOutput("r", GIVEN, IDS, (out,), True, prompt_logprobs=ROWS)


def call(**fields) -> Call:
  return Call([GIVEN], SamplingParams(logprobs=1), **fields)


def written() -> dict:
  """By hand from the rows above."""
  five, four = TOKENIZER.token_text(5), TOKENIZER.token_text(4)
  return {"tokens": [*NAMES, four], "token_logprobs": [None, -1.5, -9999.0, -0.25, -0.75],
          "top_logprobs": [None, {NAMES[1]: -1.5, five: -0.5}, {NAMES[2]: -9999.0, five: -0.1},
                           {NAMES[3]: -0.25}, {four: -0.75}],
          "text_offset": [0, 2, 3, 3, 4]}


def test_the_example_is_what_it_claims():
  assert len(IDS) == 4 and [TOKENIZER.token_bytes(t) for t in IDS] == [
      b"he", b" ", b"\xc3", b"\xa9"]


@pytest.mark.parametrize("given", [GIVEN, list(IDS)])
def test_an_echo_has_the_rows_of_prompt_and_text(given):
  answer = CompletionAnswer(call(echo=[given]), "m", TOKENIZER).whole([output()])
  [choice] = answer["choices"]
  assert choice["text"] == GIVEN + TOKENIZER.decode([4])
  assert choice["logprobs"] == written() and "prompt_logprobs" not in choice


def test_a_streamed_echo_has_the_prompts_rows_in_its_first_chunk():
  answer = CompletionAnswer(call(echo=[GIVEN]), "m", TOKENIZER)
  first, second = (c["choices"][0] for c in answer.chunks(0, output()))
  assert (first["text"], first["finish_reason"]) == (GIVEN, None)
  joined = {name: first["logprobs"][name] + second["logprobs"][name] for name in written()}
  assert joined == written() and len(first["logprobs"]["tokens"]) == 4


def test_prompt_logprobs_are_by_token_id_in_vllms_words():
  rows = [None, *({str(t): {"logprob": max(lp.logprob, -9999.0), "rank": lp.rank,
                            "decoded_token": lp.decoded_token} for t, lp in r.items()}
                  for r in ROWS[1:])]
  asked = call(prompt_logprobs=True)
  [choice] = CompletionAnswer(asked, "m", TOKENIZER).whole([output()])["choices"]
  assert choice["prompt_logprobs"] == rows and choice["text"] == TOKENIZER.decode([4])
  chat = ChatAnswer(asked, "m", TOKENIZER).whole([output()])
  assert chat["prompt_logprobs"] == rows and "prompt_logprobs" not in chat["choices"][0]


def test_a_special_token_before_the_prompt_has_no_place_in_its_text():
  """As tokenizers add one that begins a text; written out by the client it has."""
  ids = (1, *IDS[:2])  # <|user|>
  rows = (None, row(IDS[0], -1.0), row(IDS[1], -1.0))
  spelled = TOKENIZER.token_text(1)
  for given, offsets in (("he ", [0, 0, 2]), (spelled + "he ", [0, len(spelled), len(spelled) + 2]),
                         (list(ids), [0, len(spelled), len(spelled) + 2])):
    out = RequestOutput("r", None, ids, (CompletionOutput(0, "", (), "length", logprobs=()),),
                        True, prompt_logprobs=rows)
    [choice] = CompletionAnswer(call(echo=[given]), "m", TOKENIZER).whole([out])["choices"]
    assert choice["logprobs"]["text_offset"] == offsets
    assert choice["text"] == ("he " if given == "he " else spelled + "he ")


def test_a_prompt_that_was_cut_is_echoed_as_it_was_read():
  out = RequestOutput("r", GIVEN, IDS[:1], (CompletionOutput(0, "", (), "length"),), True)
  for truncated, text in ((True, "he"), (False, GIVEN)):
    asked = call(echo=[GIVEN], truncated=truncated)
    assert CompletionAnswer(asked, "m", TOKENIZER).whole([out])["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_offsets_are_where_the_tokens_lie_in_the_text(kind, stream):
  """Their spaces count, but for the one that a text begins with and does not show."""
  tokenizer = TOKENIZERS[kind]
  ids = tokenizer.encode("the land é on")
  for prompt, text in (((1,), "the land é on"), ((1, 3), tokenizer.decode([3, *ids])[1:])):
    rows = tuple({t: Logprob(-1.0, 1, tokenizer.token_text(t))} for t in ids)
    out = CompletionOutput(0, text, tuple(ids), "stop", logprobs=rows)
    whole = RequestOutput("r", None, prompt, (out,), True)
    answer = CompletionAnswer(call(), "m", tokenizer)
    if stream:
      outs = [CompletionOutput(0, "", (t,), logprobs=(row,))
              for t, row in zip(ids, rows, strict=True)]
      deltas = [dataclasses.replace(whole, outputs=(out,)) for out in outs]
      offsets = sum((c["choices"][0]["logprobs"]["text_offset"]
                     for delta in deltas for c in answer.chunks(0, delta)), [])
    else:
      offsets = answer.whole([whole])["choices"][0]["logprobs"]["text_offset"]
    assert len(offsets) == len(ids)
    for i, (at, token) in enumerate(zip(offsets, ids, strict=True)):
      shown = tokenizer.token_text(token)
      half = tokenizer.token_bytes(token)[0] > 127
      expected = "é" if half else shown if i else shown.lstrip(" ") if text[0] != " " else shown
      assert text.startswith(expected, at), (kind, text, at, expected)
