"""No drafts: keeps the target's hidden states of every token, for training heads (vLLM's name).

A finished request hands them out as CompletionOutput.hidden_states, so self-generated training data
needs no second pass of the target.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec.config.methods.hidden_states import HiddenStatesOptions
from jspec.drafters import text_pages
from jspec.speculation.drafter import Drafter, DrafterSetup, root_only
from jspec.types import Committed, Slots


class FeaturePages(flax.struct.PyTreeNode):
  """Hidden states under the target's page ids."""

  # bfloat16 bits: XLA:CPU would convert a whole bfloat16 array to float32 and back at each write.
  bits: jax.Array  # u16[P, S, F]; stale beyond the committed length


def hidden_states(layers: tuple[int, ...], width: int, page_size: int) -> Drafter:
  """layers: named as in transformers' `hidden_states`, see model.forward. width: F."""

  def init(num_slots, num_pages):
    del num_slots  # unused
    return FeaturePages(jnp.zeros((num_pages, page_size, width), jnp.uint16))

  def observe(params, state, slots: Slots, committed: Committed):
    del params  # unused
    at = text_pages.committed_places(slots, committed, page_size)
    bits = jax.lax.bitcast_convert_type(committed.feature.astype(jnp.bfloat16), jnp.uint16)
    return FeaturePages(state.bits.at[at].set(bits, mode="drop"))

  take = jax.jit(lambda state, table: jnp.take(state.bits, table, axis=0, mode="clip"))

  def collect(state, page_table: np.ndarray, count: int) -> np.ndarray:
    bits = np.asarray(take(state, page_table)).reshape(-1, width)
    bits = bits[:count].copy()  # the rest of the pages is not kept alive
    return bits.view(jnp.bfloat16)

  return Drafter(init, lambda params, state, root, slots: (root_only(root, 1), state), observe,
                 num_nodes=1, max_depth=0, feature_layers=layers, collect=collect)


def build(options: HiddenStatesOptions, setup: DrafterSetup):
  layers, deepest = options.hidden_state_layers, setup.target.num_layers
  if max(layers) > deepest:
    raise ValueError(f"hidden_state_layers={list(layers)} must lie in 0..{deepest}, the target's "
                     "number of layers")
  return hidden_states(layers, len(layers) * setup.target.width, setup.page_size), ()
