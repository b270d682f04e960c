"""Prompt lookup (Saxena 2023): continue as after an earlier occurrence of the latest n-gram.

vLLM's rule: the longest suffix of prompt + output, max_n down to min_n tokens, that also occurs
earlier; on ties the earliest occurrence (`latest=True`: the latest); propose what followed it, up
to the end of the text. Wholly on the device, no table: one comparison of the text with itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.config.methods.ngram import NgramOptions
from jspec.drafters.text_pages import append_text, init_text, text_of
from jspec.speculation.drafter import Drafter, DrafterSetup
from jspec.types import NO_PARENT, PAD_TOKEN, DraftTree


def ngram(num_draft: int, max_n: int, min_n: int, max_len: int, page_size: int,
          latest: bool = False) -> Drafter:
  """max_len: of prompt and output, root included."""
  position = jnp.arange(max_len)

  def propose_slot(history, length):  # length: the root's index
    run = jnp.zeros(max_len, jnp.int32)  # tokens ending at each position that match the suffix
    alive = jnp.ones(max_len, bool)
    for back in range(max_n):
      shifted = jnp.pad(history, (back, 0), constant_values=PAD_TOKEN)[:max_len]
      suffix = history[jnp.maximum(length - back, 0)]
      alive &= (position >= back) & (length >= back) & (shifted == suffix)
      run += alive
    run = jnp.where(position < length, run, 0)  # an earlier occurrence only
    best = run.max()
    at = jnp.where(run == best, position, -1).max() if latest else jnp.argmax(run)
    source = at + 1 + jnp.arange(num_draft)
    usable = (best >= min_n) & (source <= length)
    token = jnp.where(usable, history[jnp.minimum(source, max_len - 1)], 0)
    return token, jnp.where(usable, jnp.arange(num_draft), NO_PARENT)

  def propose(params, state, root, slots):
    del params  # unused
    token, parent = jax.vmap(propose_slot)(text_of(state, slots, root, max_len), slots.length)
    first = jnp.full_like(root, NO_PARENT)
    tree = DraftTree(jnp.concatenate([root[:, None], token], 1),
                     jnp.concatenate([first[:, None], parent], 1), None)
    return tree, state

  return Drafter(lambda num_slots, num_pages: init_text(num_pages, page_size), propose,
                 lambda params, state, slots, committed: append_text(state, slots, committed),
                 num_draft + 1, num_draft)


def build(options: NgramOptions, setup: DrafterSetup):
  drafter = ngram(setup.num_draft, options.prompt_lookup_max, options.prompt_lookup_min,
                  setup.max_model_len + 1, setup.page_size, options.prompt_lookup_latest)
  return drafter, ()
