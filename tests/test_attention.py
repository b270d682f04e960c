"""The reference attention against dense numpy in float64, with NaN wherever it must not look."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.attention import paged_attention
from jspec.types import NO_PARENT

SIZE, HEAD = 4, 8
LENGTHS = (0, 3, 4, 8, 13, 37)  # exact page multiples among them
TREE = (NO_PARENT, 0, 0, 1, 1, 2)


def case(num_heads, num_kv, parents, seed=0):
  """Inputs whose only finite KV are each slot's first length + N positions."""
  rng = np.random.default_rng(seed)
  b, n, per_slot = len(LENGTHS), len(parents), 12
  table = rng.permutation(b * per_slot + 5)[:b * per_slot].reshape(b, per_slot)
  q = rng.normal(size=(b, n, num_heads, HEAD)).astype(np.float32)
  k, v = (np.full((b * per_slot + 5, SIZE, num_kv * HEAD), np.nan, np.float32) for _ in "kv")
  for slot, length in enumerate(LENGTHS):
    for at in range(length + n):
      for pages in (k, v):
        pages[table[slot, at // SIZE], at % SIZE] = rng.normal(size=num_kv * HEAD)
  mask = np.array(tree.ancestors(jnp.array([parents] * b), n))
  return q, k, v, table, np.array(LENGTHS), mask


def dense(q, k, v, table, lengths, mask, *, scale, soft_cap=None, window=None, first_visible=0):
  """One query at a time, over the list of positions that it sees."""
  out = np.zeros(q.shape)
  group = q.shape[2] // (k.shape[2] // HEAD)
  for slot, length in enumerate(lengths):
    flat = lambda pages, slot=slot: pages[table[slot]].reshape(-1, k.shape[2] // HEAD, HEAD)
    for node in range(q.shape[1]):
      kin = np.flatnonzero(mask[slot, node])
      depth = lambda j, slot=slot: mask[slot, j].sum() - 1
      seen = [(at, at) for at in range(length)] + [(length + j, length + depth(j)) for j in kin]
      seen = [at for at, position in seen if at >= first_visible
              and (window is None or position > length + depth(node) - window)]
      for head in range(q.shape[2] if seen else 0):
        keys = flat(k)[seen, head // group].astype(np.float64)
        score = keys @ q[slot, node, head] * scale
        if soft_cap is not None:
          score = soft_cap * np.tanh(score / soft_cap)
        weight = np.exp(score - score.max())
        out[slot, node, head] = weight / weight.sum() @ flat(v)[seen, head // group]
  return out


def check(num_heads=4, num_kv=2, parents=TREE, **options):
  inputs = case(num_heads, num_kv, parents)
  got = np.array(paged_attention(*map(jnp.array, inputs), scale=0.3, **options))
  np.testing.assert_allclose(got, dense(*inputs, scale=0.3, **options), atol=2e-5)


@pytest.mark.parametrize("parents", [(NO_PARENT,), tree.chain(3), TREE, tree.from_widths((3, 2))])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (8, 1)])
def test_every_gqa_ratio_and_tree(heads, parents):
  check(*heads, parents)


@pytest.mark.parametrize("options", [
    {"soft_cap": 1.5}, {"window": 1}, {"window": 3}, {"window": 6, "soft_cap": 2.0},
    {"first_visible": 1}, {"first_visible": 5}, {"first_visible": 2, "window": 7}])
def test_options(options):
  check(parents=TREE, **options)
  check(parents=tree.chain(2), **options)


def test_a_slots_result_does_not_depend_on_its_company():
  """Bit for bit, alone or beside slots that reach further."""
  q, k, v, table, lengths, mask = map(jnp.array, case(4, 2, TREE))
  together = paged_attention(q, k, v, table, lengths, mask, scale=0.3)
  for slot in range(len(LENGTHS)):
    only = slice(slot, slot + 1)
    alone = paged_attention(q[only], k, v, table[only], lengths[only], mask[only], scale=0.3)
    np.testing.assert_array_equal(alone[0], together[slot])


def test_contexts_longer_than_one_pass():
  """Hundreds of positions: several turns of the loop, of which short slots need only the first."""
  rng = np.random.default_rng(1)
  lengths, per_slot, n = np.array([300, 5]), 80, 2
  table = rng.permutation(2 * per_slot).reshape(2, per_slot)
  k, v = (rng.normal(size=(2 * per_slot, SIZE, 2 * HEAD)).astype(np.float32) for _ in "kv")
  for slot, length in enumerate(lengths):
    for at in range(length + n, per_slot * SIZE):
      k[table[slot, at // SIZE], at % SIZE] = v[table[slot, at // SIZE], at % SIZE] = np.nan
  q = rng.normal(size=(2, n, 4, HEAD)).astype(np.float32)
  inputs = q, k, v, table, lengths, np.array(tree.chain_mask(2, n))
  got = paged_attention(*map(jnp.array, inputs), scale=0.3)
  np.testing.assert_allclose(got, dense(*inputs, scale=0.3), atol=2e-5)
