"""Rules of acceptance that change the text. Nothing here keeps the target's distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.speculation import sampling
from jspec.types import NO_PARENT, DraftTree, Verdict


def verify_lossy_typical(draft: DraftTree, scores: jax.Array, of_node: jax.Array, mask: jax.Array,
                         u_bonus: jax.Array, threshold: float, alpha: float) -> Verdict:
  """Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1): what is not unlikely passes.

  A node passes where p(x) > min(threshold, alpha * exp(-H(p))), H the entropy of p, and so do all
  before it. The longest path wins; of several the one of the largest sum of log p. Greedy slots
  accept the target's argmax alone. The bonus token is drawn from p.

  Args:
    scores: f32[R, V], log p at each row up to a constant. of_node: i32[B, N].
    mask: bool[B, N, N], ancestors or self. u_bonus: [B, N] uniforms, by accepted tokens.
  """
  b, n = draft.token.shape
  log_p = jax.nn.log_softmax(scores)
  p = jnp.exp(log_p)
  entropy = -jnp.sum(p * jnp.log(p + 1e-5), -1)
  row = jnp.minimum(of_node, scores.shape[0] - 1)
  of_parent = jnp.take_along_axis(row, jnp.maximum(draft.parent, 0), 1)
  log_p_x = log_p[of_parent, draft.token]
  bound = jnp.minimum(threshold, alpha * jnp.exp(-entropy))[of_parent]
  passes = (draft.parent != NO_PARENT) & (jnp.exp(log_p_x) > bound)
  passes = passes.at[:, 0].set(True)
  log_p_x = log_p_x.at[:, 0].set(0)
  accepted = (passes[:, None] | ~mask).all(-1)
  depth = mask.sum(-1, dtype=jnp.int32) - 1
  longest = jnp.where(accepted, depth, -1).max(-1, keepdims=True)
  likelihood = jnp.where(mask, jnp.maximum(log_p_x, -1e30)[:, None], 0).sum(-1)
  best = jnp.argmax(jnp.where(accepted & (depth == longest), likelihood, -jnp.inf), -1)
  path = _path_to(best, mask, depth)
  num_accepted = longest[:, 0]
  last = row[jnp.arange(b), best]
  return Verdict(path, num_accepted,
                 sampling.inverse_cdf(p[last], u_bonus[jnp.arange(b), num_accepted]))


def verify_lossy_synthetic(draft: DraftTree, scores: jax.Array, of_node: jax.Array,
                           mask: jax.Array, u_accept: jax.Array, u_bonus: jax.Array,
                           rates: tuple[float, ...]) -> Verdict:
  """Accepts by the coin, for benchmarks: i tokens pass with probability rates[i - 1].

  Along the tree's first nodes; what the tokens are plays no part. rates never rise, so one uniform
  per step, u_accept[:, 0], decides. The bonus token is drawn from p. Other arguments as in
  `verify_lossy_typical`.
  """
  b, n = draft.token.shape
  depth = mask.sum(-1, dtype=jnp.int32) - 1
  used = (draft.parent != NO_PARENT).at[:, 0].set(True)
  first = jnp.ones((b, 1), bool)
  for i in range(1, n):  # a node is first if its parent is and no elder sibling is there
    elder = (draft.parent[:, :i] == draft.parent[:, i:i + 1]) & used[:, :i]
    elder = elder.at[:, 0].set(False)
    on_path = jnp.take_along_axis(first, jnp.maximum(draft.parent[:, i:i + 1], 0), 1)
    first = jnp.concatenate([first, on_path & used[:, i:i + 1] & ~elder.any(1, keepdims=True)], 1)
  wanted = (u_accept[:, :1] < jnp.array(rates)).sum(-1, dtype=jnp.int32)
  taken = first & (depth <= wanted[:, None])
  num_accepted = jnp.where(taken, depth, 0).max(-1)
  last = jnp.argmax(taken & (depth == num_accepted[:, None]), -1)
  row = jnp.minimum(of_node, scores.shape[0] - 1)[jnp.arange(b), last]
  p = jax.nn.softmax(scores[row])
  return Verdict(_path_to(last, mask, depth), num_accepted,
                 sampling.inverse_cdf(p, u_bonus[jnp.arange(b), num_accepted]))


def _path_to(node: jax.Array, mask: jax.Array, depth: jax.Array) -> jax.Array:
  """i32[B, N]: the ancestors of node[B], by depth, and 0 beyond it."""
  above = jnp.take_along_axis(mask, node[:, None, None], 1)  # bool[B, 1, N]
  at_depth = above & (depth[:, None] == jnp.arange(mask.shape[1])[:, None])
  return jnp.argmax(at_depth, -1).astype(jnp.int32)
