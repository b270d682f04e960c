"""Lossless in law, without sampling: the law of what `verify` emits, in float64, to 1e-12.

The real functions compute every number. `verify` is a function of uniforms that only ever changes
at thresholds: node i is accepted iff u_accept[i] lies below one, and the bonus token rises with
u_bonus. So the law is found from outside: bisect each threshold to the last bit (that is the
probability of the branch), put u in the middle of either side, go on to the next node; then bisect
the bonus token's steps. Draft tokens are enumerated with the probability the drafter gives them.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_law import BOUND, MUTANT, V, drafts, error, independent, law_of, path_of, table

from jspec.speculation import sampling, tree
from jspec.speculation import verify as rule
from jspec.types import NO_PARENT, DraftTree

BRANCHES = (NO_PARENT, 0, 0, 1, 2, 2)
HOLE = (NO_PARENT, 0, NO_PARENT, 0, 1, 1)  # node 2 unused
SHAPES = {"root": (NO_PARENT,), "chain": tree.chain(3), "siblings": tree.from_widths((3,)),
          "widths": tree.from_widths((2, 1)), "branches": BRANCHES, "hole": HOLE}


def without_replacement(laws):
  def law(prefix, elder):
    q = laws[prefix] * ~np.isin(np.arange(V), elder)
    return q / q.sum()
  return law


@functools.cache
def compiled(verify, residual):
  del residual  # verify calls it: a mutant of it is another program
  return jax.jit(lambda *args: verify(*args))


@jax.jit
def follow(draft, p, u):
  """Verdict of verify_point_mass: p [N, V], u f64[combinations, N] for the choice at each node."""
  rows = jnp.broadcast_to(p, (*u.shape, V)).reshape(-1, V)
  choice = sampling.inverse_cdf(rows, u.reshape(-1)).reshape(u.shape)
  mask = tree.ancestors(draft.parent, u.shape[1] - 1)
  return rule.verify_point_mass(draft, choice, mask)


def emitted_law(parents, p_laws, q_law, point_mass=False):
  """Law of the emitted token runs: {tokens: probability}, through the real `verify`."""
  tokens, qs, weight = drafts(parents, q_law)
  size, n = tokens.shape
  p = np.array([[p_laws[path_of(parents, t, i)] if i == 0 or parents[i] != NO_PARENT
                 else np.full(V, 1 / V) for i in range(n)] for t in tokens])
  draft = DraftTree(jnp.array(tokens, jnp.int32),
                    jnp.broadcast_to(jnp.array(parents, jnp.int32), tokens.shape),
                    None if point_mass else jnp.array(qs))
  judge = compiled(rule.verify, rule.residual)
  def run(u, bonus):
    verdict = judge(draft, jnp.log(p).reshape(-1, V), np.arange(size * n).reshape(size, n), u,
                    np.repeat(bonus[:, None], n, 1))
    return jax.tree.map(np.array, (verdict, verdict.num_accepted + 1))

  return law_of(run, tokens, weight, V)


def check(shape, p_kind="dense", q_kind="dense", draw=independent, same=False, **kwargs):
  parents = SHAPES[shape]
  with jax.enable_x64(True):
    p = table(1, p_kind)
    q = p if same else table(2, q_kind)
    law = emitted_law(parents, p, draw(q), **kwargs)
    return error(law, p, max(tree.depths([max(x, 0) if i else x for i, x in
                                          enumerate(parents)])) + 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_emitted_law_is_the_targets(shape):
  assert check(shape) < BOUND


@pytest.mark.parametrize("p_kind, q_kind", [
    ("one-hot", "dense"), ("dense", "one-hot"), ("one-hot", "one-hot"), ("low", "high"),
    ("dense", "holes"), ("holes", "dense"), ("holes", "holes")])
@pytest.mark.parametrize("shape", ["chain", "widths"])
def test_emitted_law_with_zeros_in_p_or_q(shape, p_kind, q_kind):
  assert check(shape, p_kind, q_kind) < BOUND


@pytest.mark.parametrize("shape", ["chain", "widths", "branches"])
def test_emitted_law_where_p_is_q(shape):
  assert check(shape, same=True) < BOUND


@pytest.mark.parametrize("shape, same", [("siblings", False), ("siblings", True),
                                         ("branches", False)])
def test_emitted_law_with_siblings_drawn_without_replacement(shape, same):
  assert check(shape, draw=without_replacement, same=same) < BOUND


@pytest.mark.parametrize("shape", ["chain", "branches"])
def test_emitted_law_of_drafts_whose_q_is_unknown(shape):
  """A token drawn independently of the coins may always be judged as a point mass."""
  assert check(shape, point_mass=True) < BOUND


# ------------------------------------------------------------------ point mass


def point_mass_law(parents, tokens, p_laws):
  """Law through `verify_point_mass`, its choices drawn by `inverse_cdf`, one uniform per depth."""
  n = len(parents)
  used = [i == 0 or parents[i] != NO_PARENT for i in range(n)]
  p = np.array([p_laws[path_of(parents, tokens, i)] if used[i] else np.full(V, 1 / V)
                for i in range(n)])
  depth = np.array([len(path_of(parents, tokens, i)) if used[i] else 0 for i in range(n)])
  pieces = []
  for d in range(depth.max() + 1):
    cuts = np.unique(np.concatenate([[0, 1], *np.cumsum(p[depth == d], -1)]).clip(0, 1))
    pieces.append(list(zip((cuts[1:] + cuts[:-1]) / 2, np.diff(cuts), strict=True)))
  combos = list(itertools.product(*pieces))
  u = np.array([[x for x, _ in combo] for combo in combos])
  weight = np.array([np.prod([w for _, w in combo]) for combo in combos])
  many = lambda x: jnp.broadcast_to(jnp.array(x, jnp.int32), (len(combos), n))
  verdict = jax.tree.map(np.array, follow(DraftTree(many(tokens), many(parents), None), p,
                                          u[:, depth]))
  law = {}
  for b, w in enumerate(weight):
    path = verdict.path[b, 1:verdict.num_accepted[b] + 1]
    key = (*np.array(tokens)[path].tolist(), int(verdict.bonus[b]))
    law[key] = law.get(key, 0.0) + w
  return law


@pytest.mark.parametrize("p_kind", ["dense", "one-hot", "holes"])
@pytest.mark.parametrize("shape, tokens", [
    ("root", (0,)), ("chain", (0, 1, 2, 1)), ("siblings", (0, 2, 0, 1)), ("siblings", (0, 1, 1, 2)),
    ("widths", (0, 0, 1, 2, 2)), ("branches", (0, 1, 1, 0, 2, 2)), ("hole", (0, 2, 1, 2, 0, 1))])
def test_point_mass_law_is_the_targets(shape, tokens, p_kind):
  parents = SHAPES[shape]
  with jax.enable_x64(True):
    p = table(1, p_kind)
    law = point_mass_law(parents, tokens, p)
    length = max(map(len, law))
    assert error(law, p, length) < BOUND


# ------------------------------------------------------------------ mutants


def bonus_from_q(p, q):
  return q


def half_a_residual(p, q):
  return jnp.maximum(p - q, 0) + 0.5 * jnp.minimum(p, q)


@pytest.mark.parametrize("mutant", [lambda p, q: p, bonus_from_q, half_a_residual],
                         ids=["no residual", "bonus from q", "half a residual"])
@pytest.mark.parametrize("shape", ["chain", "widths"])
def test_wrong_residuals_are_noticed(monkeypatch, shape, mutant):
  monkeypatch.setattr(rule, "residual", mutant)
  assert check(shape) > MUTANT


def misstated_q(draft):
  q = draft.q_probs**0.5
  return draft.replace(q_probs=q / jnp.maximum(q.sum(-1, keepdims=True), 1e-30))


@pytest.mark.parametrize("mutant", [
    lambda draft, p, node, u, bonus: (misstated_q(draft), p, node, u, bonus),
    lambda draft, p, node, u, bonus: (draft, p, jnp.roll(node, 1, axis=1), u, bonus),
    lambda draft, p, node, u, bonus: (draft, p, node, jnp.zeros_like(u) + u[:, -1:], bonus),
], ids=["q of another temperature", "p of the neighbour", "one coin for all nodes"])
def test_wrong_arguments_are_noticed(monkeypatch, mutant):
  honest = rule.verify
  monkeypatch.setattr(rule, "verify", lambda *args: honest(*mutant(*args)))
  assert check("chain") > MUTANT


def test_siblings_without_replacement_judged_by_the_undiminished_q_are_noticed(monkeypatch):
  honest, q_law = rule.verify, table(2)
  first = jnp.array(q_law[()])
  monkeypatch.setattr(rule, "verify", lambda draft, *rest: honest(
      draft.replace(q_probs=jnp.broadcast_to(first, draft.q_probs.shape)), *rest))
  assert check("siblings", draw=without_replacement) > MUTANT
