"""Verdicts of small trees, worked out by hand or by walking; the law is test_lossless_exact's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.speculation import tree, verify
from jspec.types import NO_PARENT, DraftTree

CHAIN, TREE = tree.chain(3), (NO_PARENT, 0, 0, 1, 2, 2)


def point_mass(parents, tokens, choice):
  draft = DraftTree(jnp.array([tokens]), jnp.array([parents]), None)
  mask = tree.ancestors(draft.parent, len(parents) - 1)
  verdict = verify.verify_point_mass(draft, jnp.array([choice]), mask)
  n = int(verdict.num_accepted[0])
  return verdict.path[0, :n + 1].tolist(), int(verdict.bonus[0])


@pytest.mark.parametrize("choice, path, bonus", [
    ((9, 7, 8, 6), [0], 9), ((5, 9, 8, 6), [0, 1], 9), ((5, 7, 8, 6), [0, 1, 2, 3], 6),
    ((4, 7, 8, 6), [0], 4), ((5, 4, 8, 6), [0, 1], 4)])
def test_point_mass_chain(choice, path, bonus):
  assert point_mass(CHAIN, (1, 5, 7, 8), choice) == (path, bonus)


@pytest.mark.parametrize("choice, path, bonus", [
    ((3, 0, 7, 0, 0, 2), [0, 2, 5], 2), ((3, 0, 6, 0, 4, 0), [0, 2, 4], 4),
    ((2, 5, 6, 1, 0, 0), [0, 1, 3], 1), ((2, 6, 6, 1, 0, 0), [0, 1], 6),
    ((9, 5, 6, 7, 7, 7), [0], 9)])
def test_point_mass_tree(choice, path, bonus):
  assert point_mass(TREE, (1, 2, 3, 5, 6, 7), choice) == (path, bonus)


def test_an_unused_node_is_never_accepted():
  parents = (NO_PARENT, NO_PARENT, 0)
  assert point_mass(parents, (1, 5, 6), (5, 0, 0)) == ([0], 5)
  assert point_mass(parents, (1, 5, 6), (6, 0, 3)) == ([0, 2], 3)


def test_of_repeated_siblings_only_the_first_is_followed():
  """The accepted nodes are one lineage: node 5, child of the second 4, is not on it."""
  tokens, choice = (1, 4, 4, 5, 6, 7), (4, 7, 7, 0, 0, 3)
  assert point_mass(TREE, tokens, choice) == ([0, 1], 7)


def test_a_slot_with_only_its_root_emits_its_choice():
  assert point_mass((NO_PARENT,), (3,), (8,)) == ([0], 8)


def rejection(parents, tokens, p, q, u, u_bonus=0.5):
  n = len(parents)
  draft = DraftTree(jnp.array([tokens]), jnp.array([parents]), q if q is None else jnp.array([q]))
  verdict = verify.verify(draft, jnp.log(jnp.array(p)), jnp.arange(n)[None], jnp.array([u]),
                          jnp.full((1, n), u_bonus))
  m = int(verdict.num_accepted[0])
  return verdict.path[0, :m + 1].tolist(), int(verdict.bonus[0])


P = [[0.5, 0.25, 0.25, 0.0]] * 4
Q = [[0.25, 0.5, 0.0, 0.25]] * 4


@pytest.mark.parametrize("u, path", [
    ((0, 0.49, 0.49, 0.49), [0, 1, 2, 3]), ((0, 0.5, 0, 0), [0]), ((0, 0.49, 0.5, 0), [0, 1])])
def test_acceptance_is_strictly_below_p_over_q(u, path):
  """p(1)/q(1) = 1/2 everywhere; u = 1/2 refuses, as u in [0, 1) reaches 0 but not 1."""
  assert rejection(CHAIN, (0, 1, 1, 1), P, Q, u)[0] == path


def test_a_token_of_probability_zero_is_never_accepted():
  assert rejection(CHAIN, (0, 3, 3, 3), P, Q, (0.0,) * 4)[0] == [0]


def test_the_bonus_after_a_refusal_is_from_the_residual():
  """max(p - q, 0) = (1/4, 0, 1/4, 0)."""
  bonus = [rejection(CHAIN, (0, 1, 1, 1), P, Q, (0, 0.6, 0, 0), u)[1] for u in (0.0, 0.49, 0.51)]
  assert bonus == [0, 0, 2]


def test_a_refused_point_mass_is_taken_out_of_p():
  coins = (0, 0.6, 0, 0)
  bonus = {rejection(CHAIN, (0, 0, 0, 0), P, None, coins, u)[1] for u in (0.0, 0.4, 0.6, 1)}
  assert bonus == {1, 2}


def test_siblings_are_tried_against_the_residual():
  """Node 1 refused leaves (1/2, 0, 1/2, 0): node 2's token 2, q(2) = 1, is taken below 1/2."""
  one_hot = [0.0, 0.0, 1.0, 0.0]
  parents, q = tree.from_widths((2,)), [Q[0], Q[0], one_hot]
  assert rejection(parents, (0, 1, 2), P[:3], q, (0, 0.6, 0.49))[0] == [0, 2]
  assert rejection(parents, (0, 1, 2), P[:3], q, (0, 0.6, 0.51)) == ([0], 0)


def test_residual_is_normalised_and_falls_back_to_p():
  p, q = np.array(P[0]), np.array(Q[0])
  np.testing.assert_allclose(verify.residual(p, q), [0.5, 0, 0.5, 0])
  np.testing.assert_array_equal(verify.residual(p, p), p)


def test_no_distribution_is_made_for_every_node():
  """Of arrays with V numbers for each node only the normaliser's, which fuse into its sums."""
  b, n, v = 3, 5, 70
  draft = DraftTree(jnp.zeros((b, n), jnp.int32), jnp.tile(jnp.array(tree.chain(n - 1)), (b, 1)),
                    jnp.ones((b, n, v)) / v)
  program = jax.make_jaxpr(verify.verify)(draft, jnp.zeros((b * n, v)), jnp.zeros((b, n), int),
                                          jnp.zeros((b, n)), jnp.zeros((b, n)))

  def made(jaxpr):
    for equation in jaxpr.eqns:
      yield from ((equation.primitive.name, out.aval.shape) for out in equation.outvars)
      for value in equation.params.values():
        for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "jaxpr")):
          if hasattr(inner, "jaxpr"):
            yield from made(inner.jaxpr)

  with_v = [(name, shape) for name, shape in made(program.jaxpr) if shape[-1:] == (v,)]
  assert ("exp", (b, v)) in with_v  # p after one node of each slot
  assert [name for name, shape in with_v if np.prod(shape) > b * v] == ["sub", "exp"]
