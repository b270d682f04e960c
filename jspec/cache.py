"""The paged KV cache: slot arithmetic, writes and the commit of an accepted path.

The layout is one [P, S, K*h] buffer per layer: updated in place by XLA on CPU, GPU and TPU, where
a stacked or head-major pool is copied every step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.types import KVPages, Rows, Verdict


def init_pages(config: ModelConfig, num_pages: int, page_size: int, dtype) -> KVPages:
  shape = (num_pages, page_size, config.num_kv_heads * config.head_dim)
  if dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
    dtype = jnp.uint16  # its bits: XLA:CPU scatters into bfloat16 by way of all of it in float32
  zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
  return KVPages(zeros(), zeros())


def locate(page_table: jax.Array, position: jax.Array,
           page_size: int) -> tuple[jax.Array, jax.Array]:
  """Page and offset of positions i32[B, T]; beyond the table the page is out of range."""
  index = position // page_size
  page = jnp.take_along_axis(page_table, jnp.minimum(index, page_table.shape[1] - 1), axis=1)
  beyond = index >= page_table.shape[1]
  return jnp.where(beyond, jnp.iinfo(jnp.int32).max, page), position % page_size


def locate_rows(rows: Rows, page_table: jax.Array, length: jax.Array,
                page_size: int) -> tuple[jax.Array, jax.Array]:
  """Page and offset of each row's node, at length + node; invalid rows lie out of range."""
  position = (length[rows.slot] + rows.node)[:, None]
  page, offset = locate(page_table[rows.slot], position, page_size)
  return jnp.where(rows.valid, page[:, 0], jnp.iinfo(jnp.int32).max), offset[:, 0]


def write(pages: jax.Array, page: jax.Array, offset: jax.Array, x: jax.Array) -> jax.Array:
  """pages[P, S, K*h] with x[R, K*h] at (page, offset)[R]; out-of-range pages are dropped."""
  return pages.at[page, offset].set(as_stored(x, pages.dtype), mode="drop")


def as_stored(x: jax.Array, dtype) -> jax.Array:
  return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def commit(pages: KVPages, page_table: jax.Array, length: jax.Array, verdict: Verdict) -> KVPages:
  """Moves the accepted path's KV from its tree slots to consecutive ones.

  Chains need no call: their nodes already lie where they belong.
  """
  depth = jnp.arange(verdict.path.shape[1])
  size = pages.k[0].shape[1]
  source = locate(page_table, length[:, None] + verdict.path, size)
  page, offset = locate(page_table, jnp.broadcast_to(length[:, None] + depth, verdict.path.shape),
                        size)
  moves = (depth <= verdict.num_accepted[:, None]) & (verdict.path != depth)
  page = jnp.where(moves, page, jnp.iinfo(jnp.int32).max)
  return jax.tree.map(lambda x: x.at[page, offset].set(x[source], mode="drop"), pages)
