"""Block verification of chains: its law, in float64, to 1e-12, and what it gains."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_lossless_exact as exact

from jspec.speculation import verify as rule
from jspec.types import NO_PARENT, DraftTree

V, NEVER = exact.V, 1 - 2**-53


@functools.cache
def compiled(verify):
  return jax.jit(lambda *args: verify(*args))


def block_law(length, p_laws, q_laws, num_nodes=4, verify=None):
  """{emitted tokens: probability} of chains of `length` drafts, and the mean accepted number.

  Node i is the last to pass with the probability of its threshold, once those behind it have not:
  each threshold and each step of the bonus token is bisected out of the real function.
  """
  judge = compiled(verify or rule.verify_block)
  parents = (*range(NO_PARENT, length), *[NO_PARENT] * (num_nodes - 1 - length))
  tokens, qs, weight = exact.drafts(parents, exact.independent(q_laws))
  size, n = tokens.shape
  p = np.array([[p_laws[tuple(t[1:i + 1])] if i <= length else np.full(V, 1 / V)
                 for i in range(n)] for t in tokens])
  draft = DraftTree(jnp.array(tokens, jnp.int32),
                    jnp.broadcast_to(jnp.array(parents, jnp.int32), tokens.shape), jnp.array(qs))
  def run(u, bonus):
    verdict = judge(draft, jnp.log(p).reshape(-1, V), np.arange(size * n).reshape(size, n), u,
                    np.repeat(bonus[:, None], n, 1))
    return jax.tree.map(np.array, (verdict, verdict.num_accepted + 1))

  return law_of_chain(run, tokens, weight, length, V)


def law_of_chain(run, tokens, weight, length, vocab):
  """As exact.law_of, of chains that are judged as a whole; and the mean accepted number."""
  size, n = tokens.shape
  law, mean, left = {}, 0.0, weight.copy()
  for i in range(length, -1, -1):
    def coins(x, i=i):
      u = np.full((size, n), NEVER)
      u[:, i] = x
      return u
    passes = exact.bisect(lambda x, i=i: run(coins(x), x * 0)[0].num_accepted >= i,
                          size) if i else np.ones(size)
    here, left = left * passes, left * (1 - passes)
    mean += i * here.sum()
    exact.add_bonus(law, run, coins(np.minimum(passes / 2, NEVER)), here, tokens, vocab)
  return law, mean


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
