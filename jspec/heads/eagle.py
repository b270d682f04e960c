"""EAGLE's head over KV pages of its own: EAGLE-1 and -2 (Li et al. 2024), EAGLE-3 (Li et al. 2025).

Entry i of the pages is the pair (feature_{i-1}, token_i). It depends on the tokens up to i and
nothing later, just as the target's KV does, so its page is complete when the target's is. Index 0
has no pair and is never attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.heads.config import EagleConfig
from jspec.model import transformer
from jspec.model.execution import Execution
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


def make_head(config: EagleConfig, target: ModelConfig, how: Execution) -> Head:
  layer = config.layer
  if config.draft_vocab_size and not config.has_head:
    raise ValueError("a head that drafts from rows of the target's lm_head needs a copy of them: "
                     "see drafters.eagle.with_lm_head")

  def fuse(params, feature):
    head = params["head"]
    feature = feature.astype(head["fc"]["w"].dtype)
    if config.version == 1:
      return feature  # fc takes it together with the embedding
    if config.norm_before_fc:
      feature = transformer.norm(feature, head["fc_norm"], layer, how)
    elif config.fc_norm:
      taps = jnp.split(feature, config.num_taps, -1)
      feature = jnp.concatenate([transformer.norm(x, p, layer, how)
                                 for x, p in zip(taps, head["fc_norm"], strict=True)], -1)
    rows = transformer.dense(feature.reshape(-1, feature.shape[-1]), head["fc"], how)
    return rows.reshape(*feature.shape[:-1], -1)

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
    x = embed(params, token.reshape(-1), position).astype(feature.dtype)
    if config.version == 1:
      x = attn_input = transformer.dense(jnp.concatenate([x, feature], -1), head["fc"], how)
    else:
      first = head["layers"][0]
      normed = transformer.norm(feature, first["feature_norm"], layer, how)
      attn_input = jnp.concatenate(
          [transformer.norm(x, first["embed_norm"], layer, how), normed], -1)
      x = normed if config.norm_before_residual else feature
    x, _, pages = transformer.blocks(
        head["layers"], layer, x, position, mask, rows, pages, page_table, length, how=how,
        is_chain=is_chain, attn_input=attn_input, first_visible=1)
    return x, pages

  def run(params, token, feature, rows, mask, pages, page_table, length, is_chain):
    x, pages = run_layers(params, token, feature, rows, mask, pages, page_table, length, is_chain)
    head = params["head"]
    y = x if config.version == 1 else transformer.norm(x, head["final_norm"], layer, how)
    if config.has_head:
      logits = transformer.logits(head, layer, y, how)
    else:
      logits = transformer.logits(params["target"], target, y, how)
    back = y if config.norm_output else x
    return logits.reshape(*token.shape, -1), back.reshape(*token.shape, -1), pages

  def observe(params, pages: KVPages, slots: Slots, committed: Committed) -> KVPages:
    b, t = committed.token.shape
    feature = jnp.concatenate([slots.feature[:, None], committed.feature[:, :-1]], 1)
    rows = rows_of_all(jnp.arange(t) < committed.count[:, None])
    return run_layers(params, committed.token, fuse(params, feature), rows,
                      chain_mask(b, t), pages, slots.page_table, slots.length, True)[1]

  return Head(fuse, run, observe)
