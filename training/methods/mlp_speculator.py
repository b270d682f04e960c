"""MLPSpeculator (Wertheimer et al. 2024): cross-entropy of every stage, fed the text's tokens."""

from __future__ import annotations

import dataclasses

import jax

from jspec.config import ModelConfig
from jspec.heads import mlp_speculator as arithmetic
from jspec.heads.config import MlpSpeculatorConfig
from jspec.heads.init import init_head
from jspec.model.execution import FAST
from jspec.training import terms
from jspec.training.types import Batch, Mean, Measured, Method, Params


@dataclasses.dataclass(frozen=True)
class MlpSpeculatorOptions:
  """What there is to choose about an MLPSpeculator."""

  n_predict: int = 3
  inner_dim: int = 0  # 0: the target's width
  scale_input: bool = True
  tie_weights: bool = False  # all stages but the first projection share their weights

  def __post_init__(self):
    terms.check_positive("mlp_speculator options", self, "n_predict")
    terms.check_range("mlp_speculator options", self, 0, 1e9, "inner_dim")


def make(options: MlpSpeculatorOptions, target: ModelConfig) -> Method:
  config = MlpSpeculatorConfig(target.width, target.vocab_size, options.n_predict,
                               options.inner_dim or target.width, options.scale_input,
                               options.tie_weights)

  def init(key, target_params):
    del target_params  # unused
    stages = init_head(key, config)["stages"]
    if config.tie_weights:
      stages = [stages[0], *({"proj": stage["proj"]} for stage in stages[1:2])]
    return {"stages": stages}

  def logits(params, target_params, batch: Batch):
    del target_params  # unused
    return stage_logits(stages_of(params, config), config, batch)

  def loss_terms(params, target_params, batch: Batch, step, key):
    del step, key  # unused
    parts: list[Mean] = []
    metrics: dict[str, Measured] = {"terms": terms.number(terms.counted(batch, 2))}
    for i, out in enumerate(logits(params, target_params, batch)):
      entropy = terms.mean(terms.cross_entropy(out, terms.shifted(batch.token, i + 2)),
                           terms.counted(batch, i + 2))
      parts.append(entropy)
      metrics |= terms.draft_metrics(out, batch, i, None, entropy)
    return tuple(parts), metrics

  return Method("mlp_speculator", config, init, loss_terms, logits,
                lambda params, target_params: {"stages": stages_of(params, config)},
                options.n_predict)


def stages_of(params: Params, config: MlpSpeculatorConfig) -> list[Params]:
  """All stages, from the trained ones: tied ones are kept once, or they would drift apart."""
  kept = params["stages"]
  if not config.tie_weights:
    return kept
  return [{**kept[0], "proj": kept[min(i, 1)]["proj"]} for i in range(config.n_predict)]


def stage_logits(stages: list[Params], config: MlpSpeculatorConfig,
                 batch: Batch) -> tuple[jax.Array, ...]:
  """f32[B, T, V] of each stage.

  Stage i has the target's state at t and tokens t + 1 .. t + 1 + i of the text.
  """
  state, out = arithmetic.first_state(stages, config, terms.hidden_of(batch), FAST), []
  for i, stage in enumerate(stages):
    state = arithmetic.next_state(stage, config, arithmetic.projected(stage, state, FAST),
                                  terms.shifted(batch.token, i + 1), FAST)
    out.append(arithmetic.logits(stage, state, FAST))
  return tuple(out)
