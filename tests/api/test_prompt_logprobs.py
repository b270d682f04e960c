"""Log-probabilities of prompts, against numpy's pass over the text; prompts that are only read."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from prompt_oracle import assert_prompt_logprobs, log_probabilities
from tiny_llm import OPTIONS, greedy, is_idle, tiny_llm, tiny_model

from jspec.async_llm import AsyncLLM
from jspec.config import EngineConfig
from jspec.sampling_params import SamplingParams
from jspec.text.prompt import read_prompt

IDS = [int(t) for t in np.random.default_rng(5).integers(5, 64, 75)]  # five chunks of 16
MAX_LEN = OPTIONS["max_model_len"]
METHODS = ("none", "ngram")


def check(outputs, num_top=2):
  for out in outputs:
    assert_prompt_logprobs(out, tiny_model(), num_top)


@pytest.fixture
def helpings(monkeypatch):
  """Chunks of so many tokens, of any number up to 16, in the program for 16."""
  return lambda size: monkeypatch.setattr(
      EngineConfig, "prefill_chunk", lambda self, remaining: (16, min(remaining, size)))


@pytest.mark.parametrize("method", METHODS)
def test_chunk_borders_anywhere(method, helpings):
  """Each pair of neighbours is divided by some border; and prompts of every length up to 33."""
  llm = tiny_llm(method)
  borders = set()
  for size in (1, 2, 3, 5, 7, 11, 13, 16):
    helpings(size)
    borders |= set(range(size, 40, size))
    check(llm.generate([IDS[:40]], greedy(max_tokens=2, prompt_logprobs=2)))
  assert borders == set(range(1, 40))
  check(llm.generate([IDS[:n] for n in range(1, 34)], greedy(max_tokens=1, prompt_logprobs=2)))
  assert is_idle(llm)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_the_programs_own_chunks_and_as_many_of_the_likeliest_as_asked(num_top):
  """75 tokens make a chunk of more rows than are scored at once."""
  llm = tiny_llm("none")
  [out] = llm.generate([IDS], greedy(max_tokens=3, prompt_logprobs=num_top))
  check([out], num_top)
  assert out.logprobs is None and len(out.token_ids) == 3
  traces = {name: n for name, n in llm.engine.traces.items() if name.startswith("scores")}
  assert traces and set(traces.values()) == {1}


@pytest.mark.parametrize("method", METHODS)
def test_what_the_cache_has_of_a_prompt_is_computed_again_and_shared_later(method):
  llm = tiny_llm(method)
  prompt = IDS[::-1][:41]
  wanted = greedy(max_tokens=4, prompt_logprobs=2)
  plain = greedy(max_tokens=4)
  first, asked, later = (llm.generate([prompt], params)[0] for params in (plain, wanted, plain))
  check([asked])
  assert (asked.num_cached_tokens, later.num_cached_tokens) == (0, 40)
  assert first.token_ids == asked.token_ids == later.token_ids
  assert first.prompt_logprobs is None and later.prompt_logprobs is None
  fresh = [*prompt[:8], *IDS[:20]]  # its pages are written by who asks, and found by who doesn't
  before = llm.engine.stats()
  asked, later = (llm.generate([fresh], params)[0] for params in (wanted, plain))
  check([asked])
  assert (asked.num_cached_tokens, later.num_cached_tokens) == (0, 24)
  after = llm.engine.stats()
  assert after.prefix_queries - before.prefix_queries == len(fresh)  # what was not looked up


@pytest.mark.parametrize("method", METHODS)
def test_beside_others_and_for_several_outputs(method):
  """Who asks and who doesn't share the slots, more requests than there are, and get their own."""
  llm = tiny_llm(method)
  prompts = [IDS[i:i + 5 + 9 * i] for i in range(7)]
  params = [SamplingParams(temperature=1.0, seed=i, max_tokens=9, n=1 + i % 2, ignore_eos=True,
                           logprobs=1, prompt_logprobs=2 if i % 3 else None) for i in range(7)]
  quiet = llm.generate(prompts, [dataclasses.replace(p, prompt_logprobs=None) for p in params])
  outputs = llm.generate(prompts, params)
  check(out for out, p in zip(outputs, params, strict=True) if p.prompt_logprobs is not None)
  assert [out.prompt_logprobs is None for out in outputs] == [not i % 3 for i in range(7)]
  tokens = lambda outputs: [[o.token_ids for o in out.outputs] for out in outputs]
  assert tokens(outputs) == tokens(quiet) and len(outputs[1].outputs) == 2


