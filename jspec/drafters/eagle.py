"""EAGLE: a head that predicts the target's next feature, and from it the next token.

EAGLE-1 (Li et al. 2024a) and EAGLE-3 (Li et al. 2025) heads, drafting a chain or a tree of fixed
shape, greedy or sampled, or EAGLE-2's dynamic tree (Li et al. 2024b). Its state is KV pages alone.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, draft_trees
from jspec.config.methods.eagle import EagleOptions
from jspec.drafters import draft_laws
from jspec.heads.config import EagleConfig
from jspec.heads.eagle import make_head
from jspec.model import cache, transformer
from jspec.model.control import run_if
from jspec.model.execution import FAST, Execution
from jspec.model.rows import one_row, rows_at
from jspec.speculation import sampling, tree
from jspec.speculation.drafter import Drafter, DrafterSetup, load_head
from jspec.types import NO_PARENT, DraftTree, KVPages

CHAIN_TOKENS, DYNAMIC_DEPTH = 3, 5  # where the configuration names no number


class _Draft(flax.struct.PyTreeNode):
  """A tree of fixed shape while it grows."""

  token: jax.Array  # i32[B, N]
  q: jax.Array | None  # f32[B, N, V]
  feature: jax.Array  # [B, n, E], fed back by the n nodes of the last level that have children
  reach: jax.Array  # i32[B], how deep the draft goes
  pages: KVPages


def eagle(config: EagleConfig, shape: tree.Shape, target: ModelConfig, page_size: int, dtype, *,
          sampled: bool = False, confidence: float = 0.0,
          how: Execution = FAST) -> Drafter:
  """Trees of one shape; params: {"head": see heads/config.py, "target": the target's}.

  Args:
    dtype: of the KV pages.
    sampled: children are drawn without replacement at the request's temperature, q kept; else
      they are the likeliest tokens.
    confidence: a chain ends before a token if the likeliest one has a lower probability.
  """
  known = config.draft_vocab_size or config.vocab_size
  if max(shape.rank) >= known:
    raise ValueError(f"EAGLE tree: rank {max(shape.rank)} needs more than {known} draft tokens")
  draft_laws.check_stop(confidence, shape)
  head = make_head(config, target, how)
  depth, rank, parents = np.array(shape.depth), np.array(shape.rank), np.array(shape.parents)
  # By level, the nodes that have children: the others need no pass.
  inner = [np.array([i for i in range(shape.num_nodes) if depth[i] == level and shape.children(i)])
           for level in range(shape.max_depth)]

  def draw(params, logits, width, level, slots):
    """Tokens [B, n, width] after each node, and the laws [B, n, width, Vd] if sampled."""
    if not sampled:
      parts = config.layer.vocab_parts if config.has_head else target.vocab_parts
      return _in_target(params, sampling.top_k(logits, width, parts)[1]), None
    u = draft_laws.draft_uniforms(slots.key, level, (logits.shape[1], width))
    token, law = draft_laws.siblings(logits, slots.temperature, u)
    return _in_target(params, token), law

  def expand(params, level, slots, mask, draft: _Draft) -> _Draft:
    """Runs the nodes of one level and draws their children."""
    nodes = inner[level]
    children = np.flatnonzero(depth == level + 1)
    b = slots.length.shape[0]
    if shape.is_chain:  # what is above lies in the pages like a prefix
      place, length = one_row(b), slots.length + level
    else:
      size = nodes[-1] + 1
      place, length = (rows_at(b, nodes, size), mask[:, :size, :size]), slots.length
    up = np.searchsorted(inner[level - 1], parents[nodes]) if level else np.array([0])
    logits, feature, pages = head.run(
        params, draft.token[:, nodes], draft.feature[:, up], *place, draft.pages, slots.page_table,
        length, shape.is_chain)
    token, law = draw(params, logits, rank[children].max() + 1, level, slots)
    of = np.searchsorted(nodes, parents[children])
    going = draft.reach == level
    if confidence > 0:
      going &= draft_laws.confident(logits[:, 0], confidence)
    q = draft.q
    if q is not None:
      q = q.at[:, children].set(draft_laws.to_target(
          law[:, of, rank[children]], params["head"].get("target_id"), config.vocab_size))
    return draft.replace(token=draft.token.at[:, children].set(token[:, of, rank[children]]), q=q,
                         feature=feature, reach=draft.reach + going, pages=pages)

  def propose(params, pages, root, slots):
    b, n = root.shape[0], shape.num_nodes
    parent = jnp.broadcast_to(jnp.array(parents, jnp.int32), (b, n))
    mask = tree.ancestors(parent, shape.max_depth)
    idle = slots.page_table[:, 0] == cache.NOWHERE
    draft = _Draft(jnp.zeros((b, n), jnp.int32).at[:, 0].set(root),
                   jnp.zeros((b, n, config.vocab_size)) if sampled else None,
                   head.fuse(params, slots.feature[:, None]), jnp.where(idle, -1, 0), pages)
    for level in range(shape.max_depth):
      run = lambda draft, level=level: expand(params, level, slots, mask, draft)
      # With no slot left that is confident, the rest of the chain is not computed.
      draft = run_if((draft.reach == level).any(), run, draft) if confidence > 0 else run(draft)
    parent = jnp.where(jnp.array(depth) <= draft.reach[:, None], parent, NO_PARENT)
    return DraftTree(draft.token, parent, draft.q), draft.pages

  return Drafter(_init(config, page_size, dtype), propose, head.observe, shape.num_nodes,
                 shape.max_depth, config.taps(target.num_layers), sampled)


def eagle_dynamic(config: EagleConfig, target: ModelConfig, page_size: int, dtype, *, top_k: int,
                  depth: int, total_tokens: int, how: Execution = FAST) -> Drafter:
  """EAGLE-2's tree, which follows the head's own confidence (Li et al. 2024b, section 4).

  Each level expands the top_k nodes of the last one that are likeliest by the product of the
  head's probabilities along their path, by top_k children each; of all of them the likeliest are
  kept. That is the tree's choice, made by looking at the tokens, so the tokens must not be samples.

  Args:
    depth: of the deepest node; EAGLE's own `depth` counts the passes after the first, depth - 1.
    total_tokens: nodes kept, root included, as EAGLE's `total_token`.
  """
  size_of = lambda level: top_k + (level - 1) * top_k**2  # of the pool, down to a level
  known = config.draft_vocab_size or config.vocab_size
  if not (2 <= top_k <= known and depth >= 1):
    raise ValueError(f"EAGLE tree: {top_k=} must lie in 2..{known} and {depth=} be >= 1")
  if not depth + 2 <= total_tokens <= 1 + size_of(depth):  # depth + 1 would promise a chain
    raise ValueError(f"EAGLE tree: {total_tokens=} must lie in {depth + 2}..{1 + size_of(depth)}, "
                     f"given {top_k=} and {depth=}")
  head = make_head(config, target, how)
  parts = config.layer.vocab_parts if config.has_head else target.vocab_parts

  def best(params, logits):
    """Log-probability and token [..., top_k] of the likeliest children."""
    value, token = sampling.top_k(logits, top_k, parts)
    return value - jax.nn.logsumexp(logits, -1, keepdims=True), _in_target(params, token)

  def propose(params, pages, root, slots):
    b = root.shape[0]
    logits, feature, pages = head.run(
        params, root[:, None], head.fuse(params, slots.feature[:, None]), *one_row(b), pages,
        slots.page_table, slots.length, True)
    score, token = best(params, logits[:, 0])
    feature = jnp.broadcast_to(feature, (b, top_k, feature.shape[-1]))
    at = jnp.broadcast_to(jnp.arange(top_k), (b, top_k))  # where in the pool the frontier is
    itself = jnp.broadcast_to(jnp.eye(top_k, dtype=bool), (b, top_k, top_k))
    seen = jnp.concatenate([jnp.ones((b, top_k, 1), bool), itself], -1)
    pools = [(score, token, jnp.full_like(token, NO_PARENT))]
    for level in range(1, depth):
      first = seen.shape[-1] - top_k  # the frontier's KV lies after that of earlier ones
      rows = rows_at(b, first + np.arange(top_k), first + top_k)
      mask = jnp.pad(seen, ((0, 0), (first, 0), (0, 0)))
      logits, feature, pages = head.run(params, token, feature, rows, mask, pages,
                                        slots.page_table, slots.length, False)
      gain, child = best(params, logits)
      scores = (score[:, :, None] + gain).reshape(b, -1)
      children = child.reshape(b, -1)
      pools.append((scores, children, jnp.repeat(at, top_k, 1)))
      score, best_at = jax.lax.top_k(scores, top_k)
      at = size_of(level) + best_at
      token = jnp.take_along_axis(children, best_at, 1)
      row = (best_at // top_k)[..., None]
      feature, seen = (jnp.take_along_axis(x, row, 1) for x in (feature, seen))
      seen = jnp.concatenate([seen, itself], -1)
    pool = (jnp.concatenate(x, 1) for x in zip(*pools, strict=True))
    token, parent = jax.vmap(functools.partial(_rerank, total_tokens - 1))(*pool)
    token = jnp.concatenate([root[:, None], token], 1)
    parent = jnp.pad(parent, ((0, 0), (1, 0)), constant_values=NO_PARENT)
    return DraftTree(token, parent, None), pages

  return Drafter(_init(config, page_size, dtype), propose, head.observe, total_tokens, depth,
                 config.taps(target.num_layers), num_scratch=1 + (depth - 1) * top_k)


def _rerank(num: int, score, token, parent):
  """The `num` likeliest nodes of the pool f32[p], and their parents as nodes of the tree.

  Their order stays the pool's, which is breadth-first. No child is likelier than its parent, nor
  before it, so every parent is kept.
  """
  kept = jnp.sort(jax.lax.top_k(score, num)[1])
  node = jnp.zeros(score.shape, jnp.int32).at[kept].set(jnp.arange(1, num + 1))
  parent = parent[kept]
  return token[kept], jnp.where(parent == NO_PARENT, 0, node[parent])


def _in_target(params, token):
  """The target's ids of draft tokens."""
  ids = params["head"].get("target_id")
  return token if ids is None else ids[token]


def _init(config: EagleConfig, page_size: int, dtype):
  return lambda num_slots, num_pages: cache.init_pages(config.layer, num_pages, page_size, dtype)


def with_lm_head(config: EagleConfig, head, target_params):
  """The head with a copy of the target's lm_head rows, where it drafts from these."""
  if config.has_head or not config.draft_vocab_size:
    return config, head
  rows = transformer.lm_head(target_params, head["target_id"])
  w = jax.device_put(rows, head["fc"]["w"].sharding)
  return dataclasses.replace(config, has_head=True), head | {"head": {"w": w}}


def build_eagle(options: EagleOptions, setup: DrafterSetup):
  """EAGLE-1 and -2."""
  return _build(options, setup, "eagle")


def build_eagle3(options: EagleOptions, setup: DrafterSetup):
  return _build(options, setup, "eagle3")


def _build(options: EagleOptions, setup: DrafterSetup, method: str):
  config, head = with_lm_head(*load_head(options, setup, method), setup.target_params)
  if options.tree_top_k:
    drafter = eagle_dynamic(
        config, setup.target, setup.page_size, setup.kv_dtype, top_k=options.tree_top_k,
        depth=setup.num_draft or DYNAMIC_DEPTH, total_tokens=options.tree_total_tokens,
        how=setup.execution)
  else:
    shape = tree.shape_of(options.tree_paths or draft_trees.of_widths(
        (1,) * (setup.num_draft or CHAIN_TOKENS)))
    drafter = eagle(config, shape, setup.target, setup.page_size, setup.kv_dtype,
                    sampled=options.is_sampled, confidence=options.draft_confidence_threshold,
                    how=setup.execution)
  shared = {name: x for name, x in setup.target_params.items() if name != "layers"}
  return drafter, {"head": head, "target": shared}
