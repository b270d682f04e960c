"""A request that fails, wherever that may be, ends alone: the others get what they should."""

from __future__ import annotations

import asyncio
import dataclasses
import io

import jax
import pytest
from tiny_llm import byte_tokenizer, greedy, is_idle, tiny_llm, tiny_model

from jspec import AsyncLLM, EngineDead, RequestFailed, SamplingParams
from jspec.bench.runner import llm_engine
from jspec.cli import terminal
from jspec.engine import loop as engine_module
from jspec.engine import prompts as prompts_module
from jspec.engine import request as request_module
from jspec.engine.limits import check_tokenizer
from jspec.engine.programs import Device
from jspec.engine.request import Group, Request
from jspec.engine.scheduler import Scheduler
from jspec.engine.slot_sampling import row_inputs
from jspec.llm import LLM

SEED = 77  # of the request that fails: by it its calls are known
FAILING = SamplingParams(temperature=0.0, seed=SEED, logprobs=7, max_tokens=24,
                         skip_special_tokens=False, ignore_eos=True)
GOOD = [greedy(max_tokens=30, ignore_eos=True), SamplingParams(seed=3, max_tokens=20, logprobs=2),
        SamplingParams(n=2, seed=5, max_tokens=25, ignore_eos=True)]
PROMPTS = ["the cat and", "abc abc", "he ran and ran"]


def of_request(request):
  return request.params.seed == SEED


def of_tenant(tenant):
  return of_request(tenant.request)


SITES = {  # what is made to raise, at which of its calls for the failing request, and whose one is
  "admission": (Scheduler, "_place", 0, lambda _, order, request: of_request(request)),
  "begin": (Scheduler, "begin", 0, lambda _, tenant: of_tenant(tenant)),
  "key": (Device, "key", 0, lambda _, seed, number: seed == SEED),
  "row": (prompts_module, "slot_request", 0, lambda tenant, *_: of_tenant(tenant)),
  "chunk": (prompts_module, "prompt_chunk", 0, lambda tenant, *_: of_tenant(tenant)),
  "publish": (Scheduler, "publish", 0, lambda _, tenant: of_tenant(tenant)),
  "pages": (Scheduler, "grow", 1, lambda _, tenant, num: of_tenant(tenant)),
  "first token": (engine_module, "hand_over", 0, lambda request, *_: of_request(request)),
  "tokens": (engine_module, "hand_over", 1, lambda request, *_: of_request(request)),
  "push": (Request, "push", 5, lambda request, new: of_request(request)),
  "finish": (Scheduler, "finish", 0, lambda _, tenant: of_tenant(tenant)),
  "news": (Group, "news", 1, lambda group: of_request(group.requests[0])),
  "output": (Group, "output", 0, lambda group: of_request(group.requests[0])),
  "snapshot": (Request, "output", 0, of_request),
}


def raise_at(monkeypatch, owner, name, after, concerns):
  original, calls = getattr(owner, name), []

  def call(*args, **named):
    if concerns(*args):
      calls.append(1)
      if len(calls) > after:
        raise KeyError("boom")
    return original(*args, **named)

  monkeypatch.setattr(owner, name, call)


def plain(outputs):
  return [(o.text, o.token_ids, o.finish_reason) for out in outputs for o in out.outputs]


def check_offline(llm, expected):
  bad, *good = llm.generate(["on the one", *PROMPTS], [FAILING, *GOOD])
  assert plain(good) == expected and bad.finished and bad.finish_reason == "error"
  assert "KeyError: 'boom'" in bad.outputs[0].stop_reason
  assert is_idle(llm)


async def last(engine, prompt, params):
  return [output async for output in engine.generate(prompt, params)][-1]


def check_serving(llm, expected):
  async def main():
    engine = AsyncLLM(llm)
    try:
      tasks = [asyncio.create_task(last(engine, *pair)) for pair in zip(
          ["on the one", *PROMPTS], [FAILING, *GOOD], strict=True)]
      bad, *good = await asyncio.gather(*tasks, return_exceptions=True)
      assert isinstance(bad, RequestFailed) and "KeyError: 'boom'" in str(bad)
      assert plain(good) == expected
      assert engine.is_healthy and engine.num_requests == 0
    finally:
      await engine.shutdown()

  asyncio.run(main())
  assert is_idle(llm)


@pytest.fixture(scope="module")
def llm() -> LLM:
  return tiny_llm("ngram")


@pytest.fixture(scope="module")
def expected(llm):
  return plain(llm.generate(PROMPTS, GOOD))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("check", [check_offline, check_serving], ids=["offline", "serving"])
def test_whatever_raises_for_one_request_ends_that_one(site, check, llm, expected, monkeypatch):
  with monkeypatch.context() as patch:
    raise_at(patch, *SITES[site])
    check(llm, expected)
  assert plain(llm.generate(PROMPTS, GOOD)) == expected  # nothing is left behind


@pytest.mark.parametrize("check", [check_offline, check_serving], ids=["offline", "serving"])
@pytest.mark.parametrize("method", ["push", "flush"])
def test_a_detokenizer_that_raises_ends_its_request(method, check, llm, expected, monkeypatch):
  def broken(*args):
    raise KeyError("boom")

  class Broken(request_module.Detokenizer):
    pass

  setattr(Broken, method, broken)
  original = request_module.Detokenizer
  monkeypatch.setattr(request_module, "Detokenizer", lambda tokenizer, skip, *rest: (
      original if skip else Broken)(tokenizer, skip, *rest))
  check(llm, expected)