@pytest.mark.parametrize("method", METHODS)
def test_after_a_preemption_at_any_turn(method, monkeypatch):
  """While its prompt is read, with scores on their way, and while it is answered."""
  llm = tiny_llm(method)
  engine = llm.engine
  monkeypatch.setattr(engine.prompts, "config", dataclasses.replace(
      engine.config, max_num_batched_tokens=16, prefill_chunks=(16,)))
  params = greedy(max_tokens=12, ignore_eos=True, prompt_logprobs=2)
  [want] = llm.generate([IDS], params)
  for turn in range(9):
    group = llm.prepare(IDS, params)
    engine.add(group.requests[0])
    for i in range(60):
      engine.start(1, False)
      if i == turn:
        [tenant] = engine.scheduler.running.values()
        assert tenant.is_active == (turn > 3)
        engine._preempt(tenant)
      engine.collect()
      if group.requests[0].finished:
        break
    out = group.output()
    check([out])
    assert out.token_ids == want.token_ids and out.num_cached_tokens == 0
    assert is_idle(llm)


def test_a_stream_shows_them_once_they_are_all_there(monkeypatch):
  llm = tiny_llm("ngram")
  monkeypatch.setattr(llm.engine.prompts, "config", dataclasses.replace(
      llm.engine.config, max_num_batched_tokens=16, prefill_chunks=(16,)))
  snapshots = list(llm.stream([IDS], greedy(max_tokens=5, prompt_logprobs=2)))
  assert len(snapshots) > 1
  check(snapshots)


def test_of_a_prompt_with_broken_logits_there_are_none(monkeypatch):
  llm = tiny_llm("none")
  target = llm.engine.inputs.target
  good, bad = IDS[:20], IDS[:20]
  bad[13] = next(t for t in range(5, 64) if t not in good)
  before = llm.engine.stats().corrupted_requests
  with monkeypatch.context() as patch:
    embed = target["embed"].at[bad[13]].set(jnp.nan)
    patch.setattr(llm.engine.inputs, "target", {**target, "embed": embed})
    failed, fine = llm.generate([bad, good], greedy(max_tokens=0, prompt_logprobs=2))
  assert failed.finish_reason == "error" and failed.prompt_logprobs is None
  assert "NaN or infinite logits for tokens of the prompt" in failed.outputs[0].stop_reason
  check([fine])
  assert is_idle(llm) and llm.engine.stats().corrupted_requests == before + 1


# ------------------------------------------------------------------ nothing but the prompt


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_without_a_token_to_generate_the_prompt_is_read_and_that_is_all(method):
  """Alone, beside others, of the longest prompt that there can be, and of one that is known."""
  llm = tiny_llm(method)
  longest = (IDS + IDS)[:MAX_LEN]
  params = [greedy(max_tokens=0, prompt_logprobs=2), greedy(max_tokens=0),
            greedy(max_tokens=0, logprobs=1, n=2, prompt_logprobs=2), greedy(max_tokens=6)]
  before = dict(llm.engine.stats().finished).get("length", 0)
  outputs = llm.generate([longest, IDS, IDS, IDS], params)
  check([outputs[0], outputs[2]])
  for out in outputs[:3]:
    for one in out.outputs:
      assert (one.text, one.token_ids, one.finish_reason) == ("", (), "length")
  assert [len(out.outputs) for out in outputs] == [1, 1, 2, 1]
  assert outputs[2].logprobs == () and outputs[1].prompt_logprobs is None
  assert outputs[3].token_ids == llm.generate([IDS], greedy(max_tokens=6))[0].token_ids
  assert dict(llm.engine.stats().finished)["length"] == before + 6 and is_idle(llm)
  [again] = llm.generate([IDS[:64]], greedy(max_tokens=0))  # whole pages: nothing is left to read
  assert again.num_cached_tokens == 64 and again.finished
  with pytest.raises(ValueError, match=f"97 tokens, but max_model_len=96 allows at most {MAX_LEN}"):
    llm.generate([[*longest, 5]], greedy(max_tokens=0))
  with pytest.raises(ValueError, match="96 tokens, but max_model_len=96 allows at most 95"):
    llm.generate([longest], greedy(max_tokens=1))


