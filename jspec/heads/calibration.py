"""What Medusa heads say along a text, from which medusa_choices finds the tree to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.heads.config import MedusaConfig
from jspec.heads.medusa import head_logits, target_ids
from jspec.model import cache, transformer
from jspec.model.rows import chain_mask, rows_of_all

ROWS = 64  # positions whose logits exist at a time


def hidden_states(params: Any, config: ModelConfig, token: jax.Array) -> jax.Array:
  """The target's final hidden states [T, E] along the text i32[T], computed from nothing."""
  t = token.shape[0]
  dtype = cache.stored_dtype("auto", params["embed"].dtype.name, jax.default_backend())
  zeros = jnp.zeros((1, 1), jnp.int32)
  return transformer.forward(params, config, token[None], chain_mask(1, t),
                       rows_of_all(jnp.ones((1, t), bool)),
                       cache.init_pages(config, 1, t, dtype), zeros, zeros[0], is_chain=True)[0]


def likeliest(params: Any, config: MedusaConfig, target: ModelConfig, hidden: jax.Array,
              num_ranks: int) -> jax.Array:
  """i32[T, H, R]: each head's likeliest tokens after each of the hidden states [T, E].

  params: see head_params of heads/medusa.py.
  """
  def some(rows):
    tops = [jax.lax.top_k(head_logits(params, config, target, rows, i), num_ranks)[1]
            for i in range(config.num_heads)]
    return target_ids(params, jnp.stack(tops, 1))

  t = hidden.shape[0]
  rows = jnp.pad(hidden, ((0, -t % ROWS), (0, 0))).reshape(-1, ROWS, hidden.shape[1])
  return jax.lax.map(some, rows).reshape(-1, config.num_heads, num_ranks)[:t]


def predicted(text: Sequence[int], num_heads: int, start: int, size: int) -> np.ndarray:
  """int[size, H]: the token that each head has to predict at each position of the text.

  -1 before position start and where the text ends too early.
  """
  true = np.full((size, num_heads), -1)
  for head in range(num_heads):
    later = text[start + head + 2:]
    true[start:start + len(later), head] = later
  return true
