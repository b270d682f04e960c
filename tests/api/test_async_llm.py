"""AsyncLLM: many tasks, one engine, nothing lost or left behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tiny_llm import greedy, is_idle, tiny_llm

from jspec import AsyncLLM, Draining, EngineDead, QueueFull, RequestOutput, SamplingParams


@contextlib.asynccontextmanager
async def serving(**options):
  engine = AsyncLLM(tiny_llm("ngram"), **options)
  try:
    yield engine
  finally:
    await engine.shutdown()


async def text(engine, prompt, params, **options):
  outputs = [output async for output in engine.generate(prompt, params, **options)]
  return outputs[-1].outputs[0]


async def idle(engine):
  async with asyncio.timeout(30):
    while not is_idle(engine.llm) or engine.num_requests:
      await asyncio.sleep(0.005)


def test_tasks_get_what_generate_gives():
  prompts = ["the cat", "abc abc", "in", "er er er er", "he ran and", "on one", "hat"]
  params = [SamplingParams(temperature=t, seed=i, max_tokens=5 + 3 * i, ignore_eos=True)
            for i, t in enumerate([0, 1, 0, 1.5, 1, 0, 0.5])]
  expected = [out.outputs[0] for out in tiny_llm("ngram").generate(prompts, params)]

  async def main():
    async with serving() as engine:
      found = await asyncio.gather(*[text(engine, *pair)
                                     for pair in zip(prompts, params, strict=True)])
      await idle(engine)
      return found

  for out, other in zip(asyncio.run(main()), expected, strict=True):
    assert (out.text, out.token_ids, out.finish_reason) == (
        other.text, other.token_ids, other.finish_reason)


def test_snapshots_grow_and_a_slow_reader_loses_nothing():
  async def main():
    async with serving() as engine:
      seen = []
      async for output in engine.generate("the cat", greedy(max_tokens=40, ignore_eos=True)):
        seen.append(output)
        await asyncio.sleep(0.02)
      return seen

  seen = asyncio.run(main())
  tokens = [out.token_ids for out in seen]
  assert all(b[:len(a)] == a and len(b) > len(a) for a, b in zip(tokens, tokens[1:], strict=False))
  (expected,) = tiny_llm("ngram").generate("the cat", greedy(max_tokens=40, ignore_eos=True))
  assert tokens[-1] == expected.token_ids and seen[-1].finished and not seen[0].finished
  assert 0 <= seen[-1].timing.admitted <= seen[-1].timing.first_token


def test_deltas_are_what_is_new_and_a_slow_reader_finds_several_in_one():
  params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)

  async def main():
    async with serving() as engine:
      seen = []
      async for delta in engine.deltas("the cat", params):
        seen.append(delta)
        await asyncio.sleep(0.02)
      return seen

  seen = asyncio.run(main())
  (expected,) = tiny_llm("ngram").generate("the cat", params)
  whole = RequestOutput.joined(seen)
  for out, want in zip(whole.outputs, expected.outputs, strict=True):
    assert (out.text, out.token_ids, out.logprobs, out.finish_reason, out.drafted) == (
        want.text, want.token_ids, want.logprobs, want.finish_reason, want.drafted)
  assert len(seen) > 2 and seen[-1].finished and all(delta.news for delta in seen)


def test_leaving_the_iterator_and_cancelling_the_task_free_slot_and_pages():
  async def main():
    async with serving() as engine:
      stream = engine.generate("abc", greedy(max_tokens=80, ignore_eos=True))
      await anext(stream)
      assert engine.num_requests == 1
      await stream.aclose()
      await idle(engine)
      tasks = [asyncio.create_task(text(engine, "abc", greedy(max_tokens=80, ignore_eos=True)))
               for _ in range(9)]
      await asyncio.sleep(0.02)
      for task in tasks:
        task.cancel()
      assert all(isinstance(r, asyncio.CancelledError)
                 for r in await asyncio.gather(*tasks, return_exceptions=True))
      await idle(engine)

  asyncio.run(main())


def test_a_full_queue_refuses_and_what_was_taken_is_answered():
  async def main():
    async with serving(max_waiting=2) as engine:
      tasks = [asyncio.create_task(text(engine, "the", greedy(max_tokens=30, ignore_eos=True)))
               for _ in range(9)]
      results = await asyncio.gather(*tasks, return_exceptions=True)
      refused = [r for r in results if isinstance(r, QueueFull)]
      assert len(refused) == 3 and "2 requests are waiting" in str(refused[0])  # four have slots
      assert len({out.text for out in results if not isinstance(out, QueueFull)}) == 1

  asyncio.run(main())


def test_each_output_counts_as_waiting():
  async def main():
    async with serving(max_waiting=2) as engine:  # and four slots
      with pytest.raises(ValueError, match="n=7 exceeds the 6 outputs"):
        await text(engine, "a", greedy(n=7))
      params = SamplingParams(n=5, max_tokens=40, ignore_eos=True)
      first = asyncio.create_task(text(engine, "a", params))
      await asyncio.sleep(0.02)
      with pytest.raises(QueueFull):
        await text(engine, "a", greedy(n=2))
      await first
      await idle(engine)

  asyncio.run(main())


def test_a_request_that_no_pool_can_hold_harms_nobody(monkeypatch):
  """Refused by the engine's thread, of one engine or of several, after another was taken."""
  async def main():
    async with serving() as engine:
      add = engine.llm.engine.add
      seen = []

      def refuse_the_third(request):
        seen.append(request)
        if len(seen) == 3:
          raise ValueError("needs 99 pages")
        add(request)

      monkeypatch.setattr(engine.llm.engine, "add", refuse_the_third)
      other = asyncio.create_task(text(engine, "in", greedy(max_tokens=30, ignore_eos=True)))
      while not seen:
        await asyncio.sleep(0.005)
      with pytest.raises(ValueError, match="needs 99 pages"):
        await text(engine, "a", SamplingParams(n=2, max_tokens=90, ignore_eos=True))
      assert len((await other).token_ids) == 30
      await idle(engine)

  asyncio.run(main())


