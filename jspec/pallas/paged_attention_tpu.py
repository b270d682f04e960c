"""Paged tree attention for TPUs: pools stay in HBM, pages come by double-buffered copies.

One grid step is a slot's block of query nodes. It walks the slot's pages, pages_per_step at a time,
with an online softmax; while one lot is worked on the next is under way, the first lot of the next
grid step included. A head's queries are the rows of its products: nodes times group; tpu_layout has
how they lie.

Compiled for v4 to 7x without a device and run in the interpreters; never run on a TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.pallas import block_sizes, tpu_layout, tree_bits
from jspec.pallas.tpu_layout import Plan

MASKED = -1e30  # finite, so that a masked score gives exp(MASKED - max) == 0, not NaN
SMEM_BYTES = 1 << 20
PAGE_BYTES = 4 << 20  # keys and values: two buffers must fit 16 MiB of VMEM beside the sums
TILE_ROWS = 8  # of pages in HBM, whatever their dtype


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
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """reference.paged_attention, which says what the arguments mean."""
  b, n, num_heads, head_dim = q.shape
  num_pages, page_size, lanes = k_pages.shape
  num_kv = lanes // head_dim
  group = num_heads // num_kv
  max_pages = page_table.shape[1]
  _check(q, k_pages, page_table, ancestors)
  scales = () if k_scale is None else (k_scale, v_scale)
  windows = tpu_layout.lane_windows(num_kv, head_dim)
  pages_per_step, block, cores = block_sizes.tpu(
      block_sizes.device_kind(), token_bytes=2 * lanes * k_pages.dtype.itemsize,
      page_size=page_size, max_pages=max_pages, num_nodes=n,
      node_rows=group * len(windows[0].heads),
      row_bytes=len(windows) * tpu_layout.width(windows) * q.dtype.itemsize)
  num_blocks = pl.cdiv(n, block)
  plan = Plan(
      windows=windows, num_slots=b, num_blocks=num_blocks,
      cores=cores if b % cores == 0 else 1, pages_per_step=pages_per_step, page_size=page_size,
      max_pages=max_pages, num_words=ancestors.shape[2], block=block, group=group,
      soft_cap=soft_cap, window=window, first_visible=first_visible, is_chain=is_chain)
  queries = tpu_layout.pack_queries(q * jnp.asarray(scale, q.dtype), plan)
  rows = tpu_layout.mask_rows(ancestors, plan, queries.shape[3])
  steps = tpu_layout.page_ranges(ancestors, length, plan)
  in_use = lax.bitcast_convert_type(tree_bits.columns_in_use(ancestors), jnp.int32)
  # A table may lead anywhere past a slot's pages; a TPU halts on a copy from outside the pool.
  table = jnp.clip(page_table, 0, num_pages - 1)
  slot_block = lambda core, i, j, *_: (core * (b // plan.cores) + i, j, 0, 0, 0)
  row_block = lambda core, i, j, *_: slot_block(core, i, j)[:4]
  pools = (k_pages, v_pages, *scales)
  buffer = lambda pool: pltpu.VMEM((2, pages_per_step, *pool.shape[1:]), pool.dtype)
  sums = queries.shape[2:]
  # Nothing static says how long the slots are: the estimate is for as long as they can be.
  context = max_pages * page_size if window is None else min(max_pages * page_size, window + n)
  out = pl.pallas_call(
      functools.partial(_kernel, plan),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=6,
          grid=(plan.cores, b // plan.cores, num_blocks),
          in_specs=[
              pl.BlockSpec((1, 1, *sums), slot_block),
              pl.BlockSpec((1, 1, *rows.shape[2:]), row_block),
              tuple(pl.BlockSpec(memory_space=pl.ANY) for _ in pools),
          ],
          out_specs=pl.BlockSpec((1, 1, *sums), slot_block),
          scratch_shapes=[
              tuple(buffer(pool) for pool in pools),
              pltpu.SemaphoreType.DMA((2, len(pools))),
              pltpu.SMEM((1,), jnp.int32),
              pltpu.VMEM((*sums[:2], 1), jnp.float32),
              pltpu.VMEM((*sums[:2], 1), jnp.float32),
              pltpu.VMEM(sums, jnp.float32),
          ]),
      out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
      compiler_params=pltpu.CompilerParams(
          # Slots of one core follow each other, as each fetches for the next.
          dimension_semantics=("parallel", "arbitrary", "arbitrary")),
      cost_estimate=pl.CostEstimate(
          flops=4 * b * n * num_heads * head_dim * context,
          bytes_accessed=2 * queries.size * q.dtype.itemsize + b * num_blocks * context * sum(
              pool.size * pool.dtype.itemsize for pool in pools) // (num_pages * page_size),
          transcendentals=b * n * num_heads * context),
      interpret=interpret,
      name="paged_attention",
  )(table.reshape(-1), length, *steps, in_use.reshape(-1), queries, rows, pools)
  return tpu_layout.unpack_outputs(out, plan, q.shape)


def _check(q, k_pages, page_table, ancestors) -> None:
  """Raises for what the kernel cannot do."""
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    raise NotImplementedError(f"{q.dtype=}: float32 or bfloat16")
  if k_pages.dtype not in (q.dtype, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2):
    raise NotImplementedError(f"{k_pages.dtype=}: {q.dtype} or 8 bits")
  if k_pages.shape[1] % TILE_ROWS:
    raise NotImplementedError(f"page_size={k_pages.shape[1]}: a multiple of {TILE_ROWS}, as tiles "
                              "are")
  page_bytes = 2 * k_pages.shape[1] * k_pages.shape[2] * k_pages.dtype.itemsize
  if page_bytes > PAGE_BYTES:
    raise NotImplementedError(f"pages{k_pages.shape} of {k_pages.dtype}: {page_bytes} bytes of "
                              f"keys and values a page, at most {PAGE_BYTES}; use smaller pages")
  b, _, words = ancestors.shape
  scalars = 4 * (page_table.size + b * (1 + words) + 3 * b * ancestors.shape[1])
  if scalars > SMEM_BYTES * 3 // 4:
    raise NotImplementedError(f"{page_table.shape=}: {scalars} bytes of scalars, of {SMEM_BYTES} "
                              "in SMEM; use larger pages or fewer slots")


def _kernel(
    plan: Plan,
    # prefetch
    table_ref,  # i32[B * max_pages]
    length_ref,  # i32[B]
    first_ref,  # i32[B * blocks]
    end_ref,  # i32[B * blocks]
    plain_ref,  # i32[B * blocks]
    in_use_ref,  # i32[B * W]
    # inputs
    q_ref,  # [1, 1, windows, rows, lanes]
    rows_ref,  # i32[1, 1, rows, W + 1], or [1, 1, rows, 1] for chains
    pools,  # [P, S, K*h] keys and values, then maybe f32[P, K, S] scales, in HBM
    # outputs
    out_ref,  # [1, 1, windows, rows, lanes]
    # scratch
    buffers,  # [2, pages_per_step, ...] for each pool
    arrived,  # DMA semaphores [2, pools]
    next_buffer,  # i32[1]: where the first pages of this grid step are
    top_ref,  # f32[windows, rows, 1]
    total_ref,  # f32[windows, rows, 1]
    acc_ref,  # f32[windows, rows, lanes]
):
  per_core = plan.num_slots // plan.cores
  turn, block = pl.program_id(1), pl.program_id(2)
  slot = pl.program_id(0) * per_core + turn
  step = slot * plan.num_blocks + block
  first, end = first_ref[step], end_ref[step]
  length = length_ref[slot]
  num_chunks = pl.cdiv(end - first, plan.pages_per_step)
  is_last = (turn == per_core - 1) & (block == plan.num_blocks - 1)

  def copies(step, chunk, buffer, act):
    """Starts or awaits the copies of one chunk's pages."""
    start = first_ref[step] + chunk * plan.pages_per_step
    table = step // plan.num_blocks * plan.max_pages + start

    def one(i, _):
      page = table_ref[table + i]
      for j, (pool, pages) in enumerate(zip(pools, buffers, strict=True)):
        act(pltpu.make_async_copy(pool.at[page], pages.at[buffer, i], arrived.at[buffer, j]))

    lax.fori_loop(0, jnp.minimum(end_ref[step] - start, plan.pages_per_step), one, None)

  def fetch(step, chunk, buffer):
    copies(step, chunk, buffer, lambda copy: copy.start())

  def wait(chunk, buffer):
    copies(step, chunk, buffer, lambda copy: copy.wait())

  @pl.when((turn == 0) & (block == 0))
  def begin():
    next_buffer[0] = 0
    _clear(buffers)
    fetch(step, 0, 0)

  @pl.when((num_chunks == 0) & ~is_last)
  def pass_on():
    fetch(step + 1, 0, next_buffer[0])

  top_ref[...] = jnp.full_like(top_ref, MASKED)
  total_ref[...] = jnp.zeros_like(total_ref)
  acc_ref[...] = jnp.zeros_like(acc_ref)

  def chunk_turn(chunk, _):
    buffer = (next_buffer[0] + chunk) % 2
    more = chunk + 1 < num_chunks

    @pl.when(more | ~is_last)
    def fetch_next():
      fetch(jnp.where(more, step, step + 1), jnp.where(more, chunk + 1, 0), 1 - buffer)

    wait(chunk, buffer)
    page = first + chunk * plan.pages_per_step
    position = page * plan.page_size
    size = plan.pages_per_step * plan.page_size
    attend = functools.partial(
        _attend, plan, q_ref, [pages.at[buffer] for pages in buffers], top_ref, total_ref, acc_ref)
    is_plain = (position + size <= length) & (position >= plain_ref[step])

    @pl.when(is_plain)
    def attend_all():
      attend(None)

    @pl.when(~is_plain)
    def attend_visible():
      words = [in_use_ref[slot * plan.num_words + i] for i in range(plan.num_words)]
      low = jnp.maximum(length // plan.page_size - page, 0)
      high = jnp.minimum(end - page, plan.pages_per_step)
      _clean(plan, buffers, buffer, words, position - length, low, high)
      columns = lax.broadcasted_iota(jnp.int32, (1, size), 1) + position - length
      attend(_visible(plan, rows_ref[0, 0], columns, length))

  lax.fori_loop(0, num_chunks, chunk_turn, None)
  next_buffer[0] = (next_buffer[0] + num_chunks) % 2
  total = total_ref[...]
  out = jnp.where(total > 0, acc_ref[...] / jnp.where(total > 0, total, 1.0), 0.0)
  out_ref[0, 0] = out.astype(out_ref.dtype)


def _clear(buffers) -> None:
  """What no page has been copied to must be finite where it meets a weight of 0: not the keys."""
  for pages in buffers[1:]:
    pages[...] = jnp.zeros_like(pages)


def _clean(plan: Plan, buffers, buffer, in_use, column, low, high) -> None:
  """Zeros values and scales that the slot does not own, as 0 * NaN is NaN, in pages low to high."""
  _, values, *scales = buffers

  def one(i, _):
    def clean(pages, shape, axis):
      at = lax.broadcasted_iota(jnp.int32, shape, axis) + column + i * plan.page_size
      owned = (at < 0) | _has(in_use, at)
      x = pages[buffer, i]
      pages[buffer, i] = jnp.where(owned, x.astype(jnp.float32), 0).astype(x.dtype)

    clean(values, (plan.page_size, 1), 0)
    for pages in scales:
      clean(pages, (1, plan.page_size), 1)

  lax.fori_loop(low, high, one, None)


def _has(words, column) -> jax.Array:
  """tree_bits.has for words i32 in a list, scalars or columns [rows, 1]: Mosaic shifts no u32."""
  word = jnp.zeros((), jnp.int32)
  for i, x in enumerate(words):
    word = jnp.where(column >> 5 == i, x, word)
  return (word >> (column & 31)) & 1 > 0


def _visible(plan: Plan, rows, column, length) -> jax.Array:
  """bool[rows, C] from rows i32[rows, W + 1] and column i32[1, C]."""
  depth = rows[:, -1:]
  if plan.is_chain:
    seen = column <= depth
    if plan.window is not None:
      seen &= column > depth - plan.window
  else:
    words = [rows[:, i:i + 1] for i in range(plan.num_words)]
    seen = (column < 0) | _has(words, column)
    if plan.window is not None:  # the bits have seen to the tree's own columns
      seen &= (column >= 0) | (column > depth - plan.window)
  if plan.first_visible:
    seen &= column >= plan.first_visible - length
  return seen


def _attend(plan: Plan, q_ref, buffers, top_ref, total_ref, acc_ref, visible) -> None:
  """Adds a chunk to the running sums; visible None: all of it."""
  keys, values, *scales = buffers
  size = plan.pages_per_step * plan.page_size
  dtype = q_ref.dtype
  # One pass of bf16 products would lose 16 bits of a float32.
  dot = functools.partial(
      lax.dot_general, preferred_element_type=jnp.float32,
      precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None)
  for i, w in enumerate(plan.windows):
    lanes = slice(w.start, w.stop)
    width = w.stop - w.start
    k = keys[:, :, lanes].reshape(size, width).astype(dtype)
    v = values[:, :, lanes].reshape(size, width).astype(dtype)
    score = dot(q_ref[0, 0, i, :, :width], k, (((1,), (1,)), ((), ())))  # [rows, C]
    if scales:
      score = score * _by_row(plan, scales[0], w.heads, score.shape)
    if plan.soft_cap is not None:
      score = plan.soft_cap * jnp.tanh(score / plan.soft_cap)
    if visible is not None:
      score = jnp.where(visible, score, MASKED)
    old = top_ref[i]
    top = jnp.maximum(old, score.max(-1, keepdims=True))
    weight = jnp.exp(score - top)
    if visible is not None:
      # A row that has seen nothing yet has weight exp(0) on masked columns.
      weight = jnp.where(visible, weight, 0.0)
    shrink = jnp.exp(old - top)
    top_ref[i] = top
    total_ref[i] = total_ref[i] * shrink + weight.sum(-1, keepdims=True)
    if scales:
      weight = weight * _by_row(plan, scales[1], w.heads, score.shape)
    out = dot(weight.astype(dtype), v, (((1,), (0,)), ((), ())))  # [rows, width]
    acc_ref[i, :, :width] = acc_ref[i, :, :width] * shrink + out


def _by_row(plan: Plan, scales, heads, shape) -> jax.Array:
  """f32, of shape [rows, C] or what broadcasts to it: each row's head's scales."""
  lines = [jnp.concatenate([scales[p, k:k + 1] for p in range(plan.pages_per_step)], axis=1)
           for k in heads]
  out = lines[-1]
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  for j in reversed(range(len(lines) - 1)):
    out = jnp.where(row < (j + 1) * plan.head_rows, lines[j], out)
  return out
