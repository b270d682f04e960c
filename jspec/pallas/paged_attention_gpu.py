"""Paged tree attention for Hopper GPUs: TMA and WGMMA through Pallas' Mosaic GPU backend.

One thread block takes 64 or 128 rows (queries of all nodes and heads that share a kv head) and a
share of the slot's columns. One warpgroup copies pages into a ring of shared-memory chunks; the
others, 64 rows each, run an online softmax over them. Shares are merged outside the kernel (Dao et
al. 2023, "Flash-Decoding for long-context inference"). A chunk that lies wholly in the prefix costs
no mask arithmetic.

Simulated on a CPU and compiled for sm_90a without spilling a register; never run on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.pallas import block_sizes, reference, tree_bits

try:
  from jax.experimental.pallas import mosaic_gpu
except ImportError:  # jax 0.10 imports absl, which it does not install; _refuse says no to it
  mosaic_gpu = None  # type: ignore[assignment]

plgpu: Any = mosaic_gpu  # the types of its parts change with each jax

MASKED = -1e30  # finite: MASKED - MASKED is 0, not NaN
ROWS = 64  # of one warpgroup's WGMMA; fewer are padded
LANES = 64  # of a head, where more at a time would not fit the registers
FETCH_REGISTERS, ATTEND_REGISTERS = 40, 232  # of a thread; three warpgroups have 3 * 168
EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
HOPPER = r"\bG?H(100|200|800|20)\b"
LOG2E = math.log2(math.e)  # exp2 is one instruction; scores are kept in base 2


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static about one call."""

  head_dim: int
  page_size: int
  chunk: int  # columns per step
  stages: int  # chunks in flight
  groups: int  # of ROWS queries, that share the chunks
  splits: int  # shares of the columns
  num_kv: int
  num_blocks: int  # of `groups` groups
  out_rows: int  # rows written for each group, a multiple of 8
  scale: float
  soft_cap: float | None
  is_chain: bool
  has_oldest: bool  # a window or first_visible
  kv_dtype: jnp.dtype
  out_dtype: jnp.dtype

  @property
  def tile(self) -> int:
    """Columns of one copy."""
    return min(self.page_size, self.chunk)

  @property
  def halves(self) -> int:
    """Warpgroups that make the same scores and a part of the head each: 256 sums a row would not
    fit one warpgroup's registers.
    """
    return max(1, self.head_dim // 128)

  @property
  def warpgroups(self) -> int:
    """That attend; one more fetches."""
    return self.groups * self.halves

  @property
  def narrow(self) -> bool:
    return self.kv_dtype != jnp.bfloat16


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
    interpret: object = False,  # or True, or plgpu.InterpretGPUParams
) -> jax.Array:
  """pallas/reference.py's paged_attention."""
  k_pages, v_pages = reference.values(k_pages), reference.values(v_pages)
  _refuse(q, k_pages, k_scale, interpret)
  b, n, num_heads, head_dim = q.shape
  num_pages, page_size, _ = k_pages.shape
  num_kv = k_pages.shape[2] // head_dim
  num_rows = n * (num_heads // num_kv)
  sizes = block_sizes.hopper(num_rows, head_dim, k_pages.dtype.itemsize, b * num_kv,
                             page_table.shape[1] * page_size)
  num_blocks = pl.cdiv(num_rows, sizes.groups * ROWS)
  plan = Plan(
      head_dim=head_dim, page_size=page_size, chunk=sizes.chunk, stages=sizes.stages,
      groups=sizes.groups, splits=sizes.splits, num_kv=num_kv, num_blocks=num_blocks,
      out_rows=ROWS if num_rows > ROWS else pl.cdiv(num_rows, 8) * 8, scale=scale,
      soft_cap=soft_cap, is_chain=is_chain, has_oldest=window is not None or first_visible > 0,
      kv_dtype=k_pages.dtype, out_dtype=q.dtype if sizes.splits == 1 else jnp.dtype("float32"))
  scales = () if k_scale is None else (k_scale, v_scale)
  cost = _cost(plan, b, num_rows, page_table.shape[1] * page_size)
  out, mass = _call(plan, b, cost, interpret)(
      _rows(plan, q), k_pages, v_pages, _pages(plan, page_table, num_pages),
      *_visibility(plan, length, ancestors, num_heads // num_kv, window, first_visible), *scales)
  out = _merge(out, mass) if plan.splits > 1 else out[:, :, 0]
  out = out[:, :, :num_rows].reshape(b, num_kv, n, num_heads // num_kv, head_dim)
  return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _refuse(q, k_pages, k_scale, interpret) -> None:
  """Raises NotImplementedError for what this kernel cannot do."""
  head_dim, page_size = q.shape[3], k_pages.shape[1]
  kind = block_sizes.device_kind()
  if jax.__version_info__ < (0, 12):
    raise NotImplementedError(f"jax {jax.__version__}: Mosaic GPU of 0.12 or later is needed")
  if not (interpret or kind == "cpu" or re.search(HOPPER, kind)):  # "cpu": lowered for elsewhere
    raise NotImplementedError(f"{kind}: WGMMA is Hopper's alone")
  if q.dtype != jnp.bfloat16:
    raise NotImplementedError(f"queries in {q.dtype}: WGMMA takes bfloat16")
  if k_pages.dtype.name not in (EIGHT_BITS if k_scale is not None else ("bfloat16",)):
    raise NotImplementedError(f"pages in {k_pages.dtype}: must be bfloat16, or {EIGHT_BITS} with "
                              "scales")
  if head_dim not in (64, 128, 256):
    raise NotImplementedError(f"{head_dim=}: must be 64, 128 or 256")
  smallest = 8 if k_scale is None else 32  # TMA aligns what it writes to 8 rows, or 32 scales
  if page_size % smallest or max(page_size, 128) % min(page_size, 128):
    raise NotImplementedError(f"{page_size=}: must be a power of two from {smallest} to 128, or a "
                              "multiple of 128")


def _rows(plan: Plan, q: jax.Array) -> jax.Array:
  """[B, N, H, h] -> [B, K, rows, h]: the heads of a node beside each other, padded with zeros."""
  b, n, num_heads, h = q.shape
  q = q.reshape(b, n, plan.num_kv, -1, h).transpose(0, 2, 1, 3, 4).reshape(b, plan.num_kv, -1, h)
  return jnp.pad(q, ((0, 0), (0, 0), (0, _padded_rows(plan) - q.shape[2]), (0, 0)))


def _padded_rows(plan: Plan) -> int:
  return plan.num_blocks * plan.groups * ROWS


def _pages(plan: Plan, page_table: jax.Array, num_pages: int) -> jax.Array:
  """The table with every entry in the pool and whole chunks of pages."""
  per_chunk = max(1, plan.chunk // plan.page_size)
  table = jnp.clip(page_table, 0, num_pages - 1)
  return jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_chunk)))


def _visibility(plan: Plan, length, ancestors, group: int, window, first_visible):
  """What the kernel knows of who sees what. Columns count from the end of the prefix.

  Returns:
    bounds: i32[B, blocks, 4]: first chunk, chunk after the last, length, and the first column that
      every row of the block sees as far as windows go.
    by_row: i32[B, 2 + words, rows]: the oldest column that a row does not see; the newest that it
      sees (chains); its ancestors' words, after a chunk's worth for the prefix, with room behind.
    in_use: i32[B, chunk + N + chunk]: 1 for the columns that hold anything, from -chunk on.
  """
  b, n, _ = ancestors.shape
  columns = tree_bits.columns_in_use(ancestors)
  used = tree_bits.unpack(columns, n)  # bool[B, N]
  num_used = jnp.where(used, jnp.arange(n) + 1, 0).max(-1)  # i32[B], up to the last in use
  node = jnp.broadcast_to(jnp.arange(n), (b, n))
  level = node if plan.is_chain else tree_bits.depth(ancestors)
  oldest = jnp.full((b, n), -(1 << 30)) if window is None else level - window
  oldest = jnp.maximum(oldest, first_visible - 1 - length[:, None])
  newest = jnp.minimum(node, num_used[:, None] - 1)
  words = tree_bits.within_window(ancestors, window)
  words = lax.bitcast_convert_type(words, jnp.int32).transpose(0, 2, 1)  # [B, W, N]
  ahead = plan.chunk // tree_bits.WORD
  words = jnp.pad(words, ((0, 0), (ahead, 0), (0, 0)), constant_values=-1)
  words = jnp.pad(words, ((0, 0), (0, ahead + 1), (0, 0)))
  by_row = jnp.concatenate([jnp.stack([oldest, newest], 1), words], 1)
  by_row = jnp.repeat(by_row, group, axis=2)
  spare = _padded_rows(plan) - n * group
  by_row = jnp.pad(by_row, ((0, 0), (0, 0), (0, spare)), mode="edge")

  blocks = by_row[:, :2].reshape(b, 2, plan.num_blocks, plan.groups * ROWS)
  last = blocks[:, 1].max(-1) + 1 if plan.is_chain else num_used[:, None]
  end = jnp.where(num_used[:, None] > 0, length[:, None] + last, 0)
  begin = jnp.maximum(blocks[:, 0].min(-1) + 1 + length[:, None], 0)
  bounds = jnp.stack(jnp.broadcast_arrays(
      begin // plan.chunk, pl.cdiv(end, plan.chunk), length[:, None],
      blocks[:, 0].max(-1) + 1), -1)
  in_use = jnp.pad(used.astype(jnp.int32), ((0, 0), (plan.chunk, 0)), constant_values=1)
  return bounds, by_row, jnp.pad(in_use, ((0, 0), (0, plan.chunk)))


def _cost(plan: Plan, b: int, num_rows: int, columns: int) -> pl.CostEstimate:
  """At a full table: the lengths are not known before the kernel runs."""
  scores = b * plan.num_kv * num_rows * columns
  kv_bytes = plan.head_dim * plan.kv_dtype.itemsize + (4 if plan.narrow else 0)
  return pl.CostEstimate(
      flops=4 * scores * plan.head_dim, transcendentals=scores,
      bytes_accessed=2 * b * plan.num_kv * (columns * kv_bytes + num_rows * plan.head_dim * 2))


def _merge(out: jax.Array, mass: jax.Array) -> jax.Array:
  """f32[B, K, splits, rows, h] and log2 of the weight behind each row -> f32[B, K, rows, h]."""
  weight = jnp.exp2(mass - mass.max(2, keepdims=True))
  weight = jnp.where(mass > MASKED / 2, weight, 0.0)[..., None]
  total = weight.sum(2)
  return (out * weight).sum(2) / jnp.where(total > 0, total, 1.0)


def _call(plan: Plan, b: int, cost: pl.CostEstimate, interpret):
  """The kernel for q[B, K, rows, h]; makes [B, K, splits, rows, h] and f32[B, K, splits, rows]."""
  h, chunk, stages = plan.head_dim, plan.chunk, plan.stages
  rows = plan.num_blocks * plan.groups * plan.out_rows
  copies = chunk // plan.tile * (1 + plan.narrow)
  smem = lambda *shape, dtype: plgpu.SMEM(shape, dtype, transforms=_swizzled(dtype))
  barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
  scratch = dict(
      q_smem=smem(plan.groups, ROWS, h, dtype=jnp.bfloat16),
      k_smem=smem(stages, chunk, h, dtype=plan.kv_dtype),
      v_smem=smem(stages, chunk, h, dtype=plan.kv_dtype),
      weight_smem=smem(plan.warpgroups, ROWS, chunk, dtype=jnp.bfloat16),
      out_smem=smem(plan.warpgroups, ROWS, LANES, dtype=plan.out_dtype),
      mass_smem=plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
      q_ready=plgpu.Barrier(num_arrivals=plan.groups),
      k_ready=barrier(copies), v_ready=barrier(copies),
      k_free=barrier(plan.warpgroups), v_free=barrier(plan.warpgroups),
      together=plgpu.Barrier(num_arrivals=plan.warpgroups))
  if plan.narrow:
    scratch |= dict(k_wide=smem(chunk, h, dtype=jnp.bfloat16),
                    v_wide=smem(chunk, h, dtype=jnp.bfloat16),
                    k_scale_smem=plgpu.SMEM((stages, chunk), jnp.float32),
                    v_scale_smem=plgpu.SMEM((stages, chunk), jnp.float32))
  return plgpu.kernel(
      functools.partial(_kernel, plan),
      out_type=(
          jax.ShapeDtypeStruct((b, plan.num_kv, plan.splits, rows, h), plan.out_dtype),
          jax.ShapeDtypeStruct((b, plan.num_kv, plan.splits, rows), jnp.float32)),
      scratch_types=scratch,
      grid=(plan.splits, plan.num_blocks, b * plan.num_kv),
      grid_names=("split", "row_block", "slot_and_head"),
      num_threads=plan.warpgroups + 1, thread_name="warpgroup",
      compiler_params=plgpu.CompilerParams(approx_math=True), cost_estimate=cost,
      kernel_name="paged_attention",
      interpret=plgpu.InterpretGPUParams() if interpret is True else interpret)


def _swizzled(dtype) -> tuple:
  """The layout that TMA writes and WGMMA reads: tiles of 8 rows and at most LANES columns."""
  swizzle = min(128, LANES * jnp.dtype(dtype).itemsize)
  return (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
          plgpu.SwizzleTransform(swizzle))


def _kernel(plan: Plan, q_ref, k_pages, v_pages, table, bounds, by_row, in_use, *refs, **smem):
  """One thread block: a share of a slot's chunks for one kv head and block of rows."""
  *scales, out_ref, mass_ref = refs
  warpgroup, split = lax.axis_index("warpgroup"), lax.axis_index("split")
  block, place = lax.axis_index("row_block"), lax.axis_index("slot_and_head")
  slot, head = place // plan.num_kv, place % plan.num_kv
  first, last = bounds[slot, block, 0], bounds[slot, block, 1]
  share = (jnp.maximum(last - first, 0) + plan.splits - 1) // plan.splits
  first = first + split * share
  steps = jnp.clip(last - first, 0, share)

  @pl.when(warpgroup == plan.warpgroups)
  def _():
    if plan.warpgroups > 1:  # each of two warpgroups has all it can use, 255, as it is
      plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
    for group in range(plan.groups):
      rows = pl.ds((block * plan.groups + group) * ROWS, ROWS)
      plgpu.copy_gmem_to_smem(q_ref.at[slot, head, rows], smem["q_smem"].at[group],
                              smem["q_ready"])
    pools = {"k": (k_pages, *scales[:1]), "v": (v_pages, *scales[1:])}
    _fetch(plan, first, steps, table.at[slot], head, pools, smem)

  @pl.when(warpgroup < plan.warpgroups)
  def _():
    if plan.warpgroups > 1:
      plgpu.set_max_registers(ATTEND_REGISTERS, action="increase")
    group = warpgroup // plan.halves
    share = Share(plan, warpgroup, group, first, bounds.at[slot, block], by_row.at[slot],
                  in_use.at[slot], (block * plan.groups + group) * ROWS, smem)
    plgpu.barrier_wait(smem["q_ready"])
    state = lax.fori_loop(0, steps, functools.partial(_attend, share), _start(plan))
    _write(share, state, out_ref.at[slot, head, split], mass_ref.at[slot, head, split],
           (block * plan.groups + group) * plan.out_rows)


@dataclasses.dataclass(frozen=True)
class Share:
  """What one warpgroup works on; see _visibility for the three references to global memory."""

  plan: Plan
  warpgroup: jax.Array
  group: jax.Array
  first: jax.Array  # chunk
  bounds: Any  # i32[4]
  by_row: Any  # i32[2 + words, rows]
  in_use: Any  # i32[chunk + N + chunk]
  row: jax.Array  # the first of ROWS
  smem: dict[str, Any]  # references, see _call

  def rows(self, field) -> jax.Array:
    """i32[ROWS]"""
    return _load_rows(self.by_row.at[field, pl.ds(self.row, ROWS)])


def _load_rows(ref) -> jax.Array:
  """What goes with the rows of a score matrix, to be broadcast over its columns."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def _load_columns(ref) -> jax.Array:
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def _fetch(plan: Plan, first, steps, table, head, pools, smem) -> None:
  """Keeps the ring of chunks full; keys and values of a chunk are awaited and freed separately."""
  @pl.loop(0, steps)
  def _(i):
    stage = lax.rem(i, plan.stages)
    tiles = [_tile(plan, table, first + i, t) for t in range(plan.chunk // plan.tile)]
    for name, (pages, *scale) in pools.items():
      ready = smem[f"{name}_ready"].at[stage]

      @pl.when(i >= plan.stages)
      def _(name=name):
        plgpu.barrier_wait(smem[f"{name}_free"].at[stage])

      for t, (page, offset) in enumerate(tiles):
        rows, at = pl.ds(offset, plan.tile), pl.ds(t * plan.tile, plan.tile)
        plgpu.copy_gmem_to_smem(pages.at[page, rows, pl.ds(head * plan.head_dim, plan.head_dim)],
                                smem[f"{name}_smem"].at[stage, at], ready)
        for x in scale:
          plgpu.copy_gmem_to_smem(x.at[page, head, rows], smem[f"{name}_scale_smem"].at[stage, at],
                                  ready)


def _tile(plan: Plan, table, chunk, t):
  """The page of a chunk's t-th tile, and the tile's place in it."""
  if plan.page_size <= plan.chunk:
    return table[chunk * (plan.chunk // plan.page_size) + t], 0
  per_page = plan.page_size // plan.chunk
  return table[chunk // per_page], lax.rem(chunk, per_page) * plan.chunk


def _start(plan: Plan):
  """Weighted sum of values, largest score and sum of weights of rows that have seen nothing."""
  acc = jnp.zeros((ROWS, plan.head_dim // plan.halves), jnp.float32)
  top, total = jnp.full((ROWS,), MASKED, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
  by_row = plgpu.Layout.WGMMA.reduce(1)
  return (plgpu.layout_cast(acc, plgpu.Layout.WGMMA), plgpu.layout_cast(top, by_row),
          plgpu.layout_cast(total, by_row))


def _attend(share: Share, i, state):
  """One chunk of the online softmax (Milakov and Gimelshein 2018, alg. 3), in base 2."""
  plan, smem = share.plan, share.smem
  acc, top, total = state
  stage = lax.rem(i, plan.stages)
  column = (share.first + i) * plan.chunk - share.bounds[2]  # the chunk's first
  k_ref, v_ref = smem["k_smem"].at[stage], smem["v_smem"].at[stage]

  plgpu.barrier_wait(smem["k_ready"].at[stage])
  if plan.narrow:
    k_scale = _load_columns(smem["k_scale_smem"].at[stage])
    k_ref = _widen(share, k_ref, smem["k_wide"], None)
  scores = _product(smem["q_smem"].at[share.group], k_ref.transpose((1, 0)), plan.chunk)
  plgpu.barrier_arrive(smem["k_free"].at[stage])
  if plan.narrow:
    scores *= lax.broadcast_in_dim(k_scale, scores.shape, [1])
  if plan.soft_cap is None:
    scores *= plan.scale * LOG2E
  else:
    # tanh, of which the fast instruction has 11 good bits only
    power = jnp.exp2(scores * (2 * LOG2E * plan.scale / plan.soft_cap))
    scores = plan.soft_cap * LOG2E * (1 - 2 / (1 + power))
  partly = column + plan.chunk > 0
  if plan.has_oldest:
    partly |= column < share.bounds[3]
  scores = lax.cond(partly, functools.partial(_mask, share, column), lambda x: x, scores)

  new_top = jnp.maximum(top, scores.max(1))
  base = jnp.where(new_top > MASKED / 2, new_top, 0.0)  # exp2(MASKED) is 0, exp2(0) would not be
  weight = jnp.exp2(scores - lax.broadcast_in_dim(base, scores.shape, [0]))
  shrink = jnp.exp2(top - base)
  total = total * shrink + weight.sum(1)

  plgpu.barrier_wait(smem["v_ready"].at[stage])
  in_use = _columns_in_use(share, column)
  if plan.narrow:
    v_scale = _load_columns(smem["v_scale_smem"].at[stage])
    v_scale = jnp.where(_load_columns(in_use) > 0, v_scale, 0.0)
    weight *= lax.broadcast_in_dim(v_scale, weight.shape, [1])
  weight_smem = smem["weight_smem"].at[share.warpgroup]
  weight_smem[...] = weight.astype(jnp.bfloat16)
  plgpu.commit_smem()
  if plan.narrow:
    v_ref = _widen(share, v_ref, smem["v_wide"], in_use)
  else:
    pl.when(column + plan.chunk > 0)(functools.partial(_clean, share, v_ref, in_use))
  width = acc.shape[1]
  v_ref = v_ref.at[:, pl.ds(share.warpgroup % plan.halves * width, width)]
  acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]) + _product(weight_smem, v_ref, width)
  plgpu.barrier_arrive(smem["v_free"].at[stage])
  return acc, new_top, total


def _product(left, right, width: int) -> jax.Array:
  """f32[ROWS, width] of references to bf16[ROWS, x] and bf16[x, width] in shared memory."""
  def accumulate(acc):
    plgpu.wgmma(acc, left, right)
    return acc[...]

  return pl.run_scoped(accumulate, plgpu.ACC((ROWS, width), jnp.float32))


def _mask(share: Share, column, scores):
  """MASKED where a row does not see one of the columns from `column` on."""
  plan = share.plan
  over = lambda x: lax.broadcast_in_dim(x, scores.shape, [0])
  place = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
  if plan.is_chain:
    seen = place <= over(share.rows(1) - column)
  else:
    seen = _bits(share, column, place, over) != 0
  if plan.has_oldest:
    seen &= place > over(share.rows(0) - column)
  return jnp.where(seen, scores, MASKED)


def _bits(share: Share, column, place, over):
  """i32[ROWS, chunk], each row's ancestor bit of each column; the prefix, before 0, is all ones."""
  words = share.plan.chunk // tree_bits.WORD
  at = jnp.maximum(column + share.plan.chunk, 0)
  shift = at % tree_bits.WORD
  raw = [share.rows(2 + at // tree_bits.WORD + w) for w in range(words + 1)]
  lows = [lax.shift_right_logical(x, jnp.broadcast_to(shift, (ROWS,))) for x in raw[:-1]]
  highs = [(x << 1) << (tree_bits.WORD - 1 - shift) for x in raw[1:]]
  *others, word = (over(low | high) for low, high in zip(lows, highs, strict=True))
  for w, other in reversed(list(enumerate(others))):
    word = jnp.where(place < (w + 1) * tree_bits.WORD, other, word)
  return lax.shift_right_logical(word, place % tree_bits.WORD) & 1


def _columns_in_use(share: Share, column):
  """Reference to i32[chunk] flags of the columns from `column` on; the whole prefix is in use."""
  at = jnp.maximum(column, -share.plan.chunk) + share.plan.chunk
  return share.in_use.at[pl.ds(at, share.plan.chunk)]


def _clean(share: Share, v_ref, in_use) -> None:
  """Zeros the values of columns not in use: their weight is 0, but 0 * NaN is NaN."""
  _rewrite(share, v_ref, v_ref, in_use, lambda x: x)


def _widen(share: Share, ref, wide, in_use):
  """8-bit [chunk, h] as bfloat16, which WGMMA takes, in `wide`; 0 where flags are given and 0."""
  # Hopper converts 8-bit floats to bfloat16 by way of float32 only.
  middle = jnp.int8 if ref.dtype == jnp.int8 else jnp.float32
  _rewrite(share, ref, wide, in_use, lambda x: x.astype(middle).astype(jnp.bfloat16))
  return wide


def _rewrite(share: Share, source, target, in_use, convert) -> None:
  """[chunk, h] to [chunk, h], by all warpgroups for all; a little at a time to spare registers."""
  plan = share.plan
  tiles = [(r, c) for r in range(0, plan.chunk, ROWS) for c in range(0, plan.head_dim, LANES)]
  for t, (r, c) in enumerate(tiles):
    @pl.when(share.warpgroup == t % plan.warpgroups)
    def _(r=r, c=c):
      at = pl.ds(r, ROWS), pl.ds(c, LANES)
      x = convert(plgpu.load(source.at[at], layout=plgpu.Layout.WGMMA))
      if in_use is not None:
        flags = _load_rows(in_use.at[pl.ds(r, ROWS)])
        x = jnp.where(lax.broadcast_in_dim(flags, x.shape, [0]) > 0, x, jnp.zeros((), x.dtype))
      target[at] = x
  plgpu.commit_smem()
  if plan.warpgroups > 1:
    plgpu.barrier_arrive(share.smem["together"])
    plgpu.barrier_wait(share.smem["together"])


def _write(share: Share, state, out_ref, mass_ref, row) -> None:
  """The rows' mean values, 0 for those that saw nothing, and log2 of their weights' sum."""
  plan, smem = share.plan, share.smem
  acc, top, total = state
  out_smem, mass_smem = (smem[x].at[share.warpgroup] for x in ("out_smem", "mass_smem"))
  rows, written = pl.ds(row, plan.out_rows), pl.ds(0, plan.out_rows)
  total_or_1 = jnp.where(total > 0, total, 1.0)  # all sums of a row that saw nothing are 0
  acc = acc * lax.broadcast_in_dim(1.0 / total_or_1, acc.shape, [0])

  half = share.warpgroup % plan.halves

  @pl.when(half == 0)
  def _():
    mass_smem[...] = jnp.where(total > 0, top + jnp.log2(total_or_1), MASKED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mass_smem.at[written], mass_ref.at[rows])

  for c in range(0, acc.shape[1], LANES):
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    out_smem[...] = acc[:, c:c + LANES].astype(plan.out_dtype)
    plgpu.commit_smem()
    lanes = pl.ds(half * acc.shape[1] + c, LANES)
    plgpu.copy_smem_to_gmem(out_smem.at[written], out_ref.at[rows, lanes])
  plgpu.wait_smem_to_gmem(0)
