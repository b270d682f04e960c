"""The reference attention against dense numpy in float64, with NaN wherever it must not look."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LENGTHS, assert_right, case

from jspec.pallas.reference import paged_attention
from jspec.speculation import tree
from jspec.types import NO_PARENT

TREE = (NO_PARENT, 0, 0, 1, 1, 2)


@pytest.mark.parametrize("parents", [(NO_PARENT,), tree.chain(3), TREE, tree.from_widths((3, 2))])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (8, 1)])
def test_every_gqa_ratio_and_tree(heads, parents):
  assert_right(paged_attention, case(*heads, parents), scale=0.3)


OPTIONS = [
    {"soft_cap": 1.5}, {"window": 1}, {"window": 3}, {"window": 6, "soft_cap": 2.0},
    {"first_visible": 1}, {"first_visible": 5}, {"first_visible": 2, "window": 7}]


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
  assert_right(paged_attention, case(4, 2, TREE), scale=0.3, **options)
  for is_chain in (False, True):
    assert_right(paged_attention, case(4, 2, tree.chain(4)), scale=0.3, is_chain=is_chain,
                 **options)


def test_nodes_not_in_use_may_hold_anything():
  """Pruned leaves of a tree, the end of a chain: their keys and values were never written."""
  assert_right(paged_attention, case(4, 2, TREE, unused=(3, 5)), scale=0.3)
  chain = case(4, 2, tree.chain(3), unused=(2, 3))
  assert_right(paged_attention, chain, scale=0.3)
  assert_right(paged_attention, chain, scale=0.3, is_chain=True)


@pytest.mark.parametrize("num_nodes", [31, 32, 33, 65])
def test_masks_of_several_words(num_nodes):
  parents = [NO_PARENT, 0, 0] + [i // 2 for i in range(3, num_nodes)]
  assert_right(paged_attention, case(2, 1, parents, lengths=(0, 5, 40)), scale=0.3)
  assert_right(paged_attention, case(2, 1, parents, lengths=(0, 5, 40)), scale=0.3, window=3)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_pages(kv_dtype):
  assert_right(paged_attention, case(4, 2, TREE, kv_dtype=kv_dtype), scale=0.3)


def test_bfloat16():
  assert_right(paged_attention, case(4, 2, TREE, dtype="bfloat16"), scale=0.3, atol=2e-2)


def test_a_slots_result_does_not_depend_on_its_company():
  """Bit for bit, alone or beside slots that reach further."""
  arrays = case(4, 2, TREE).arrays
  together = paged_attention(**arrays, scale=0.3)
  for slot in range(len(LENGTHS)):
    own = {name: arrays[name][slot:slot + 1] for name in ("q", "page_table", "length", "ancestors")}
    np.testing.assert_array_equal(
        paged_attention(**{**arrays, **own}, scale=0.3)[0], together[slot])


def test_contexts_longer_than_one_pass():
  """Hundreds of positions: several turns of the loop, of which short slots need only the first."""
  assert_right(paged_attention, case(4, 2, tree.chain(1), lengths=(300, 5)), scale=0.3)


def test_a_slot_without_nodes_in_use_makes_nobody_wait():
  """Its length does not lengthen the loop: NaN in all its pages, and a table out of the pool."""
  arrays = dict(case(4, 2, tree.chain(1), lengths=(4, 300)).arrays)
  alone = paged_attention(**arrays, scale=0.3)[0]
  arrays["ancestors"] = arrays["ancestors"].at[1].set(0)
  arrays["page_table"] = arrays["page_table"].at[1].set(jnp.iinfo(jnp.int32).max)
  np.testing.assert_array_equal(paged_attention(**arrays, scale=0.3)[0], alone)
