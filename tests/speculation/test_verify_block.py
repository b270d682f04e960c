"""Block verification of chains: its law, in float64, to 1e-12, and what it gains."""

from __future__ import annotations

import itertools

import exact_law as exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_block import V, block_law

from jspec.speculation import verify as rule


@pytest.mark.parametrize("p_kind, q_kind, length", [
    ("dense", "dense", 3), ("dense", "dense", 1), ("dense", "dense", 0), ("one-hot", "dense", 3),
    ("dense", "one-hot", 3), ("one-hot", "one-hot", 3), ("low", "high", 3), ("dense", "holes", 3),
    ("holes", "dense", 3), ("holes", "holes", 2)])
def test_emitted_law_is_the_targets(p_kind, q_kind, length):
  with jax.enable_x64(True):
    p = exact.table(1, p_kind)
    law, _ = block_law(length, p, exact.table(2, q_kind))
    assert exact.error(law, p, length + 1) < exact.BOUND


def test_emitted_law_where_p_is_q():
  with jax.enable_x64(True):
    p = exact.table(1)
    law, mean = block_law(3, p, p)
    assert exact.error(law, p, 4) < exact.BOUND
    assert abs(mean - 3) < 1e-9  # everything passes


def test_no_rule_accepts_more_tokens_and_token_by_token_accepts_fewer():
  """Sun et al., theorem 2: the mean is the sum over i of E[min over prefixes], computed by hand."""
  with jax.enable_x64(True):
    p, q = exact.table(1), exact.table(2)
    _, mean = block_law(3, p, q)
  joint = lambda laws, x: np.prod([laws[x[:i]][x[i]] for i in range(len(x))])
  token_by_token = 0.0
  for length in (1, 2, 3):
    for x in itertools.product(range(V), repeat=length):
      token_by_token += np.prod([min(p[x[:i]][x[i]], q[x[:i]][x[i]]) for i in range(length)])
  most = sum(min(joint(p, x), joint(q, x)) for length in (1, 2, 3)
             for x in itertools.product(range(V), repeat=length))
  assert token_by_token + 1e-3 < mean <= most + 1e-12


@pytest.mark.parametrize("mutant", ["ratio of another token", "bonus from p"])
def test_mutants_are_noticed(monkeypatch, mutant):
  honest = rule.verify_block

  def wrong(draft, scores, of_node, u_accept, u_bonus):
    verdict = honest(draft, scores, of_node, u_accept, u_bonus)
    if mutant == "bonus from p":
      row = jnp.take_along_axis(of_node, verdict.num_accepted[:, None], 1)[:, 0]
      bonus = rule.sampling.inverse_cdf(jax.nn.softmax(scores[row]), u_bonus[:, 0])
      return verdict.replace(bonus=bonus)
    ones = jnp.roll(draft.token, 1, 1)
    return honest(draft.replace(token=ones), scores, of_node, u_accept, u_bonus)

  with jax.enable_x64(True):
    p = exact.table(1)
    law, _ = block_law(3, p, exact.table(2), verify=wrong)
    assert exact.error(law, p, 4) > exact.MUTANT
