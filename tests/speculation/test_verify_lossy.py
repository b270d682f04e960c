"""The rules that change the text do what they say, and only under their own names."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jspec.config import Verification
from jspec.speculation import step, tree, verify, verify_lossy
from jspec.types import NO_PARENT, DraftTree

V, B, N = 6, 400, 7


def drafts(seed):
  """B random trees with unused nodes, random laws p[B, N, V], uniforms."""
  rng = np.random.default_rng(seed)
  parent = np.full((B, N), NO_PARENT, np.int32)
  for b in range(B):
    for i in range(1, rng.integers(1, N + 1)):
      parent[b, i] = rng.integers(max(parent[b, i - 1], 0), i)
  token = rng.integers(0, V, (B, N)).astype(np.int32)
  p = rng.dirichlet(np.full(V, 0.4), (B, N))
  return DraftTree(jnp.array(token), jnp.array(parent), None), p, rng


def arguments(draft, p):
  mask = tree.ancestors(draft.parent, N - 1)
  of_node = jnp.arange(B * N).reshape(B, N)
  return jnp.log(jnp.array(p.reshape(-1, V), jnp.float32)), of_node, mask


def paths(parent):
  """Every root-to-node path of a tree, as tuples of nodes."""
  out = {0: ()}
  for i, p in enumerate(parent):
    if p != NO_PARENT:
      out[i] = (*out[p], i)
  return out


@pytest.mark.parametrize("threshold, alpha", [(0.09, 0.3), (0.3, 0.9), (0.01, 0.05)])
def test_typical_acceptance_is_the_papers(threshold, alpha):
  draft, p, rng = drafts(1)
  scores, of_node, mask = arguments(draft, p)
  u = rng.uniform(size=(B, N)).astype(np.float32)
  got = verify_lossy.verify_lossy_typical(draft, scores, of_node, mask, u, threshold, alpha)
  token, parent = np.array(draft.token), np.array(draft.parent)
  lengths = set()
  for b in range(B):
    best = ((0, 0.0), ())
    for path in paths(parent[b]).values():
      laws = [p[b, parent[b, i]] for i in path]
      chances = [law[token[b, i]] for law, i in zip(laws, path, strict=True)]
      entropy = [-(law * np.log(law + 1e-5)).sum() for law in laws]
      if all(c > min(threshold, alpha * np.exp(-h)) for c, h in zip(chances, entropy, strict=True)):
        best = max(best, ((len(path), np.log(chances).sum()), path), key=lambda x: x[0])
    path = best[1]
    assert got.num_accepted[b] == len(path)
    assert got.path[b, 1:len(path) + 1].tolist() == list(path)
    law = p[b, path[-1] if path else 0]
    assert got.bonus[b] == np.searchsorted(np.cumsum(law), u[b, len(path)], side="right")
    lengths.add(len(path))
  assert len(lengths) > 2


def test_typical_acceptance_of_greedy_slots_is_exact():
  """p is then one-hot: the argmax passes, all else does not."""
  draft, p, rng = drafts(2)
  p = np.eye(V)[p.argmax(-1)]
  scores, of_node, mask = arguments(draft, p)
  got = verify_lossy.verify_lossy_typical(draft, scores, of_node, mask, np.zeros((B, N)), 0.09, 0.3)
  want = verify.verify_point_mass(draft, jnp.array(p.argmax(-1), jnp.int32), mask)
  np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
  np.testing.assert_array_equal(got.bonus, want.bonus)


def test_synthetic_acceptance_has_the_rates_asked_for():
  """Of first children, whatever they hold; |z| > 5 has probability 6e-7."""
  size, rates = 40000, (0.8, 0.5, 0.5)
  parent = np.tile([NO_PARENT, 0, 0, 1, 1, 3], (size, 1)).astype(np.int32)
  draft = DraftTree(jnp.zeros_like(parent), jnp.array(parent), None)
  u = jax.random.uniform(jax.random.key(0), (size, 6))
  p = jnp.zeros((size * 6, V))
  got = verify_lossy.verify_lossy_synthetic(
      draft, p, jnp.arange(size * 6).reshape(size, 6), tree.ancestors(draft.parent, 3), u, u, rates)
  for i, rate in enumerate(rates, 1):
    passed = (np.array(got.num_accepted) >= i).mean()
    assert abs(passed - rate) < 5 * np.sqrt(rate * (1 - rate) / size)
  whole = np.array(got.path)[np.array(got.num_accepted) == 3]
  assert (whole[:, :4] == [0, 1, 3, 5]).all()


def test_synthetic_acceptance_stops_where_the_draft_does():
  draft, p, rng = drafts(3)
  scores, of_node, mask = arguments(draft, p)
  u = np.zeros((B, N), np.float32)
  got = verify_lossy.verify_lossy_synthetic(draft, scores, of_node, mask, u, u, (1.0,) * 6)
  for b, row in enumerate(np.array(draft.parent)):
    node, path = 0, []
    while (row == node).any():
      node = int(np.flatnonzero(row == node)[0])
      path.append(node)
    assert got.path[b, 1:len(path) + 1].tolist() == path and got.num_accepted[b] == len(path)


def test_lossy_rules_say_so_in_their_names():
  functions = [name for name, f in inspect.getmembers(verify_lossy, inspect.isfunction)
               if f.__module__ == verify_lossy.__name__ and not name.startswith("_")]
  assert functions and all("lossy" in name for name in functions)


@pytest.mark.parametrize("rule", [Verification("lossy_typical"),
                                  Verification("lossy_synthetic", rates=(0.9, 0.8, 0.7, 0.6))])
def test_a_lossy_rule_runs_in_the_step_and_is_not_the_lossless_one(rule):
  """At temperature 1 more tokens pass."""
  b = 64
  rig = tiny.rig("random_trees" if rule.name == "lossy_typical" else "ngram", b)
  ruled = dataclasses.replace(rig.config, verification=rule)
  lossy, _ = tiny.compiled(step.make_step(ruled, rig.drafter), 1)
  accepted = []
  for run in (rig.step, lossy):
    state = tiny.start(rig, [[1, 2, 3, 1, 2, 3, 1, 2]] * b,
                       sampling=tiny.sampling_for(b, temperature=1.0))
    _, outputs = tiny.generate(rig, state, 30, run)
    accepted.append(np.mean([out.drafted.sum() for out in outputs]))
  assert accepted[1] > 1.2 * accepted[0]
