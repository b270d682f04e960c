"""The methods whose losses are tested, with small packed batches and noisy parameters."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny_cases import TARGET, VOCAB, target_params
from training_checks import quickly

from jspec.training.methods import draft_model, eagle1, medusa, medusa2, mlp_speculator
from jspec.training.methods.draft_model import DraftModelOptions
from jspec.training.methods.eagle1 import Eagle1Options
from jspec.training.methods.medusa import MedusaOptions
from jspec.training.methods.medusa2 import Medusa2Options
from jspec.training.methods.mlp_speculator import MlpSpeculatorOptions
from jspec.training.types import Batch

B, T, KNOWN = 2, 14, np.array([1, 2, 3, 5, 6, 8, 9, 11])
JOINT = Medusa2Options(num_heads=2, rank=3, alpha=6.0, heads_weight=0.3)
EAGLE1 = Eagle1Options(noise=0.0)
METHODS = {
  "medusa": medusa.make(MedusaOptions(num_layers=2), TARGET),
  "medusa_vocab": medusa.make(MedusaOptions(), TARGET, KNOWN),
  "medusa_shared": medusa.make(MedusaOptions(shares_head=True, has_bias=False), TARGET),
  "medusa2": medusa2.make(JOINT, TARGET),
  "medusa2_distill": medusa2.make(dataclasses.replace(
      JOINT, self_distill=True, ramp="sine", ramp_steps=8, heads_only_steps=2), TARGET),
  "medusa2_full": medusa2.make(dataclasses.replace(JOINT, rank=0, checkpoint=False), TARGET, KNOWN),
  "eagle1": eagle1.make(EAGLE1, TARGET),
  "mlp": mlp_speculator.make(MlpSpeculatorOptions(inner_dim=16), TARGET),
  "mlp_tied": mlp_speculator.make(
      MlpSpeculatorOptions(inner_dim=16, scale_input=False, tie_weights=True), TARGET),
  "draft_model": draft_model.make(DraftModelOptions(num_layers=1, temperature=1.5), TARGET),
  "draft_model_reverse": draft_model.make(
      DraftModelOptions(num_layers=1, divergence="reverse", checkpoint=True), TARGET),
  "draft_model_ce": draft_model.make(
      DraftModelOptions(num_layers=1, divergence="cross_entropy"), TARGET),
}
ONE_OF_EACH = ("medusa_vocab", "medusa2", "eagle1", "mlp", "draft_model")


def packed(seed: int = 0, mask: bool = True) -> Batch:
  """Rows [6 | 7 | 1 of padding] and [3 | 11], with arbitrary hidden states."""
  rng = np.random.default_rng(seed)
  sizes = ((6, 7), (3, 11))
  segment = np.zeros((B, T), np.int32)
  position = np.zeros((B, T), np.int32)
  for row, parts in enumerate(sizes):
    at = 0
    for number, size in enumerate(parts, 1):
      segment[row, at:at + size], position[row, at:at + size] = number, np.arange(size)
      at += size
  loss = (rng.random((B, T)) < 0.7) & (segment > 0) if mask else segment > 0
  return Batch(*map(jnp.asarray, (
      rng.integers(0, VOCAB, (B, T)).astype(np.int32), segment, position, loss,
      rng.normal(size=(B, T, TARGET.width)).astype(np.float32))))


@functools.cache
def params_of(name: str):
  """Initial parameters with noise on all of them: zeros hide mistakes."""
  params = METHODS[name].init(jax.random.key(1), target_params())
  rng = np.random.default_rng(2)
  return jax.tree.map(lambda x: x + jnp.asarray(0.15 * rng.normal(size=x.shape), x.dtype), params)


@functools.cache
def jitted(name: str):
  return jax.jit(METHODS[name].loss, compiler_options=quickly)


def loss_of(name: str, batch: Batch, step: int = 5, params=None):
  params = params_of(name) if params is None else params
  total, metrics = jitted(name)(params, target_params(), batch, jnp.int32(step), jax.random.key(3))
  return float(total), {k: float(v) for k, v in metrics.items()}
