"""Parameters of a new drafting head: the trees of heads/config.py, with random matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.heads import eagle, medusa, mlp_speculator
from jspec.heads.config import HeadConfig

Params = dict[str, Any]

# method -> (config, matrix(rows, columns, bias), more keys, dtype) -> parameters
INITS: dict[str, Callable[..., Params]] = {
  "medusa": medusa.init, "mlp_speculator": mlp_speculator.init, "eagle": eagle.init,
  "eagle3": eagle.init,
}


def init_head(key: jax.Array, config: HeadConfig, dtype=jnp.float32) -> Params:
  """Matrices with a standard deviation of 1 / sqrt(inputs), biases 0, norms 1.

  A draft vocabulary is the target's first tokens, until one is chosen by frequency.
  """
  keys = (jax.random.fold_in(key, i) for i in itertools.count())

  def matrix(rows: int, columns: int, bias: bool = False) -> Params:
    w = (jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)).astype(dtype)
    return {"w": w, "b": jnp.zeros(columns, dtype)} if bias else {"w": w}

  params = INITS[config.method](config, matrix, keys, dtype)
  if config.draft_vocab_size:
    params["target_id"] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
  return params
