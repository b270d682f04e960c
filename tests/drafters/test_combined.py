"""Two drafters as one, on drafters made by hand; the five laws run over pairs of real ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jspec.drafters.combined import combine
from jspec.model import cache
from jspec.speculation.drafter import Drafter, Feed
from jspec.types import NO_PARENT, Committed, DraftTree

V, D1, D2 = 7, 4, 3
OPTIONS = {"xla_backend_optimization_level": 0}


def canned(num_nodes, max_depth, base, sampled=False, **others) -> Drafter:
  """Proposes params["parent"] i32[B, N] with tokens base + node; its state counts the calls."""

  def propose(params, state, root, slots):
    del slots  # unused
    token = jnp.broadcast_to(base + jnp.arange(num_nodes), params["parent"].shape) % V
    token = token.at[:, 0].set(root)
    q = jnp.full((*token.shape, V), 1 / V) if sampled else None
    return DraftTree(token, params["parent"], q), {**state, "proposed": state["proposed"] + 1}

  def observe(params, state, slots, committed):
    del params, slots  # unused
    return {**state, "observed": state["observed"] + committed.count.sum()}

  init = lambda num_slots, num_pages: {"proposed": jnp.int32(0), "observed": jnp.int32(0)}
  return Drafter(init, propose, observe, num_nodes, max_depth, sampled=sampled, **others)


def chains(depths, num_nodes):
  node = np.arange(num_nodes)
  return jnp.array([np.where((node > 0) & (node <= d), node - 1, NO_PARENT) for d in depths],
                   jnp.int32)


def pair(depths, other_depths, sampled=False, owned=None):
  """The combined proposal of two chains of these depths, and the state after it."""
  drafter, params = combine(
      canned(D1 + 1, D1, 1), {"parent": chains(depths, D1 + 1)},
      canned(D2 + 1, D2, 3, sampled), {"parent": chains(other_depths, D2 + 1)})
  b = len(depths)
  table, num_pages = tiny.page_table(b, drafter.lookahead, 32)
  table = table if owned is None else jnp.where(jnp.array(owned)[:, None], table, cache.NOWHERE)
  propose = jax.jit(drafter.propose, compiler_options=OPTIONS)
  draft, state = propose(params, drafter.init(b, num_pages), jnp.full(b, 6, jnp.int32),
                         tiny.slots_of(table, np.full(b, 5)))
  return drafter, jax.tree.map(np.array, draft), state


def drafted(draft):
  """The tokens of each slot's chain."""
  out = []
  for token, parent in zip(draft.token, draft.parent, strict=True):
    used = np.flatnonzero(parent != NO_PARENT)
    np.testing.assert_array_equal(parent[used], np.arange(len(used)))
    out.append(token[used].tolist())
  return out


def test_the_first_takes_over_where_it_is_at_least_as_deep():
  every = [(i, j) for i in range(D1 + 1) for j in range(D2 + 1)]
  _, draft, _ = pair(*zip(*every, strict=True))
  expected = [[2, 3, 4, 5][:i] if i >= j and i > 0 else [4, 5, 6][:j] for i, j in every]
  assert drafted(draft) == expected
  assert (draft.token[:, 0] == 6).all() and draft.token.shape == (len(every), D1 + 1)


def test_the_second_runs_only_while_some_slot_waits_for_it():
  """That owns pages, and whose first proposal is less deep than the second's may be."""
  cases = [([D2, D1], [1, 1], 0), ([D2, D2 - 1], [1, 1], 1), ([0, D2], [0, 1], 0),
           ([0, D2], [1, 1], 1), ([0, 0], [0, 0], 0)]
  for depths, owned, runs in cases:
    _, draft, state = pair(depths, [D2, D2], owned=owned)
    assert [int(s["proposed"]) for s in state] == [1, runs], (depths, owned)
    waiting = [[2, 3, 4, 5][:d] if d >= D2 else [4, 5, 6] * runs for d in depths]
    assert drafted(draft) == waiting


def test_a_sampled_second_is_judged_by_what_it_may_do_not_by_what_it_drew():
  """How deep it is may depend on its tokens: keeping some of them for that would bias them."""
  every = [(i, j) for i in range(D1 + 1) for j in range(D2 + 1)]
  _, draft, _ = pair(*zip(*every, strict=True), sampled=True)
  assert drafted(draft) == [[2, 3, 4, 5][:i] if i >= D2 else [4, 5, 6][:j] for i, j in every]


def test_tokens_of_the_first_carry_point_masses_beside_a_sampled_second():
  _, draft, _ = pair([4, 2, 3, 0], [3, 3, 1, 3], sampled=True)
  one_hot = np.eye(V)[draft.token]
  taken = [True, False, True, False]
  np.testing.assert_array_equal(draft.q_probs[taken], one_hot[taken])
  others = np.logical_not(taken)
  np.testing.assert_allclose(draft.q_probs[others, :D2 + 1], 1 / V)
  np.testing.assert_array_equal(draft.q_probs[others, D2 + 1:], one_hot[others, D2 + 1:])


def test_both_observe_and_the_state_keeps_its_structure():
  drafter, _, state = pair([1, 2], [2, 0])
  committed = Committed(*(jnp.zeros((2, 3), jnp.int32),) * 2, jnp.zeros((2, 3, 0)),
                        jnp.array([2, 3]))
  slots = tiny.slots_of(tiny.page_table(2, drafter.lookahead, 32)[0], np.zeros(2))
  observed = drafter.observe((None, None), state, slots, committed)
  assert [int(s["observed"]) for s in observed] == [5, 5]
  spec = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert spec(observed) == spec(state) == spec(drafter.init(2, 4))


@pytest.mark.parametrize("first, second, is_chain", [
    ((5, 4), (4, 3), True), ((4, 3), (5, 4), True), ((5, 4), (5, 2), False),
    ((5, 2), (5, 4), False), ((9, 3), (5, 4), False), ((6, 3), (9, 4), False)])
def test_only_two_chains_make_a_chain(first, second, is_chain):
  drafter, _ = combine(canned(*first, 1), (), canned(*second, 1), ())
  assert drafter.is_chain == is_chain
  assert drafter.num_nodes >= max(first[0], second[0])
  assert drafter.max_depth == max(first[1], second[1])


def test_the_combined_drafter_needs_what_both_need():
  fed = []
  feed = Feed(lambda texts: {"fed": texts}, 9, lambda prompt, output: fed.append((prompt, output)),
              fed.clear)
  drafter, params = combine(canned(3, 2, 1, feed=feed), "before", canned(
      3, 2, 1, feature_layers=(1, 2), num_scratch=9), "second's")
  assert params == ("before", "second's")
  assert drafter.feed.params([[1], None]) == ({"fed": [[1], None]}, "second's")
  drafter.feed.finished([1], [2])
  assert fed == [([1], [2])]
  drafter.feed.forget()
  assert fed == []
  assert (drafter.feature_layers, drafter.num_scratch, drafter.lookahead) == ((1, 2), 9, 9)
  assert combine(canned(3, 2, 1), (), canned(3, 2, 1), ())[0].feed is None


@pytest.mark.parametrize("others", [{"sampled": True}, {"feature_layers": (1,)}])
def test_a_first_that_is_not_free_is_refused(others):
  with pytest.raises(ValueError, match="the first of two drafters"):
    combine(canned(3, 2, 1, **others), (), canned(3, 2, 1), ())
