"""What the parts of training hand to each other. No logic.

Letters as in jspec/types.py; T: tokens of a row of the batch, several sequences one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax

from jspec.config import ModelConfig
from jspec.head_config import HeadConfig

Params = Any  # a pytree of arrays
Metrics = dict[str, jax.Array]  # by name; scalars


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
  # (params, target params, batch, step i32[], key) -> (loss f32[], metrics)
  loss: Callable[[Params, Params, Batch, jax.Array, jax.Array], tuple[jax.Array, Metrics]]
  # (params, target params, batch) -> by depth, [B, T, Vd] given the text before
  logits: Callable[[Params, Params, Batch], tuple[jax.Array, ...]]
  # (params, target params) -> the tree of head_config.py, or of model.py
  export: Callable[[Params, Params], Params]
  depth: int  # D, the drafts that `logits` tells of
  feature_layers: tuple[int, ...] = ()  # target hidden states that fill Batch.feature
  target_id: Any = None  # i32[Vd], the target's token of each draft token; None: its own ids
  # (params, target params) -> the target as it came out, where the method trains it too
  tuned: Callable[[Params, Params], Params] | None = None
