"""A text kept in pages, under the target's page ids: what drafters that copy look things up in."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jspec.model import cache
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
