"""A packed batch with features, for EAGLE-3's training."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from tiny_cases import TARGET, VOCAB, target_params

from jspec.training import layers
from jspec.training.types import Batch

TARGET_ID = np.array([0, 1, 3, 4, 6, 7, 8, 10, 11], np.int32)
TAPS = (0, 1, 2)
T = 14


def packed_batch() -> Batch:
  """One row of two sequences and padding, one of a single sequence; the target's states with it."""
  token = np.random.default_rng(0).integers(0, VOCAB, (2, T)).astype(np.int32)
  segment = np.array([[1] * 6 + [2] * 6 + [0] * 2, [1] * T], np.int32)
  position = np.array([[*range(6), *range(6), 0, 0], [*range(T)]], np.int32)
  loss = (position >= 2) & (segment > 0)
  batch = Batch(*map(jnp.asarray, (token, segment, position, loss)))
  hidden, feature = layers.forward(target_params(), TARGET, batch.token, batch.segment,
                                        batch.position, TAPS)
  return batch.replace(hidden=hidden, feature=feature)
