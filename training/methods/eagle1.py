"""EAGLE-1 (Li et al. 2024): regression of the target's next feature, and its next-token law.

Row t holds the head's entry t + 1 (jspec/heads/eagle.py): token t + 1 with feature t, from which it
predicts feature t + 1, and by the target's lm_head token t + 2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.heads import eagle
from jspec.heads.config import EagleConfig
from jspec.heads.init import init_head
from jspec.model import transformer
from jspec.model.execution import FAST
from jspec.training import terms
from jspec.training.methods.eagle_layers import draft_layer, draft_layers, no_keys
from jspec.training.types import Batch, Method, Params


@dataclasses.dataclass(frozen=True)
class Eagle1Options:
  """What there is to choose about an EAGLE-1 head and its loss."""

  num_layers: int = 1
  fc_bias: bool = True
  feature_weight: float = 1.0
  logit_weight: float = 0.1
  noise: float = 0.2  # width of the uniform noise on features, for a sequence of 512 tokens
  num_draft: int = 3  # depths that `logits` tells of

  def __post_init__(self):
    terms.check_positive("eagle1 options", self, "num_layers", "num_draft")
    terms.check_range("eagle1 options", self, 0, 1e9, "feature_weight", "logit_weight", "noise")


def make(options: Eagle1Options, target: ModelConfig) -> Method:
  config = EagleConfig(1, draft_layer(target, options.num_layers), target.width, num_taps=1)

  def init(key, target_params):
    del target_params  # unused
    params = init_head(key, config)
    if options.fc_bias:
      params["fc"]["b"] = jnp.zeros(config.width)
    return params

  def loss_terms(params, target_params, batch: Batch, step, key):
    del step  # unused
    feature = terms.hidden_of(batch).astype(params["fc"]["w"].dtype)
    noisy = feature + options.noise * noise(key, batch, feature.shape[-1]).astype(feature.dtype)
    predicted, = unroll(params, target_params, batch, noisy, config, target, 1)
    true = terms.shifted(feature, 1)
    counts = terms.counted(batch, 2)
    of_feature = terms.mean(smooth_l1(predicted, true), counts)
    student, teacher = (transformer.logits(target_params, target, x) for x in (predicted, true))
    of_logits = terms.mean(terms.soft_cross_entropy(teacher, student), counts)
    metrics = {"loss_feature": of_feature, "loss_logits": of_logits, "terms": terms.number(counts)}
    return ((of_feature.times(options.feature_weight), of_logits.times(options.logit_weight)),
            metrics | terms.draft_metrics(student, batch, 0, None))

  def logits(params, target_params, batch: Batch):
    feature = terms.hidden_of(batch).astype(params["fc"]["w"].dtype)
    return tuple(transformer.logits(target_params, target, x) for x in unroll(
        params, target_params, batch, feature, config, target, options.num_draft))

  return Method("eagle", config, init, loss_terms, logits, lambda params, target_params: params,
                options.num_draft)


def unroll(params: Params, target_params: Params, batch: Batch, feature: jax.Array,
           config: EagleConfig, target: ModelConfig, num_steps: int) -> list[jax.Array]:
  """Predicted features [B, T, E] of each step: the j-th of row t is of token t + 1 + j.

  A later step takes token t + 1 + j of the text with the step before's own feature. As in drafting,
  it sees the text's entries up to the row's, and the row's own of the steps before.
  """
  layer, out = config.layer, []
  keys = no_keys(params["layers"])
  for j in range(num_steps):
    position = batch.position + 1 + j
    x = transformer.embed(target_params, target, terms.shifted(batch.token, 1 + j), position)
    x, attn_input = eagle.inputs(params, config, x, feature, FAST)
    x = draft_layers(params["layers"], layer, x, attn_input, position, batch, keys)
    out.append(x)
    feature = x
  return out


def noise(key: jax.Array, batch: Batch, width: int) -> jax.Array:
  """f32[B, T, width], uniform in +-1/2 for sequences of 512 tokens, the wider the shorter."""
  length = (batch.segment[:, :, None] == batch.segment[:, None]).sum(-1)
  uniform = jax.random.uniform(key, (*batch.token.shape, width), minval=-0.5, maxval=0.5)
  return uniform * (512 / length)[..., None]


def smooth_l1(predicted: jax.Array, true: jax.Array) -> jax.Array:
  """Mean over the last axis of Huber's loss with delta 1."""
  error = jnp.abs(predicted.astype(jnp.float32) - true.astype(jnp.float32))
  return jnp.where(error < 1, error**2 / 2, error - 0.5).mean(-1)