def test_bad_requests_are_refused_with_their_reason():
  async def main():
    async with serving() as engine:
      with pytest.raises(ValueError, match="the prompt is empty"):
        await text(engine, [], None)
      with pytest.raises(ValueError, match="num_speculative_tokens=99 exceeds"):
        await text(engine, "a", greedy(num_speculative_tokens=99))
      first = asyncio.create_task(text(engine, "a", greedy(max_tokens=60, ignore_eos=True),
                                       request_id="x"))
      while not engine.num_requests:
        await asyncio.sleep(0)
      with pytest.raises(ValueError, match="request_id 'x' is already running"):
        await text(engine, "a", greedy(), request_id="x")
      await first
      await idle(engine)

  asyncio.run(main())
  for options in (dict(max_waiting=0), dict(steps_per_turn=1.5)):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
      AsyncLLM(tiny_llm("ngram"), **options)


def test_drain_lets_what_runs_end_and_refuses_the_rest():
  async def main():
    async with serving() as engine:
      running = asyncio.create_task(text(engine, "in", greedy(max_tokens=50, ignore_eos=True)))
      await asyncio.sleep(0.02)
      assert engine.is_healthy and not await engine.drain(timeout=0)
      with pytest.raises(Draining):
        await text(engine, "in", greedy())
      assert await engine.drain(timeout=60) and not engine.is_healthy
      assert len((await running).token_ids) == 50

  asyncio.run(main())


def test_shutdown_ends_those_who_still_wait():
  async def main():
    async with serving() as engine:
      task = asyncio.create_task(text(engine, "in", greedy(max_tokens=90, ignore_eos=True)))
      await asyncio.sleep(0.02)
      await engine.shutdown()
      with pytest.raises(Draining):
        await task
      assert is_idle(engine.llm)

  asyncio.run(main())


def test_an_engine_that_fails_tells_everybody(monkeypatch):
  async def main():
    async with serving() as engine:
      monkeypatch.setattr(engine.llm.engine, "step", lambda *a: 1 / 0)
      with pytest.raises(EngineDead, match="ZeroDivisionError"):
        await text(engine, "in", greedy())
      assert not engine.is_healthy
      with pytest.raises(EngineDead):
        await text(engine, "in", greedy())

  asyncio.run(main())
  for request in [t.request for t in tiny_llm("ngram").engine.scheduler.running.values()]:
    tiny_llm("ngram").engine.abort(request)
