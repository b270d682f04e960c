"""Ancestor masks as bits: what the attention kernels know of a token tree.

Row i of a tree of N nodes is W = ceil(N / 32) words; bit j % 32 of word j // 32 says that node j is
node i or an ancestor of it. Nodes not in use have no bits, not even their own. Node j's key lies at
column j, counted from the end of the committed prefix; columns below 0 are the prefix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WORD = 32


def pack(mask: jax.Array) -> jax.Array:
  """bool[..., N] -> u32[..., W]."""
  n = mask.shape[-1]
  mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -n % WORD)])
  mask = mask.reshape(*mask.shape[:-1], -1, WORD).astype(jnp.uint32)
  return (mask << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def unpack(words: jax.Array, num_nodes: int) -> jax.Array:
  """u32[..., W] -> bool[..., N]."""
  bits = words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)
  return (bits.reshape(*words.shape[:-1], -1)[..., :num_nodes] & 1) > 0


def depth(words: jax.Array) -> jax.Array:
  """u32[..., W] -> i32[...]: ancestors, the node itself not counted; -1 for nodes not in use."""
  return jax.lax.population_count(words).sum(-1).astype(jnp.int32) - 1


def columns_in_use(words: jax.Array) -> jax.Array:
  """u32[B, N, W] -> u32[B, W]: the nodes in use; every other column may hold anything."""
  return jax.lax.reduce(words, jnp.uint32(0), jax.lax.bitwise_or, (1,))


def within_window(words: jax.Array, window: int | None) -> jax.Array:
  """Takes out ancestors that lie `window` or more positions before the node, by depth."""
  num_nodes = words.shape[-2]
  if window is None or num_nodes <= window:
    return words
  level = depth(words)
  near = level[..., None, :] > (level - window)[..., :, None]
  return words & pack(near)


def has(words: jax.Array, column: jax.Array) -> jax.Array:
  """bool[B, N, C]: whether each row u32[B, N, W] has the bit `column` i32[B, C]; none outside.

  Shifts and selects only, where a gather from the mask would cost more than the attention.
  """
  column = column[:, None]
  word = jnp.zeros((), jnp.uint32)
  for i in range(words.shape[-1]):
    word = jnp.where(column >> 5 == i, words[..., i:i + 1], word)
  return (word >> (column & 31).astype(jnp.uint32)) & 1 > 0
