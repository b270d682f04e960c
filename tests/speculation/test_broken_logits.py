"""NaN and infinite logits: never a token, never acceptance; who has them fails, and nobody else."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_llm import greedy, is_idle, tiny_llm

from jspec.config import Verification
from jspec.model.rows import pack
from jspec.sampling_params import SamplingParams
from jspec.speculation import sampling, tree
from jspec.speculation.judge import judge
from jspec.types import NO_PARENT, DraftTree

V, N = tiny.VOCAB, 4
ROW = np.linspace(-3.0, 3.0, V).astype(np.float32)


def test_what_is_broken_and_what_is_not():
  rows = np.tile(ROW, (7, 1))
  rows[0, 3], rows[1, 3], rows[2], rows[3] = np.nan, np.inf, -np.inf, np.nan
  rows[4, :-1] = -np.inf  # all but one are banned by the model itself
  rows[5] = 3e38
  assert sampling.broken(jnp.array(rows)).tolist() == [True] * 4 + [False] * 3


RULES = {  # rule, and whether drafts come with their distribution
  "point mass": (Verification(), False), "sampled": (Verification(), True),
  "block": (Verification("block"), True), "typical": (Verification("lossy_typical"), False),
  "synthetic": (Verification("lossy_synthetic", rates=(1.0, 1.0, 1.0)), False)}
BREAKS = {"NaN": (slice(None), np.nan), "one NaN": (5, np.nan), "+inf": (5, np.inf),
          "all -inf": (slice(None), -np.inf)}


@functools.partial(jax.jit, static_argnums=0)
def judged(rule, logits, draft, mask, temperature):
  """What judge says of chains of N nodes, all of them in rows."""
  b = len(mask)
  rows = pack(jnp.ones((b, N), bool), b * N)
  state = types.SimpleNamespace(
      length=jnp.arange(b), key=jax.random.split(jax.random.key(0), b), active=jnp.ones(b, bool),
      num_output=jnp.ones(b, jnp.int32), sampling=tiny.sampling_for(b, temperature=temperature))
  verification, has_q = RULES[rule]
  return judge(logits, draft, mask, rows, state, has_q, verification)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_accepted_behind_a_broken_node_under_any_rule(rule, temperature):
  """Chains that are accepted whole but for that; slots break at node 0, 1, 2, 3, or not at all."""
  at = [*range(N)] * len(BREAKS) + [N]
  b = len(at)
  token = np.tile(np.arange(1, N + 1), (b, 1)).astype(np.int32)
  logits = np.zeros((b, N, V), np.float32)
  for i in range(N):
    logits[:, i, i + 2] = 80.0  # the next draft, or after the last one 5
  for slot, (place, value) in enumerate(x for x in BREAKS.values() for _ in range(N)):
    logits[slot, at[slot], place] = value
  q = jax.nn.one_hot(token, V) if RULES[rule][1] else None
  parent = jnp.tile(jnp.array([NO_PARENT, *range(N - 1)]), (b, 1))
  draft = DraftTree(jnp.array(token), parent, q)
  verdict, broken = jax.tree.map(np.array, judged(
      rule, logits.reshape(-1, V), draft, tree.ancestors(parent, N - 1), temperature))
  assert broken.tolist() == [True] * (b - 1) + [False]
  assert verdict.num_accepted.tolist() == [*at[:-1], N - 1]
  assert verdict.bonus[-1] == N + 1


@pytest.mark.parametrize("rule", ["sampled", "block"])
def test_drafts_of_a_law_that_is_nan_count_as_not_made(rule):
  """The drafter is broken, the target is not: its law is kept, by the same random numbers."""
  b = 64
  parent = jnp.tile(jnp.array([NO_PARENT, 0, 1, 2]), (b, 1))
  token = jnp.tile(jnp.array([1, 2, 3, 4]), (b, 1))
  logits = jnp.tile(jnp.array(ROW), (b * N, 1))

  def verdict(first, q):
    draft = DraftTree(token, parent.at[:, first:].set(NO_PARENT), q)
    return judged(rule, logits, draft, tree.ancestors(parent, N - 1), 1.0)

  q = jnp.full((b, N, V), 1 / V)
  for first in (1, 2):
    (got, broken), (want, _) = verdict(N, q.at[:, first:].set(jnp.nan)), verdict(first, q)
    assert not broken.any() and (got.num_accepted < first).all()
    np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
    np.testing.assert_array_equal(got.bonus, want.bonus)


# ------------------------------------------------------------------------------- in the engine


GOOD = [greedy(max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)]
PROMPTS = ["the cat and the cat", "abc abc abc"]


def plain(outputs):
  return [(o.text, o.token_ids, o.finish_reason) for out in outputs for o in out.outputs]


def poison(monkeypatch, llm, token):
  """NaN for whoever reads the token: its row of the embedding."""
  target = llm.engine.inputs.target
  embed = target["embed"].at[token].set(jnp.nan)
  monkeypatch.setattr(llm.engine.inputs, "target", {**target, "embed": embed})


def unused(llm, *outputs):
  """Tokens that these texts have not."""
  seen = {t for out in outputs for t in (*out.prompt_token_ids, *out.token_ids)}
  return [t for t in range(5, llm.config.vocab_size) if t not in seen]


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(temperature=1.0, seed=9)],
                         ids=["greedy", "sampled"])
def test_the_first_token_and_a_later_one(method, params, monkeypatch):
  llm = tiny_llm(method)
  fields = dict(max_tokens=30, ignore_eos=True, logit_bias={9: 3.0, 10: -5.0}, **params)
  whole = [llm.generate("he", SamplingParams(**fields))[0], *llm.generate(PROMPTS, GOOD)]
  answer = whole[0].token_ids
  others = unused(llm, *whole[1:])
  late = next(i for i in range(4, 30) if answer[i] in others and answer[i] not in answer[:i])
  before = llm.engine.stats()
  poison(monkeypatch, llm, answer[late])
  prompts = ["he", llm.tokenizer.encode("he") + [answer[late]], *PROMPTS]
  outputs = llm.generate(prompts, [SamplingParams(**fields)] * 2 + GOOD)
  assert plain(outputs[2:]) == plain(whole[1:])  # pages of who failed are taken by others
  later, first = outputs[:2]
  assert later.token_ids == answer[:late + 1] and first.token_ids == ()
  for out, number in ((later, late + 2), (first, 1)):
    assert out.finish_reason == "error" and out.finished
    assert f"NaN or infinite logits for token {number} of the answer" in out.outputs[0].stop_reason
  assert is_idle(llm) and llm.engine.traces["step"] == 1
  after = llm.engine.stats()
  assert after.corrupted_requests == before.corrupted_requests + 2
  assert dict(after.finished)["error"] == dict(before.finished).get("error", 0) + 2


def test_pages_with_a_nan_are_found_by_nobody(monkeypatch):
  """The fault of one moment: afterwards the same prompt is answered, from pages of its own."""
  llm = tiny_llm("none")
  prompt = [11, 12, 13, 14, 15, 16, 17, 18] * 2 + [19]
  with monkeypatch.context() as patch:
    poison(patch, llm, 12)
    [bad] = llm.generate([prompt], greedy(max_tokens=5))
  [good] = llm.generate([prompt], greedy(max_tokens=5, ignore_eos=True))
  assert bad.finish_reason == "error" and good.num_cached_tokens == 0
  assert len(good.token_ids) == 5


def test_what_a_stop_string_ended_before_is_no_failure(monkeypatch):
  """The device, one loop ahead, meets the NaN behind the stop string that only the host sees."""
  llm = tiny_llm("none")
  [whole] = llm.generate("he", greedy(max_tokens=30, ignore_eos=True))
  text = llm.tokenizer.decode
  late = next(i for i in range(2, 30) if text(whole.token_ids[i:i + 1]) not in text(
      whole.token_ids[:i]))
  before = llm.engine.stats().corrupted_requests
  poison(monkeypatch, llm, whole.token_ids[late])
  params = greedy(max_tokens=30, ignore_eos=True, stop=text(whole.token_ids[late:late + 1]))
  [out] = llm.generate("he", params)
  assert (out.finish_reason, out.token_ids) == ("stop", whole.token_ids[:late + 1])
  assert llm.engine.stats().corrupted_requests == before and is_idle(llm)
