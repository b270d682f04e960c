"""Paged tree attention in jax.numpy: the oracle for every kernel, and the CPU path.

Walks the pages of all slots in step, chunk by chunk, with an online softmax (Milakov and
Gimelshein 2018, alg. 3), as far as the longest slot reaches: the cost follows the lengths, not
max_pages. A chunk that is wholly masked for a slot changes nothing in it, not even by rounding,
so a slot's result does not depend on its company.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.pallas import tree_bits

CHUNK = 128  # tokens per pass of the loop: 128 beat 256 and 512 on two CPU cores, 29 Nov 2026
MASKED = -1e30  # finite, so that a fully masked chunk gives exp(MASKED - max) == 0, not NaN


def paged_attention(
    q: jax.Array,  # [B, N, H, h]
    k_pages: jax.Array,  # [P, S, K*h]
    v_pages: jax.Array,  # [P, S, K*h]
    page_table: jax.Array,  # i32[B, max_pages], any number where a slot has no page
    length: jax.Array,  # i32[B], committed tokens: columns below it are visible to all nodes
    ancestors: jax.Array,  # u32[B, N, W], see tree_bits; column j lies at length + j
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    first_visible: int = 0,
    is_chain: bool = False,
    k_scale: jax.Array | None = None,  # f32[P, K, S]
    v_scale: jax.Array | None = None,  # f32[P, K, S]
) -> jax.Array:
  """Attention of N tree nodes over each slot's committed prefix and their own ancestors.

  The nodes' own keys and values must already be in the pages, node j at position length + j.
  What else lies in the pages, NaN included, does not matter. `window` counts visible positions, the
  node's own included; a node's position is length + depth. Positions below `first_visible` are
  never seen. `is_chain` promises that each node's parent is the node before it and that the columns
  in use come first. 8-bit pages hold value / scale, one scale for each head and position.

  Returns [B, N, H, h] in q's dtype: 0 for a node that sees nothing, any finite numbers for a node
  not in use.
  """
  b, n, num_heads, head_dim = q.shape
  page_size = k_pages.shape[1]
  num_kv = k_pages.shape[2] // head_dim
  group = num_heads // num_kv
  per_chunk = max(1, min(CHUNK // page_size, page_table.shape[1]))
  chunk = per_chunk * page_size
  max_chunks = -(-page_table.shape[1] // per_chunk)
  table = jnp.pad(page_table, ((0, 0), (0, max_chunks * per_chunk - page_table.shape[1])))
  depth = tree_bits.depth(ancestors)  # i32[B, N]
  words = tree_bits.within_window(ancestors, window)
  in_use = tree_bits.columns_in_use(ancestors)
  # A slot none of whose nodes is in use makes nobody wait.
  reach = jnp.where((in_use > 0).any(-1), length + n, 0).max()
  queries = (q * jnp.asarray(scale, q.dtype)).reshape(b, n, num_kv, group, head_dim)
  queries = queries.transpose(0, 2, 3, 1, 4).reshape(b, num_kv, group * n, head_dim)

  def load(pages, scales, ids, owned):
    """f32 or bf16 [B, K, C, h]; what a slot does not own is 0, as 0 * NaN is NaN."""
    x = values(pages[ids]).reshape(b, chunk, num_kv, head_dim).transpose(0, 2, 1, 3)
    if scales is not None:
      s = scales[ids].transpose(0, 2, 1, 3).reshape(b, num_kv, chunk, 1)
      x = (x.astype(jnp.float32) * s).astype(q.dtype)
    return jnp.where(owned, x, 0)

  def visible_columns(column):
    """bool[B, N, C]."""
    if is_chain:
      seen = column[:, None] <= jnp.arange(n)[:, None]
    else:
      seen = (column < 0)[:, None] | tree_bits.has(words, column)
    if window is not None:
      oldest = (depth - window)[:, :, None] if not is_chain else jnp.arange(n)[:, None] - window
      # The bits have seen to the tree's own columns.
      seen &= (column[:, None] > oldest) | ((column[:, None] >= 0) & (not is_chain))
    if first_visible:
      seen &= (column + length[:, None] >= first_visible)[:, None]
    return seen

  def attend(i, carry):
    top, total, acc = carry  # f32 [B, K, G*N, 1], [B, K, G*N, 1], [B, K, G*N, h]
    ids = jax.lax.dynamic_slice_in_dim(table, i * per_chunk, per_chunk, axis=1)
    column = i * chunk + jnp.arange(chunk) - length[:, None]  # i32[B, C], < 0 in the prefix
    owned = (column < 0) | tree_bits.has(in_use[:, None], column)[:, 0]
    owned = owned[:, None, :, None]
    # Head-major copies, made here and not left to the products: XLA:CPU takes twice as long else.
    k, v = jax.lax.optimization_barrier(
        (load(k_pages, k_scale, ids, owned), load(v_pages, v_scale, ids, owned)))
    scores = jnp.einsum("bkgh,bkch->bkgc", queries, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = scores.reshape(b, num_kv, group, n, chunk)
    scores = jnp.where(visible_columns(column)[:, None, None], scores, MASKED)
    scores = scores.reshape(b, num_kv, group * n, chunk)
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
  num_chunks = jnp.minimum((reach + chunk - 1) // chunk, max_chunks)
  _, total, acc = jax.lax.fori_loop(0, num_chunks, attend, start)
  out = jnp.where(total > 0, acc / jnp.where(total > 0, total, 1.0), 0.0)
  out = out.reshape(b, num_kv, group, n, head_dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(b, n, num_heads, head_dim).astype(q.dtype)


def values(x: jax.Array) -> jax.Array:
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
