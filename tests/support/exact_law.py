"""The exact law of what a rule of acceptance emits: thresholds of its coins, bisected."""

from __future__ import annotations

import itertools

import numpy as np

from jspec.types import NO_PARENT

V, BOUND, MUTANT = 3, 1e-12, 1e-3


def path_of(parents, tokens, i):
  """Tokens from below the root to node i."""
  return () if i == 0 else (*path_of(parents, tokens, parents[i]), tokens[i])


def table(seed, kind="dense"):
  """A law for every prefix, of the given kind."""
  rng = np.random.default_rng(seed)
  laws = {}
  for length in range(4):
    for prefix in itertools.product(range(V), repeat=length):
      law = rng.dirichlet(np.full(V, 0.7))
      if kind == "one-hot":
        law = np.eye(V)[rng.integers(V)]
      elif kind == "holes":
        law = law * (np.arange(V) != rng.integers(V))
      elif kind in ("low", "high"):
        law = law * ((np.arange(V) < 2) if kind == "low" else (np.arange(V) >= 2))
      laws[prefix] = law / law.sum()
  return laws


def drafts(parents, q_law, vocab=V):
  """Every tuple of draft tokens, the q of each node, the tuple's probability (0 for some)."""
  out = [((0,), (np.zeros(vocab),), 1.0)]
  for i in range(1, len(parents)):
    grown = []
    for tokens, qs, weight in out:
      if parents[i] == NO_PARENT:
        grown.append(((*tokens, 0), (*qs, np.zeros(vocab)), weight))
        continue
      elder = [tokens[j] for j in range(1, i) if parents[j] == parents[i]]
      q = q_law(path_of(parents, tokens, parents[i]), elder)
      grown += [((*tokens, v), (*qs, q), weight * q[v]) for v in range(vocab)]
    out = grown
  tokens, qs, weight = zip(*out, strict=True)
  return np.array(tokens), np.array(qs), np.array(weight)


def independent(laws):
  return lambda prefix, elder: laws[prefix]


def bisect(below, size):
  """The largest t in [0, 1] with below(u) for all u < t, of a monotone below, per batch entry."""
  low, high = np.zeros(size), np.ones(size)
  for _ in range(56):
    middle = (low + high) / 2
    yes = below(middle)
    low, high = np.where(yes, middle, low), np.where(yes, high, middle)
  return np.where(high == 1, 1.0, low)


def add_bonus(law, run, u, weight, tokens, vocab):
  """Adds what is emitted with the coins u, by its mass over the uniforms of the bonus token."""
  size = len(tokens)
  verdict, count = run(u, np.zeros(size))
  upto = [bisect(lambda x, v=v: run(u, x)[0].bonus <= v, size) for v in range(vocab)]
  for v, mass in enumerate(np.diff(upto, axis=0, prepend=0)):
    for b in np.flatnonzero(weight * mass > 0):
      path = verdict.path[b, 1:verdict.num_accepted[b] + 1]
      key = (*tokens[b, path].tolist(), v)[:count[b]]
      law[key] = law.get(key, 0.0) + weight[b] * mass[b]


def law_of(run, tokens, weight, vocab):
  """{emitted tokens: probability} of draft tokens that have the weights, token by token.

  run: (coins [size, N], uniforms of the bonus token [size]) -> (Verdict, i32[size] emitted tokens).
  """
  size, n = tokens.shape
  law = {}

  def accepted(u, i):
    verdict = run(u, np.zeros(size))[0]
    on_path = (verdict.path == i) & (np.arange(n) <= verdict.num_accepted[:, None])
    return on_path.any(1)

  def visit(u, i, weight):
    if i == n:
      return add_bonus(law, run, u, weight, tokens, vocab)
    with_u = lambda x: np.concatenate([u[:, :i], x[:, None], u[:, i + 1:]], 1)
    limit = bisect(lambda x: accepted(with_u(x), i), size)
    for middle, part in ((limit / 2, limit), ((1 + limit) / 2, 1 - limit)):
      if (weight * part).max() > 0:
        visit(with_u(np.minimum(middle, 1 - 2**-53)), i + 1, weight * part)

  visit(np.zeros((size, n)), 1, weight)
  return law


def error(law, p_laws, length):
  """Largest difference from the target's joint law, after its own continuation of short runs."""
  assert abs(sum(law.values()) - 1) < BOUND
  worst = 0.0
  for text in itertools.product(range(V), repeat=length):
    chance = lambda start, text=text: np.prod([p_laws[text[:i]][text[i]]
                                               for i in range(start, length)])
    got = sum(law.get(text[:k], 0.0) * chance(k) for k in range(1, length + 1))
    worst = max(worst, abs(got - chance(0)))
  return worst
