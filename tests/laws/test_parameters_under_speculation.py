"""Every field of SamplingParams: does what it should, and the same with speculation as without."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from tiny_llm import EOS, tiny_llm

from jspec.outputs import RequestOutput
from jspec.sampling_params import SamplingParams

PROMPT = "the cat and the hat and the cat and the hat"
SAMPLED = dict(temperature=1.0, seed=3)
WARM = dict(temperature=2.0, seed=3)


@functools.cache
def plain() -> RequestOutput:
  """What greedy decoding says: some cases need a piece of it."""
  return run("none")


def some_word() -> str:
  """Text of two tokens in a row that are how the tokenizer would spell it."""
  tokenizer, ids = tiny_llm().tokenizer, plain().token_ids
  pairs = (list(ids[i:i + 2]) for i in range(3, len(ids) - 2))
  return next(tokenizer.decode(p) for p in pairs
              if tokenizer.encode(tokenizer.decode(p)) == p and tokenizer.decode(p)[0] != " ")


def some_stop() -> str:
  """A few characters that the text has in its middle, across tokens."""
  return plain().text[7:10]


# field: (its value, the other fields of both runs), as functions: some look at plain().
CASES = {
  "n": lambda: (3, SAMPLED),
  "temperature": lambda: (1.0, dict(seed=3)),
  "top_k": lambda: (2, WARM),
  "top_p": lambda: (0.4, WARM),
  "min_p": lambda: (0.4, WARM),
  "seed": lambda: (4, dict(SAMPLED)),
  "repetition_penalty": lambda: (1.7, {}),
  "presence_penalty": lambda: (2.0, {}),
  "frequency_penalty": lambda: (1.5, {}),
  "logit_bias": lambda: ({plain().token_ids[4]: -100.0, 8: 2.5}, {}),
  "bad_words": lambda: ([some_word()], {}),
  "allowed_token_ids": lambda: ([*range(5, 25)], WARM),
  "min_tokens": lambda: (8, dict(logit_bias={EOS: 50}, ignore_eos=False)),
  "max_tokens": lambda: (9, {}),
  "stop": lambda: ([some_stop(), "qqq"], {}),
  "stop_token_ids": lambda: ([plain().token_ids[10]], {}),
  "include_stop_str_in_output": lambda: (True, dict(stop=some_stop())),
  "ignore_eos": lambda: (True, dict(ignore_eos=False, logit_bias={EOS: 5})),
  "logprobs": lambda: (4, SAMPLED),
  "prompt_logprobs": lambda: (2, {}),
  "num_speculative_tokens": lambda: (0, {}),
  "truncate_prompt_tokens": lambda: (4, {}),
  "skip_special_tokens": lambda: (False, dict(logit_bias={1: 8.0})),
}
METHODS = ("ngram", "draft_model")


def run(method: str, **fields) -> RequestOutput:
  fields = dict(temperature=0.0, ignore_eos=True, max_tokens=40) | fields
  return tiny_llm(method).generate(PROMPT, SamplingParams(**fields))[0]


def visible(out: RequestOutput) -> list:
  """Everything a user sees but numbers that may round."""
  prompt = out.prompt_logprobs and [row and sorted(row) for row in out.prompt_logprobs]
  return [(o.text, o.token_ids, o.finish_reason, o.stop_reason, prompt,
           o.logprobs and [sorted(row) for row in o.logprobs]) for o in out.outputs]


def test_the_table_holds_every_field():
  assert set(CASES) == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("field", CASES)
def test_a_field_shows_in_plain_decoding(field):
  """Against the same request without it; so the comparison below means something."""
  value, others = CASES[field]()
  with_it, without = (visible(run("none", **{**others, **extra})) for extra in ({field: value}, {}))
  if field == "num_speculative_tokens":  # shows in the statistics alone
    assert with_it == without
    assert run("ngram").speculation.num_draft_tokens > 0
    assert run("ngram", num_speculative_tokens=0).speculation.num_draft_tokens == 0
  else:
    assert with_it != without


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("field", CASES)
def test_a_field_does_the_same_under_speculation(field, method):
  value, others = CASES[field]()
  fields = {**others, field: value}
  expected, got = run("none", **fields), run(method, **fields)
  assert visible(got) == visible(expected)
  for a, b in zip(got.outputs, expected.outputs, strict=True):
    for row, other in zip(a.logprobs or (), b.logprobs or (), strict=True):
      assert {t: x.rank for t, x in row.items()} == {t: x.rank for t, x in other.items()}
      assert [row[t].logprob for t in row] == pytest.approx([other[t].logprob for t in row],
                                                            abs=1e-4)
  if field == "num_speculative_tokens":
    stats = got.speculation
    assert stats.num_drafts == stats.num_draft_tokens == 0
    assert stats.num_steps == stats.num_generated_tokens == 39


@pytest.mark.parametrize("method", METHODS)
def test_drafts_were_accepted_meanwhile(method):
  assert run(method).speculation.num_accepted_tokens > 0
  assert run(method, repetition_penalty=1.1).speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft", [1, 2, 3])
def test_fewer_drafts_than_the_engine_would_make(method, draft):
  out = run(method, num_speculative_tokens=draft)
  assert out.token_ids == plain().token_ids
  histogram = out.speculation.drafted_histogram
  assert histogram[draft] > 0 and not any(histogram[draft + 1:])


@pytest.mark.parametrize("method", ("none", *METHODS))
@pytest.mark.parametrize("stop", [lambda: dict(stop=some_stop()),
                                  lambda: dict(stop_token_ids=[plain().token_ids[10]]),
                                  lambda: dict(ignore_eos=False, logit_bias={EOS: 5.0})],
                         ids=["string", "token", "eos"])
def test_log_probabilities_end_where_the_tokens_end(method, stop):
  """None is missing, none is 0 for want of a value, and they are the sampled tokens'."""
  out = run(method, logprobs=2, **stop()).outputs[0]
  assert out.finish_reason == "stop" and 0 < len(out.token_ids) < 40
  assert [next(iter(row)) for row in out.logprobs] == list(out.token_ids)
  assert all(2 <= len(row) <= 3 and all(x.logprob < 0 for x in row.values())
             for row in out.logprobs)
  assert len(out.drafted) == len(out.token_ids)


@pytest.mark.parametrize("method", METHODS)
def test_min_p_holds_for_every_emitted_token(method):
  """No token less likely than min_p times the likeliest, accepted drafts included."""
  out = run(method, temperature=1.0, seed=1, min_p=0.3, logprobs=1)
  for row, token in zip(out.logprobs, out.token_ids, strict=True):
    best = max(x.logprob for x in row.values())
    assert row[token].logprob >= best - 1.2040  # log 0.3
  assert out.token_ids == run("none", temperature=1.0, seed=1, min_p=0.3).token_ids


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", range(12))
def test_an_end_token_is_obeyed_at_every_position_of_an_accepted_run(method, at):
  """Whichever token greedy emits at this place is declared a stop."""
  token = plain().token_ids[at]
  out = run(method, stop_token_ids=[token]).outputs[0]
  end = plain().token_ids.index(token) + 1
  assert out.token_ids == plain().token_ids[:end]
  assert (out.finish_reason, out.stop_reason) == ("stop", token)