def test_failures_are_counted_and_what_they_wrote_is_found_by_nobody(llm, monkeypatch):
  prompt = [7, 8, 9, 10, 11, 12, 13, 14] * 3  # three pages
  errors = lambda: dict(llm.engine.stats().finished).get("error", 0)
  before = errors()
  with monkeypatch.context() as patch:
    raise_at(patch, Request, "push", 0, lambda request, new: of_request(request))
    [bad] = llm.generate([prompt], FAILING)
  assert bad.finish_reason == "error" and errors() == before + 1
  [again, cached] = [llm.generate([prompt], greedy(max_tokens=3))[0] for _ in range(2)]
  assert (again.num_cached_tokens, cached.num_cached_tokens) == (0, 24)
  assert again.token_ids == cached.token_ids


class Feed:
  """A drafter's feed, of which nothing comes."""

  context = 4

  def __init__(self, params):
    self.given, self.texts = params, []

  def params(self, ends):
    return self.given

  def finished(self, prompt_ids, tokens):
    self.texts.append(tokens)


@pytest.mark.parametrize("check", [check_offline, check_serving], ids=["offline", "serving"])
def test_the_text_that_a_drafter_is_fed(check, llm, expected, monkeypatch):
  engine = llm.engine
  feed = Feed(engine.inputs.draft)
  monkeypatch.setattr(engine.inputs, "feed", feed)
  raise_at(monkeypatch, Request, "last_tokens", 2, lambda request, count: of_request(request))
  check(llm, expected)
  assert len(feed.texts) == len(expected)


def test_an_answer_that_is_complete_counts_whatever_happens_afterwards(llm, monkeypatch):
  [expected] = llm.generate("on the one", FAILING)
  before = dict(llm.engine.stats().finished)
  feed = Feed(llm.engine.inputs.draft)
  raise_at(monkeypatch, feed, "finished", 0, lambda *_: True)
  monkeypatch.setattr(llm.engine.inputs, "feed", feed)
  assert plain(llm.generate("on the one", FAILING)) == plain([expected])
  assert dict(llm.engine.stats().finished) == before | {"length": before["length"] + 1}


def test_an_abort_that_raises_harms_nobody(llm, expected, monkeypatch):
  raise_at(monkeypatch, Scheduler, "abort", 0, lambda _, request: of_request(request))

  async def main():
    engine = AsyncLLM(llm)
    try:
      stream = engine.generate("on the one", FAILING)
      await anext(stream)
      others = [asyncio.create_task(last(engine, *pair)) for pair in zip(PROMPTS, GOOD,
                                                                        strict=True)]
      await stream.aclose()
      assert plain(await asyncio.gather(*others)) == expected
    finally:
      await engine.shutdown()

  asyncio.run(main())
  assert is_idle(llm)


def test_a_device_that_fails_ends_the_engine(monkeypatch):
  """Its state may be gone: what came after would be wrong."""
  llm = tiny_llm("ngram")

  def admit(slot, request):
    raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

  monkeypatch.setattr(llm.engine.device, "admit", admit)

  async def main():
    engine = AsyncLLM(llm)
    try:
      with pytest.raises(EngineDead, match="the device is gone"):
        await last(engine, "the", FAILING)
    finally:
      await engine.shutdown()

  asyncio.run(main())
  for tenant in list(llm.engine.scheduler.running.values()):
    llm.engine.abort(tenant.request)


def test_part_of_an_answer_is_no_answer_to_a_terminal_or_a_benchmark(llm, monkeypatch):
  """They end with the reason, whatever text there is; training.generate asks the same function."""
  raise_at(monkeypatch, Request, "push", 5, lambda request, new: of_request(request))
  out = io.StringIO()
  with pytest.raises(ValueError, match="the request failed: KeyError: 'boom'"):
    terminal.write_stream(llm.stream("on the one", FAILING), llm.tokenizer, out)
  assert out.getvalue()
  with pytest.raises(ValueError, match="the request failed: KeyError: 'boom'"):
    llm_engine("tiny", llm, FAILING).generate([[5, 6, 7]], 24)


# -------------------------------------------------------------- what is refused before the thread


@pytest.mark.parametrize("priority", ["high", 1.5, True, None])
def test_a_priority_is_a_whole_number(priority, llm):
  with pytest.raises(ValueError, match="priority must be an integer"):
    llm.prepare("a", greedy(), priority=priority)


def test_a_bad_word_with_a_token_that_the_model_has_not_is_never_generated_anyway():
  """A vocabulary of 64, and a tokenizer with ids beyond: the other words still are forbidden."""
  tokenizer = byte_tokenizer(extra="0123456789!?")
  beyond, inside = tokenizer.encode("?"), tokenizer.encode("b")
  assert beyond[0] >= 64 > inside[0]
  params = SamplingParams(bad_words=["?", "a?", "b"], ignore_eos=True)
  row = row_inputs(params, tokenizer, 64)
  assert row.biased.tolist() == inside and (row.bad_words == -1).all()


def test_a_model_without_a_row_for_what_it_needs_is_refused():
  tokenizer = byte_tokenizer()
  check_tokenizer(tokenizer, 64)
  with pytest.raises(ValueError, match="an ordinary token 63, but the model has rows for 62"):
    check_tokenizer(tokenizer, 62)
  for fields, what in (({"eos_ids": (0, 64)}, "end token 64"), ({"bos_id": 70}, "begin token 70")):
    odd = dataclasses.replace(byte_tokenizer(), **fields)
    with pytest.raises(ValueError, match=f"the tokenizer has the {what}, but the model has rows"):
      check_tokenizer(odd, 64)
    with pytest.raises(ValueError, match="rows for 64 tokens only"):
      LLM(tiny_model()._replace(tokenizer=odd), max_model_len=32)
  added = byte_tokenizer()  # as Gemma 3's <image_soft_token>
  added.backend.add_special_tokens(["<image>", "<sound>"])
  assert added.vocab_size == 66
  check_tokenizer(added, 64)
