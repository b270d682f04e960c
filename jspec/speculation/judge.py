"""From logits to the verdict: the law at each node, the coins, and the rule that was asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.config import Verification
from jspec.speculation import sampling
from jspec.speculation.verify import verify, verify_block, verify_point_mass
from jspec.speculation.verify_lossy import verify_lossy_synthetic, verify_lossy_typical
from jspec.types import NO_PARENT, DraftTree, Rows, SpecState, Verdict


def judge(logits: jax.Array, draft: DraftTree, mask: jax.Array, rows: Rows, state: SpecState,
          sampled: bool, rule: Verification) -> tuple[Verdict, jax.Array]:
  """Which nodes are accepted, and the token after them; bool[B]: whether there is none.

  Nothing is accepted below a node whose logits are NaN or infinite; no token follows a path that
  ends there. Drafts of a law that is NaN count as not made.

  Args:
    logits: f32[R, V], of the rows. mask: bool[B, N, N], ancestors or self.
    sampled: whether the draft has q_probs.
  """
  broken = jnp.take(sampling.broken(logits), rows.of_node, mode="fill", fill_value=False)
  useless = (mask & broken[:, None]).sum(-1) > broken  # a proper ancestor is broken
  if draft.q_probs is not None:
    useless |= (mask & _lawless(draft.token, draft.q_probs)[:, None]).any(-1)
  draft = draft.replace(parent=jnp.where(useless, NO_PARENT, draft.parent))
  verdict = _verdict(logits, draft, mask, rows, state, sampled, rule)
  end = jnp.take_along_axis(verdict.path, verdict.num_accepted[:, None], 1)
  return verdict, jnp.take_along_axis(broken, end, 1)[:, 0]


def _lawless(token: jax.Array, q_probs: jax.Array) -> jax.Array:
  """bool[B, N]: drafted by NaN logits, of which every probability is NaN."""
  b, n, v = q_probs.shape
  q = sampling.pick(q_probs.reshape(b * n, v), token.reshape(-1, 1)).reshape(b, n)
  return jnp.isnan(q).at[:, 0].set(False)


def _verdict(logits: jax.Array, draft: DraftTree, mask: jax.Array, rows: Rows, state: SpecState,
             sampled: bool, rule: Verification) -> Verdict:
  context = sampling.node_context(draft, rows, mask)
  if not sampled and rule.name == "lossless":
    position = state.length[rows.slot] + context.depth + 1
    u = sampling.uniforms(state.key[rows.slot], position, sampling.TARGET)
    choice = sampling.choose(logits, state.sampling, state.num_output, state.active, context, u)
    choice = jnp.take(choice, rows.of_node, mode="fill", fill_value=0)
    return verify_point_mass(draft, choice, mask)
  scores = sampling.target_scores(logits, state.sampling, state.num_output, context)
  u_accept, u_bonus = _coins(mask, state)
  if rule.name == "lossy_typical":
    return verify_lossy_typical(draft, scores, rows.of_node, mask, u_bonus,
                                rule.posterior_threshold, rule.posterior_alpha)
  if rule.name == "lossy_synthetic":
    return verify_lossy_synthetic(draft, scores, rows.of_node, mask, u_accept, u_bonus, rule.rates)
  by = verify_block if rule.name == "block" else verify
  return by(draft, scores, rows.of_node, u_accept, u_bonus)


def _coins(mask: jax.Array, state: SpecState) -> tuple[jax.Array, jax.Array]:
  """Uniforms f32[B, N]: one for each node, and one for each number of accepted tokens."""
  n = mask.shape[1]
  ahead = state.length[:, None] + jnp.arange(1, n + 1)
  position = state.length[:, None] + mask.sum(-1) - 1
  draw = lambda key, at: jax.vmap(jax.random.uniform)(sampling.fold_keys(
      jnp.broadcast_to(key, at.shape), at, sampling.TARGET))
  u_bonus = jax.vmap(draw)(state.key, ahead)
  accept_keys = jax.vmap(lambda key, at: sampling.fold_keys(
      jnp.broadcast_to(key, at.shape), at, sampling.ACCEPT))(state.key, position)
  # Siblings share a position: the node number sets their coins apart.
  u_accept = jax.vmap(jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i))),
                      (0, None))(accept_keys, jnp.arange(n))
  return u_accept, u_bonus
