"""The exact law of chains that are judged as a whole."""

from __future__ import annotations

import functools

import exact_law as exact
import jax
import jax.numpy as jnp
import numpy as np

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
