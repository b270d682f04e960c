"""Continuous batching: whatever else goes on, a request gets what it would have got alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tiny_llm import OPTIONS, greedy, is_idle, tiny_llm, tiny_model

from jspec.llm import LLM
from jspec.sampling_params import SamplingParams

WORDS = ("the cat", "and the hat", "in", "on one", "he ran", "abc", "er er er")
# Room for two of the longest requests, or about four short ones; prompts in small helpings.
TIGHT = OPTIONS | dict(num_pages=22, max_num_batched_tokens=16)
SPECULATION = {
  "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
            "prompt_lookup_min": 1},
  "sampled": {"model": "tiny", "num_speculative_tokens": 3,
              "draft_sample_method": "probabilistic"},
}
METHODS = ("ngram", pytest.param("sampled", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=METHODS)
def llm(request) -> LLM:
  return LLM(tiny_model(), speculative_config=SPECULATION[request.param], progress=False, **TIGHT)


def plain() -> LLM:
  """One after the other, without drafts and without anything found in the cache."""
  return tiny_llm("none", enable_prefix_caching=False)


@dataclasses.dataclass
class Job:
  prompt: str
  params: SamplingParams
  arrives: int  # turn of the engine
  leaves: int | None  # turn at which it is aborted
  priority: int


def jobs(rng: np.random.Generator, count: int, drafts: int) -> list[Job]:
  """Every kind of parameter; some prompts begin alike."""
  out = []
  for i in range(count):
    start = " ".join(WORDS[:3]) + " " if rng.random() < 0.4 else ""
    prompt = start + " ".join(rng.choice(WORDS, rng.integers(1, 9)))
    fields: dict = dict(max_tokens=int(rng.integers(1, 40)), ignore_eos=bool(rng.random() < 0.8))
    if rng.random() < 0.5:
      fields |= dict(temperature=float(rng.choice([0.5, 1.0, 1.5])), seed=i)
    else:
      fields |= dict(temperature=0.0)
    extra = (dict(top_k=5), dict(top_p=0.7), dict(min_p=0.1), dict(repetition_penalty=1.3),
             dict(frequency_penalty=0.5, presence_penalty=0.2), dict(logprobs=3), dict(stop="an"),
             dict(bad_words=["the hat"]), dict(logit_bias={7: 2.0}),
             dict(min_tokens=int(rng.integers(0, fields["max_tokens"]))), dict(stop_token_ids=[9]),
             dict(num_speculative_tokens=int(rng.integers(0, drafts + 1))))
    for j in rng.choice(len(extra), rng.integers(0, 4), replace=False):
      fields |= extra[j]
    arrives = int(rng.integers(0, 120))
    leaves = arrives + int(rng.integers(0, 25)) if rng.random() < 0.2 else None
    out.append(Job(prompt, SamplingParams(**fields), arrives, leaves, int(rng.integers(0, 3))))
  return out


def run(llm: LLM, work: list[Job], rng: np.random.Generator) -> dict[int, object]:
  """The outputs of the jobs that were not aborted, by number."""
  groups: dict[int, object] = {}
  gone, turn = set(), 0
  while len(groups) < len(work) or llm.engine.busy:
    for i, job in enumerate(work):
      if job.arrives == turn:
        groups[i] = llm.prepare(job.prompt, job.params, priority=job.priority)
        llm.engine.add(groups[i].requests[0])
      if job.leaves == turn and not groups[i].requests[0].finished:
        llm.engine.abort(groups[i].requests[0])
        gone.add(i)
    llm.engine.step(int(rng.choice([1, 1, 2, 16])))
    turn += 1
    assert turn < 5000
  return {i: group.output().outputs[0] for i, group in groups.items() if i not in gone}


def same(a, b) -> None:
  assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
      b.token_ids, b.text, b.finish_reason, b.stop_reason)
  for left, right in zip(a.logprobs or (), b.logprobs or (), strict=True):
    assert list(left) == list(right)
    for token in left:
      assert left[token].rank == right[token].rank
      assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)


def test_measured_costs_change_no_text():
  """A storm with dynamic speculation, in eight slots: one trace, and drafts only if allowed."""
  llm = LLM(tiny_model(), speculative_config=SPECULATION["ngram"], progress=False,
            dynamic_speculation=True, **TIGHT | dict(max_num_seqs=8))
  llm.warm_up(progress=False)
  assert set(llm.engine.traces.values()) == {1} and is_idle(llm)
  rng = np.random.default_rng(5)
  work = jobs(rng, 48, drafts=4)
  for i, output in run(llm, work, rng).items():
    (alone,) = plain().generate(work[i].prompt, dataclasses.replace(
        work[i].params, num_speculative_tokens=0))
    same(output, alone.outputs[0])
  assert set(llm.engine.traces.values()) == {1} and is_idle(llm)
  loses = llm.engine.inputs.clock.goodput
  loses.drafts = lambda batch: False
  (out,) = llm.generate("abc abc abc abc", greedy(max_tokens=30, ignore_eos=True))
  assert out.speculation.num_drafts == 0
  del loses.drafts
  loses.drafts = lambda batch: True
  (out,) = llm.generate("abc abc abc abc", greedy(max_tokens=30, num_speculative_tokens=0))
  assert out.speculation.num_drafts == 0  # the request's own limit stands


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_64_requests_that_come_and_go_get_what_they_would_have_got_alone(llm, seed):
  """Against plain decoding, one by one; sampled drafts, whose draws differ, against themselves."""
  rng = np.random.default_rng(seed)
  sampled = llm.engine.drafter.sampled
  work = jobs(rng, 64, drafts=llm.engine.drafter.max_depth)
  before = llm.engine.stats()
  together = run(llm, work, rng)
  after = llm.engine.stats()
  assert is_idle(llm) and not np.asarray(llm.engine.device.state.active).any()
  assert after.num_preemptions > before.num_preemptions
  assert after.prefix_hits > before.prefix_hits
  assert 32 < len(together) < 64
  for i, output in together.items():
    params = work[i].params
    if not sampled:
      params = dataclasses.replace(params, num_speculative_tokens=0)
    (alone,) = (llm if sampled else plain()).generate(work[i].prompt, params)
    same(output, alone.outputs[0])
  assert after.speculation.num_accepted_tokens > before.speculation.num_accepted_tokens


def counts(stats) -> tuple:
  return dict(stats.finished), stats.generation_tokens, stats.prompt_tokens


def test_statistics_add_up(llm):
  before = llm.engine.stats()
  work = jobs(np.random.default_rng(9), 12, 0)
  outputs = run(llm, work, np.random.default_rng(9))
  after = llm.engine.stats()
  finished = {reason: n - dict(before.finished).get(reason, 0) for reason, n in after.finished}
  reasons = [out.finish_reason for out in outputs.values()]
  assert finished == {**{r: reasons.count(r) for r in finished}, "abort": 12 - len(outputs)}
  assert after.generation_tokens - before.generation_tokens >= sum(
      len(out.token_ids) for out in outputs.values())
  assert after.num_running == after.num_waiting == 0 and after.kv_cache_usage == 0


def test_a_long_prompt_does_not_keep_the_others_waiting(llm):
  """Between two of its helpings of 16 tokens everybody else takes a step."""
  short = llm.prepare("the cat", greedy(max_tokens=40, ignore_eos=True)).requests[0]
  long = llm.prepare("abc abc " * 13, greedy(max_tokens=2)).requests[0]
  llm.engine.add(short)
  llm.engine.step(1)
  llm.engine.add(long)
  seen = []
  while not long.tokens:
    llm.engine.step(16)
    seen.append(len(short.tokens))
  assert len(long.prompt_ids) >= 4 * 16 and len(set(seen)) >= 4
  while llm.engine.busy:
    llm.engine.step(16)
  assert len(short.tokens) == 40 and len(long.tokens) == 2


def test_the_most_urgent_is_answered_first(llm):
  requests = [llm.prepare("in", greedy(max_tokens=3, ignore_eos=True), priority=p).requests[0]
              for p in (5, 3, 4, 1, 2, 0)]
  for request in requests:
    llm.engine.add(request)
  llm.engine.step(1)  # four slots
  started = sorted(r.priority for r in requests if r.admitted_at)
  assert started == [0, 1, 2, 3]
  while llm.engine.busy:
    llm.engine.step(1)


# ------------------------------------------------------------ prefix caching

SYSTEM = "the cat and the hat in the one on the cat and the hat "


@pytest.mark.parametrize("more", range(9))
def test_a_hit_gives_what_a_miss_gives(llm, more):
  """Shared text of n pages and 0 to 8 tokens more, sampled and greedy."""
  prompt = llm.tokenizer.encode(SYSTEM)[:24] + [5, 9, 11, 4, 8, 6, 7, 12][:more]
  for params in (greedy(max_tokens=12, ignore_eos=True, logprobs=2),
                 SamplingParams(temperature=1.0, seed=more, max_tokens=12, ignore_eos=True)):
    (cold,) = plain().generate([prompt], dataclasses.replace(params, num_speculative_tokens=0))
    (first,) = llm.generate([prompt], params)
    (warm,) = llm.generate([prompt], params)
    assert warm.num_cached_tokens == len(prompt) // 8 * 8
    if not llm.engine.drafter.sampled or params.temperature == 0:
      same(warm.outputs[0], cold.outputs[0])
    same(warm.outputs[0], first.outputs[0])


def test_the_outputs_of_one_prompt_share_it(llm):
  """All come in one turn: the first one's pages are there before the second one begins."""
  prompt = llm.tokenizer.encode("he ran on one hand and the hat in the cat abc")[:24] + [6, 6]
  before = llm.engine.stats().prefix_hits
  (out,) = llm.generate([prompt], SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6,
                                                 ignore_eos=True))
  assert llm.engine.stats().prefix_hits - before == 2 * 24
  if not llm.engine.drafter.sampled:
    for i, own in enumerate(out.outputs):
      (alone,) = plain().generate([prompt], SamplingParams(
          temperature=1.0, seed=4 + i, max_tokens=6, ignore_eos=True, num_speculative_tokens=0))
      same(own, alone.outputs[0])


