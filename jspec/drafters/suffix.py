"""Suffix decoding (Oliaro et al. 2024; Arctic Inference): go on as most earlier occurrences did.

A slot looks at its own text (prompt and output, root included) and at a few windows of past
outputs. For each p up to max_match, an occurrence is a place where its last p tokens stand and
something follows. Their continuations are a trie; the probability of a node is the share of the
occurrences that pass through it, which is the product of Arctic's count ratios along its path. The
draft for p is the path of most frequent children or, as a tree, the likeliest nodes: of at least
min_token_prob, at most max_spec_factor * p of them. Its score is the sum of its probabilities; the
best of all p is proposed, on ties the longest match.

Where we differ from Arctic: own text and windows count together, not as two tries of which the
better one drafts; the end of the text itself is no occurrence, so what always followed has
probability 1; of all occurrences the NUM_OCCURRENCES with the longest matches count; match and
draft are limited each by itself, not in sum; among equals the own text, then the latest, decides.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec.config.methods.suffix import SuffixOptions
from jspec.drafters.suffix_store import SuffixStore
from jspec.drafters.text_pages import append_text, init_text, text_of
from jspec.speculation.drafter import Drafter, DrafterSetup, Feed
from jspec.types import NO_PARENT, PAD_TOKEN, DraftTree

NUM_OCCURRENCES = 64
NUM_WINDOWS, WINDOW_LEN = 8, 256  # two device loops stay inside, as a rule
NUM_DRAFT = 16  # by default, at most


class Trie(flax.struct.PyTreeNode):
  """What followed the occurrences, longest match first, and how many agree, for each p."""

  token: jax.Array  # i32[C, D], after each occurrence; PAD_TOKEN at its end
  found: jax.Array  # bool[p, C], whether it matches p tokens
  passing: jax.Array  # bool[D, C, C], whether both have the same first d + 1 tokens
  count: jax.Array  # i32[p, D, C], occurrences that share its first d + 1 tokens
  total: jax.Array  # i32[p], occurrences


def suffix(num_draft: int, max_match: int, max_spec_factor: float, min_token_prob: float,
           max_len: int, page_size: int, num_nodes: int | None = None,
           store: SuffixStore | None = None) -> Drafter:
  """params: {"windows": i32[slots, W, M], or of one row for all}, PAD_TOKEN beyond each.

  Args:
    num_draft: the longest draft, or the depth of trees.
    max_len: of prompt and output, root included.
    num_nodes: of trees, root included; None: chains.
    store: feeds the windows, if given.
  """
  if num_nodes is not None and num_nodes < 3:
    raise ValueError(f"a tree needs at least 3 nodes, got {num_nodes=}")
  # A tree of num_nodes = depth + 1 nodes would pass for a chain.
  depth = num_draft if num_nodes is None else min(num_draft, num_nodes - 2)
  num_tokens = num_draft if num_nodes is None else num_nodes - 1
  limit = np.floor(np.arange(1, max_match + 1) * max_spec_factor + 1e-6)
  limit = np.minimum(limit, num_tokens).astype(np.int32)

  def propose_slot(windows, own, length):  # length: the root's index
    own = jnp.where(jnp.arange(max_len) <= length, own, PAD_TOKEN)
    back = length - jnp.arange(max_match)
    latest = jnp.where(back >= 0, own[jnp.maximum(back, 0)], PAD_TOKEN)
    # Reversed: of equals the last decides, which is to be the first window, after the own text.
    passages = jnp.pad(windows[::-1], ((0, 0), (1, 0)), constant_values=PAD_TOKEN)
    text = jnp.concatenate([passages.reshape(-1), jnp.full(1, PAD_TOKEN), own])
    trie = _trie(text, latest, depth)
    if num_nodes is None:
      return _best_chain(trie, limit, min_token_prob)
    return _best_tree(trie, limit, min_token_prob, num_tokens)

  def propose(params, state, root, slots):
    b, windows = root.shape[0], jnp.asarray(params["windows"])
    own = text_of(state, slots, root, max_len)
    windows = windows[jnp.minimum(slots.index, windows.shape[0] - 1)]
    token, parent = jax.vmap(propose_slot)(windows, own, slots.length)
    first = jnp.full((b, 1), NO_PARENT, jnp.int32)
    return DraftTree(jnp.concatenate([root[:, None], token], 1),
                     jnp.concatenate([first, parent], 1), None), state

  return Drafter(lambda num_slots, num_pages: init_text(num_pages, page_size), propose,
                 lambda params, state, slots, committed: append_text(state, slots, committed),
                 num_tokens + 1, depth, feed=None if store is None else feed(store))


def _trie(text: jax.Array, latest: jax.Array, depth: int) -> Trie:
  """Of text i32[...], PAD_TOKEN around passages, after the tokens latest i32[max_match]."""
  size = text.shape[0]
  matched, alive = jnp.zeros(size, jnp.int32), jnp.ones(size, bool)
  for back in range(latest.shape[0]):
    shifted = jnp.pad(text, (back, 0), constant_values=PAD_TOKEN)[:size]
    alive &= (shifted == latest[back]) & (shifted != PAD_TOKEN)
    matched += alive
  after = jnp.pad(text[1:], (0, depth), constant_values=PAD_TOKEN)
  matched = jnp.where(after[:size] != PAD_TOKEN, matched, 0)
  at = _largest(matched * size + jnp.arange(size), min(NUM_OCCURRENCES, size))
  found = matched[at] >= jnp.arange(1, latest.shape[0] + 1)[:, None]
  token = after[at[:, None] + jnp.arange(depth)]
  same = (token[:, None] == token) & (token != PAD_TOKEN)
  common = jnp.where(same, depth, jnp.arange(depth)).min(-1)
  passing = common > jnp.arange(depth)[:, None, None]
  count = jnp.einsum("pk,dkc->pdc", found.astype(jnp.float32), passing.astype(jnp.float32))
  return Trie(token, found, passing, count.astype(jnp.int32), found.sum(1))


def _best_chain(trie: Trie, limit: np.ndarray, min_prob: float) -> tuple[jax.Array, jax.Array]:
  """Tokens and parents [D] of the best p's path of most frequent children."""

  def descend(alive, level):
    count, token = level  # i32[p, C], i32[C]
    pick = jnp.argmax(jnp.where(alive, count, -1), 1)
    taken = jnp.take_along_axis(count, pick[:, None], 1)[:, 0]
    return alive & (token == token[pick][:, None]), (token[pick], taken)

  levels = trie.count.swapaxes(0, 1), trie.token.T
  token, taken = jax.tree.map(jnp.transpose, jax.lax.scan(descend, trie.found, levels)[1])
  used = _likely(trie, taken, min_prob) & (jnp.arange(token.shape[1]) < limit[:, None])
  best = _best(trie, taken, used)
  used = used[best]
  return (jnp.where(used, token[best], 0),
          jnp.where(used, jnp.arange(token.shape[1]), NO_PARENT))


