"""The arithmetic of an MLPSpeculator (Wertheimer et al. 2024), for whoever runs it.

Stage i takes the state of the last one and a token, and predicts the token after it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jspec.heads.config import MlpSpeculatorConfig
from jspec.model import transformer
from jspec.model.execution import Execution
from jspec.pallas.reference import tree_sum

EPS = 1e-6  # of its norms


def init(c: MlpSpeculatorConfig, matrix, keys, dtype) -> Any:
  """See heads/init.py."""
  del keys, dtype  # unused: all are matrices
  inner = c.inner_dim

  def stage(rows: int) -> Any:
    return {"emb": matrix(c.vocab_size, inner)["w"] * math.sqrt(c.vocab_size / inner),
            "proj": matrix(rows, inner),
            "ln": {"scale": jnp.ones(inner), "bias": jnp.zeros(inner)},
            "head": matrix(inner, c.vocab_size)}

  stages = [stage(c.width if i == 0 else inner) for i in range(c.n_predict)]
  if c.tie_weights:
    for i, one in enumerate(stages[1:], 1):
      one.update({name: stages[0][name] for name in ("emb", "ln", "head")},
                 proj=stages[min(i, 1)]["proj"])
  return {"stages": stages}


def first_state(stages: Any, config: MlpSpeculatorConfig, hidden: jax.Array,
                how: Execution) -> jax.Array:
  """What stage 0 starts from, [..., E], of the target's final hidden states."""
  state = _normed(hidden, how) / math.sqrt(2) if config.scale_input else hidden
  return state.astype(stages[0]["proj"]["w"].dtype)


def projected(stage: Any, state: jax.Array, how: Execution) -> jax.Array:
  """f32[..., I], what the last stage's state gives to every token that follows it."""
  return transformer.dense(state, stage["proj"], how).astype(jnp.float32)


def next_state(stage: Any, config: MlpSpeculatorConfig, above: jax.Array, token: jax.Array,
               how: Execution) -> jax.Array:
  """State [..., I] of tokens i32[...], from what is above them f32[..., I], see projected."""
  # Half of the variance of the target's state is left after all stages, however many draft.
  state_weight = 0.5 ** (0.5 / config.n_predict)
  emb_weight = math.sqrt((1 - state_weight**2) * config.inner_dim / 2)
  x = above + emb_weight / state_weight * stage["emb"][token].astype(jnp.float32)
  x = _normed(x, how) * stage["ln"]["scale"] + stage["ln"]["bias"]
  return jax.nn.gelu(x, approximate=False).astype(stage["proj"]["w"].dtype)


def logits(stage: Any, state: jax.Array, how: Execution) -> jax.Array:
  """f32[..., V]."""
  return transformer.dense(state, stage["head"], how, jnp.float32)


def _normed(x: jax.Array, how: Execution) -> jax.Array:
  x = x.astype(jnp.float32)
  total = tree_sum(x * x) if how.bitwise else (x * x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(total / x.shape[-1] + EPS)
