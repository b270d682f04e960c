"""Parameters of a new drafting head: the trees of heads/config.py, with random matrices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jspec.heads.config import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig
from jspec.model.params import init_params

Params = dict[str, Any]


def init_head(key: jax.Array, config: HeadConfig, dtype=jnp.float32) -> Params:
  """Matrices with a standard deviation of 1 / sqrt(inputs), biases 0, norms 1."""
  keys = (jax.random.fold_in(key, i) for i in itertools.count())

  def matrix(rows: int, columns: int, bias: bool = False) -> Params:
    w = (jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)).astype(dtype)
    return {"w": w, "b": jnp.zeros(columns, dtype)} if bias else {"w": w}

  if isinstance(config, MedusaConfig):
    return _medusa(config, matrix)
  if isinstance(config, MlpSpeculatorConfig):
    return _mlp_speculator(config, matrix)
  return _eagle(config, matrix, next(keys), dtype)


def _medusa(c: MedusaConfig, matrix) -> Params:
  def head() -> Params:
    blocks = [matrix(c.width, c.width, c.has_bias) for _ in range(c.num_layers)]
    size = c.draft_vocab_size or c.vocab_size
    return {"blocks": blocks} | ({} if c.shares_head else {"head": matrix(c.width, size)})

  return {"heads": [head() for _ in range(c.num_heads)]} | _first_tokens(c.draft_vocab_size)


def _mlp_speculator(c: MlpSpeculatorConfig, matrix) -> Params:
  inner = c.inner_dim

  def stage(rows: int) -> Params:
    return {"emb": matrix(c.vocab_size, inner)["w"] * math.sqrt(c.vocab_size / inner),
            "proj": matrix(rows, inner),
            "ln": {"scale": jnp.ones(inner), "bias": jnp.zeros(inner)},
            "head": matrix(inner, c.vocab_size)}

  stages = [stage(c.width if i == 0 else inner) for i in range(c.n_predict)]
  if c.tie_weights:
    for i, one in enumerate(stages[1:], 1):
      one.update({name: stages[0][name] for name in ("emb", "ln", "head")},
                 proj=stages[min(i, 1)]["proj"])
  return {"stages": stages}


def _eagle(c: EagleConfig, matrix, key: jax.Array, dtype) -> Params:
  layer = c.layer
  whole = init_params(key, layer, dtype)
  layers = whole["layers"]
  del layers[0]["attn_norm"]
  norm = lambda width=layer.width: {"scale": jnp.ones(width)}
  features = c.num_taps * c.target_width if c.version == 3 else c.target_width
  inputs = features if c.version == 3 else layer.width + features
  params = {"fc": matrix(inputs, layer.width), "layers": layers}
  if c.version == 3:
    kv = layer.num_kv_heads * layer.head_dim
    for name, columns in (("q", layer.num_heads * layer.head_dim), ("k", kv), ("v", kv)):
      layers[0][name] = matrix(2 * layer.width, columns, layer.qkv_bias)
    layers[0] |= {"embed_norm": norm(), "feature_norm": norm()}
    params["final_norm"] = norm()
    if c.norm_before_fc:
      params["fc_norm"] = norm(features)
    if c.fc_norm:
      params["fc_norm"] = [norm(c.target_width) for _ in range(c.num_taps)]
  if c.has_head:
    params["head"] = matrix(layer.width, c.draft_vocab_size or c.vocab_size)
  if c.has_embed:
    params["embed"] = whole["embed"]
  return params | _first_tokens(c.draft_vocab_size)


def _first_tokens(draft_vocab_size: int) -> Params:
  """A draft vocabulary of the target's first tokens, until one is chosen by frequency."""
  if not draft_vocab_size:
    return {}
  return {"target_id": jnp.arange(draft_vocab_size, dtype=jnp.int32)}
