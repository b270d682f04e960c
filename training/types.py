"""What the parts of training hand to each other.

Letters as in jspec/types.py; T: tokens of a row of the batch, several sequences one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.heads.config import HeadConfig

Params = Any  # a pytree of arrays
Metrics = dict[str, jax.Array]  # by name; scalars


class Mean(flax.struct.PyTreeNode):
  """A sum over rows and how many they are: means of parts of a batch add up to the whole's."""

  total: jax.Array  # f32[]
  count: jax.Array  # f32[]

  @property
  def value(self) -> jax.Array:
    """0 where nothing counts."""
    return self.over(self.count)

  def over(self, count: jax.Array) -> jax.Array:
    """This part's share in the mean over `count` rows."""
    return self.total / jnp.maximum(count, 1)

  def times(self, weight: jax.Array | float) -> Mean:
    return Mean(weight * self.total, self.count)


# A number that adds up, a mean, or a sum of means.
Measured = jax.Array | Mean | tuple[Mean, ...]


def value(x: Measured) -> jax.Array:
  """f32[]."""
  if isinstance(x, Mean):
    return x.value
  return jnp.stack([mean.value for mean in x]).sum() if isinstance(x, tuple) else x


class Batch(flax.struct.PyTreeNode):
  """Rows of packed sequences, and what the target thinks of them."""

  token: jax.Array  # i32[B, T]
  segment: jax.Array  # i32[B, T], 1, 2, ... the sequences of a row; 0 is padding
  position: jax.Array  # i32[B, T], from 0 in each segment
  loss: jax.Array  # bool[B, T], whether this token is one to learn to predict: the assistant's
  hidden: jax.Array | None = None  # [B, T, E], the target's final normed hidden state
  feature: jax.Array | None = None  # [B, T, F], the hidden states of Method.feature_layers


class Method(NamedTuple):
  """How one kind of drafter is trained: pure functions of trainable params and the target's.

  Row t of logits[d] predicts token t + 2 + d: that is what a draft d + 1 tokens deep is, drafted
  when the target has seen token t and drawn token t + 1 (the root).
  """

  name: str
  config: HeadConfig | ModelConfig  # of what is exported
  init: Callable[[jax.Array, Params], Params]  # (key, target params) -> trainable params, float32
  # (params, target params, batch, step i32[], key) -> (what adds up to the loss, metrics)
  terms: Callable[[Params, Params, Batch, jax.Array, jax.Array],
                  tuple[tuple[Mean, ...], dict[str, Measured]]]
  # (params, target params, batch) -> by depth, [B, T, Vd] given the text before
  logits: Callable[[Params, Params, Batch], tuple[jax.Array, ...]]
  # (params, target params) -> the tree of heads/config.py, or of model/transformer.py
  export: Callable[[Params, Params], Params]
  depth: int  # D, the drafts that `logits` tells of
  feature_layers: tuple[int, ...] = ()  # target hidden states that fill Batch.feature
  target_id: Any = None  # i32[Vd], the target's token of each draft token; None: its own ids
  # (params, target params) -> the target as it came out, where the method trains it too
  tuned: Callable[[Params, Params], Params] | None = None

  def loss(self, params: Params, target_params: Params, batch: Batch, step: jax.Array,
           key: jax.Array) -> tuple[jax.Array, Metrics]:
    """(f32[], metrics) of one batch."""
    parts, metrics = self.terms(params, target_params, batch, step, key)
    return value(parts), {name: value(x) for name, x in metrics.items()}
