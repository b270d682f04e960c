"""Where an output ends, and that its ids, log-probabilities and text end at the same token."""

from __future__ import annotations

import pickle

import hypothesis
import hypothesis.strategies as st
import pytest
from tiny_tokenizers import EOS, TOKENIZERS, continuation

from jspec import RequestOutput
from jspec.engine.request import Group, NewToken, Request
from jspec.sampling_params import SamplingParams
from jspec.text.tokenizer import Tokenizer

STOP = 60
PROMPT = (3, 4)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> Tokenizer:
  return TOKENIZERS[request.param]


def make(tokenizer, limit=100, **fields) -> Request:
  fields.setdefault("logprobs", 0)
  return Request("r", 0, PROMPT, SamplingParams(max_tokens=None, **fields), limit, tokenizer)


def text_of(tokenizer, tokens) -> str:
  """What these tokens add to the prompt's text."""
  return tokenizer.decode([*PROMPT, *tokens])[len(tokenizer.decode(PROMPT)):]


def run(tokenizer, tokens, limit=100, **fields) -> Request:
  """The request after a step that emitted these tokens, however many of them too many."""
  out = make(tokenizer, limit, **fields)
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
def test_a_stop_token_is_looked_for_before_the_limit(tokenizer, limit, expected):
  assert ended(run(tokenizer, ROW, limit, stop_token_ids=[STOP])) == expected


@pytest.mark.parametrize("at", range(6))
def test_the_models_own_end_is_seen_anywhere_in_an_accepted_run(tokenizer, at):
  tokens = [10, 11, 12, 13, 14, 15]
  tokens[at] = EOS
  r = run(tokenizer, tokens)
  assert ended(r) == ("stop", None, tokens[:at + 1])
  assert r.output().text == text_of(tokenizer, tokens[:at])
  assert ended(run(tokenizer, tokens, ignore_eos=True)) == (None, None, tokens)
  assert ended(run(tokenizer, tokens, ignore_eos=True, stop_token_ids=[EOS])) == (
      "stop", EOS, tokens[:at + 1])


def test_nothing_is_added_after_the_end(tokenizer):
  r = run(tokenizer, ROW, stop_token_ids=[STOP])
  before = r.output()
  r.push(NewToken(30))
  assert r.output() == before


def test_text_of_the_stop_token_is_left_out_unless_included(tokenizer):
  tokens = continuation(tokenizer, "abc.def")
  stop = continuation(tokenizer, ".")
  assert run(tokenizer, tokens, stop_token_ids=stop).output().text == "abc"
  r = run(tokenizer, tokens, stop_token_ids=stop, include_stop_str_in_output=True)
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
def test_a_stop_string_ends_ids_and_text_at_the_token_that_completes_it(
    tokenizer, text, stop, kept, include):
  tokens = continuation(tokenizer, text)
  num = next(i for i in range(1, len(tokens) + 1) if stop in text_of(tokenizer, tokens[:i]))
  r = run(tokenizer, tokens + [EOS], stop=stop, include_stop_str_in_output=include)
  assert ended(r) == ("stop", stop, tokens[:num])
  assert r.output().text == kept + (stop if include else "")
  assert stop in text_of(tokenizer, r.tokens) and stop not in text_of(tokenizer, r.tokens[:-1])


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
  tokens = continuation(tokenizer, "one and two")
  r = run(tokenizer, tokens, stop=["two", "d t", "and"])
  assert (r.stop_reason, r.output().text) == ("and", "one ")
  assert run(tokenizer, continuation(tokenizer, "xthey"), stop=["he", "the"]).output().text == "x"


def test_a_stop_string_completed_at_the_limit_is_a_stop(tokenizer):
  tokens = continuation(tokenizer, "abcdef")
  assert ended(run(tokenizer, tokens, 3, stop="c")) == ("stop", "c", tokens[:3])
  assert ended(run(tokenizer, tokens, 3, stop="d")) == ("length", None, tokens[:3])
  assert run(tokenizer, tokens, 3, stop="d").output().text == "abc"


