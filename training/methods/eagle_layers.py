"""What EAGLE-1 and EAGLE-3 heads share in training: their layers, unrolled over drafted tokens."""

from __future__ import annotations

import dataclasses

import jax

from jspec.config import ModelConfig
from jspec.model import transformer
from jspec.model.execution import FAST
from jspec.training.layers import attention
from jspec.training.types import Batch, Params

Keys = list[list[tuple[jax.Array, jax.Array]]]  # by layer and step, (k, v)


def draft_layer(target: ModelConfig, num_layers: int) -> ModelConfig:
  """Llama layers of the target's sizes: what EAGLE's checkpoints can hold, whatever the target."""
  return dataclasses.replace(
      target, family="llama", num_layers=num_layers, norm="rms", activation="silu", gated_mlp=True,
      qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False, post_norms=False,
      embed_scale=1.0, learned_positions=False, rope_theta_local=None, attn_scale=None,
      attn_soft_cap=None, final_soft_cap=None, window=None, sliding_layers=(),
      tie_embeddings=False, vocab_parts=1)


def no_keys(layers: list[Params]) -> Keys:
  return [[] for _ in layers]


def draft_layers(layers: list[Params], config: ModelConfig, x: jax.Array, attn_input: jax.Array,
                 position: jax.Array, batch: Batch, keys: Keys) -> jax.Array:
  """x [B, T, E] after the layers, as one step of several; adds the step's keys and values.

  A row sees the text's entries, of the first step, up to its own, and its own of later steps.

  Args:
    attn_input: what the first layer's q, k and v are computed from.
    position: i32[B, T], of this step's entries.
  """
  angles = transformer.rope_angles(config, position)[False]
  for i, p in enumerate(layers):
    def attend(q, k, v, steps=keys[i]):
      steps.append((k, v))
      (text_k, text_v), *later = steps
      return attention(q, text_k, text_v, batch.segment, batch.position, config, later=later)

    x = transformer.layer(p, config, x, angles, attend, FAST, None if i else attn_input)
  return x
