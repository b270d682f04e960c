"""Suffix decoding against a trie of counts in plain Python, its store against brute force."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jspec.config.methods.suffix import SuffixOptions
from jspec.drafters import suffix as module
from jspec.drafters import suffix_store
from jspec.drafters.suffix import build, feed, suffix
from jspec.drafters.suffix_store import SuffixStore
from jspec.types import NO_PARENT, PAD_TOKEN, Committed

B, MAX_LEN, W, M = 100, 32, 3, 12
OPTIONS = {"xla_backend_optimization_level": 0}
RULES = [  # max_match, num_draft, max_spec_factor, min_token_prob, num_nodes
  (8, 6, "1", "1/10", None), (4, 8, "2", "1/4", None), (6, 8, "1/2", "2/5", None),
  (5, 5, "3", "0", None), (8, 4, "1", "1/10", 12), (3, 5, "3", "1/5", 9), (5, 3, "4", "0", 24),
  (4, 8, "2", "1/3", 4)]


# ------------------------------------------------------------------ the algorithm, plainly


def occurrences(own, windows, max_match, most):
  """(tokens that match, what followed), in the order that decides among equals."""
  found = []
  for passage in (own, *windows):
    here = []
    for end in range(1, len(passage)):
      n = 0
      while n < min(max_match, end, len(own)) and passage[end - 1 - n] == own[-1 - n]:
        n += 1
      if n:
        here.append((n, tuple(passage[end:])))
    found += here[::-1]
  return sorted(found, key=lambda o: -o[0])[:most]


def greedy_path(count, total, limit, min_prob, depth):
  path = ()
  while len(path) < min(limit, depth):
    children = [node for node in count if node[:-1] == path]
    node = max(children, key=lambda n: count[n], default=None)  # the first of equals
    if node is None or Fraction(count[node], total) < min_prob:
      break
    path = node
  return [path[:i] for i in range(1, len(path) + 1)]


def likeliest_nodes(count, total, limit, min_prob, depth):
  chosen = [()]
  while len(chosen) <= limit:
    frontier = [n for n in count if n not in chosen and n[:-1] in chosen and len(n) <= depth
                and Fraction(count[n], total) >= min_prob]
    if not frontier:
      break
    chosen.append(max(frontier, key=lambda n: (count[n], -len(n))))
  return sorted(chosen[1:], key=len)


def expected_nodes(own, windows, rule, most=64):
  """Each node of the draft as its path of tokens, breadth-first."""
  max_match, num_draft, factor, min_prob, num_nodes = rule
  best, best_score = [], 0
  found = occurrences(own, windows, max_match, most)
  for p in range(1, max_match + 1):
    followed = [text for n, text in found if n >= p]
    count = {}
    for text in followed:
      for i in range(1, len(text) + 1):
        count[text[:i]] = count.get(text[:i], 0) + 1
    limit, total = math.floor(Fraction(factor) * p), len(followed)
    if num_nodes is None:
      nodes = greedy_path(count, total, limit, Fraction(min_prob), num_draft)
    else:
      nodes = likeliest_nodes(count, total, min(limit, num_nodes - 1), Fraction(min_prob),
                              min(num_draft, num_nodes - 2))
    score = sum(Fraction(count[node], total) for node in nodes)
    if nodes and score >= best_score:
      best, best_score = nodes, score
  return best


# ------------------------------------------------------------------ the device half


def drafter_of(rule, store=None):
  max_match, num_draft, factor, min_prob, num_nodes = rule
  return suffix(num_draft, max_match, float(Fraction(factor)), float(Fraction(min_prob)),
                MAX_LEN + 1, tiny.PAGE, num_nodes, store)


def texts(seed):
  """For each slot its own text (root last) and windows, of few different tokens."""
  rng = np.random.default_rng(seed)
  out = []
  for i in range(B):
    draw = lambda most, few=2 + i % 3: rng.integers(0, few, rng.integers(0, most + 1)).tolist()
    out.append((draw(MAX_LEN - 5) + [int(rng.integers(0, 2))], [draw(M) for _ in range(W)]))
  return out


def proposals(drafter, cases, windows=None):
  """The used nodes of each slot's draft, as paths of tokens."""
  num_slots = len(cases)
  if windows is None:
    windows = np.full((num_slots, W, M), PAD_TOKEN, np.int32)
    for row, (_, passages) in zip(windows, cases, strict=True):
      for window, passage in zip(row, passages, strict=True):
        window[:len(passage)] = passage
  params = {"windows": windows}
  table, num_pages = tiny.page_table(num_slots, drafter.lookahead, MAX_LEN)
  token = np.full((num_slots, MAX_LEN), 1, np.int32)
  for row, (own, _) in zip(token, cases, strict=True):
    row[:len(own)] = own
  length = np.array([len(own) - 1 for own, _ in cases], np.int32)
  committed = Committed(jnp.array(token), jnp.array(np.roll(token, -1, 1)),
                        jnp.zeros((num_slots, MAX_LEN, 0)), jnp.array(length))
  observe = jax.jit(drafter.observe, compiler_options=OPTIONS)
  state = observe(params, drafter.init(num_slots, num_pages),
                  tiny.slots_of(table, np.zeros(num_slots)), committed)
  root = jnp.array(token[np.arange(num_slots), length])
  draft, _ = jax.jit(drafter.propose, compiler_options=OPTIONS)(
      params, state, root, tiny.slots_of(table, length))
  return [paths(t, p) for t, p in zip(np.array(draft.token), np.array(draft.parent), strict=True)]