def test_min_tokens_holds_stop_strings_back(tokenizer):
  """Only text of tokens beyond min_tokens can end the request; nothing is cut before that."""
  tokens = continuation(tokenizer, "axbxcx")
  assert ended(run(tokenizer, tokens, stop="x", min_tokens=0))[2] == tokens[:2]
  for least in (2, 3):
    r = run(tokenizer, tokens, stop="x", min_tokens=least)
    assert ended(r) == ("stop", "x", tokens[:4]) and r.output().text == "axb"
  assert ended(run(tokenizer, tokens, stop="x", min_tokens=6)) == (None, None, tokens)


def test_special_tokens_are_shown_on_request(tokenizer):
  tokens = [10, 1, 11]
  assert run(tokenizer, tokens).output().text == "hi"
  assert run(tokenizer, tokens, skip_special_tokens=False).output().text == "h<|user|>i"


def test_logprobs_hold_the_sampled_token_first_and_as_many_as_asked_for(tokenizer):
  r = make(tokenizer, logprobs=2)
  r.push(NewToken(10, False, -3.0, 9, ((11, -0.5), (12, -1.0), (13, -1.5))))
  r.push(NewToken(12, True, -1.0, 2, ((11, -0.5), (12, -1.0), (13, -1.5))))
  first, second = r.output().logprobs
  assert [(t, x.logprob, x.rank, x.decoded_token) for t, x in first.items()] == [
      (10, -3.0, 9, "h"), (11, -0.5, 1, "i"), (12, -1.0, 2, "j")]
  assert list(second) == [12, 11] and second[12].rank == 2
  assert r.output().drafted == (False, True)
  assert make(tokenizer, logprobs=None).output().logprobs is None


TEXTS = st.text(alphabet="abthe né日🎉.", max_size=30)
STOPS = st.lists(st.text(alphabet="abthe é日", min_size=1, max_size=5), max_size=3)


@hypothesis.settings(deadline=None, max_examples=150)
@pytest.mark.parametrize("kind", TOKENIZERS)
@hypothesis.given(TEXTS, STOPS, st.integers(1, 60), st.integers(0, 10), st.booleans())
def test_snapshots_grow_and_never_show_part_of_a_stop_string(
    kind, text, stop, limit, least, include):
  """Every snapshot begins the final text, with whole characters only."""
  tokenizer = TOKENIZERS[kind]
  r = make(tokenizer, limit, stop=stop, min_tokens=least, include_stop_str_in_output=include)
  shown, deltas = [""], []
  for token in continuation(tokenizer, text):
    if not r.finished:
      r.push(NewToken(token))
      shown.append(r.output().text)
      deltas.append(r.output(delta=True).text)
      assert "".join(deltas) == shown[-1]
  whole = text_of(tokenizer, r.tokens)
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


def test_a_delta_is_as_large_as_what_is_new_however_long_the_answer(tokenizer):
  """And all of them together are the whole output."""
  requests = [make(tokenizer, 600, logprobs=1, prompt_logprobs=0, stop=["zz"]) for _ in range(2)]
  group, sizes, deltas = Group("r", "a prompt", requests), [], []
  requests[0].read(1, [NewToken(t) for t in requests[0].prompt_ids[1:]])
  for i in range(600):
    for request in requests[:2 if i < 300 else 1]:  # one ends before its neighbour
      request.push(NewToken(5, i % 2 > 0, -1.0, 1, ((5, -1.0),)))
    if i == 299:
      requests[1].fail("enough")
    deltas.append(group.output(delta=True))
    sizes.append(len(pickle.dumps(deltas[-1])))
  assert group.output().finished and max(sizes[1:]) <= sizes[1] + 32  # numbers get more digits
  assert RequestOutput.joined(deltas) == group.output()
  ends = [d.outputs[1].finish_reason for d in deltas if d.outputs[1] in d.news]
  assert ends == [None] * 299 + ["error"]