def test_truncated_to_what_fits_no_room_is_kept_for_an_answer_that_nobody_wants():
  llm = tiny_llm("none")
  for max_tokens, size in ((0, MAX_LEN), (1, MAX_LEN - 1)):
    params = greedy(max_tokens=max_tokens, truncate_prompt_tokens=-1)
    [out] = llm.generate([IDS + IDS], params)
    assert out.prompt_token_ids == tuple((IDS + IDS)[-size:])


def test_the_likelihood_of_a_continuation_is_what_generating_it_gave():
  """As an evaluation harness scores answers: read back, and summed up."""
  llm = tiny_llm("ngram")
  [said] = llm.generate([IDS[:9]], greedy(max_tokens=20, ignore_eos=True, logprobs=0))
  whole = [*IDS[:9], *said.token_ids]
  [read] = llm.generate([whole], greedy(max_tokens=0, prompt_logprobs=0))
  total = sum(row[t].logprob for t, row in zip(whole[9:], read.prompt_logprobs[9:], strict=True))
  assert abs(total - said.outputs[0].cumulative_logprob) < 1e-3
  law = log_probabilities(tiny_model(), whole)
  assert abs(total - sum(law[i - 1, whole[i]] for i in range(9, len(whole)))) < 1e-3


# --------------------------------------------------------------------------- cache_salt


def test_pages_are_shared_by_requests_of_one_salt_only():
  llm = tiny_llm("ngram")
  prompt, params = IDS[40:70], greedy(max_tokens=1)
  cached = lambda salt: llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}],
                                     params)[0].num_cached_tokens
  assert [cached(salt) for salt in ("a", "b", None, "a", "b", None, "ab", "\ud800")] == [
      0, 0, 0, 24, 24, 24, 0, 0]


def test_a_salt_given_by_name_is_one_of_a_dict(monkeypatch):
  llm = tiny_llm("ngram")
  salt = lambda prompt, **given: llm.prepare(prompt, greedy(), **given).requests[0].cache_salt
  assert [salt("a"), salt("a", cache_salt="x"), salt({"prompt": "a", "cache_salt": "x"})] == [
      None, "x", "x"]
  assert read_prompt({"prompt": "a", "cache_salt": "x"}, "x").cache_salt == "x"
  for prompt, given, message in (
      ("a", "", "cache_salt must be text that is not empty, got ''"),
      ({"prompt": "a", "cache_salt": 5}, None, "cache_salt must be text that is not empty, got 5"),
      ({"prompt": "a", "cache_salt": "x"}, "y", "one cache_salt, and the call another")):
    with pytest.raises(ValueError, match=message):
      llm.prepare(prompt, greedy(), cache_salt=given)


def test_the_async_engine_passes_both_on():
  llm = tiny_llm("ngram")
  prompt = IDS[20:60]

  async def ask(engine, salt):
    stream = engine.generate(prompt, greedy(max_tokens=0), cache_salt=salt)
    async with contextlib.aclosing(stream):
      return [out async for out in stream][-1]

  async def main():
    engine = AsyncLLM(llm)
    try:
      return [await ask(engine, salt) for salt in ("one", "two", "one")]
    finally:
      await engine.shutdown()

  outputs = asyncio.run(main())
  assert [out.num_cached_tokens for out in outputs] == [0, 0, 40]
  assert all(out.finished and out.token_ids == () for out in outputs)