def paths(token, parent):
  path = {0: ()}
  for i in range(1, len(token)):
    if parent[i] != NO_PARENT:
      path[i] = (*path[int(parent[i])], int(token[i]))
  assert list(path) == list(range(len(path)))  # the unused nodes come last
  return list(path.values())[1:]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_drafts_are_those_of_a_trie_of_counts(rule):
  """300 texts and their windows, node for node."""
  drafter, sizes = drafter_of(rule), []
  for seed in range(3):
    cases = texts(seed)
    for (own, windows), got in zip(cases, proposals(drafter, cases), strict=True):
      assert got == expected_nodes(own, windows, rule), (own, windows)
      sizes.append(len(got))
  assert len(set(sizes)) >= min(3, drafter.num_nodes - 1)


@pytest.mark.parametrize("rule", [RULES[0], RULES[4]], ids=str)
def test_of_many_occurrences_those_with_the_longest_matches_count(rule, monkeypatch):
  monkeypatch.setattr(module, "NUM_OCCURRENCES", 5)
  cases = texts(7)
  expected = [expected_nodes(own, windows, rule, 5) for own, windows in cases]
  assert proposals(drafter_of(rule), cases) == expected
  assert expected != [expected_nodes(own, windows, rule) for own, windows in cases]


def count_once(honest):
  def trie(*args):
    made = honest(*args)
    return made.replace(count=jnp.minimum(made.count, 1))
  return trie


MUTANTS = {
  "counts ignored": ("_trie", count_once),
  "threshold ignored": ("_likely", lambda honest: lambda trie, taken, min_prob: taken > 0),
  "shortest match preferred": ("_best", lambda honest: lambda trie, taken, used:
                               jnp.argmax(used.any(1))),
  "first of equal scores": ("_best", lambda honest: lambda trie, taken, used: jnp.argmax(
      jnp.where(used, taken, 0).sum(1) / jnp.maximum(trie.total, 1))),
}


@pytest.mark.parametrize("rule", [RULES[1], RULES[5]], ids=str)
@pytest.mark.parametrize("mutant", [*MUTANTS, "limit by p ignored"])
def test_the_trie_refuses_mutants(mutant, rule, monkeypatch):
  cases, given = texts(0), rule
  expected = [expected_nodes(own, windows, rule) for own, windows in cases]
  if mutant in MUTANTS:
    name, change = MUTANTS[mutant]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
  else:
    given = (*rule[:2], "99", *rule[3:])
  assert proposals(drafter_of(given), cases) != expected


def test_one_row_of_windows_serves_every_slot():
  cases = texts(1)[:6]
  row = cases[2][1]
  windows = np.full((1, W, M), PAD_TOKEN, np.int32)
  for window, passage in zip(windows[0], row, strict=True):
    window[:len(passage)] = passage
  got = proposals(drafter_of(RULES[0]), cases, windows)
  assert got == [expected_nodes(own, row, RULES[0]) for own, _ in cases]


def test_a_tree_is_never_taken_for_a_chain():
  for num_nodes in (3, 4, 7):
    assert not drafter_of((4, 8, "1", "0", num_nodes)).is_chain
  with pytest.raises(ValueError, match="num_nodes=2"):
    drafter_of((4, 8, "1", "0", 2))


# ------------------------------------------------------------------ the store


def brute_force(outputs, text, max_match, num_windows, window_len):
  """The longest matches by looking everywhere, with the same rule for what overlaps."""
  held, match = [], {}
  for output in outputs:
    first = len(held)
    held += [*output, None]
    for end in range(first + 1, len(held) - 1):
      n = 0
      while n < min(max_match, len(text), end - first) and held[end - 1 - n] == text[-1 - n]:
        n += 1
      if n:
        start = end - n
        match[n, start] = range(start, min(start + window_len, held.index(None, start)))
  chosen = []
  for key in sorted(match, reverse=True):
    if len(chosen) < num_windows and all(not set(match[key]) & set(c) for c in chosen):
      chosen.append(match[key])
  return [[held[i] for i in c] for c in sorted(chosen, key=lambda c: -c[0])]


