"""The target's parameter tree: its leaves and their shapes, random ones, and where they are put.

`param_shapes` is the one description of the tree, {"embed", "layers": [...], "final_norm", ...}.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig

Path = tuple[str | int, ...]  # ("layers", 3, "q", "w")
Params = dict[str, Any]
Place = Callable[[Path, Any], jax.Array]  # puts a parameter on the device or devices that need it
# A checkpoint's config -> the model as the devices hold it, and how to put its parameters there.
Placer = Callable[[ModelConfig], tuple[ModelConfig, Place]]


def param_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  """Every leaf of the parameter tree and its shape, in loading order."""
  shapes: dict[Path, tuple[int, ...]] = {("embed",): (config.vocab_size, config.width)}
  if config.learned_positions:
    shapes["positions",] = (config.max_positions, config.width)
  for i in range(config.num_layers):
    for name, shape in _layer_shapes(config).items():
      shapes["layers", i, *name] = shape
  shapes.update({("final_norm", *name): shape for name, shape in _norm(config).items()})
  if not config.tie_embeddings:
    shapes["head", "w"] = (config.width, config.vocab_size)
  return shapes


def _norm(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  parts = ("scale", "bias") if config.norm == "layer" else ("scale",)
  return {(part,): (config.width,) for part in parts}


def _layer_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  width, heads, mlp = config.width, config.num_heads * config.head_dim, config.mlp_dim
  kv_heads = config.num_kv_heads * config.head_dim
  linears = {"q": (width, heads, config.qkv_bias), "k": (width, kv_heads, config.qkv_bias),
             "v": (width, kv_heads, config.qkv_bias), "o": (heads, width, config.out_bias),
             "gate": (width, mlp, config.mlp_bias), "up": (width, mlp, config.mlp_bias),
             "down": (mlp, width, config.mlp_bias)}
  if not config.gated_mlp:
    del linears["gate"]
  shapes: dict[Path, tuple[int, ...]] = {}
  for name, (rows, columns, bias) in linears.items():
    shapes[name, "w"] = (rows, columns)
    if bias:
      shapes[name, "b"] = (columns,)
  norms = ["attn_norm", "mlp_norm"]
  norms += ["attn_post_norm", "mlp_post_norm"] if config.post_norms else []
  shapes.update({(norm, *part): shape for norm in norms for part, shape in _norm(config).items()})
  if config.qk_norm:
    shapes["q_norm", "scale"] = shapes["k_norm", "scale"] = (config.head_dim,)
  return shapes


def on_device(path: Path, array: Any) -> jax.Array:
  """A parameter on the default device."""
  del path  # unused: all go to the same place
  return jnp.array(array, copy=False)


def init_params(key: jax.Array, config: ModelConfig, dtype=jnp.float32) -> Params:
  """Random parameters, for tests and for shapes: normal, scaled by 1/sqrt(fan in)."""
  c = config
  count = iter(range(10**6))

  def matrix(fan_in, fan_out, bias=False):
    out = {"w": _normal(jax.random.fold_in(key, next(count)), (fan_in, fan_out), fan_in, dtype)}
    if bias:
      out["b"] = _normal(jax.random.fold_in(key, next(count)), (fan_out,), 16, dtype)
    return out

  def norm_params(size):
    out = {"scale": 1 + _normal(jax.random.fold_in(key, next(count)), (size,), 16, jnp.float32)}
    if c.norm == "layer":
      out["bias"] = _normal(jax.random.fold_in(key, next(count)), (size,), 16, jnp.float32)
    return out

  def layer():
    out = {"attn_norm": norm_params(c.width), "mlp_norm": norm_params(c.width),
           "q": matrix(c.width, c.num_heads * c.head_dim, c.qkv_bias),
           "k": matrix(c.width, c.num_kv_heads * c.head_dim, c.qkv_bias),
           "v": matrix(c.width, c.num_kv_heads * c.head_dim, c.qkv_bias),
           "o": matrix(c.num_heads * c.head_dim, c.width, c.out_bias),
           "up": matrix(c.width, c.mlp_dim, c.mlp_bias),
           "down": matrix(c.mlp_dim, c.width, c.mlp_bias)}
    if c.gated_mlp:
      out["gate"] = matrix(c.width, c.mlp_dim, c.mlp_bias)
    if c.qk_norm:
      out |= {"q_norm": norm_params(c.head_dim), "k_norm": norm_params(c.head_dim)}
    if c.post_norms:
      out |= {"attn_post_norm": norm_params(c.width), "mlp_post_norm": norm_params(c.width)}
    return out

  params = {"embed": matrix(c.vocab_size, c.width)["w"] * math.sqrt(c.vocab_size / c.width),
            "layers": [layer() for _ in range(c.num_layers)], "final_norm": norm_params(c.width)}
  if c.learned_positions:
    params["positions"] = _normal(jax.random.fold_in(key, next(count)),
                                  (c.max_positions, c.width), 16, dtype)
  if not c.tie_embeddings:
    params["head"] = matrix(c.width, c.vocab_size)
  return params


def _normal(key, shape, fan_in, dtype):
  return (jax.random.normal(key, shape) / math.sqrt(fan_in)).astype(dtype)
