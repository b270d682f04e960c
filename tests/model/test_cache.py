"""Pages against a dense copy kept by plain Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.model import cache
from jspec.model.rows import pack
from jspec.types import KVPages, Verdict

TABLE = np.array([[5, 0, 3], [1, 6, 2]], np.int32)  # pages of 4 tokens; 4 and 7 nobody's
SIZE, NUM_PAGES, WIDTH = 4, 8, 6


def dense(pages):
  return np.array(pages)[TABLE].reshape(2, -1, WIDTH)


def test_locate_follows_the_page_table():
  page, offset = cache.locate(jnp.array(TABLE), jnp.array([[0, 3, 4, 11], [7, 8, 12, 40]]), SIZE)
  np.testing.assert_array_equal(page[0], [5, 5, 0, 3])
  np.testing.assert_array_equal(page[1, :2], [6, 2])
  assert (np.array(page[1, 2:]) >= NUM_PAGES).all()  # beyond the table: out of range, dropped
  np.testing.assert_array_equal(offset, [[0, 3, 0, 3], [3, 0, 0, 0]])


@pytest.mark.parametrize("length", [(0, 3), (4, 8), (10, 11)])
def test_writes_land_at_length_plus_node_and_nowhere_else(length):
  keep = np.array([[1, 1, 0, 1], [1, 0, 0, 1]], bool)
  rows = pack(jnp.array(keep), 7)
  old = jax.random.normal(jax.random.key(0), (NUM_PAGES, SIZE, WIDTH))
  x = jax.random.normal(jax.random.key(1), (7, WIDTH))
  where = cache.locate_rows(rows, jnp.array(TABLE), jnp.array(length), SIZE)
  new = cache.write(old, None, *where, x)[0]
  expected, row = dense(old).copy(), 0
  for slot, node in np.argwhere(keep):
    if length[slot] + node < expected.shape[1]:  # what does not fit is dropped
      expected[slot, length[slot] + node] = x[row]
    row += 1
  np.testing.assert_array_equal(dense(new), expected)
  np.testing.assert_array_equal(new[jnp.array([4, 7])], old[jnp.array([4, 7])])


@pytest.mark.parametrize("length", [(0, 3), (3, 4), (5, 6)])
@pytest.mark.parametrize("path, accepted", [
    ([[0, 2, 5], [0, 1, 3]], (2, 2)), ([[0, 3, 4], [0, 3, 5]], (1, 0)),
    ([[0, 1, 2], [0, 2, 3]], (2, 2)), ([[0, 2, 3], [0, 3, 5]], (2, 2))])
def test_commit_moves_the_accepted_path_and_nothing_else(length, path, accepted):
  k = jax.random.split(jax.random.key(0), 4)
  make = lambda key: jax.random.normal(key, (NUM_PAGES, SIZE, WIDTH))
  old = KVPages((make(k[0]), make(k[1])), (make(k[2]), make(k[3])))
  verdict = Verdict(jnp.array(path), jnp.array(accepted), jnp.zeros(2, jnp.int32))
  new = cache.commit(old, jnp.array(TABLE), jnp.array(length), verdict)
  for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
    expected = dense(before).copy()
    for slot in range(2):
      for d in range(accepted[slot] + 1):
        expected[slot, length[slot] + d] = dense(before)[slot, length[slot] + path[slot][d]]
    np.testing.assert_array_equal(dense(after), expected)
    np.testing.assert_array_equal(after[jnp.array([4, 7])], before[jnp.array([4, 7])])
