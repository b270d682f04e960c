"""EAGLE-3 (Li et al. 2025): soft cross-entropy over the draft vocabulary, by training-time test.

The head drafts several tokens in a row in training as it will in use: step 0 takes the target's
features, each later step what the step before gave out. All steps share the weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.heads import eagle
from jspec.heads.config import EagleConfig
from jspec.heads.init import init_head
from jspec.model import transformer
from jspec.model.execution import FAST
from jspec.training import terms
from jspec.training.methods.eagle_layers import draft_layer, draft_layers, no_keys
from jspec.training.types import Batch, Mean, Measured, Method, Params


@dataclasses.dataclass(frozen=True)
class Eagle3Options:
  """What there is to choose about an EAGLE-3 head and its loss."""

  steps: int = 3  # of training-time test: drafts this deep; EAGLE's own code takes 7
  step_decay: float = 0.8  # weight of step j is step_decay ** j
  num_layers: int = 1
  feature_layers: tuple[int, ...] = ()  # (): (2, L // 2, L - 3), see heads/config.py
  fc_norm: bool = True  # EAGLE-3.1: a norm per tap before fc; taps of small models are ill-scaled
  norm_before_residual: bool = False
  norm_output: bool = False
  train_head: bool = False  # else lm_head stays the target's rows, and need not be stored
  init_layer: int | None = None  # the target layer that layer 0 starts from; None: random

  def __post_init__(self):
    terms.check_positive("eagle3 options", self, "steps", "num_layers")
    if not 0 < self.step_decay <= 1:
      raise ValueError(f"eagle3 options: step_decay must lie in (0, 1], got {self.step_decay}")


def make(options: Eagle3Options, target: ModelConfig, target_id: np.ndarray | None) -> Method:
  """target_id: i32[Vd], the draft vocabulary, ascending; None: the target's own.

  EAGLE's code leaves out rows whose likeliest target token is outside the draft vocabulary; here
  those whose text goes on outside of it: the same for greedy text, and it needs no full lm_head.
  """
  terms.check_draft_vocabulary("eagle3", target_id, target.vocab_size)
  if options.init_layer is not None and not 0 <= options.init_layer < target.num_layers:
    raise ValueError(f"eagle3 options: init_layer={options.init_layer} must lie in "
                     f"0..{target.num_layers - 1}, the target's layers")
  config = head_config(options, target, 0 if target_id is None else len(target_id))
  taps = config.taps(target.num_layers)
  if not all(0 <= tap <= target.num_layers for tap in taps):
    raise ValueError(f"eagle3 options: feature_layers={list(taps)} must lie in "
                     f"0..{target.num_layers}, the target's hidden states")

  def frozen(target_params):
    return {"w": jax.lax.stop_gradient(terms.lm_head(target_params, target_id))}

  def run(params, target_params, batch):
    return unroll(params, target_params, batch, config, target, options.steps)

  def loss_terms(params, target_params, batch: Batch, step, key):
    del step, key  # unused
    own, hidden = frozen(target_params), terms.hidden_of(batch)
    head = params["head"] if options.train_head else own
    # What the target says about the token after each one, within the draft vocabulary.
    teacher = jax.lax.stop_gradient(
        transformer.dense(hidden, _cast(own, hidden), FAST, jnp.float32))
    if target.final_soft_cap is not None:
      teacher = target.final_soft_cap * jnp.tanh(teacher / target.final_soft_cap)
    parts: list[Mean] = []
    metrics: dict[str, Measured] = {"terms": terms.number(terms.counted(batch, 2))}
    for j, y in enumerate(run(params, target_params, batch)):
      label, counts = terms.shifted(batch.token, j + 2), terms.counted(batch, j + 2)
      known = terms.draft_token(label, target_id, target.vocab_size)[1]
      logits = transformer.dense(y, _cast(head, y), FAST, jnp.float32)
      part = terms.mean(
          terms.soft_cross_entropy(terms.shifted(teacher, j + 1), logits), counts & known)
      parts.append(part.times(options.step_decay**j))
      metrics |= terms.draft_metrics(logits, batch, j, target_id, part)
    return tuple(parts), metrics

  def logits(params, target_params, batch: Batch):
    head = params["head"] if options.train_head else frozen(target_params)
    return tuple(transformer.dense(y, _cast(head, y), FAST, jnp.float32)
                 for y in run(params, target_params, batch))

  def export(params, target_params):
    head = {"w": terms.lm_head(target_params, target_id)}
    return terms.with_target_ids({"head": head} | params, target_id)

  return Method("eagle3", config, lambda key, target_params: init(
      key, options, config, target_params, target_id), loss_terms, logits, export,
      options.steps, taps, target_id)


def head_config(options: Eagle3Options, target: ModelConfig, draft_vocab_size: int) -> EagleConfig:
  layer = draft_layer(target, options.num_layers)
  return EagleConfig(
      version=3, layer=layer, target_width=target.width, draft_vocab_size=draft_vocab_size,
      feature_layers=options.feature_layers, num_taps=len(options.feature_layers) or 3,
      has_head=True, norm_before_residual=options.norm_before_residual, fc_norm=options.fc_norm,
      norm_output=options.norm_output)


def init(key: jax.Array, options: Eagle3Options, config: EagleConfig, target_params: Params,
         target_id: np.ndarray | None) -> Params:
  """A random head whose final norm and lm_head are the target's, layer 0 too if asked for."""
  params = init_head(key, config)
  params.pop("target_id", None)
  del params["head"]
  if options.train_head:
    params["head"] = {"w": terms.lm_head(target_params, target_id)}
  params["final_norm"] = {"scale": target_params["final_norm"]["scale"]}
  if options.init_layer is not None:
    source, layer = target_params["layers"][options.init_layer], params["layers"][0]
    for name in ("o", "gate", "up", "down"):
      layer[name] = {"w": source[name]["w"]}
    for name in "qkv":  # the feature's half; the embedding's stays random
      w = layer[name]["w"]
      layer[name] = {"w": w.at[config.width:].set(source[name]["w"])}
    layer["feature_norm"] = {"scale": source["attn_norm"]["scale"]}
    layer["mlp_norm"] = {"scale": source["mlp_norm"]["scale"]}
  return terms.to_float32(params)


def unroll(params: Params, target_params: Params, batch: Batch, config: EagleConfig,
           target: ModelConfig, num_steps: int) -> list[jax.Array]:
  """Normed hidden states [B, T, E] of each step: the j-th of row t is for token t + 2 + j.

  Row t is the pair of feature t and token t + 1. A later step takes token t + 1 + j of the text
  with what the step before gave out; it sees the text's pairs up to the row's, and the row's own of
  the steps before.
  """
  if batch.feature is None:
    raise ValueError("the batch has no features: run the target over it first")
  layer, feature = config.layer, eagle.fuse(params, config, batch.feature, FAST)
  keys = no_keys(params["layers"])
  out = []
  for j in range(num_steps):
    position = batch.position + 1 + j
    embedded = transformer.embed(target_params, target, terms.shifted(batch.token, 1 + j), position)
    x, attn_input = eagle.inputs(params, config, embedded, feature, FAST)
    x = draft_layers(params["layers"], layer, x, attn_input, position, batch, keys)
    y, feature = eagle.outputs(params, config, x, FAST)
    out.append(y)
  return out


def _cast(head: Params, y: jax.Array) -> Params:
  return {"w": head["w"].astype(y.dtype)}
