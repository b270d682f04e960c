"""Lossless verification of draft trees: which nodes the target accepts, and its next token.

Two formulations of one rule (Leviathan et al. 2023, alg. 1; Chen et al. 2023, alg. 2; for trees the
multi-round form of Miao et al. 2024, SpecInfer alg. 2, and Li et al. 2024, EAGLE): a node is tried
iff its parent is the last accepted node; it is accepted with probability min(1, p(x) / q(x)); if
refused, p becomes the residual distribution norm(max(p - q, 0)), from which the bonus token is
drawn in the end.

Where every q is a point mass the same law has a simpler form: draw y from p, and follow the child
that holds y if there is one. Then the emitted text is a function of the request's random numbers
alone: with or without drafts, a seed gives the same text, token for token.

`verify_block` (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", alg. 2) is
lossless, too: it accepts as many tokens of a sampled chain as any rule can. Rules that change the
law are in verify_lossy.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jspec.model.control import run_if
from jspec.speculation import sampling
from jspec.types import NO_PARENT, DraftTree, Verdict


def verify_point_mass(draft: DraftTree, choice: jax.Array, mask: jax.Array) -> Verdict:
  """Follows the target's own draws through the tree.

  Args:
    choice: i32[B, N], a draw from the target's distribution after each node; draws at one depth
      may share their randomness, as only one node per depth is ever reached.
    mask: bool[B, N, N], ancestors or self.
  """
  b, n = draft.token.shape
  parent = jnp.maximum(draft.parent, 0)
  agrees = (draft.parent != NO_PARENT) & (
      draft.token == jnp.take_along_axis(choice, parent, 1)) & ~_repeats(draft)
  agrees = agrees.at[:, 0].set(True)
  accepted = (agrees[:, None] | ~mask).all(-1)  # every ancestor agrees, and itself
  depth = mask.sum(-1) - 1
  at_depth = accepted[:, None] & (depth[:, None] == jnp.arange(n)[:, None])  # [B, D + 1, N]
  path = jnp.argmax(at_depth, -1).astype(jnp.int32)
  num_accepted = at_depth.any(-1).sum(-1, dtype=jnp.int32) - 1
  last = jnp.take_along_axis(path, num_accepted[:, None], 1)
  return Verdict(path, num_accepted, jnp.take_along_axis(choice, last, 1)[:, 0])


def _repeats(draft: DraftTree) -> jax.Array:
  """bool[B, N]: an earlier sibling holds the same token."""
  same = (draft.parent[:, :, None] == draft.parent[:, None]) & (
      draft.token[:, :, None] == draft.token[:, None])
  return jnp.tril(same, -1).any(-1)


def verify(draft: DraftTree, scores: jax.Array, of_node: jax.Array, u_accept: jax.Array,
           u_bonus: jax.Array) -> Verdict:
  """The rule with sampled drafts (draft.q_probs given), or without.

  Works from log-space: of p only single entries are looked at, until a refusal needs all of one
  row. At most one distribution per slot exists at a time, never [B, N, V] of them.

  Args:
    scores: f32[R, V], the target's distribution at each row, as logarithms up to a constant.
    of_node: i32[B, N], the row of each node; out of range for nodes that are not in use.
    u_accept: [B, N] uniforms in [0, 1), one per node and independent.
    u_bonus: [B, D + 1] uniforms, by the number of accepted tokens; D is N - 1.
  """
  b, num_nodes = draft.token.shape
  slot = jnp.arange(b)
  normaliser = jax.nn.logsumexp(scores, -1)
  row_of = lambda node: jnp.minimum(of_node[slot, node], scores.shape[0] - 1)

  def p_after(node):
    row = row_of(node)
    return jnp.exp(scores[row] - normaliser[row][:, None])

  def visit(carry, i):
    current, refused, rest, path, depth = carry  # rest: f32[B, V], p after a refusal at `current`
    x = draft.token[:, i]
    q = jax.nn.one_hot(x, scores.shape[1], dtype=scores.dtype) if draft.q_probs is None else (
        draft.q_probs[:, i])
    row = row_of(current)
    p_x = jnp.where(refused, rest[slot, x], jnp.exp(scores[row, x] - normaliser[row]))
    tried = draft.parent[:, i] == current
    accepted = tried & (u_accept[:, i] * q[slot, x] < p_x)
    refuses = tried & ~accepted

    def refuse(rest):
      p = jnp.where(refused[:, None], rest, p_after(current))
      return jnp.where(refuses[:, None], residual(p, q), rest)

    rest = run_if(refuses.any(), refuse, rest)
    depth = depth + accepted
    path = path.at[slot, jnp.where(accepted, depth, num_nodes)].set(i, mode="drop")
    return (jnp.where(accepted, i, current), (refused | refuses) & ~accepted, rest, path,
            depth), None

  zero = jnp.zeros(b, jnp.int32)
  start = (zero, zero > 0, jnp.zeros((b, scores.shape[1]), scores.dtype),
           jnp.zeros((b, num_nodes), jnp.int32), zero)
  (current, refused, rest, path, depth), _ = jax.lax.scan(
      visit, start, jnp.arange(1, num_nodes, dtype=jnp.int32))
  p = jnp.where(refused[:, None], rest, p_after(current))
  return Verdict(path, depth, sampling.inverse_cdf(p, u_bonus[slot, depth]))


def verify_block(draft: DraftTree, scores: jax.Array, of_node: jax.Array, u_accept: jax.Array,
                 u_bonus: jax.Array) -> Verdict:
  """Judges a sampled chain as a whole; arguments as in `verify`.

  Carries w_i = min(1, w_(i-1) p(x_i) / q(x_i)), which a later, likelier token can make good again.
  The prefix of i tokens passes with probability h_i; the longest one that passes is accepted, and
  the bonus token is drawn from norm(max(w_i p - q, 0)).
  """
  b, num_nodes = draft.token.shape
  slot = jnp.arange(b)
  used = draft.parent != NO_PARENT  # [B, N], a chain: the used nodes come first
  one = jnp.ones(b, scores.dtype)
  q_probs: Any = draft.q_probs

  def visit(carry, i):
    w, accepted, rest = carry  # rest: f32[B, V], the law of the bonus token there
    row = jnp.minimum(of_node[:, i], scores.shape[0] - 1)
    p = jax.nn.softmax(scores[row])
    following = jnp.minimum(i + 1, num_nodes - 1)
    goes_on = (i + 1 < num_nodes) & used[:, following]
    q = q_probs[:, following]
    excess = jnp.maximum(w[:, None] * p - q, 0)
    total = excess.sum(-1)
    # Nothing in excess at w = 1 means p = q: what follows passes anyway.
    passes = jnp.where(total > 0, total / jnp.where(total > 0, total + 1 - w, 1), w >= 1)
    passes = jnp.where(goes_on, passes, w)
    here = (i == 0) | (used[:, i] & (u_accept[:, i] < passes))
    left = jnp.where((goes_on & (total > 0))[:, None], excess / jnp.where(total > 0, total, 1)[
        :, None], p)
    x = draft.token[:, following]
    ratio = p[slot, x] / jnp.where(q[slot, x] > 0, q[slot, x], 1)
    return (jnp.where(goes_on, jnp.minimum(1, w * ratio), w), jnp.where(here, i, accepted),
            jnp.where(here[:, None], left, rest)), None

  start = one, jnp.zeros(b, jnp.int32), jnp.zeros((b, scores.shape[1]), scores.dtype)
  (_, accepted, rest), _ = jax.lax.scan(visit, start, jnp.arange(num_nodes, dtype=jnp.int32))
  path = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), (b, num_nodes))
  path = jnp.where(path <= accepted[:, None], path, 0)
  return Verdict(path, accepted, sampling.inverse_cdf(rest, u_bonus[slot, accepted]))


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
  """norm(max(p - q, 0)); p itself where nothing is left, which only rounding can bring about."""
  rest = jnp.maximum(p - q, 0)
  total = rest.sum(-1, keepdims=True)
  return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)
