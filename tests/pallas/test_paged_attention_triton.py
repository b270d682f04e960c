"""The Triton kernel, interpreted, against dense numpy in float64, and mutants that must fail."""

from __future__ import annotations

import functools
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_right, case

from jspec.pallas import block_sizes, paged_attention_triton
from jspec.speculation import tree
from jspec.types import NO_PARENT

TREE = (NO_PARENT, 0, 0, 1, 1, 2)
WIDE = (NO_PARENT, 0, 0, *(i // 2 for i in range(3, 65)))  # three words


def interpreted(kernel):
  return jax.jit(functools.partial(kernel, interpret=True), static_argnames=(
      "scale", "soft_cap", "window", "first_visible", "is_chain"))


attend = interpreted(paged_attention_triton.paged_attention)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Sizes at which a few nodes and pages make several blocks, turns of the loop and splits."""
  monkeypatch.setattr(block_sizes, "triton", lambda *_: block_sizes.Triton(16, 16, 3, 4, 2))


@pytest.mark.parametrize("heads, parents", [
    ((4, 4), (NO_PARENT,)), ((4, 2), tree.chain(3)), ((6, 2), TREE), ((8, 1), TREE),
    ((3, 1), tree.from_widths((3, 2)))])
def test_every_gqa_ratio_and_tree(heads, parents):
  assert_right(attend, case(*heads, parents), scale=0.3)


@pytest.mark.parametrize("options", [
    {"soft_cap": 1.5}, {"window": 1}, {"window": 3}, {"window": 6, "soft_cap": 2.0},
    {"first_visible": 5}, {"first_visible": 2, "window": 7}])
def test_options(options):
  assert_right(attend, case(4, 2, TREE), scale=0.3, **options)
  assert_right(attend, case(4, 2, tree.chain(4)), scale=0.3, is_chain=True, **options)


def test_nodes_not_in_use_may_hold_anything():
  """Pruned leaves of a tree, the end of a chain: their keys and values were never written."""
  assert_right(attend, case(4, 2, TREE, unused=(3, 5)), scale=0.3)
  assert_right(attend, case(4, 2, tree.chain(3), unused=(2, 3)), scale=0.3, is_chain=True)


def test_masks_of_several_words():
  assert_right(attend, case(2, 1, WIDE, lengths=(0, 5, 40)), scale=0.3)
  assert_right(attend, case(2, 1, WIDE, lengths=(0, 5, 40), unused=(40, 63)), scale=0.3, window=3)


@pytest.mark.parametrize("window", [None, 20])
def test_a_prefill_chunk_of_256(window):
  chain = case(2, 1, tree.chain(255), lengths=(0, 40), page_size=16, unused=range(200, 256))
  assert_right(attend, chain, scale=0.3, is_chain=True, window=window)


@pytest.mark.parametrize("dtype, atol", [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_pages(kv_dtype, dtype, atol):
  assert_right(attend, case(4, 2, TREE, kv_dtype=kv_dtype, dtype=dtype), scale=0.3, atol=atol)


@pytest.mark.parametrize("head_dim, page_size", [(16, 16), (80, 3), (96, 1)])
def test_head_sizes_and_page_sizes(head_dim, page_size):
  c = case(2, 1, TREE, lengths=(0, 6, 32), head_dim=head_dim, page_size=page_size)
  assert_right(attend, c, scale=0.1)


def test_bfloat16_also_as_bits():
  c = case(4, 2, TREE, dtype="bfloat16")
  assert_right(attend, c, scale=0.3, atol=2e-2)
  bits = {name: c.arrays[name].view(jnp.uint16) for name in ("k_pages", "v_pages")}
  np.testing.assert_array_equal(attend(**{**c.arrays, **bits}, scale=0.3),
                                attend(**c.arrays, scale=0.3))


def test_the_real_block_sizes(monkeypatch):
  monkeypatch.undo()
  c = case(4, 2, tree.chain(40), lengths=(700, 5, 256), page_size=16)
  assert_right(attend, c, scale=0.3, is_chain=True)


def test_a_slot_without_nodes_in_use_reads_nothing():
  """NaN in all its pages, and a table that leads out of the pool."""
  arrays = dict(case(4, 2, tree.chain(1), lengths=(4, 300)).arrays)
  alone = attend(**arrays, scale=0.3)[0]
  arrays["ancestors"] = arrays["ancestors"].at[1].set(0)
  arrays["page_table"] = arrays["page_table"].at[1].set(jnp.iinfo(jnp.int32).max)
  got = attend(**arrays, scale=0.3)
  np.testing.assert_array_equal(got[0], alone)
  np.testing.assert_array_equal(got[1], 0)


def refused(match, **changes):
  arrays = {**case(4, 2, TREE, lengths=(3,)).arrays, **changes}
  with pytest.raises(NotImplementedError, match=match):
    attend(**arrays, scale=0.3)


def test_what_it_cannot_do_is_refused_before_launching():
  c = case(4, 2, TREE, lengths=(3,), kv_dtype="int8").arrays
  refused("head size 320", q=jnp.zeros((1, 6, 4, 320)))
  refused("queries in float16", q=jnp.zeros((1, 6, 4, 8), jnp.float16))
  refused("pages in bfloat16 for queries in float32", k_pages=jnp.zeros((9, 4, 16), jnp.bfloat16))
  refused("8-bit pages need both", k_pages=c["k_pages"], v_pages=c["v_pages"])
  refused("8-bit pages need both", k_scale=c["k_scale"])


def test_pages_that_overflow_jaxs_offsets_are_refused():
  shape = lambda s, t: jax.ShapeDtypeStruct(s, t)
  pages, scales = shape((2**14 + 1, 128, 1024), jnp.int8), shape((2**14 + 1, 8, 128), jnp.float32)
  with pytest.raises(NotImplementedError, match="2147614720 one-byte numbers"):
    jax.eval_shape(
        lambda *a: attend(*a[:-2], scale=1.0, k_scale=a[-2], v_scale=a[-1]),
        shape((1, 1, 8, 128), jnp.bfloat16), pages, pages, shape((1, 4), jnp.int32),
        shape((1,), jnp.int32), shape((1, 1, 1), jnp.uint32), scales, scales)


MUTANTS = {  # name: (in the source, in its place)
    "accumulator not cleared": ("jnp.zeros((rows, padded_dim), jnp.float32))",
                                "jnp.full((rows, padded_dim), jnp.nan))"),
    "page index off by one": ("position // page_size]", "position // page_size + 1]"),
    "offset off by one": ("position % page_size\n", "(position + 1) % page_size\n"),
    "mask word off by one": ("jnp.maximum(column, 0) >> 5", "(jnp.maximum(column, 0) >> 5) + 1"),
    "mask bit off by one": (">> (column & 31)", ">> (column + 1 & 31)"),
    "splits merged without their maxima": ("jnp.exp2(top - top.max(-2, keepdims=True))",
                                           "jnp.ones_like(top)"),
    "a split left out": ("(acc * share[..., None]).sum(-3)",
                         "(acc * share[..., None])[..., :-1, :, :].sum(-3)"),
    "unowned values not zeroed": ("mask = owned[:, None] if mask is None",
                                  "mask = None if mask is None"),
    "key scale ignored": ("scores *= _load(k_scale_ref", "_ = _load(k_scale_ref"),
    "value scale ignored": ("weight *= _load(v_scale_ref", "_ = _load(v_scale_ref"),
}


def check(kernel) -> None:
  """Enough of the above to tell a mutant."""
  assert_right(kernel, case(2, 1, WIDE, lengths=(0, 40), head_dim=16), scale=1.0)
  assert_right(kernel, case(2, 1, TREE, lengths=(13,), head_dim=16, kv_dtype="int8"), scale=1.0)


def load(source: str):
  module = types.ModuleType("mutant")
  exec(compile(source, "mutant", "exec"), module.__dict__)
  return interpreted(module.paged_attention)


def test_the_check_of_mutants_passes_the_kernel_itself():
  check(attend)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
  old, new = MUTANTS[name]
  source = pathlib.Path(paged_attention_triton.__file__).read_text()
  assert source.count(old) == 1
  mutant = load(source.replace(old, new))
  with pytest.raises(AssertionError):
    check(mutant)
