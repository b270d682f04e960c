"""Token trees against loops over parents."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.model.rows import chain_mask, pack
from jspec.speculation import tree
from jspec.types import NO_PARENT

SHAPES = [tree.chain(0), tree.chain(5), tree.from_widths((3, 2)), tree.from_widths((2, 2, 1)),
          (NO_PARENT, 0, NO_PARENT, 0, 1, 1, 4, 6), (NO_PARENT, NO_PARENT, NO_PARENT)]


def lineage(parents, i):
  return {i} if parents[i] == NO_PARENT else {i} | lineage(parents, parents[i])


@pytest.mark.parametrize("parents", SHAPES)
def test_ancestors_are_those_found_by_walking_up(parents):
  n = len(parents)
  for max_depth in {max(n - 1, 0), max(tree.depths(parents))}:
    mask = np.array(tree.ancestors(jnp.array([parents, parents]), max_depth))
    for i in range(n):
      assert set(np.flatnonzero(mask[1, i])) == lineage(parents, i)


def test_chain_mask_is_the_ancestors_of_a_chain():
  parent = jnp.array([tree.chain(6)] * 2)
  np.testing.assert_array_equal(chain_mask(2, 7), tree.ancestors(parent, 6))


def test_from_paths_is_breadth_first_whatever_the_order():
  expected = (NO_PARENT, 0, 0, 1, 1, 2, 3)
  paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
  assert tree.from_paths(paths) == tree.from_paths(reversed(paths)) == expected


@pytest.mark.parametrize("paths, word", [([(0,), (0,)], "repeat"), ([(0,), (1, 0)], "parent")])
def test_from_paths_names_what_is_wrong(paths, word):
  with pytest.raises(ValueError, match=word):
    tree.from_paths(paths)


def test_from_widths():
  assert tree.from_widths((1, 1, 1)) == tree.chain(3)
  assert tree.from_widths((2, 2)) == (NO_PARENT, 0, 0, 1, 1, 2, 2)
  assert tree.depths(tree.from_widths((2, 2))) == (0, 1, 1, 2, 2, 2, 2)


def test_used_is_the_root_and_what_has_a_parent():
  parent = jnp.array([[NO_PARENT, 0, NO_PARENT], [NO_PARENT, NO_PARENT, 0]])
  np.testing.assert_array_equal(tree.used(parent), [[1, 1, 0], [1, 0, 1]])


@pytest.mark.parametrize("num_rows", [7, 8, 12])
def test_pack_lists_the_kept_nodes_slot_by_slot(num_rows):
  keep = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
  rows = pack(jnp.array(keep), num_rows)
  expected = [tuple(x) for x in np.argwhere(keep)]
  assert int(rows.valid.sum()) == len(expected)
  got = list(zip(np.array(rows.slot).tolist(), np.array(rows.node).tolist(), strict=True))
  assert got[:len(expected)] == expected
  of_node = np.array(rows.of_node)
  assert [of_node[at] for at in expected] == list(range(len(expected)))
  assert (of_node[~keep] == num_rows).all()
  assert of_node.dtype == rows.slot.dtype == np.int32


def test_along_path_gathers_nodes():
  x = jnp.arange(24).reshape(2, 4, 3)
  got = tree.along_path(x, jnp.array([[0, 3], [0, 2]]))
  np.testing.assert_array_equal(got, [[x[0, 0], x[0, 3]], [x[1, 0], x[1, 2]]])
