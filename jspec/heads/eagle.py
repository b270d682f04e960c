"""EAGLE's arithmetic, and its head over KV pages: EAGLE-1 and -2 (Li et al. 2024), EAGLE-3 (2025).

Entry i of the pages is the pair (feature_{i-1}, token_i). It depends on the tokens up to i and
nothing later, just as the target's KV does, so its page is complete when the target's is. Index 0
has no pair and is never attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.heads.config import EagleConfig
from jspec.model import transformer
from jspec.model.execution import Execution
from jspec.model.params import init_params
from jspec.model.rows import chain_mask, rows_of_all
from jspec.types import Committed, KVPages, Rows, Slots


class Head(NamedTuple):
  """One head's functions of its parameters {"head", "target"}; n nodes of each of B slots."""

  fuse: Callable  # (params, target features f32[B, n, F]) -> what `run` takes [B, n, E]
  # (params, token i32[B, n], fused or fed back [B, n, E], rows, mask bool[B, N, N], pages,
  #  page_table, length i32[B], is_chain) -> (logits f32[B, n, Vd], to feed back [B, n, E], pages)
  run: Callable
  # (params, pages, slots, committed) -> pages
  observe: Callable


def init(c: EagleConfig, matrix, keys, dtype) -> Any:
  """See heads/init.py."""
  layer = c.layer
  whole = init_params(next(keys), layer, dtype)
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
  return params


def fuse(head: Any, config: EagleConfig, feature: jax.Array, how: Execution) -> jax.Array:
  """The target's features [..., F] -> what `inputs` takes beside the first token, [..., E].

  Version 1 takes the feature as it is: fc has it together with the embedding.
  """
  feature = feature.astype(head["fc"]["w"].dtype)
  if config.version == 1:
    return feature
  if config.norm_before_fc:
    feature = transformer.norm(feature, head["fc_norm"], config.layer, how)
  elif config.fc_norm:
    taps = jnp.split(feature, config.num_taps, -1)
    feature = jnp.concatenate([transformer.norm(x, p, config.layer, how)
                               for x, p in zip(taps, head["fc_norm"], strict=True)], -1)
  return transformer.dense(feature, head["fc"], how)


def inputs(head: Any, config: EagleConfig, embedded: jax.Array, feature: jax.Array,
           how: Execution) -> tuple[jax.Array, jax.Array]:
  """What the layers start from: x [..., E], and attn_input of the first, see transformer.layer.

  Args:
    embedded: [..., E], the tokens. feature: [..., E], fused or fed back.
  """
  embedded = embedded.astype(feature.dtype)
  if config.version == 1:
    x = transformer.dense(jnp.concatenate([embedded, feature], -1), head["fc"], how)
    return x, x
  first = head["layers"][0]
  normed = transformer.norm(feature, first["feature_norm"], config.layer, how)
  attn_input = jnp.concatenate(
      [transformer.norm(embedded, first["embed_norm"], config.layer, how), normed], -1)
  return normed if config.norm_before_residual else feature, attn_input


def outputs(head: Any, config: EagleConfig, x: jax.Array,
            how: Execution) -> tuple[jax.Array, jax.Array]:
  """Of x [..., E] after the layers: what the lm_head takes, and what is fed back."""
  if config.version == 1:
    return x, x
  y = transformer.norm(x, head["final_norm"], config.layer, how)
  return y, y if config.norm_output else x


def make_head(config: EagleConfig, target: ModelConfig, how: Execution) -> Head:
  layer = config.layer
  if config.draft_vocab_size and not config.has_head:
    raise ValueError("a head that drafts from rows of the target's lm_head needs a copy of them: "
                     "see drafters.eagle.with_lm_head")

  def embed(params, token, position):
    if config.has_embed:
      return transformer.embed(params["head"], layer, token, position)
    return transformer.embed(params["target"], target, token, position)

  def run_layers(params, token, feature, rows: Rows, mask, pages, page_table, length, is_chain):
    """The hidden state [R, E] of each row, and the pages with its pair written."""
    head = params["head"]
    depth = mask.sum(-1, dtype=jnp.int32) - 1
    position = length[rows.slot] + depth[rows.slot, rows.node]
    feature = feature.reshape(-1, feature.shape[-1])
    x, attn_input = inputs(head, config, embed(params, token.reshape(-1), position), feature, how)
    x, _, pages = transformer.blocks(
        head["layers"], layer, x, position, mask, rows, pages, page_table, length, how=how,
        is_chain=is_chain, attn_input=attn_input, first_visible=1)
    return x, pages

  def run(params, token, feature, rows, mask, pages, page_table, length, is_chain):
    x, pages = run_layers(params, token, feature, rows, mask, pages, page_table, length, is_chain)
    y, back = outputs(params["head"], config, x, how)
    if config.has_head:
      logits = transformer.logits(params["head"], layer, y, how)
    else:
      logits = transformer.logits(params["target"], target, y, how)
    return logits.reshape(*token.shape, -1), back.reshape(*token.shape, -1), pages

  def observe(params, pages: KVPages, slots: Slots, committed: Committed) -> KVPages:
    b, t = committed.token.shape
    feature = jnp.concatenate([slots.feature[:, None], committed.feature[:, :-1]], 1)
    rows = rows_of_all(jnp.arange(t) < committed.count[:, None])
    return run_layers(params, committed.token, fuse(params["head"], config, feature, how), rows,
                      chain_mask(b, t), pages, slots.page_table, slots.length, True)[1]

  return Head(lambda params, feature: fuse(params["head"], config, feature, how), run, observe)