def test_as_many_answers_as_helpings_have_tokens_do_not_starve_a_prompt(llm, monkeypatch):
  monkeypatch.setattr(llm.engine.prompts, "config", dataclasses.replace(
      llm.engine.config, max_num_batched_tokens=1))
  running = [llm.prepare("in", greedy(max_tokens=60, ignore_eos=True)).requests[0]
             for _ in range(3)]
  late = llm.prepare("the cat and the hat", greedy(max_tokens=2)).requests[0]
  for request in (*running, late):
    llm.engine.add(request)
  while not late.finished:
    llm.engine.step(1)
  assert not any(r.finished for r in running)
  for request in running:
    llm.engine.abort(request)
  assert is_idle(llm)


def test_a_finished_answer_is_found_by_the_next_turn_of_the_talk(llm):
  (first,) = llm.generate("on the one", greedy(max_tokens=30, ignore_eos=True))
  talk = [*first.prompt_token_ids, *first.token_ids]
  (second,) = llm.generate([[*talk, 5, 6]], greedy(max_tokens=3))
  assert second.num_cached_tokens == (len(talk) - 1) // 8 * 8  # the last token's KV was not there


def test_without_prefix_caching_nothing_is_found():
  llm = plain()
  for _ in range(2):
    (out,) = llm.generate(SYSTEM, greedy(max_tokens=2, num_speculative_tokens=0))
    assert out.num_cached_tokens == 0
  assert llm.engine.stats().prefix_hits == 0
