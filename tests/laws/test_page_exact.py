"""Page-exact drafting: full pages carry all that a request needs to go on after them.

A slot is rebuilt from the full pages of another one - the target's KV, the drafter's, what the
pages' tails keep - and from 0, 1 or 2 more prompt tokens. It must go on exactly as a cold one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jspec.model import cache
from jspec.types import SlotRequest

B, LENGTH = 64, 12
DONATED = 24  # tokens whose pages a donor leaves behind


def donors(rig, state, prompts):
  """The state when every slot has DONATED tokens committed, and those tokens."""
  texts = [[*prompt, int(root)] for prompt, root in zip(prompts, state.root, strict=True)]
  while state.active.any():
    state, out = rig.step(rig.params, state)
    for text, tokens, n in zip(texts, *map(np.array, (out.tokens, out.num_tokens)), strict=True):
      text += tokens[:n].tolist()
  np.testing.assert_array_equal(state.length, DONATED)
  return state, [text[:DONATED] for text in texts]


def requests(temperature):
  """For each slot whose pages it begins with (another's), how many, and the prompt's end."""
  rng = np.random.default_rng(8)
  donor, pages, more = (np.arange(B) + 5) % B, 1 + np.arange(B) % 5, np.arange(B) // 5 % 3
  ends = [rng.integers(0, tiny.VOCAB, n).tolist() for n in more]
  keys = jax.random.split(jax.random.key(12), B)
  return donor, pages, ends, keys, tiny.sampling_for(B, temperature=temperature)


def two_tables(rig):
  """Half of every slot's pages, and the other half; beyond them nothing."""
  table, num_pages = tiny.page_table(B, rig.drafter.lookahead, tiny.MAX_LEN)
  table = np.array(table)
  half = table.shape[1] // 2
  assert half * tiny.PAGE >= DONATED + LENGTH + rig.drafter.lookahead
  nothing = np.full_like(table, cache.NOWHERE)
  first, second = nothing.copy(), nothing.copy()
  first[:, :half], second[:, :half] = table[:, :half], table[:, half:2 * half]
  return first, second, tiny.empty_state(rig.drafter, B, jnp.array(table), num_pages)


def rebuilt_and_cold(name, temperature, spoil=lambda state: state):
  """Texts and step outputs of rebuilt slots, and of cold ones; `spoil` changes what was kept."""
  rig = tiny.rig(name, B)
  first, second, empty = two_tables(rig)
  whole = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B,))
  request = lambda table, length, keys, sampling, limit=LENGTH: SlotRequest(
      jnp.array(table), whole(length), whole(limit), whole(99), keys, sampling)
  donor, pages, ends, keys, sampling = requests(temperature)

  prompts = tiny.random_prompts(B)
  earlier = request(first, 0, jax.random.split(jax.random.key(3), B), sampling,
                    [DONATED + 1 - len(prompt) for prompt in prompts])
  state, texts = donors(rig, tiny.admit_all(rig, tiny.copy(empty), earlier, prompts), prompts)
  shared = second.copy()
  for i in range(B):
    shared[i, :pages[i]] = first[donor[i], :pages[i]]
  warm = tiny.admit_all(rig, spoil(state), request(shared, pages * tiny.PAGE, keys, sampling), ends)
  whole_prompts = [texts[donor[i]][:pages[i] * tiny.PAGE] + ends[i] for i in range(B)]
  cold = tiny.admit_all(rig, empty, request(second, 0, keys, sampling), whole_prompts)
  np.testing.assert_array_equal(warm.length, cold.length)
  return tiny.generate(rig, warm, LENGTH), tiny.generate(rig, cold, LENGTH)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", tiny.quick_cases())
def test_a_slot_rebuilt_from_full_pages_goes_on_as_a_cold_one(name, temperature):
  """The same text from the same drafts, with no more than two tokens prefilled."""
  (got, outputs), (want, expected) = rebuilt_and_cold(name, temperature)
  assert got == want
  for a, b in zip(outputs, expected, strict=True):
    np.testing.assert_array_equal(a.num_tokens, b.num_tokens)
    np.testing.assert_array_equal(a.drafted_at, b.drafted_at)


def without_drafter_pages(state):
  return state.replace(draft=jax.tree.map(jnp.zeros_like, state.draft))


def without_features(state):
  return state.replace(tails=state.tails.replace(feature=0 * state.tails.feature))


@pytest.mark.parametrize("name, spoil", [
    ("draft_model", without_drafter_pages), ("ngram", without_drafter_pages),
    ("suffix", without_drafter_pages), ("eagle", without_drafter_pages),
    ("eagle", without_features), ("medusa_tree", without_features)])
def test_what_the_pages_keep_is_what_makes_the_drafts(name, spoil):
  (_, outputs), (_, expected) = rebuilt_and_cold(name, 0.0, spoil)
  steps = min(len(outputs), len(expected))
  assert any((a.num_tokens != b.num_tokens).any()
             for a, b in zip(outputs[:steps], expected[:steps], strict=True))
