"""The arithmetic of Medusa heads (Cai et al. 2024, section 2.1.1), for whoever runs them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.heads.config import MedusaConfig
from jspec.model import transformer
from jspec.model.execution import FAST, Execution


def init(c: MedusaConfig, matrix, keys, dtype) -> Any:
  """See heads/init.py."""
  del keys, dtype  # unused: all are matrices

  def head() -> Any:
    blocks = [matrix(c.width, c.width, c.has_bias) for _ in range(c.num_layers)]
    size = c.draft_vocab_size or c.vocab_size
    return {"blocks": blocks} | ({} if c.shares_head else {"head": matrix(c.width, size)})

  return {"heads": [head() for _ in range(c.num_heads)]}


def head_params(head: Any, config: MedusaConfig, target_params: Any) -> Any:
  """{"head": tree of the heads, "target": what `head_logits` needs of the target's, if any}."""
  if not config.shares_head:
    return {"head": head}
  lm_head = "head" if "head" in target_params else "embed"  # see transformer.logits
  return {"head": head, "target": {lm_head: target_params[lm_head]}}


def head_logits(params: Any, config: MedusaConfig, target: ModelConfig, hidden: jax.Array,
                index: int, how: Execution = FAST) -> jax.Array:
  """f32[..., Vd] of head `index`, from the target's final hidden states [..., E]."""
  head = params["head"]["heads"][index]
  hidden = hidden.astype(head["blocks"][0]["w"].dtype)
  for block in head["blocks"]:
    hidden = hidden + jax.nn.silu(transformer.dense(hidden, block, how))
  if config.shares_head:
    logits = transformer.logits(params["target"], target, hidden, how)
  else:
    logits = transformer.dense(hidden, head["head"], how, jnp.float32)
  return config.logit_scale * logits


def target_ids(params: Any, ids: jax.Array) -> jax.Array:
  """The target's tokens that the heads' token ids stand for."""
  target_id = params["head"].get("target_id")
  return ids if target_id is None else target_id[ids]