def test_a_character_cut_off_by_the_limit_shows_as_a_replacement(tokenizer):
  """Of byte tokens one for each, as in SentencePiece and transformers."""
  tokens = continuation(tokenizer, "a日")
  assert len(tokens) == 4
  cut = "a\ufffd" if tokenizer.is_byte_level else "a\ufffd\ufffd"
  assert run(tokenizer, tokens, 3).output().text == text_of(tokenizer, tokens[:3]) == cut
  assert tokenizer.backend.decode(tokens[:3]) == cut
  assert run(tokenizer, tokens[:3]).output().text == "a"


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text, stop, kept, count", [
  ("low\n|", "\n", "low", 4),
  ("low\nerer", "\n", "low", 4),
  ("low\n\n\ner", "\n\n", "low", 5),
  ("lo é.w", "é", "lo ", 5),
])
def test_a_stop_string_of_byte_tokens_ends_where_its_last_byte_is(kind, text, stop, kept, count):
  tokenizer = TOKENIZERS[kind]
  tokens = [token for part in text.split("|") for token in [*continuation(tokenizer, part), EOS]]
  assert ended(run(tokenizer, tokens, stop=stop)) == ("stop", stop, tokens[:count])
  assert run(tokenizer, tokens, stop=stop).text == kept


def test_a_character_is_shown_with_the_token_that_completes_it(tokenizer):
  r, shown = make(tokenizer), []
  for token in continuation(tokenizer, "a\né\n日."):
    r.push(NewToken(token))
    shown.append(r.output().text)
  assert shown == ["a", "a\n", "a\n", "a\né", "a\né\n", "a\né\n", "a\né\n", "a\né\n日",
                   "a\né\n日."]


def test_a_stop_string_is_looked_for_in_what_the_end_brings(tokenizer):
  """Half a character, which is shown as U+FFFD as soon as nothing can complete it."""
  half = continuation(tokenizer, "aé")[:2]
  for last, limit in ((EOS, 100), (EOS, 3)):
    r = run(tokenizer, [*half, last], limit, stop="\ufffd")
    assert ended(r) == ("stop", "\ufffd", [*half, last]) and r.output().text == "a"
  assert ended(run(tokenizer, half, 2, stop="\ufffd")) == ("stop", "\ufffd", half)
  assert ended(run(tokenizer, [*half, EOS])) == ("stop", None, [*half, EOS])


def test_the_text_goes_on_where_the_prompt_ends(tokenizer):
  """Spaces at the border are kept: prompt and text are the text of all tokens."""
  whole = "land the on er"
  ids = tokenizer.encode(whole)
  for cut in range(1, len(ids)):
    r = Request("r", 0, tuple(ids[:cut]), SamplingParams(max_tokens=None), 100, tokenizer)
    for token in ids[cut:]:
      r.push(NewToken(token))
    assert tokenizer.decode(ids[:cut]) + r.text == whole
  first = Request("r", 0, (1,), SamplingParams(max_tokens=None), 100, tokenizer)
  for token in ids:  # after a special token alone the text begins
    first.push(NewToken(token))
  assert first.text == whole


def test_texts_of_the_tokens_join_to_the_text(tokenizer):
  tokens = continuation(tokenizer, "er the land é日 on")
  r = run(tokenizer, tokens, logprobs=1)
  assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == r.text == "er the land é日 on"
  ascii_only = continuation(tokenizer, "er the land on")
  rows = run(tokenizer, ascii_only).output().logprobs
  assert "".join(next(iter(row.values())).decoded_token for row in rows) == "er the land on"


def test_any_id_of_the_model_can_be_shown(tokenizer):
  """An embedding may have rows beyond the vocabulary, and gaps within it."""
  tokens = [3, 63, 64, 70_000, 2**31 - 1, 4]
  shown = text_of(tokenizer, [3, 63, 4])
  assert run(tokenizer, tokens).text == shown
  assert run(tokenizer, tokens, 4, logprobs=3).output().logprobs[3][70_000].decoded_token == ""
  assert tokenizer.token_bytes(70_000) == b"" and tokenizer.decode(tokens) == "a" + shown[1:]
