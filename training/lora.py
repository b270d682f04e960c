"""Low-rank adapters of a transformer's matrices (Hu et al. 2022): w + alpha / rank * a @ b."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

Params = Any
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def init(key: jax.Array, params: Params, rank: int) -> Params:
  """By layer and matrix, {a f32[in, rank], b f32[rank, out]}: b is 0, so that nothing changes yet.

  params: of model/transformer.py; its embedding, lm_head, norms and biases have no adapters.
  """
  def layer(i: int, p: Params) -> Params:
    return {name: adapter(jax.random.fold_in(jax.random.fold_in(key, i), j), p[name]["w"].shape)
            for j, name in enumerate(MATRICES) if name in p}

  def adapter(key: jax.Array, shape) -> Params:
    a = jax.random.normal(key, (shape[0], rank)) / math.sqrt(shape[0])
    return {"a": a.astype(jnp.float32), "b": jnp.zeros((rank, shape[1]), jnp.float32)}

  return {"layers": [layer(i, p) for i, p in enumerate(params["layers"])]}


def merge(params: Params, adapters: Params, alpha: float) -> Params:
  """The parameters with the adapters added to their matrices, in the matrices' dtype."""
  def merged(p: Params, adapter: Params) -> Params:
    delta = alpha / adapter["a"].shape[1] * adapter["a"] @ adapter["b"]
    return {**p, "w": (p["w"].astype(delta.dtype) + delta).astype(p["w"].dtype)}

  layers = [{**p, **{name: merged(p[name], adapter) for name, adapter in of_layer.items()}}
            for p, of_layer in zip(params["layers"], adapters["layers"], strict=True)]
  return {**params, "layers": layers}
