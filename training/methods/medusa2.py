"""Medusa-2 (Cai et al. 2024, sections 2.2.2 and 2.3.2): heads and target trained together.

Trainable parameters are {"heads": as Medusa-1's, "target": adapters, or the target itself}; the two
may be given learning rates of their own (the recipe: the heads' four times the target's).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.model import transformer
from jspec.training import layers, lora, terms
from jspec.training.methods import medusa
from jspec.training.methods.medusa import MedusaOptions
from jspec.training.types import Batch, Mean, Method, Params

RAMPS = ("constant", "sine")


@dataclasses.dataclass(frozen=True)
class Medusa2Options(MedusaOptions):
  """What there is to choose besides the heads' own options.

  The loss is L + heads_weight * ramp * (the heads' loss), where L is the target's cross-entropy on
  the text, or with self_distill its divergence from what it was. Published: heads_weight 0.2 after
  a stage of heads only; 0.01 with a sine ramp in self-distillation.
  """

  rank: int = 32  # of the target's adapters; 0: all of the target is trained
  alpha: float = 16.0
  heads_weight: float = 0.2
  self_distill: bool = False
  heads_only_steps: int = 0  # first stage: the heads' loss alone, on a frozen target
  ramp: str = "constant"  # one of RAMPS, of heads_weight in the second stage
  ramp_steps: int = 0  # of the sine's quarter wave
  checkpoint: bool = True  # compute layers again for the gradient instead of keeping all of them

  def __post_init__(self):
    super().__post_init__()
    terms.check_range("medusa2 options", self, 0, 1e9, "rank", "alpha", "heads_weight",
                      "heads_only_steps", "ramp_steps")
    if self.ramp not in RAMPS:
      raise ValueError(f"medusa2 options: ramp {self.ramp!r} is not one of {RAMPS}")
    if (self.ramp == "sine") != (self.ramp_steps > 0):
      raise ValueError("medusa2 options: ramp_steps >= 1 belongs to ramp 'sine', got "
                       f"ramp_steps={self.ramp_steps} with {self.ramp!r}")


def make(options: Medusa2Options, target: ModelConfig,
         target_id: np.ndarray | None = None) -> Method:
  """target_id: i32[Vd], the draft vocabulary, ascending; None: the target's own."""
  config = medusa.head_config(options, target, target_id)

  def init(key, target_params):
    trained = lora.init(key, target_params, options.rank) if options.rank else (
        terms.to_float32(target_params))
    return {"heads": medusa.init(config, target_params, target_id)["heads"], "target": trained}

  def forward(params, target_params, batch):
    """(the target as trained, its hidden states, the heads' logits)."""
    tuned = export_target(options, params, target_params)
    hidden, _ = layers.forward(tuned, target, batch.token, batch.segment, batch.position,
                                    checkpoint=options.checkpoint)
    return tuned, hidden, medusa.heads_logits(params, tuned, config, target, hidden)

  def loss_terms(params, target_params, batch: Batch, step, key):
    del key  # unused
    joint = step >= options.heads_only_steps
    frozen = jax.tree.map(lambda x: jnp.where(joint, x, jax.lax.stop_gradient(x)), params["target"])
    tuned, hidden, out = forward({**params, "target": frozen}, target_params, batch)
    heads, metrics = medusa.heads_terms(out, batch, options.decay, target_id, target.vocab_size)
    own = target_loss(tuned, hidden, target_params, batch)
    weight = jnp.where(joint, heads_weight(options, step), 1)
    parts = (Mean(jnp.where(joint, own.total, 0), own.count), *(x.times(weight) for x in heads))
    return parts, metrics | {"loss_heads": heads, "loss_target": own}

  def target_loss(tuned, hidden, target_params, batch):
    student = transformer.logits(tuned, target, hidden)
    if options.self_distill:
      teacher = transformer.logits(target_params, target, terms.hidden_of(batch))
      each = terms.divergence(teacher, student)
    else:
      each = terms.cross_entropy(student, terms.shifted(batch.token, 1))
    return terms.mean(each, terms.counted(batch, 1))

  def export(params, target_params):
    del target_params  # unused
    return terms.with_target_ids({"heads": params["heads"]}, target_id)

  return Method("medusa2", config, init, loss_terms, lambda *args: forward(*args)[2], export,
                options.num_heads, target_id=target_id,
                tuned=lambda params, target_params: export_target(options, params, target_params))


def heads_weight(options: Medusa2Options, step: jax.Array) -> jax.Array:
  """Of the heads' loss, in the second stage."""
  if options.ramp == "constant":
    return jnp.float32(options.heads_weight)
  way = jnp.clip((step - options.heads_only_steps) / options.ramp_steps, 0, 1)
  return options.heads_weight * jnp.sin(way * jnp.pi / 2)


def export_target(options: Medusa2Options, params: Params, target_params: Params) -> Params:
  """The target as it was trained, its parameter tree: the heads are good for this one only."""
  return lora.merge(target_params, params["target"], options.alpha) if options.rank else (
      params["target"])
