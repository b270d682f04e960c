"""Medusa-1 (Cai et al. 2024, section 2.2.1): heads on a frozen target."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.heads import medusa as medusa_head
from jspec.heads.config import MedusaConfig
from jspec.training import terms
from jspec.training.types import Batch, Mean, Measured, Method, Params


@dataclasses.dataclass(frozen=True)
class MedusaOptions:
  """What there is to choose about Medusa heads and their loss."""

  num_heads: int = 3
  num_layers: int = 1  # residual blocks per head
  has_bias: bool = True
  shares_head: bool = False  # logits by the target's lm_head, which is neither copied nor trained
  decay: float = 0.8  # weight of head i's loss is decay ** i

  def __post_init__(self):
    terms.check_positive("medusa options", self, "num_heads", "num_layers")
    terms.check_range("medusa options", self, 0, 1, "decay")


def make(options: MedusaOptions, target: ModelConfig,
         target_id: np.ndarray | None = None) -> Method:
  """target_id: i32[Vd], the draft vocabulary, ascending; None: the target's own."""
  config = head_config(options, target, target_id)

  def loss_terms(params, target_params, batch: Batch, step, key):
    del step, key  # unused
    out = logits(params, target_params, batch)
    return heads_terms(out, batch, options.decay, target_id, target.vocab_size)

  def logits(params, target_params, batch: Batch):
    return heads_logits(params, target_params, config, target, terms.hidden_of(batch))

  return Method("medusa", config, lambda key, target_params: init(config, target_params, target_id),
                loss_terms, logits,
                lambda params, target_params: terms.with_target_ids(params, target_id),
                options.num_heads, target_id=target_id)


def head_config(options: MedusaOptions, target: ModelConfig,
                target_id: np.ndarray | None) -> MedusaConfig:
  terms.check_draft_vocabulary("medusa", target_id, target.vocab_size)
  if options.shares_head and target_id is not None:
    raise ValueError(f"medusa options: shares_head=True has all {target.vocab_size} tokens of the "
                     f"target; a draft vocabulary of {len(target_id)} needs shares_head=False")
  return MedusaConfig(target.width, target.vocab_size, options.num_heads, options.num_layers,
                      options.has_bias, options.shares_head,
                      0 if target_id is None else len(target_id))


def init(config: MedusaConfig, target_params: Params, target_id: np.ndarray | None) -> Params:
  """Blocks that change nothing, and the target's lm_head: every head starts as the target's own."""
  def head() -> Params:
    width = config.width
    bias = {"b": jnp.zeros(width)} if config.has_bias else {}
    blocks = [{"w": jnp.zeros((width, width))} | bias for _ in range(config.num_layers)]
    return {"blocks": blocks} | (
        {} if config.shares_head else {"head": {"w": terms.lm_head(target_params, target_id)}})

  return {"heads": [head() for _ in range(config.num_heads)]}


def heads_logits(params: Params, target_params: Params, config: MedusaConfig, target: ModelConfig,
                 hidden: jax.Array) -> tuple[jax.Array, ...]:
  """f32[B, T, Vd] of each head, from the target's final hidden states [B, T, E]."""
  both = {"head": params, "target": target_params}
  return tuple(medusa_head.head_logits(both, config, target, hidden, i)
               for i in range(config.num_heads))


def heads_terms(logits: tuple[jax.Array, ...], batch: Batch, decay: float,
                target_id: np.ndarray | None, vocab_size: int
                ) -> tuple[tuple[Mean, ...], dict[str, Measured]]:
  """decay^i * CE of head i, on token t + 2 + i of each row t."""
  parts: list[Mean] = []
  metrics: dict[str, Measured] = {"terms": terms.number(terms.counted(batch, 2))}
  for i, out in enumerate(logits):
    label, known = terms.draft_token(terms.shifted(batch.token, i + 2), target_id, vocab_size)
    entropy = terms.mean(terms.cross_entropy(out, label), terms.counted(batch, i + 2) & known)
    parts.append(entropy.times(decay**i))
    metrics |= terms.draft_metrics(out, batch, i, target_id, entropy)
  return tuple(parts), metrics
