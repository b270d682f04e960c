"""Paged tree attention in jax.numpy: the oracle for every kernel, and the CPU path.

Walks the pages of all slots in step, chunk by chunk, with an online softmax (Milakov and
Gimelshein 2018, alg. 3), as far as the longest slot reaches: the cost follows the lengths, not
max_pages. A chunk that is wholly masked for a slot changes nothing in it, not even by rounding,
so a slot's result does not depend on its company.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 128  # tokens per pass of the loop: 128 beat 256 and 512 on two CPU cores, 29 Nov 2026
MASKED = -1e30  # finite, so that a fully masked chunk gives exp(MASKED - max) == 0, not NaN


def paged_attention(
    q: jax.Array,  # [B, N, H, h]
    k_pages: jax.Array,  # [P, S, K*h]
    v_pages: jax.Array,  # [P, S, K*h]
    page_table: jax.Array,  # i32[B, max_pages]
    length: jax.Array,  # i32[B], committed tokens: columns below it are visible to all nodes
    tree_mask: jax.Array,  # bool[B, N, N], ancestors or self; column j lies at length + j
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    first_visible: int = 0,
) -> jax.Array:
  """Attention of N tree nodes over each slot's committed prefix and their own ancestors.

  The nodes' own keys and values must already be in the pages, node j at position length + j.
  `window` counts visible positions, the node's own included; a node's position is length + depth.
  Positions below `first_visible` are never seen. Returns [B, N, H, h] in q's dtype.
  """
  b, n, num_heads, head_dim = q.shape
  page_size = k_pages.shape[1]
  num_kv = k_pages.shape[2] // head_dim
  group = num_heads // num_kv
  per_chunk = max(1, min(CHUNK // page_size, page_table.shape[1]))
  chunk = per_chunk * page_size
  max_chunks = -(-page_table.shape[1] // per_chunk)
  table = jnp.pad(page_table, ((0, 0), (0, max_chunks * per_chunk - page_table.shape[1])))
  words = pack_bits(tree_mask)
  depth = tree_mask.sum(-1, dtype=jnp.int32) - 1  # i32[B, N]
  position = length[:, None] + depth
  queries = (q * jnp.asarray(scale, q.dtype)).reshape(b, n, num_kv, group, head_dim)
  queries = queries.transpose(0, 2, 3, 1, 4).reshape(b, num_kv, group * n, head_dim)

  def attend(i, carry):
    top, total, acc = carry  # f32 [B, K, G*N, 1], [B, K, G*N, 1], [B, K, G*N, h]
    ids = jax.lax.dynamic_slice_in_dim(table, i * per_chunk, per_chunk, axis=1)
    column = i * chunk + jnp.arange(chunk) - length[:, None]  # i32[B, C], < 0 in the prefix
    owned = (column < n)[:, None, :, None]  # elsewhere there may be anything, and 0 * NaN is NaN
    # Head-major copies, made here and not left to the products: XLA:CPU takes twice as long else.
    k, v = jax.lax.optimization_barrier(tuple(
        jnp.where(owned, _values(pages[ids]).reshape(b, chunk, num_kv, head_dim).transpose(
            0, 2, 1, 3), 0) for pages in (k_pages, v_pages)))
    visible = (column < 0)[:, None] | in_tree(words, column)
    absolute = column + length[:, None]
    if window is not None:
      # A tree column's position is its node's length + depth, not its slot.
      tree_at = jnp.take_along_axis(position, jnp.clip(column, 0, n - 1), axis=1)
      at = jnp.where(column < 0, absolute, tree_at)
      visible &= at[:, None] > (position - window)[:, :, None]
    if first_visible:
      visible &= (absolute >= first_visible)[:, None]
    scores = jnp.einsum("bkgh,bkch->bkgc", queries, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = scores.reshape(b, num_kv, group, n, chunk)
    scores = jnp.where(visible[:, None, None], scores, MASKED).reshape(b, num_kv, group * n, chunk)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weight = jnp.exp(scores - new_top)
    # A row that has seen nothing yet has weight exp(0) on masked columns: take it out.
    weight = jnp.where(scores > MASKED / 2, weight, 0.0)
    shrink = jnp.exp(top - new_top)
    total = total * shrink + tree_sum(weight)
    out = jnp.einsum("bkgc,bkch->bkgh", weight.astype(v.dtype), v,
                     preferred_element_type=jnp.float32)
    return new_top, total, acc * shrink + out

  rows = (b, num_kv, group * n)
  start = (jnp.full((*rows, 1), MASKED), jnp.zeros((*rows, 1)), jnp.zeros((*rows, head_dim)))
  num_chunks = jnp.minimum((length.max() + n + chunk - 1) // chunk, max_chunks)
  _, total, acc = jax.lax.fori_loop(0, num_chunks, attend, start)
  out = jnp.where(total > 0, acc / jnp.where(total > 0, total, 1.0), 0.0)
  out = out.reshape(b, num_kv, group, n, head_dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(b, n, num_heads, head_dim).astype(q.dtype)


def pack_bits(mask: jax.Array) -> jax.Array:
  """bool[B, N, N] -> u32[B, N, W]: bit j % 32 of word j // 32 is column j."""
  b, n, _ = mask.shape
  mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -n % 32))).reshape(b, n, -1, 32)
  return (mask.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def in_tree(words: jax.Array, column: jax.Array) -> jax.Array:
  """bool[B, N, C]: whether each row's bit `column` i32[B, C] is set; columns outside are not.

  Shifts and selects only, where a gather from the mask would cost more than the attention.
  """
  column = column[:, None]
  word = jnp.zeros((), jnp.uint32)
  for i in range(words.shape[-1]):
    word = jnp.where(column >> 5 == i, words[..., i:i + 1], word)
  return (word >> (column & 31).astype(jnp.uint32)) & 1 > 0


def _values(x: jax.Array) -> jax.Array:
  """Pages held as bits (see cache.init_pages) as the numbers they are."""
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def tree_sum(x: jax.Array) -> jax.Array:
  """Sum over the last axis, kept, by pairwise halving: the same bits for any leading shape.

  XLA's own reduction changes its order with the number of rows, which would make a wide
  verification pass differ from plain decoding in the last bit.
  """
  size = x.shape[-1]
  while size > 1:
    half = (size + 1) // 2
    low, high = x[..., :half], x[..., half:size]
    if size % 2:
      high = jnp.concatenate([high, jnp.zeros_like(x[..., :1])], -1)
    x, size = low + high, half
  return x
