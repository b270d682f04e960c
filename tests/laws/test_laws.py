"""The five laws of speculation/drafter.py, for every case of tiny_cases.CASES."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jspec.drafters import DRAFTERS
from jspec.types import NO_PARENT, Committed

B, T = 4, 13  # T tokens cross three pages
CASES = list(tiny.CASES)
SAMPLED = [name for name in CASES if tiny.CASES[name](tiny.TARGET)[0].sampled]
TREES = ["medusa_tree_sampled", "eagle_tree_sampled"]


def test_every_registered_drafter_has_a_case():
  for method in DRAFTERS:
    assert any(c == method or c.startswith(method + "_") for c in tiny.CASES), method


class Bench:
  """A drafter with its functions jitted, and slots to observe text in."""

  def __init__(self, name, num_slots=B):
    self.drafter, self.params = tiny.CASES[name](tiny.TARGET)
    self.table, num_pages = tiny.page_table(num_slots, self.drafter.lookahead, 64)
    self.empty = self.drafter.init(num_slots, num_pages)
    self.num_slots = num_slots
    # Compiled in half the time, the programs being small.
    options = {"xla_backend_optimization_level": 0}
    self._propose = jax.jit(self.drafter.propose, compiler_options=options)
    self._observe = jax.jit(self.drafter.observe, compiler_options=options)

  def slots(self, text, length, index, seed=5):
    before = text["feature"][index, np.maximum(length[index] - 1, 0)]
    feature = np.where(length[index][:, None] > 0, before, 0)
    return tiny.slots_of(self.table, length, index, seed=seed, feature=feature)

  def observe(self, state, text, length, count, index=None):
    """Slot i takes count[i] of its tokens from length[i] on."""
    index = np.arange(self.num_slots) if index is None else np.array(index)
    length, count = (np.broadcast_to(x, self.num_slots) for x in (length, count))
    at = np.minimum(length[index][:, None] + np.arange(T), text["token"].shape[1] - 2)
    take = lambda x, at: jnp.array(np.take_along_axis(x[index], at, 1))
    feature = np.take_along_axis(text["feature"][index], at[..., None], 1)
    committed = Committed(take(text["token"], at), take(text["token"], at + 1),
                          jnp.array(feature), jnp.array(count[index], jnp.int32))
    return self._observe(self.params, state, self.slots(text, length, index), committed)

  def propose(self, state, text, length, index=None, seed=5, root=None):
    index = np.arange(self.num_slots) if index is None else np.array(index)
    length = np.broadcast_to(length, self.num_slots)
    root = text["token"][index, length[index]] if root is None else root
    slots = self.slots(text, length, index, seed)
    return self._propose(self.params, state, jnp.array(root), slots)

  def text(self, seed, repeating=False):
    """i32[B, 40] tokens, and features."""
    rng = np.random.default_rng(seed)
    token = rng.integers(0, 3 if repeating else tiny.VOCAB, (self.num_slots, 40))
    width = len(self.drafter.feature_layers) * tiny.TARGET.width
    return {"token": token.astype(np.int32),
            "feature": rng.normal(size=(self.num_slots, 40, width)).astype(np.float32)}


bench = functools.cache(Bench)


def assert_same_trees(a, b, slots=slice(None)):
  np.testing.assert_array_equal(a.parent[slots], b.parent[slots])
  used = (np.array(a.parent) != NO_PARENT)[slots]
  np.testing.assert_array_equal(np.array(a.token)[slots][used], np.array(b.token)[slots][used])
  if a.q_probs is not None:
    q, other = (np.array(x.q_probs)[slots][used] for x in (a, b))
    np.testing.assert_allclose(q, other, atol=1e-5)


def assert_well_formed(tree, root, drafter):
  token, parent = np.array(tree.token), np.array(tree.parent)
  assert token.shape == parent.shape == (len(root), drafter.num_nodes)
  assert token.dtype == parent.dtype == np.int32
  assert (token >= 0).all() and (token < tiny.VOCAB).all()
  np.testing.assert_array_equal(token[:, 0], root)
  assert (parent[:, 0] == NO_PARENT).all()
  assert (tree.q_probs is not None) == drafter.sampled
  for row in parent:
    depth = {0: 0}
    for i, p in enumerate(row[1:].tolist(), 1):
      if p != NO_PARENT:
        assert p < i and p in depth  # the parent comes before, and is used itself
        depth[i] = depth[p] + 1
    assert list(depth.values()) == sorted(depth.values())  # breadth-first
    assert max(depth.values()) <= drafter.max_depth


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_law_1_trees_are_well_formed(name):
  """After any text, chunk sizes, roots and keys; fresh slots too."""
  b = bench(name)
  for seed in range(12):
    rng, text = np.random.default_rng(seed), b.text(seed, repeating=seed % 2)
    state, length = b.empty, np.zeros(B, np.int32)
    for _ in range(rng.integers(0, 4)):
      count = rng.integers(0, min(T, 9), B)
      state = b.observe(state, text, length, count)
      length = length + count
    tree, _ = b.propose(state, text, length, seed=seed)
    assert_well_formed(tree, text["token"][np.arange(B), length], b.drafter)


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_law_2_state_keeps_its_structure(name):
  b = bench(name)
  text, spec = b.text(0), lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  _, proposed = b.propose(b.empty, text, 3)
  assert spec(proposed) == spec(b.empty) == spec(b.observe(proposed, text, 3, 2))


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_law_3_propose_commits_nothing(name):
  """Not by what it returns, nor by what is observed and proposed later, whatever its root."""
  b = bench(name)
  text = b.text(1)
  state = b.observe(b.empty, text, 0, 9)
  first, dirty = b.propose(state, text, 9)
  for root in (text["token"][:, 9], (text["token"][:, 9] + 5) % tiny.VOCAB):
    _, dirty = b.propose(dirty, text, 9, seed=8, root=root)
  again, dirty = b.propose(dirty, text, 9)
  assert_same_trees(first, again)
  for count in (1, 2, 4):
    clean, after = (b.observe(s, text, 9, count) for s in (state, dirty))
    assert_same_trees(b.propose(clean, text, 9 + count)[0], b.propose(after, text, 9 + count)[0])


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_law_4_observing_in_chunks_is_observing_at_once(name):
  """Cut at every place, page boundaries and their neighbours included, and token by token."""
  b = bench(name)
  text = b.text(2, repeating=True)
  at_once, _ = b.propose(b.observe(b.empty, text, 0, T), text, T)
  cuts = [(0, cut, T) for cut in range(1, T)] + [tuple(range(T + 1)), (0, 3, 4, 5, 8, T)]
  for cut in cuts:
    for between in (False, True) if len(cut) > 3 else (False,):
      state = b.empty
      for start, end in zip(cut, cut[1:], strict=False):
        state = b.observe(state, text, start, end - start)
        if between:  # as in decoding: a proposal before every observation
          _, state = b.propose(state, text, end)
      assert_same_trees(at_once, b.propose(state, text, T)[0])


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_law_4_ragged_slots_are_each_their_own(name):
  """Slots at different lengths take different counts; those with count 0 do not change."""
  b = bench(name)
  text = b.text(3, repeating=True)
  length = np.array([4, 0, 7, 9])
  state = b.observe(b.empty, text, 0, length)
  before, state = b.propose(state, text, length)
  count = np.array([3, 0, 0, 4])
  after, _ = b.propose(b.observe(state, text, length, count), text, length + count)
  assert_same_trees(before, after, np.flatnonzero(count == 0))
  alone, _ = b.propose(b.observe(b.empty, text, 0, length + count), text, length + count)
  assert_same_trees(alone, after)


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_law_4_a_subset_of_slots_is_all_that_changes(name):
  b = bench(name)
  text = b.text(4, repeating=True)
  state = b.observe(b.empty, text, 0, 6)
  before, _ = b.propose(state, text, 6)
  part = b.observe(state, text, 6, 5, index=[3, 1])
  assert_same_trees(before, b.propose(part, text, 6)[0], np.array([0, 2]))
  everyone, _ = b.propose(b.observe(state, text, 6, 5), text, 11)
  chosen, _ = b.propose(part, text, 11, index=[3, 1])
  assert_same_trees(jax.tree.map(lambda x: x[jnp.array([3, 1])], everyone), chosen)


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_a_new_tenant_owes_nothing_to_the_last(name):
  b = bench(name)
  old, new = b.text(5), b.text(6, repeating=True)
  state = b.observe(b.empty, old, 0, T)
  for end in (T + 1, T + 2):  # decoding: proposals that came true, and not
    _, state = b.propose(state, old, end - 1)
    state = b.observe(state, old, end - 1, 1)
  _, state = b.propose(state, old, T + 2)
  fresh, _ = b.propose(b.observe(b.empty, new, 0, 5), new, 5)
  assert_same_trees(fresh, b.propose(b.observe(state, new, 0, 5), new, 5)[0])


# ------------------------------------------------------------------ law 5


N, Z = 4000, 5.5  # |z| > 5.5 has probability 4e-8; a dozen nodes x 12 tokens x 5 cases: 3e-5


def largest_z(tree):
  """Of (times node i held v - their expectation under the stated q) / standard deviation."""
  q, token = np.array(tree.q_probs, np.float64)[:, 1:], np.array(tree.token)[:, 1:]
  used = np.array(tree.parent)[:, 1:] != NO_PARENT
  q, token = q * used[..., None], np.where(used, token, -1)  # -1: no token at all
  difference = ((token[..., None] == np.arange(tiny.VOCAB)) - q).sum(0)
  variance = (q * (1 - q)).sum(0)
  assert variance.max() > 100
  return np.abs(difference / np.sqrt(variance + 1)).max()


@pytest.mark.parametrize("name", [
    *tiny.quick_cases(cases=[name for name in SAMPLED if name not in TREES]), *TREES])
def test_law_5_tokens_are_drawn_from_the_q_they_carry(name):
  """N = 4000 slots after the same text, with keys of their own."""
  b = Bench(name, N)
  text = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), b.text(7))
  tree, _ = b.propose(b.observe(b.empty, text, 0, 9), text, 9)
  q = np.array(tree.q_probs)[np.array(tree.parent) != NO_PARENT]
  assert (q >= 0).all() and len(q) > N / 2
  np.testing.assert_allclose(q.sum(-1), 1, atol=1e-5)
  assert largest_z(tree) < Z
  # The same test refuses a q stated at another temperature.
  warm = np.sqrt(np.array(tree.q_probs))
  assert largest_z(tree.replace(q_probs=warm / np.maximum(warm.sum(-1, keepdims=True), 1e-9))) > Z
