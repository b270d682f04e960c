"""The Hopper kernel under Pallas' GPU simulator, against dense numpy in float64.

The simulator runs one block's warpgroups as threads, lets a copy happen no sooner than somebody
waits for it, fills shared memory with NaN and raises on a race or a read out of bounds. It knows
nothing of layouts, registers or the size of shared memory: the deviceless compile checks those.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import inspect
import types

import jax
import numpy as np
import pytest
from attention_cases import assert_right, case

from jspec.pallas import block_sizes, paged_attention_gpu
from jspec.pallas.block_sizes import Hopper
from jspec.pallas.paged_attention_gpu import paged_attention
from jspec.speculation import tree
from jspec.types import NO_PARENT

simulated = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel and its simulator need jax 0.12 or later")

TREE = (NO_PARENT, 0, 0, 1, 1, 2)
DEEP = (NO_PARENT, 0, 0, *(i // 2 for i in range(3, 40)))
small = functools.partial(case, head_dim=64, page_size=16, dtype="bfloat16", lengths=(0, 150))
ONE_SHARE = Hopper(chunk=64, stages=2, groups=1, splits=1)
ATOL = 2e-2  # of results around 1, in bfloat16


@pytest.fixture(autouse=True)
def no_hang_no_leftovers():
  """A barrier that nobody arrives at would hang for ever; an error leaves the simulator's state."""
  faulthandler.dump_traceback_later(300, exit=True)
  yield
  faulthandler.cancel_dump_traceback_later()
  if jax.__version_info__ >= (0, 12):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def check(c, sizes=ONE_SHARE, kernel=paged_attention, **options):
  """The sizes are smaller than a chip's, so that short contexts take several steps."""
  from jax.experimental.pallas import mosaic_gpu as plgpu
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(block_sizes, "hopper", lambda *_: sizes)
    assert_right(functools.partial(kernel, interpret=plgpu.InterpretGPUParams(detect_races=True)),
                 c, atol=ATOL, scale=0.1, **options)


@simulated
@pytest.mark.parametrize(("heads", "parents"), [
    ((4, 4), (NO_PARENT,)), ((4, 2), tree.chain(3)), ((6, 2), TREE),
    ((8, 1), tree.from_widths((3, 2)))])
def test_every_gqa_ratio_and_tree(heads, parents):
  check(small(*heads, parents, lengths=(0, 70)))


@simulated
@pytest.mark.parametrize("options", [
    {"window": 3}, {"window": 70, "soft_cap": 2.0}, {"first_visible": 20}])
def test_options_on_a_tree(options):
  check(small(2, 1, TREE, lengths=(1, 150)), **options)


@simulated
@pytest.mark.parametrize("options", [{}, {"window": 70, "first_visible": 90}])
def test_the_fast_path_of_chains(options):
  check(small(2, 1, tree.chain(4), lengths=(0, 150)), is_chain=True, **options)


@simulated
@pytest.mark.parametrize("sizes", [Hopper(128, 3, 1, 1), Hopper(64, 2, 1, 3)])
def test_stages_chunks_and_splits(sizes):
  """A slot's columns in shares, some of them empty, and a ring that goes round."""
  check(small(2, 1, TREE, lengths=(0, 64, 500)), sizes)


@simulated
@pytest.mark.parametrize("page_size", [8, 64, 256])
def test_page_sizes(page_size):
  check(small(2, 1, TREE, lengths=(3, 64, 130), page_size=page_size))


@simulated
@pytest.mark.parametrize("head_dim", [128, 256])
def test_head_sizes(head_dim):
  check(small(2, 1, TREE, lengths=(13, 70), head_dim=head_dim))


@simulated
@pytest.mark.parametrize(("kv_dtype", "head_dim"), [
    ("int8", 64), ("float8_e4m3fn", 128), ("float8_e5m2", 256)])
def test_eight_bit_pages(kv_dtype, head_dim):
  check(small(2, 1, TREE, lengths=(13, 70), page_size=32, kv_dtype=kv_dtype, head_dim=head_dim))


@simulated
def test_nodes_not_in_use_may_hold_anything():
  check(small(2, 1, TREE, unused=(3, 5), lengths=(20, 126)))
  check(small(2, 1, tree.chain(3), unused=(2, 3), lengths=(20, 126)), is_chain=True)


@simulated
@pytest.mark.parametrize(("num_heads", "groups"), [(2, 1), (2, 2), (3, 2)])
def test_more_rows_than_a_warpgroup_takes(num_heads, groups):
  """40 nodes: two words, in one or two blocks, with two warpgroups that clean for each other."""
  check(small(num_heads, 1, DEEP, lengths=(5, 100)), Hopper(64, 2, groups, 2), window=60)


@simulated
def test_a_prefill_of_256_tokens():
  check(small(1, 1, tree.chain(255), lengths=(40,), page_size=64), Hopper(64, 2, 2, 1),
        is_chain=True, window=100)


