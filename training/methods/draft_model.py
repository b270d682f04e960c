"""Distillation of a small draft model from the target, started from some of its layers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jspec.config import ModelConfig
from jspec.model import transformer
from jspec.training import layers, terms
from jspec.training.types import Batch, Method, Params

DIVERGENCES = ("forward", "reverse", "cross_entropy")


@dataclasses.dataclass(frozen=True)
class DraftModelOptions:
  """What there is to choose about a draft model and its loss.

  With p the target's law and q the draft's: "forward" is KL(p || q), "reverse" KL(q || p), and
  "cross_entropy" the first without the entropy of p, which has the same gradient.
  """

  num_layers: int = 2
  divergence: str = "forward"  # one of DIVERGENCES
  temperature: float = 1.0  # of both laws; the loss is times its square (Hinton et al. 2015)
  num_draft: int = 3  # depths that `logits` tells of
  checkpoint: bool = False  # compute layers again for the gradient instead of keeping all of them

  def __post_init__(self):
    terms.check_positive("draft model options", self, "num_layers", "num_draft")
    if self.divergence not in DIVERGENCES:
      raise ValueError(f"draft model options: divergence {self.divergence!r} is not one of "
                       f"{DIVERGENCES}")
    if not self.temperature > 0:
      raise ValueError(f"draft model options: temperature must be > 0, got {self.temperature}")


def make(options: DraftModelOptions, target: ModelConfig) -> Method:
  chosen = chosen_layers(options.num_layers, target.num_layers)
  config = dataclasses.replace(
      target, num_layers=len(chosen), vocab_parts=1,
      sliding_layers=tuple(i for i, k in enumerate(chosen) if k in target.sliding_layers))

  def init(key, target_params) -> Params:
    del key  # unused
    return terms.to_float32({**target_params,
                             "layers": [target_params["layers"][k] for k in chosen]})

  def own_logits(params, batch):
    """Row t predicts token t + 1."""
    hidden, _ = layers.forward(params, config, batch.token, batch.segment, batch.position,
                                    checkpoint=options.checkpoint)
    return transformer.logits(params, config, hidden)

  def loss_terms(params, target_params, batch: Batch, step, key):
    del step, key  # unused
    out = own_logits(params, batch)
    teacher = jax.lax.stop_gradient(
        transformer.logits(target_params, target, terms.hidden_of(batch)))
    counts = terms.counted(batch, 1)
    each = distance(options.divergence, teacher / options.temperature, out / options.temperature)
    total = terms.mean(each, counts).times(options.temperature**2)
    drafts = terms.draft_metrics(terms.shifted(out, 1), batch, 0, None, total)
    return (total,), drafts | {"terms": terms.number(counts)}

  def logits(params, target_params, batch: Batch):
    del target_params  # unused
    out = own_logits(params, batch)
    # Given the text before it, a draft is as good at every depth.
    return tuple(terms.shifted(out, 1 + d) for d in range(options.num_draft))

  return Method("draft_model", config, init, loss_terms, logits,
                lambda params, target_params: params, options.num_draft)


def distance(kind: str, teacher: jax.Array, student: jax.Array) -> jax.Array:
  """One of DIVERGENCES, over the last axis of logits."""
  if kind == "cross_entropy":
    return terms.soft_cross_entropy(teacher, student)
  return terms.divergence(student, teacher) if kind == "reverse" else (
      terms.divergence(teacher, student))


def chosen_layers(num_layers: int, of: int) -> tuple[int, ...]:
  """Which of the target's layers the draft starts from: evenly, the first and the last included."""
  if num_layers > of:
    raise ValueError(f"draft model options: num_layers={num_layers} exceeds the target's {of}")
  return tuple(int(k) for k in np.rint(np.linspace(0, of - 1, num_layers)))