def _best_tree(trie: Trie, limit: np.ndarray, min_prob: float,
               num_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Tokens and parents [num_tokens] of the best p's likeliest nodes, breadth-first.

  A node is named by its depth and the first occurrence that passes through it.
  """
  depth, size = trie.passing.shape[:2]
  first = jnp.argmax(trie.passing, 1)  # [D, C]
  named = trie.passing.any(1) & (first == jnp.arange(size))
  count = jnp.where(named, trie.count, 0).reshape(-1, depth * size)
  # Of equals the shallower first, then by occurrence: so that no node precedes its parent.
  order = count * (depth * size) + jnp.arange(depth * size)[::-1]
  num_ranked = min(num_tokens, depth * size)
  at = _largest(order, num_ranked)
  taken = jnp.take_along_axis(count, at, 1)
  used = _likely(trie, taken, min_prob) & (jnp.arange(num_ranked) < limit[:, None])
  best = _best(trie, taken, used)
  at, used = at[best], used[best]
  breadth_first = jnp.argsort(jnp.where(used, at // size, depth), stable=True)
  at, used = at[breadth_first], used[breadth_first]
  level, occurrence = at // size, at % size
  above = first[jnp.maximum(level - 1, 0), occurrence]
  is_parent = (level[:, None] - 1 == level) & (above[:, None] == occurrence)
  parent = jnp.where(level == 0, 0, jnp.argmax(is_parent, 1) + 1)
  pad = lambda x, value: jnp.pad(x, (0, num_tokens - num_ranked), constant_values=value)
  return (pad(jnp.where(used, trie.token[occurrence, level], 0), 0),
          pad(jnp.where(used, parent, NO_PARENT), NO_PARENT))


def _largest(x: jax.Array, num: int) -> jax.Array:
  """Indices of the largest of i32[..., n]; numbers beyond 2^24 are told apart coarsely."""
  # In float32, as XLA:CPU sorts all of a row of integers.
  return jax.lax.top_k(x.astype(jnp.float32), num)[1]


def _likely(trie: Trie, taken: jax.Array, min_prob: float) -> jax.Array:
  """bool[p, ...]: whether nodes that `taken` occurrences pass through are likely enough."""
  return (taken > 0) & (taken / jnp.maximum(trie.total, 1)[:, None] >= min_prob)


def _best(trie: Trie, taken: jax.Array, used: jax.Array) -> jax.Array:
  """The row, p - 1, of the best score; the last of equals."""
  # Summed as integers: equal scores are equal numbers.
  score = jnp.where(used, taken, 0).sum(1) / jnp.maximum(trie.total, 1)
  return score.shape[0] - 1 - jnp.argmax(score[::-1])


def feed(store: SuffixStore) -> Feed:
  def params(texts):
    windows = np.full((len(texts), store.num_windows, store.window_len), PAD_TOKEN, np.int32)
    for row, text in zip(windows, texts, strict=True):
      for window, passage in zip(row, store.passages(text) if text else (), strict=False):
        window[:len(passage)] = passage
    return {"windows": windows}

  return Feed(params, store.max_match, lambda prompt, output: store.add(output), store.clear)


def build(options: SuffixOptions, setup: DrafterSetup):
  """num_draft 0: as many as may match, up to NUM_DRAFT."""
  max_match = options.suffix_decoding_max_tree_depth
  store = None
  if options.suffix_decoding_max_cached_requests:
    store = SuffixStore(options.suffix_decoding_max_cached_requests, max_match, NUM_WINDOWS,
                        max(WINDOW_LEN, 2 * max_match))
  drafter = suffix(setup.num_draft or min(max_match, NUM_DRAFT), max_match,
                   options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob,
                   setup.max_model_len + 1, setup.page_size, options.tree_total_tokens or None,
                   store)
  if drafter.feed is None:
    return drafter, {"windows": np.zeros((1, 0, 0), np.int32)}
  return drafter, drafter.feed.params([None])