def test_passages_are_around_the_longest_matches():
  """400 texts against 10 to 20 outputs, as found by looking everywhere; FIFO all the while."""
  rng = np.random.default_rng(0)
  draw = lambda least, most: rng.integers(0, 6, rng.integers(least, most)).tolist()
  store, outputs, several = SuffixStore(10, 5, 3, 8), [], 0
  for _ in range(400):
    outputs.append(draw(1, 20))
    store.add(outputs[-1])
    text = draw(1, 12)
    got = store.passages(text)
    assert got == brute_force(outputs[-10:], text, 5, 3, 8), text
    several += len(got) == 3
  assert several > 200


def test_the_store_forgets_the_oldest_and_what_it_held():
  store = SuffixStore(3, 8, 4, 16)
  for i in range(200):
    store.add([i, 1000 + i, 2000 + i, 3000 + i])
    expected = [[j, 1000 + j, 2000 + j, 3000 + j] for j in (i, i - 1, i - 2, i - 3) if j >= 0]
    found = [store.passages([7, 7, j[0]]) for j in expected]
    assert found == [[e] for e in expected[:3]] + [[]] * len(expected[3:])
  assert len(store._token) <= 2 * 5 * 4
  store.clear()
  assert store.passages([7, 7, 199]) == []
  store.add([199, 5])
  assert store.passages([7, 7, 199]) == [[199, 5]]
  disabled = SuffixStore(0, 8, 4, 16)
  disabled.add([1, 2, 3])
  assert disabled.passages([1, 2]) == []


def test_looking_is_bounded(monkeypatch):
  """A token that is everywhere: only its latest places are looked at."""
  store = SuffixStore(10**6, 4, 2, 8)
  for i in range(500):
    store.add([1, 1, 1, 100 + i])
  monkeypatch.setattr(suffix_store, "LOOKS", 3)
  assert all(p[-1] >= 100 + 495 for p in store.passages([1, 1]))
  assert store.passages([1, 1, 1])[0] == [1, 1, 1, 599]


def test_a_window_that_holds_nothing_but_the_match_is_refused():
  with pytest.raises(ValueError, match="window_len=8 must exceed max_match=8"):
    SuffixStore(10, 8, 4, 8)


# ------------------------------------------------------------------ both halves


@pytest.mark.parametrize("feed_once", [False, True])
def test_a_second_identical_request_drafts_the_first_ones_output(feed_once):
  """From its second token on, ever longer runs; also where the windows are fed but once."""
  rng = np.random.default_rng(2)
  noise = [rng.integers(0, 50, 20).tolist() for _ in range(30)]
  prompt, output = [60, 61, 62], rng.permutation(np.arange(100, 125)).tolist()
  store = SuffixStore(100, 8, 4, 30)
  drafter = drafter_of((8, 6, "1", "1/10", None), store)
  assert proposals(drafter, [(prompt + output[:1], [])],
                   drafter.feed.params([prompt + output[:1]])["windows"]) == [[]]
  for i, past in enumerate([*noise, output, *noise[:3]]):
    drafter.feed.finished([i], past)
  windows = drafter.feed.params([prompt + output[:1]])["windows"]
  emitted, drafted = 1, []
  while emitted < len(output):
    text = prompt + output[:emitted]
    if not feed_once:
      windows = drafter.feed.params([text])["windows"]
    draft = proposals(drafter, [(text, [])], windows)[0][-1]
    assert list(draft) == output[emitted:emitted + len(draft)]
    drafted.append(len(draft))
    emitted += len(draft) + 1
  assert drafted == [1, 3, 6, 6, 4]  # p tokens match, of 8 that may; then the output ends


def test_idle_slots_get_empty_windows():
  store = SuffixStore(100, 8, 4, 30)
  store.add([1, 2, 3, 4])
  windows = feed(store).params([None, [9, 1, 2], None])["windows"]
  assert windows.shape == (3, 4, 30) and windows.dtype == np.int32
  assert windows[1, 0, :5].tolist() == [1, 2, 3, 4, PAD_TOKEN]
  assert (windows[[0, 2]] == PAD_TOKEN).all() and (windows[1, 1:] == PAD_TOKEN).all()


@pytest.mark.parametrize("cached", [0, 50])
def test_built_drafters_run_without_being_fed(cached):
  drafter, params = build(
      SuffixOptions(suffix_decoding_max_cached_requests=cached),
      SimpleNamespace(num_draft=0, max_model_len=MAX_LEN, page_size=tiny.PAGE))
  assert drafter.max_depth == 16 and drafter.is_chain and (drafter.feed is None) == (not cached)
  case = [([1, 2, 3, 4, 5, 1, 2, 3], [])]
  assert proposals(drafter, case, params["windows"]) == [[(4,), (4, 5), (4, 5, 1)]]
