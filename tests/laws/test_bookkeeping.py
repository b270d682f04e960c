"""Acceptance bookkeeping over hundreds of steps: who cannot be refused is never refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import markov
import numpy as np
import pytest
import scipy.special
import scipy.stats
import tiny

from jspec.config import draft_trees
from jspec.drafters.draft_model import draft_model
from jspec.drafters.eagle import eagle, eagle_dynamic
from jspec.drafters.medusa import medusa
from jspec.drafters.mlp_speculator import mlp_speculator
from jspec.speculation import step, tree
from jspec.types import SlotRequest, StepInputs

STEPS = 200


def compile_steps(drafter, model=tiny.TARGET) -> tiny.Rig:
  """`step` of the rig runs 200 steps at once."""
  b = len(PROMPTS)
  config = tiny.step_config(drafter, b, model=model)
  fill, _ = tiny.compiled(tiny._make_fill(config, drafter), 1)
  run, traces = tiny.compiled(step.make_multi_step(config, drafter, STEPS), 1)
  return tiny.Rig(config, drafter, None, b, fill, run, traces)


PROMPTS = [[1, 2, 3, 4, 5], [7, 3, 1, 0], [4] * 11] * 3  # inside a page, at its end, and before


def run(rig, draft_params, target, temperature=0.0, seed=0):
  """The output of 200 steps, the texts, roots first, and the final state."""
  params = StepInputs(target, draft_params, jnp.int32(99), jnp.float32(1000))
  b, longest = len(PROMPTS), 11 + STEPS * (rig.drafter.max_depth + 1)
  table, num_pages = tiny.page_table(b, rig.drafter.lookahead, longest)
  whole = lambda x: jnp.full(b, x, jnp.int32)
  requests = SlotRequest(table, whole(0), whole(10**6), whole(99),
                         jax.random.split(jax.random.key(seed), b),
                         tiny.sampling_for(b, temperature=temperature))
  state = tiny.empty_state(rig.drafter, b, table, num_pages, rig.config.model)
  state = tiny.admit_all(rig, state, requests, PROMPTS, params)
  roots = np.array(state.root)
  state, out = rig.step(params, state, jnp.int32(STEPS))
  assert len(rig.traces) == 1
  return jax.tree.map(np.array, out), [np.array([root, *tokens[:n]]) for root, tokens, n in zip(
      roots, *map(np.array, (out.tokens, out.num_tokens)), strict=True)], state


def check(rig, draft_params, target, accepted):
  """Every step of every slot accepts so many tokens; returns the texts."""
  out, texts, state = run(rig, draft_params, target)
  np.testing.assert_array_equal(out.accepted_at.sum(1), out.accepted_at[:, accepted])
  # Drafts that never pass are seldom verified after a while; those that do always are.
  assert (out.accepted_at[:, accepted] >= (STEPS if accepted else 1)).all()
  np.testing.assert_array_equal(out.num_tokens, STEPS * (accepted + 1))
  np.testing.assert_array_equal(state.length, [len(p) + STEPS * (accepted + 1) for p in PROMPTS])
  return texts


@pytest.mark.parametrize("depth", [  # all others, too, with -m slow
    depth if depth in (3, 5) else pytest.param(depth, marks=pytest.mark.slow)
    for depth in range(1, 9)])
def test_the_target_as_its_own_draft_accepts_every_token_of_every_step(depth):
  """Chains shorter than a page, of a page and longer: 200 steps cross hundreds of boundaries."""
  drafter = draft_model(tiny.DRAFT, (1,) * depth, tiny.PAGE, jnp.float32, False)
  params = tiny.params_of(tiny.DRAFT, 5, 2.0)
  check(compile_steps(drafter, tiny.DRAFT), params, params, accepted=depth)


CHAIN = tree.shape_of([(0,) * i for i in range(1, 5)])
LONG = tree.shape_of([(0,) * i for i in range(1, 9)])  # twice a page
TREE = tree.shape_of(draft_trees.of_widths((2, 2, 1)))
sampled = functools.partial(eagle, sampled=True)
HEADS = {
    "medusa chain": (markov.MEDUSA, lambda: medusa(markov.MEDUSA, CHAIN, tiny.TARGET)),
    "medusa tree": (markov.MEDUSA, lambda: medusa(markov.MEDUSA, TREE, tiny.TARGET)),
    "mlp chain": (markov.MLP, lambda: mlp_speculator(markov.MLP, CHAIN, tiny.TARGET)),
    "mlp candidates": (markov.MLP, lambda: mlp_speculator(
        markov.MLP, tree.shape_of(draft_trees.of_widths((2, 2, 2))), tiny.TARGET,
        n_candidates=3)),
    "eagle long chain": (markov.EAGLE, lambda: eagle(markov.EAGLE, LONG, tiny.TARGET, tiny.PAGE,
                                                     jnp.float32)),
    "eagle tree": (markov.EAGLE, lambda: eagle(markov.EAGLE, TREE, tiny.TARGET, tiny.PAGE,
                                               jnp.float32)),
    "eagle3 long chain": (markov.EAGLE3, lambda: eagle(markov.EAGLE3, LONG, tiny.TARGET, tiny.PAGE,
                                                       jnp.float32)),
    "medusa sampled tree": (markov.MEDUSA, lambda: medusa(markov.MEDUSA, TREE, tiny.TARGET,
                                                          sampled=True)),
    "mlp sampled chain": (markov.MLP, lambda: mlp_speculator(markov.MLP, CHAIN, tiny.TARGET,
                                                             sampled=True)),
    "eagle sampled tree": (markov.EAGLE, lambda: sampled(markov.EAGLE, TREE, tiny.TARGET,
                                                         tiny.PAGE, jnp.float32)),
    "eagle3 sampled chain": (markov.EAGLE3, lambda: sampled(markov.EAGLE3, CHAIN, tiny.TARGET,
                                                            tiny.PAGE, jnp.float32)),
    "eagle3 dynamic": (markov.EAGLE3, lambda: eagle_dynamic(
        markov.EAGLE3, tiny.TARGET, tiny.PAGE, jnp.float32, top_k=3, depth=4, total_tokens=9)),
}


QUICK = ("medusa tree", "mlp chain", "eagle tree", "eagle3 long chain", "eagle3 sampled chain",
         "eagle3 dynamic")
every_head = pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HEADS])


@functools.cache
def head_run(name):
  return compile_steps(HEADS[name][1]())


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@every_head
def test_a_head_that_knows_the_target_by_heart(name, right):
  """Always right: all of its depth in every one of 200 steps. Always wrong: nothing, same text."""
  rig = head_run(name)
  text = check(rig, markov.head_params(HEADS[name][0], right), markov.target_params(),
               accepted=rig.drafter.max_depth if right else 0)
  for row in text:
    assert (row[1:] == markov.after(row[:-1], 1)).all()


TEMPERATURE, REPEATS = 2.5, 2
ALPHA = 1e-4 / (2 * len(HEADS) * markov.V)


def smallest_p_value(texts):
  """Of Pearson's chi-square for the law after each token, cells expected less than 5 pooled."""
  counts = np.zeros((markov.V, markov.V))
  for text in texts:
    np.add.at(counts, (text[:-1], text[1:]), 1)
  law = scipy.special.softmax(markov.table() / TEMPERATURE, -1)
  values = []
  for seen, due in zip(counts, law * counts.sum(1, keepdims=True), strict=True):
    large = due >= 5
    if large.sum() > 1:
      seen = np.append(seen[large], seen[~large].sum())
      due = np.append(due[large], max(due[~large].sum(), 1e-9))
      values.append(scipy.stats.chi2.sf(((seen - due)**2 / due).sum(), len(due) - 1))
  assert counts.sum() > 3600 and len(values) == markov.V
  return min(values)


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@every_head
def test_sampled_text_has_the_targets_law_whatever_the_head_knows(name, right):
  """N >= 3600 transitions; where q is p, hardly a draft is refused."""
  rig, texts = head_run(name), []
  params = markov.head_params(HEADS[name][0], right)
  for seed in range(REPEATS):
    out, more, _ = run(rig, params, markov.target_params(), TEMPERATURE, seed)
    texts += more
    if right and rig.drafter.sampled and "medusa" not in name:
      assert out.accepted_at[:, -1].sum() >= 0.99 * out.num_drafts.sum()
  assert smallest_p_value(texts) > ALPHA


def test_a_law_of_another_temperature_is_noticed():
  rig, params = head_run("mlp chain"), markov.head_params(markov.MLP, True)
  texts = [text for seed in range(REPEATS) for text in run(
      rig, params, markov.target_params(), 1.3 * TEMPERATURE, seed)[1]]
  assert smallest_p_value(texts) < ALPHA
