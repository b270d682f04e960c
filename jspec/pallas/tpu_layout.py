"""What lies around the TPU kernel: queries as rows, and which pages each of its steps needs.

Heads are read as windows of whole 128-lane tiles of the [S, K*h] pages, so that no lane has to
move: the queries come with zeros in the lanes of a window that belong to other heads, and the
output's lanes are picked afterwards. Where 128 is a multiple of h, the heads that share a tile
share a product.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.pallas import tree_bits

LANES = 128


class Window(NamedTuple):
  """Lanes [start, stop) of a page, and the heads that lie in them, of one product."""

  start: int
  stop: int
  heads: range


class Plan(NamedTuple):
  """What is static."""

  windows: tuple[Window, ...]
  num_slots: int
  num_blocks: int  # of query nodes, for each slot
  cores: int
  pages_per_step: int
  page_size: int
  max_pages: int
  num_words: int
  block: int  # query nodes
  group: int  # query heads for each kv head
  soft_cap: float | None
  window: int | None
  first_visible: int
  is_chain: bool

  @property
  def head_rows(self) -> int:
    """Rows of one head in a product."""
    return self.block * self.group


def lane_windows(num_kv: int, head_dim: int) -> tuple[Window, ...]:
  """Whole tiles of lanes, each with the heads of one product."""
  heads = max(1, LANES // head_dim) if LANES % head_dim == 0 else 1
  windows = []
  for first in range(0, num_kv, heads):
    end = min(first + heads, num_kv)
    start = first * head_dim // LANES * LANES
    stop = min(pl.cdiv(end * head_dim, LANES) * LANES, num_kv * head_dim)
    windows.append(Window(start, stop, range(first, end)))
  return tuple(windows)


def width(windows: tuple[Window, ...]) -> int:
  return max(w.stop - w.start for w in windows)


def pack_queries(q, plan: Plan) -> jax.Array:
  """[B, N, H, h] -> [B, blocks, windows, rows, lanes]; a row is a head, node and group member."""
  b, n, _, head_dim = q.shape
  q = jnp.pad(q, ((0, 0), (0, plan.num_blocks * plan.block - n), (0, 0), (0, 0)))
  q = q.reshape(b, plan.num_blocks, plan.block, -1, plan.group, head_dim)
  q = q.transpose(0, 1, 3, 2, 4, 5).reshape(b, plan.num_blocks, -1, plan.head_rows, head_dim)
  lanes = width(plan.windows)
  tile = 32 // q.dtype.itemsize  # rows of a tile in VMEM
  most = pl.cdiv(len(plan.windows[0].heads) * plan.head_rows, tile) * tile
  windows = []
  for w in plan.windows:
    parts = [jnp.pad(q[:, :, k], ((0, 0), (0, 0), (0, 0),
                                  (k * head_dim - w.start, lanes + w.start - (k + 1) * head_dim)))
             for k in w.heads]
    x = jnp.concatenate(parts, axis=2)
    windows.append(jnp.pad(x, ((0, 0), (0, 0), (0, most - x.shape[2]), (0, 0))))
  return jnp.stack(windows, axis=2)


def unpack_outputs(out, plan: Plan, shape) -> jax.Array:
  """The reverse of pack_queries."""
  b, n, num_heads, head_dim = shape
  heads = []
  for i, w in enumerate(plan.windows):
    for j, k in enumerate(w.heads):
      row, lane = j * plan.head_rows, k * head_dim - w.start
      heads.append(out[:, :, i, row:row + plan.head_rows, lane:lane + head_dim])
  out = jnp.stack(heads, axis=2).reshape(
      b, plan.num_blocks, -1, plan.block, plan.group, head_dim)
  return out.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, num_heads, head_dim)[:, :n]


def mask_rows(ancestors, plan: Plan, num_rows: int) -> jax.Array:
  """i32[B, blocks, rows, W + 1]: the mask words of each row of a window, then the node's depth.

  A chain needs the depth alone.
  """
  b, n, _ = ancestors.shape
  if plan.is_chain:
    rows = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], (b, n, 1))
  else:
    words = tree_bits.within_window(ancestors, plan.window)
    rows = jnp.concatenate([lax.bitcast_convert_type(words, jnp.int32),
                            tree_bits.depth(ancestors)[..., None]], -1)
  rows = jnp.pad(rows, ((0, 0), (0, plan.num_blocks * plan.block - n), (0, 0)))
  rows = jnp.repeat(rows.reshape(b, plan.num_blocks, plan.block, -1), plan.group, axis=2)
  rows = jnp.tile(rows, (1, 1, len(plan.windows[0].heads), 1))
  return jnp.pad(rows, ((0, 0), (0, 0), (0, num_rows - rows.shape[2]), (0, 0)))


def page_ranges(ancestors, length, plan: Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
  """i32[B * blocks] each: the first page that a block of nodes sees, the page past the last one
  (0 where no node is in use), and the position from which on the prefix is visible to all nodes.
  """
  b, n, w = ancestors.shape
  padded = jnp.pad(ancestors, ((0, 0), (0, plan.num_blocks * plan.block - n), (0, 0)))
  padded = padded.reshape(b, plan.num_blocks, plan.block, w)
  seen = lax.reduce(padded, jnp.uint32(0), lax.bitwise_or, (2,))
  bits = 32 - lax.clz(seen).astype(jnp.int32)
  columns = jnp.where(bits > 0, bits + tree_bits.WORD * jnp.arange(w), 0).max(-1)
  end = pl.cdiv(length[:, None] + columns, plan.page_size)
  end = jnp.where(columns > 0, jnp.minimum(end, plan.max_pages), 0)
  oldest = newest = jnp.full(columns.shape, plan.first_visible)
  if plan.window is not None:
    depth = tree_bits.depth(padded)
    past = length[:, None] - plan.window + 1
    low = jnp.where(depth < 0, n, depth).min(-1) + past
    if not plan.is_chain:  # a tree's first column may be as deep as its last one
      low = jnp.minimum(low, length[:, None])
    oldest, newest = jnp.maximum(oldest, low), jnp.maximum(newest, depth.max(-1) + past)
  first = jnp.minimum(oldest // plan.page_size, end)
  flat = lambda x: x.astype(jnp.int32).reshape(-1)
  return flat(first), flat(end), flat(newest)
