"""What drafters share: a text kept in pages, the draft's distribution, siblings drawn from it."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jspec import cache, sampling, tree
from jspec.types import PAD_TOKEN, Committed, Slots


class TextPages(flax.struct.PyTreeNode):
  """What was committed, under the target's page ids: shared pages bring their text along."""

  token: jax.Array  # i32[P, S]; stale beyond the committed length


def init_text(num_pages: int, page_size: int) -> TextPages:
  return TextPages(jnp.full((num_pages, page_size), PAD_TOKEN, jnp.int32))


def append_text(text: TextPages, slots: Slots, committed: Committed) -> TextPages:
  """With the committed tokens at their places."""
  at = committed_places(slots, committed, text.token.shape[1])
  return TextPages(text.token.at[at].set(committed.token, mode="drop"))


def committed_places(slots: Slots, committed: Committed,
                     page_size: int) -> tuple[jax.Array, jax.Array]:
  """(page, offset) i32[B, T] of each committed token; nowhere for those that are not real."""
  step = jnp.arange(committed.token.shape[1])
  page, offset = cache.locate(slots.page_table, slots.length[:, None] + step, page_size)
  return jnp.where(step < committed.count[:, None], page, cache.NOWHERE), offset


def text_of(text: TextPages, slots: Slots, root: jax.Array, max_len: int) -> jax.Array:
  """i32[B, max_len]: each slot's text, its root at index length; stale beyond."""
  page = slots.page_table[:, :-(-max_len // text.token.shape[1])]
  own = jnp.take(text.token, page, axis=0, mode="fill", fill_value=PAD_TOKEN)
  own = own.reshape(root.shape[0], -1)
  own = jnp.pad(own, ((0, 0), (0, max(0, max_len - own.shape[1]))))[:, :max_len]
  return own.at[jnp.arange(root.shape[0]), slots.length].set(root, mode="drop")


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
