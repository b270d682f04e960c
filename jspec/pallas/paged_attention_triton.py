"""Paged tree attention for NVIDIA GPUs, in Pallas with the Triton backend.

Flash decoding (Dao et al. 2023, "Flash-Decoding for long-context inference"): each slot's columns
are shared out over several programs, each with an online softmax of its own, and the parts are
merged afterwards. Takes what paged_attention_gpu.py does not: older cards, older jax, float32, any
page size and any head size up to 256.

JAX has called the Triton backend deprecated since 0.11 and says so in a DeprecationWarning when a
program is lowered, which is after this module has returned: it cannot be silenced from here, and
Python does not show it by default. Compiled for sm_80, sm_89 and sm_90, never run on a GPU.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspec.pallas import block_sizes, reference, tree_bits

MASKED = -1e30  # finite, so that exp2(MASKED - max) is 0 and never NaN
LOG2_E = math.log2(math.e)
FLOATS = {jnp.dtype(t) for t in (jnp.float32, jnp.bfloat16)}
EIGHT_BITS = {jnp.dtype(t) for t in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)}


def paged_attention(
    q: jax.Array,  # [B, N, H, h]
    k_pages: jax.Array,  # [P, S, K*h]
    v_pages: jax.Array,  # [P, S, K*h]
    page_table: jax.Array,  # i32[B, max_pages]
    length: jax.Array,  # i32[B]
    ancestors: jax.Array,  # u32[B, N, W]
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    first_visible: int = 0,
    is_chain: bool = False,
    k_scale: jax.Array | None = None,  # f32[P, K, S]
    v_scale: jax.Array | None = None,  # f32[P, K, S]
    interpret: object = False,
) -> jax.Array:
  """pallas/reference.py's paged_attention; `interpret`, if it says anything, runs it anywhere."""
  b, n, num_heads, head_dim = q.shape
  k_pages, v_pages = reference.values(k_pages), reference.values(v_pages)
  _refuse(q, k_pages, k_scale, v_scale)
  kv_dtype = k_pages.dtype
  if kv_dtype in EIGHT_BITS:  # as bits: Triton has no masked load of a float8
    k_pages, v_pages = (jax.lax.bitcast_convert_type(x, jnp.int8) for x in (k_pages, v_pages))
  num_kv = k_pages.shape[2] // head_dim
  group = num_heads // num_kv
  reach = page_table.shape[1] * k_pages.shape[1]
  sizes = block_sizes.triton(n * group, head_dim, q.dtype.itemsize, kv_dtype.itemsize, b * num_kv,
                             reach)
  num_blocks = -(-n * group // sizes.rows)
  padded_dim = max(16, pl.next_power_of_2(head_dim))

  depth = jnp.arange(n) if is_chain else tree_bits.depth(ancestors)
  depth = jnp.broadcast_to(depth, (b, n))
  in_use = tree_bits.columns_in_use(ancestors)
  begin, end = _columns(length, depth, in_use, sizes.rows, num_blocks, group, window,
                        first_visible, is_chain, reach)
  words = tree_bits.within_window(ancestors, window)
  as_i32 = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
  kernel = functools.partial(
      _kernel, sizes=sizes, kv_dtype=kv_dtype, num_kv=num_kv, group=group, scale=scale,
      soft_cap=soft_cap, window=window, first_visible=first_visible, is_chain=is_chain)
  grid = (b * num_kv, num_blocks, sizes.splits)
  block = (None, None, None, sizes.rows)
  at = lambda i, j, split: (i, j, split, 0)
  inputs = (page_table, length, begin, end, as_i32(in_use), depth, as_i32(words), q,
            k_pages, v_pages, k_scale, v_scale)
  pairs = 2 * b * n * num_heads * reach * head_dim  # as if every slot were full
  acc, top, total = pl.pallas_call(
      kernel,
      grid=grid,
      in_specs=[None if x is None else pl.BlockSpec(x.shape, lambda *_, d=x.ndim: (0,) * d)
                for x in inputs],
      out_specs=[pl.BlockSpec((*block, padded_dim), lambda *i: (*at(*i), 0)),
                 pl.BlockSpec(block, at), pl.BlockSpec(block, at)],
      out_shape=[jax.ShapeDtypeStruct((*grid, sizes.rows, padded_dim), jnp.float32),
                 jax.ShapeDtypeStruct((*grid, sizes.rows), jnp.float32),
                 jax.ShapeDtypeStruct((*grid, sizes.rows), jnp.float32)],
      compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
      cost_estimate=pl.CostEstimate(
          flops=2 * pairs, transcendentals=pairs // (2 * head_dim),
          bytes_accessed=2 * b * reach * num_kv * head_dim * k_pages.dtype.itemsize),
      interpret=bool(interpret),
      name="paged_attention_triton",
  )(*inputs)
  out = _merged(acc, top, total)[..., :head_dim]
  out = out.reshape(b, num_kv, num_blocks * sizes.rows, head_dim)[:, :, :n * group]
  out = out.reshape(b, num_kv, n, group, head_dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(q.shape).astype(q.dtype)


def _refuse(q, k_pages, k_scale, v_scale) -> None:
  head_dim = q.shape[3]
  if head_dim > 256:
    raise NotImplementedError(f"head size {head_dim} > 256 does not fit a program's registers")
  if q.dtype not in FLOATS:
    raise NotImplementedError(f"queries in {q.dtype}; float32 and bfloat16 are there")
  if k_pages.dtype != q.dtype and k_pages.dtype not in EIGHT_BITS:
    raise NotImplementedError(f"pages in {k_pages.dtype} for queries in {q.dtype}; 8-bit ones or "
                              "the queries' own dtype are there")
  scaled = k_pages.dtype in EIGHT_BITS
  if (k_scale is not None, v_scale is not None) != (scaled, scaled):
    raise NotImplementedError(f"pages in {k_pages.dtype}, scales {k_scale is not None} and "
                              f"{v_scale is not None}: 8-bit pages need both, others none")
  if 2**31 < k_pages.size and k_pages.size * k_pages.dtype.itemsize <= 2**32:
    # Pallas counts elements in 32 signed bits up to 4 GiB, and in 64 beyond.
    raise NotImplementedError(f"{k_pages.size} one-byte numbers in a layer's pages: JAX's 32-bit "
                              "offsets overflow from 2**31 up to 2**32")


def _columns(length, depth, in_use, rows, num_blocks, group, window, first_visible, is_chain,
             reach):
  """i32[B, num_blocks] twice: the positions each block of query rows has to look at, [begin, end).

  Nothing for a block without a node in use.
  """
  b, n = depth.shape
  node = jnp.arange(n)
  used = tree_bits.has(in_use[:, None], jnp.broadcast_to(node, (b, n)))  # bool[B, 1, N]
  first = np.arange(num_blocks) * rows // group
  last = ((np.arange(num_blocks) + 1) * rows - 1) // group
  mine = used & (node >= first[:, None]) & (node <= last[:, None])  # bool[B, num_blocks, N]
  # A chain's nodes see none after themselves; in a tree the order is not promised.
  ahead = jnp.where(mine if is_chain else used, node + 1, 0).max(-1)
  end = jnp.where(mine.any(-1), jnp.minimum(length[:, None] + ahead, reach), 0)
  begin = jnp.full_like(end, first_visible)
  if window is not None:
    lowest = jnp.where(mine, depth[:, None], n).min(-1)
    begin = jnp.maximum(begin, length[:, None] + lowest - window + 1)
  return begin, end


def _kernel(
    # inputs
    table_ref,  # i32[B, max_pages]
    length_ref,  # i32[B]
    begin_ref,  # i32[B, num_blocks]
    end_ref,  # i32[B, num_blocks]
    in_use_ref,  # i32[B, W]
    depth_ref,  # i32[B, N]
    words_ref,  # i32[B, N, W]
    q_ref,  # [B, N, H, h]
    k_ref,  # [P, S, K*h]
    v_ref,  # [P, S, K*h]
    k_scale_ref,  # f32[P, K, S] or None
    v_scale_ref,  # f32[P, K, S] or None
    # outputs
    acc_ref,  # f32[rows, padded_dim]
    top_ref,  # f32[rows]
    total_ref,  # f32[rows]
    *,
    sizes: block_sizes.Triton,
    kv_dtype: jnp.dtype,
    num_kv: int,
    group: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    first_visible: int,
    is_chain: bool,
):
  slot, head = pl.program_id(0) // num_kv, pl.program_id(0) % num_kv
  block, split = pl.program_id(1), pl.program_id(2)
  _, num_nodes, _, head_dim = q_ref.shape
  reach = table_ref.shape[1] * k_ref.shape[1]
  rows, padded_dim = acc_ref.shape
  length = length_ref[slot]
  row = block * rows + jnp.arange(rows)
  node = row // group
  exists = node < num_nodes
  dim = jnp.arange(padded_dim)
  inside = dim < head_dim  # of the head, whose size need not be a power of two
  q = plgpu.load(q_ref.at[slot, node[:, None], (head * group + row % group)[:, None], dim[None, :]],
                 mask=exists[:, None] & inside[None, :], other=0)
  depth = plgpu.load(depth_ref.at[slot, node], mask=exists, other=0)
  precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

  def visible(column, tree: bool):
    """bool[rows, columns]; `tree` says that the block may hold columns of the tree itself."""
    seen = jnp.full((rows, sizes.columns), True)
    if tree and is_chain:
      seen = column[None, :] <= depth[:, None]
    elif tree:
      mine = exists[:, None] & ((column >= 0) & (column < num_nodes))[None, :]
      words = words_ref.at[slot, node[:, None], _word(column)[None, :]]
      seen = (column < 0)[None, :] | _has(words, column[None, :], mine)
    if window is not None:
      near = column[None, :] > (depth - window)[:, None]
      # A tree's bits have seen to its own columns.
      seen &= near if is_chain else near | (column >= 0)[None, :]
    if first_visible:
      seen &= (column + length >= first_visible)[None, :]
    return seen

  def attend(i, carry, tree: bool):
    top, total, acc = carry  # f32[rows], [rows], [rows, padded_dim]
    position = i * sizes.columns + jnp.arange(sizes.columns)
    column = position - length  # < 0 in the prefix
    owned = None
    if tree:
      in_tree = (column >= 0) & (column < num_nodes) & (position < reach)
      owned = (column < 0) | _has(in_use_ref.at[slot, _word(column)], column, in_tree)
    page, offset = _locate(table_ref, slot, position, k_ref.shape, owned)
    mask = None if padded_dim == head_dim else inside[None, :]
    if owned is not None:  # what the slot does not own is read as 0, as 0 * NaN is NaN
      mask = owned[:, None] if mask is None else mask & owned[:, None]
    at = page[:, None], offset[:, None], (head * head_dim + dim)[None, :]
    k, v = (_decode(_load(x.at[at], mask), kv_dtype).astype(q.dtype) for x in (k_ref, v_ref))
    scores = _dot(q, k, 1, precision) * scale
    if k_scale_ref is not None:
      scores *= _load(k_scale_ref.at[page, head, offset], owned)[None, :]
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores *= LOG2_E
    masks = tree or window is not None or first_visible
    if masks:
      seen = visible(column, tree)
      scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(1))
    weight = jnp.exp2(scores - new_top[:, None])
    if masks:  # a row that has seen nothing yet has weight exp2(0) on masked columns
      weight = jnp.where(seen, weight, 0)
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + weight.sum(1)
    if v_scale_ref is not None:
      weight *= _load(v_scale_ref.at[page, head, offset], owned)[None, :]
    acc = acc * shrink[:, None] + _dot(weight.astype(q.dtype), v, 0, precision)
    return new_top, total, acc

  # The splits share this slot's own columns evenly, however many there are.
  first = begin_ref[slot, block] // sizes.columns
  last = pl.cdiv(end_ref[slot, block], sizes.columns)
  each = pl.cdiv(jnp.maximum(last - first, 0), sizes.splits)
  first = first + split * each
  last = jnp.minimum(first + each, last)
  whole = jnp.clip(length // sizes.columns, first, jnp.maximum(first, last))  # prefix only below
  carry = _start(rows, padded_dim)
  carry = jax.lax.fori_loop(first, whole, functools.partial(attend, tree=False), carry)
  carry = jax.lax.fori_loop(whole, last, functools.partial(attend, tree=True), carry)
  top_ref[...], total_ref[...], acc_ref[...] = carry


def _start(rows: int, padded_dim: int):
  return (jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32),
          jnp.zeros((rows, padded_dim), jnp.float32))


def _locate(table_ref, slot, position, pages_shape, owned):
  """Page and offset of each position; some page of the pool where the table leads out of it."""
  num_pages, page_size, _ = pages_shape
  page = _load(table_ref.at[slot, position // page_size], owned)
  return jnp.clip(page, 0, num_pages - 1), position % page_size


def _decode(x, kv_dtype):
  """The numbers that x, int8 bits of a float8, stands for; any other x is what it is.

  By way of float16, which every card has: sm_80 cannot convert a float8_e4m3fn.
  """
  if kv_dtype == jnp.float8_e5m2:
    return jax.lax.bitcast_convert_type(x.astype(jnp.int16) << 8, jnp.float16)
  if kv_dtype != jnp.float8_e4m3fn:
    return x
  x = x.astype(jnp.int16)
  bits = (x & -0x80) << 8 | (x & 0x7F) << 7  # 4 exponent bits in the place of 5: 8 too low
  return jax.lax.bitcast_convert_type(bits, jnp.float16) * 256


def _load(ref, mask):
  return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def _word(column):
  return jnp.maximum(column, 0) >> 5


def _has(words_ref, column, mask):
  """Whether the bit `column` is set in the words that words_ref picks for it; False off mask."""
  return (_load(words_ref, mask) >> (column & 31)) & 1 > 0


def _dot(a, b, contract: int, precision):
  return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), precision=precision,
                             preferred_element_type=jnp.float32)


def _merged(acc, top, total):
  """The splits as one softmax: acc f32[..., splits, rows, h], the others without h."""
  share = jnp.exp2(top - top.max(-2, keepdims=True))
  total = (total * share).sum(-2)[..., None]
  return (acc * share[..., None]).sum(-3) / jnp.where(total > 0, total, 1)
