"""The paged KV cache: slot arithmetic, writes and the commit of an accepted path.

The layout is one [P, S, K*h] buffer per layer: updated in place by XLA on CPU, GPU and TPU, where
a stacked or head-major pool is copied every step. Pages of 8 bits hold value / scale, and a scale
per head and position, [P, K, S], beside them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.config import KV_DTYPES, ModelConfig
from jspec.types import KVPages, Rows, Tails, Verdict

NOWHERE = jnp.iinfo(jnp.int32).max  # the page id of what must not be written


def stored_dtype(kv_cache_dtype: str, dtype: str, platform: str) -> jnp.dtype:
  """The dtype of the page buffers; kv_cache_dtype "auto" is the model's own."""
  dtype = KV_DTYPES[kv_cache_dtype] or dtype
  if dtype == "bfloat16" and platform == "cpu":
    dtype = "uint16"  # its bits: XLA:CPU scatters into bfloat16 by way of all of it in float32
  return jnp.dtype(dtype)


def init_pages(config: ModelConfig, num_pages: int, page_size: int, dtype) -> KVPages:
  """Empty pages of a `stored_dtype`."""
  shape = (num_pages, page_size, config.num_kv_heads * config.head_dim)
  per_layer = lambda *args: tuple(jnp.zeros(*args) for _ in range(config.num_layers))
  scales = lambda: per_layer((num_pages, config.num_kv_heads, page_size)) if is_scaled(
      dtype) else ()
  return KVPages(per_layer(shape, dtype), per_layer(shape, dtype), scales(), scales())


def is_scaled(dtype) -> bool:
  return jnp.dtype(dtype).itemsize == 1


def locate(page_table: jax.Array, position: jax.Array,
           page_size: int) -> tuple[jax.Array, jax.Array]:
  """Page and offset of positions i32[B, T]; beyond the table the page is NOWHERE."""
  index = position // page_size
  page = jnp.take_along_axis(page_table, jnp.minimum(index, page_table.shape[1] - 1), axis=1)
  return jnp.where(index >= page_table.shape[1], NOWHERE, page), position % page_size


def locate_rows(rows: Rows, page_table: jax.Array, length: jax.Array,
                page_size: int) -> tuple[jax.Array, jax.Array]:
  """Page and offset of each row's node, at length + node; of invalid rows NOWHERE."""
  position = (length[rows.slot] + rows.node)[:, None]
  page, offset = locate(page_table[rows.slot], position, page_size)
  return jnp.where(rows.valid, page[:, 0], NOWHERE), offset[:, 0]


def write(pages: jax.Array, scales: jax.Array | None, page: jax.Array, offset: jax.Array,
          x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
  """One layer's keys or values x[R, K*h] at (page, offset)[R]; pages NOWHERE are dropped.

  Args:
    pages: [P, S, K*h]. scales: f32[P, K, S] for pages of 8 bits, else None.
  """
  if scales is not None:
    x, scale = quantised(x, scales.shape[1], pages.dtype)
    scales = _write_scales(scales, page, offset, scale)
  elif x.dtype != pages.dtype:
    x = jax.lax.bitcast_convert_type(x, pages.dtype)
  return pages.at[page, offset].set(x, mode="drop"), scales


def _write_scales(scales: jax.Array, page: jax.Array, offset: jax.Array,
                  x: jax.Array) -> jax.Array:
  """scales[P, K, S] with x[R, K] at (page, offset)[R], by whole pages.

  XLA for TPU updates pages in place; single columns it writes into a copy of the pool. Rows of
  one page all write that page, with everybody's columns in it. A scale that is not finite stays
  NaN, in its own column: a product with it would spread to all.
  """
  x = jnp.where(jnp.isfinite(x), x, -1)  # scales are >= 0
  here = jax.nn.one_hot(offset, scales.shape[2], dtype=x.dtype)  # [R, S]
  together = (page[:, None] == page).astype(x.dtype)
  gathered = lambda a: jnp.einsum("ij,j...->i...", together, a, precision="highest")
  old = scales[jnp.minimum(page, scales.shape[0] - 1)]
  given = gathered(x[:, :, None] * here[:, None])
  given = jnp.where(given < 0, jnp.nan, given)
  new = jnp.where(gathered(here)[:, None] > 0, given, old)
  return scales.at[page].set(new, mode="drop")


def quantised(x: jax.Array, num_kv_heads: int, dtype) -> tuple[jax.Array, jax.Array]:
  """x[R, K*h] as (values [R, K*h] of an 8-bit dtype, scale f32[R, K]): x is about value * scale."""
  y = x.astype(jnp.float32).reshape(x.shape[0], num_kv_heads, -1)
  largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
  scale = jnp.abs(y).max(-1, keepdims=True) / largest
  y = y / jnp.where(scale > 0, scale, 1)
  y = jnp.round(y) if dtype == jnp.int8 else jnp.clip(y, -largest, largest)
  return y.astype(dtype).reshape(x.shape), scale[..., 0]


def commit(pages: KVPages, page_table: jax.Array, length: jax.Array, verdict: Verdict) -> KVPages:
  """Moves the accepted path's KV from its tree slots to consecutive ones.

  Chains need no call: their nodes already lie where they belong.
  """
  depth = jnp.arange(verdict.path.shape[1])
  size = pages.k[0].shape[1]
  from_page, from_offset = locate(page_table, length[:, None] + verdict.path, size)
  page, offset = locate(page_table, jnp.broadcast_to(length[:, None] + depth, verdict.path.shape),
                        size)
  moves = (depth <= verdict.num_accepted[:, None]) & (verdict.path != depth)
  page = jnp.where(moves, page, NOWHERE)
  values = lambda x: x.at[page, offset].set(x[from_page, from_offset], mode="drop")

  def scales(x):
    rows = x[jnp.minimum(from_page.reshape(-1), x.shape[0] - 1)]
    moved = jnp.take_along_axis(rows, from_offset.reshape(-1, 1, 1), axis=2)[..., 0]
    return _write_scales(x, page.reshape(-1), offset.reshape(-1), moved)

  both = lambda move, layers: tuple(map(move, layers))
  return KVPages(both(values, pages.k), both(values, pages.v), both(scales, pages.k_scale),
                 both(scales, pages.v_scale))


def init_tails(num_pages: int, width: int, feature_width: int) -> Tails:
  return Tails(jnp.zeros((num_pages, width)), jnp.zeros((num_pages, feature_width)))


def write_tails(tails: Tails, page_table: jax.Array, length: jax.Array, count: jax.Array,
                page_size: int, hidden: jax.Array, feature: jax.Array) -> Tails:
  """Keeps the rows of those of count[B] tokens from length[B] on that end a page.

  Args:
    hidden: [B, T, E]. feature: [B, T, F].
  """
  step = jnp.arange(hidden.shape[1])
  page, offset = locate(page_table, length[:, None] + step, page_size)
  ends = (offset == page_size - 1) & (step < count[:, None])
  page = jnp.where(ends, page, NOWHERE)
  put = lambda old, new: old.at[page].set(new.astype(old.dtype), mode="drop")
  return Tails(put(tails.hidden, hidden), put(tails.feature, feature))


def tail_before(tails: Tails, page_table: jax.Array, length: jax.Array, page_size: int) -> Tails:
  """The rows of the tokens at length - 1, one slot each, where length[B] is whole pages."""
  last = jnp.maximum(length[:, None] - 1, 0)
  page = jnp.minimum(locate(page_table, last, page_size)[0][:, 0], tails.hidden.shape[0] - 1)
  return jax.tree.map(lambda x: jnp.where(length[:, None] > 0, x[page], 0), tails)