@simulated
def test_a_slot_without_nodes_in_use_reads_nothing():
  """Nothing of its pages, which are all NaN, beside a slot that is right; in a loop, under jit."""
  arrays = dict(small(2, 1, TREE, lengths=(4, 150)).arrays)
  arrays["ancestors"] = arrays["ancestors"].at[1].set(0)
  arrays["page_table"] = arrays["page_table"].at[1].set(np.iinfo(np.int32).max)

  @jax.jit
  def twice(arrays):
    attend = lambda _, q: paged_attention(**{**arrays, "q": q}, scale=0.1, interpret=True)
    return jax.lax.fori_loop(0, 2, attend, arrays["q"])

  alone = {name: arrays[name][:1] for name in ("q", "page_table", "length", "ancestors")}
  got = twice(arrays)
  np.testing.assert_array_equal(got[1], 0)
  np.testing.assert_array_equal(got[:1], twice({**arrays, **alone}))


@pytest.mark.parametrize(("changes", "because"), [
    ({"dtype": "float32"}, "bfloat16"), ({"head_dim": 80}, "head_dim=80"),
    ({"page_size": 4}, "page_size=4"), ({"page_size": 24}, "page_size=24"),
    ({"page_size": 16, "kv_dtype": "int8"}, "page_size=16"),
    ({"kv_dtype": "float32"}, "float32")])
def test_what_it_cannot_do_it_refuses(changes, because, monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
  c = case(2, 1, TREE, **{"head_dim": 64, "page_size": 32, "dtype": "bfloat16"} | changes)
  with pytest.raises(NotImplementedError, match=because):
    paged_attention(**c.arrays, scale=0.1)


def test_other_cards_and_older_jax_are_refused(monkeypatch):
  c = small(2, 1, TREE)
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
  with pytest.raises(NotImplementedError, match=r"0\.12 or later"):
    paged_attention(**c.arrays, scale=0.1)
  monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
  for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200"):
    monkeypatch.setattr(block_sizes, "device_kind", lambda kind=kind: kind)
    with pytest.raises(NotImplementedError, match=kind):
      paged_attention(**c.arrays, scale=0.1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_sizes_keep_two_chunks_in_flight_and_use_the_chip(head_dim, kv_bytes):
  for num_rows in (1, 64, 65, 1024):
    for num_heads in (1, 8, 256):
      sizes = block_sizes.hopper(num_rows, head_dim, kv_bytes, num_heads, 1 << 14)
      blocks = num_heads * -(-num_rows // (64 * sizes.groups))
      assert sizes.stages >= 2 and sizes.splits >= 1
      assert blocks * sizes.splits > 66 or sizes.splits == (1 << 14) // (2 * sizes.chunk)


def mutant(old: str, new: str):
  """The kernel with a bug seeded into its source."""
  source = inspect.getsource(paged_attention_gpu)
  assert source.count(old) == 1, (old, source.count(old))
  module = types.ModuleType(paged_attention_gpu.__name__)
  exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
  return module.paged_attention


MUTANTS = {
    "keys not waited for": ('plgpu.barrier_wait(smem["k_ready"].at[stage])', "pass"),
    "values not waited for": ('plgpu.barrier_wait(smem["v_ready"].at[stage])', "pass"),
    "chunk overwritten in use": ('plgpu.barrier_wait(smem[f"{name}_free"].at[stage])', "pass"),
    "sums not initialised": ("acc = jnp.zeros((", "acc = jnp.nan * jnp.zeros(("),
    "page off by one": ("chunk // plan.page_size) + t]", "chunk // plan.page_size) + t + 1]"),
    "mask word off by one": ("share.rows(2 + at //", "share.rows(3 + at //"),
    "other values not cleaned": ("pl.when(column + plan.chunk > 0)", "pl.when(column > 9999)"),
    "sums not shrunk": ("acc * lax.broadcast_in_dim(shrink, acc.shape, [0])", "acc"),
    "shares merged unweighted": ("jnp.exp2(mass - mass.max(2, keepdims=True))",
                                 "jnp.ones_like(mass)"),
    "key scales ignored": ("broadcast_in_dim(k_scale,", "broadcast_in_dim(k_scale * 0 + 1,"),
}


@functools.cache
def caught_by(kv_dtype: str, splits: int):
  """A case in which the kernel is right, and its sizes."""
  c = small(2, 1, TREE, lengths=(64, 180), page_size=32, unused=(3, 5), kv_dtype=kv_dtype)
  sizes = dataclasses.replace(ONE_SHARE, splits=splits)
  check(c, sizes)
  return c, sizes


@simulated
@pytest.mark.parametrize("bug", MUTANTS)
def test_seeded_bugs_are_caught(bug):
  c, sizes = caught_by("int8" if "scales" in bug else "bfloat16", 3 if "shares" in bug else 1)
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
    check(c, sizes, kernel=mutant(*MUTANTS[bug]))
