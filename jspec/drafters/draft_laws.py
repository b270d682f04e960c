"""A draft's distribution, and siblings drawn from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.speculation import sampling, tree


def draft_law(logits: jax.Array, temperature: jax.Array) -> jax.Array:
  """q of draft logits f32[B, n, Vd] at the request's temperature f32[B]; one-hot where it is 0."""
  t = temperature[:, None, None]
  below = logits - logits.max(-1, keepdims=True)  # so that no temperature overflows the maximum
  return jnp.where(t > 0, jax.nn.softmax(below / jnp.where(t > 0, t, 1)),
                   jax.nn.one_hot(logits.argmax(-1), logits.shape[-1]))


def draft_uniforms(key: jax.Array, level: int, shape: tuple[int, ...]) -> jax.Array:
  """f32[B, *shape] for the draws of one level of the tree, from the keys [B] of Slots."""
  return jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, level), shape))(key)


def siblings(logits: jax.Array, temperature: jax.Array,
             u: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Tokens drawn without replacement, and the law each was drawn from given its elders.

  Greedy slots get the likeliest tokens, each a point mass.

  Args:
    logits: f32[B, n, Vd]. temperature: f32[B]. u: uniforms f32[B, n, width], width <= Vd.
  Returns:
    i32[B, n, width], f32[B, n, width, Vd].
  """
  b, n, v = logits.shape
  tokens, laws = [], []
  for i in range(u.shape[-1]):
    q = draft_law(logits, temperature)
    token = sampling.inverse_cdf(q.reshape(-1, v), u[..., i].reshape(-1)).reshape(b, n)
    tokens.append(token)
    laws.append(q)
    logits = jnp.where(jnp.arange(v) == token[..., None], -jnp.inf, logits)
  return jnp.stack(tokens, -1), jnp.stack(laws, -2)


def to_target(q: jax.Array, target_id: jax.Array | None, vocab_size: int) -> jax.Array:
  """q over a draft vocabulary, f32[..., Vd], as one over the target's: 0 elsewhere."""
  if target_id is None:
    return q
  return jnp.zeros((*q.shape[:-1], vocab_size), q.dtype).at[..., target_id].set(q)


def check_stop(confidence: float, shape: tree.Shape) -> None:
  """Refuses a confidence for drafts that are no chains."""
  if confidence and not shape.is_chain:
    raise ValueError(f"{confidence=} is for chains, not for trees: it may stop a chain, but this "
                     f"tree has {shape.num_nodes - 1} nodes at {shape.max_depth} depths")


def confident(logits: jax.Array, threshold: float) -> jax.Array:
  """bool[...]: whether the likeliest of the draft logits f32[..., Vd] has that probability.

  A chain may stop where it is not: the choice looks at the law of the next token, never at the
  token, so it cannot bias what is drafted.
  """
  return jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1)) >= threshold
