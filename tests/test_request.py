"""Where an output ends, and that its ids, log-probabilities and text end at the same token."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from tiny_llm import EOS, byte_tokenizer

from jspec.request import NewToken, Request
from jspec.sampling_params import SamplingParams

TOKENIZER = byte_tokenizer()
STOP = 60


def request(limit=100, **fields) -> Request:
  fields.setdefault("logprobs", 0)
  return Request("r", 0, (3, 4), SamplingParams(max_tokens=None, **fields), limit, TOKENIZER)


def run(tokens, limit=100, **fields) -> Request:
  """The request after a step that emitted these tokens, however many of them too many."""
  out = request(limit, **fields)
  for token in tokens:
    out.push(NewToken(token, logprob=-token / 10))
  return out


def ended(r: Request):
  """(finish_reason, stop_reason, tokens), checked to end together."""
  out = r.output()
  assert len(out.token_ids) == len(out.logprobs) == len(out.drafted)
  assert [next(iter(row)) for row in out.logprobs] == list(out.token_ids)
  assert out.cumulative_logprob == pytest.approx(-sum(out.token_ids) / 10)
  return out.finish_reason, out.stop_reason, list(out.token_ids)


ROW = [10, 11, STOP, 20, 21, 22]


@pytest.mark.parametrize("limit, expected", [
  (5, ("stop", STOP, ROW[:3])),
  (3, ("stop", STOP, ROW[:3])),  # the stop token is the last one allowed
  (2, ("length", None, ROW[:2])),  # the stop comes after the cap
  (100, ("stop", STOP, ROW[:3])),
])
def test_a_stop_token_is_looked_for_before_the_limit(limit, expected):
  assert ended(run(ROW, limit, stop_token_ids=[STOP])) == expected


@pytest.mark.parametrize("at", range(6))
def test_the_models_own_end_is_seen_anywhere_in_an_accepted_run(at):
  tokens = [10, 11, 12, 13, 14, 15]
  tokens[at] = EOS
  r = run(tokens)
  assert ended(r) == ("stop", None, tokens[:at + 1])
  assert r.output().text == TOKENIZER.decode(tokens[:at])
  assert ended(run(tokens, ignore_eos=True)) == (None, None, tokens)
  assert ended(run(tokens, ignore_eos=True, stop_token_ids=[EOS])) == (
      "stop", EOS, tokens[:at + 1])


def test_nothing_is_added_after_the_end():
  r = run(ROW, stop_token_ids=[STOP])
  before = r.output()
  r.push(NewToken(30))
  assert r.output() == before


def test_text_of_the_stop_token_is_left_out_unless_included():
  tokens = TOKENIZER.encode("abc.def")
  stop = TOKENIZER.encode(".")
  assert run(tokens, stop_token_ids=stop).output().text == "abc"
  r = run(tokens, stop_token_ids=stop, include_stop_str_in_output=True)
  assert r.output().text == "abc."
  assert ended(r)[2] == tokens[:4]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("text, stop, kept", [
  ("in the land", "the", "in "),  # inside the token " the"
  ("abcxyzdef", "cxy", "ab"),  # over three tokens
  ("the end", "t", ""),  # at the very start
  ("é日é", "日", "é"),  # ends where the character is whole
  ("aabaabaac", "aabaac", "aab"),  # a false start first
])
def test_a_stop_string_ends_ids_and_text_at_the_token_that_completes_it(text, stop, kept, include):
  tokens = TOKENIZER.encode(text)
  num = next(i for i in range(1, len(tokens) + 1) if stop in TOKENIZER.decode(tokens[:i]))
  r = run(tokens + [EOS], stop=stop, include_stop_str_in_output=include)
  assert ended(r) == ("stop", stop, tokens[:num])
  assert r.output().text == kept + (stop if include else "")
  assert stop in TOKENIZER.decode(r.tokens) and stop not in TOKENIZER.decode(r.tokens[:-1])


def test_the_earliest_of_several_stop_strings_counts():
  tokens = TOKENIZER.encode("one and two")
  r = run(tokens, stop=["two", "d t", "and"])
  assert (r.stop_reason, r.output().text) == ("and", "one ")
  assert run(TOKENIZER.encode("xthey"), stop=["he", "the"]).output().text == "x"


def test_a_stop_string_completed_at_the_limit_is_a_stop():
  tokens = TOKENIZER.encode("abcdef")
  assert ended(run(tokens, 3, stop="c")) == ("stop", "c", tokens[:3])
  assert ended(run(tokens, 3, stop="d")) == ("length", None, tokens[:3])
  assert run(tokens, 3, stop="d").output().text == "abc"


def test_min_tokens_holds_stop_strings_back():
  """Only text of tokens beyond min_tokens can end the request; nothing is cut before that."""
  tokens = TOKENIZER.encode("axbxcx")
  assert ended(run(tokens, stop="x", min_tokens=0))[2] == tokens[:2]
  for least in (2, 3):
    r = run(tokens, stop="x", min_tokens=least)
    assert ended(r) == ("stop", "x", tokens[:4]) and r.output().text == "axb"
  assert ended(run(tokens, stop="x", min_tokens=6)) == (None, None, tokens)


def test_special_tokens_are_shown_on_request():
  tokens = [10, 1, 11]
  assert run(tokens).output().text == "hi"
  assert run(tokens, skip_special_tokens=False).output().text == "h<|user|>i"


def test_logprobs_hold_the_sampled_token_first_and_as_many_as_asked_for():
  r = request(logprobs=2)
  r.push(NewToken(10, False, -3.0, 9, ((11, -0.5), (12, -1.0), (13, -1.5))))
  r.push(NewToken(12, True, -1.0, 2, ((11, -0.5), (12, -1.0), (13, -1.5))))
  first, second = r.output().logprobs
  assert [(t, x.logprob, x.rank, x.decoded_token) for t, x in first.items()] == [
      (10, -3.0, 9, "h"), (11, -0.5, 1, "i"), (12, -1.0, 2, "j")]
  assert list(second) == [12, 11] and second[12].rank == 2
  assert r.output().drafted == (False, True)
  assert request(logprobs=None).output().logprobs is None


TEXTS = st.text(alphabet="abthe né日🎉.", max_size=30)
STOPS = st.lists(st.text(alphabet="abthe é日", min_size=1, max_size=5), max_size=3)


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(TEXTS, STOPS, st.integers(1, 60), st.integers(0, 10), st.booleans())
def test_snapshots_grow_and_never_show_part_of_a_stop_string(text, stop, limit, least, include):
  """Every snapshot begins the final text, with whole characters only."""
  r = request(limit, stop=stop, min_tokens=least, include_stop_str_in_output=include)
  shown = [""]
  for token in TOKENIZER.encode(text):
    if not r.finished:
      r.push(NewToken(token))
      shown.append(r.output().text)
  whole = TOKENIZER.decode(r.tokens)
  *running, last = shown if r.finished else [*shown, whole]
  assert all(last.startswith(t) and "\ufffd" not in t for t in running)
  assert all(before in after for before, after in zip(running, running[1:], strict=False))
  if r.finish_reason == "stop":
    ended_by = last + ("" if include else r.stop_reason)
    assert whole.startswith(ended_by) and ended_by.endswith(r.stop_reason)
    assert len(r.tokens) > least
  elif r.finished:
    assert last == whole and len(r.tokens) == limit
  else:  # no more is held back than a stop string's beginning
    held = 0 if include else max(map(len, stop), default=1) - 1
    assert len(running[-1]) == max(0, len(whole.rstrip("\ufffd")) - held)


def test_a_character_cut_off_by_the_limit_shows_as_a_replacement():
  tokens = TOKENIZER.encode("a日")
  assert len(tokens) == 4
  assert run(tokens, 3).output().text == TOKENIZER.decode(tokens[:3]) == "a\ufffd"
  assert run(tokens[:3]).output().text == "a"
