"""Medusa heads (Cai et al. 2024): each predicts one of the next tokens from one hidden state.

The hidden state is the target's at length - 1. Its lm_head gave the root, so head 0 is about the
token after the root, at depth 1 of the tree, and head i about depth i + 1. No head sees what the
others say: a node's token depends on its depth and its rank alone.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, draft_trees
from jspec.config.methods.medusa import MedusaOptions
from jspec.drafters import draft_laws
from jspec.heads.config import MedusaConfig
from jspec.heads.medusa import head_logits, head_params, target_ids
from jspec.model.execution import FAST, Execution
from jspec.speculation import sampling, tree
from jspec.speculation.drafter import Drafter, DrafterSetup, load_head
from jspec.types import NO_PARENT, DraftTree


def medusa(config: MedusaConfig, shape: tree.Shape, target: ModelConfig, *, sampled: bool = False,
           confidence: float = 0.0, how: Execution = FAST) -> Drafter:
  """Drafts a tree of ranks, likeliest tokens first.

  params: see head_params of heads/medusa.py.

  Args:
    sampled: rank r is the r-th of the tokens drawn without replacement. The nodes of one depth
      share the draws: they hang from different parents, of which at most one is accepted.
    confidence: a chain stops before the first token whose head is less sure than this.
  """
  draft_laws.check_stop(confidence, shape)
  num_nodes, depth, rank = shape.num_nodes, np.array(shape.depth), np.array(shape.rank)

  def by_rank(logits, width, level, slots):
    """The draft ids i32[B, width] in order, and the law of each, f32[B, width, Vd], if sampled."""
    if sampled:
      u = draft_laws.draft_uniforms(slots.key, level, (1, width))
      ids, laws = draft_laws.siblings(logits[:, None], slots.temperature, u)
      return ids[:, 0], laws[:, 0]
    return sampling.top_k(logits, width, target.vocab_parts if config.shares_head else 1)[1], None

  def propose(params, state, root, slots):
    b = root.shape[0]
    token = jnp.zeros((b, num_nodes), jnp.int32).at[:, 0].set(root)
    parent = jnp.broadcast_to(jnp.array(shape.parents, jnp.int32), (b, num_nodes))
    q_probs = jnp.zeros((b, num_nodes, config.vocab_size)) if sampled else None
    going = jnp.ones((b, 1), bool)
    for level in range(shape.max_depth):
      logits = head_logits(params, config, target, slots.feature, level, how)
      nodes = np.flatnonzero(depth == level + 1)
      ids, laws = by_rank(logits, int(rank[nodes].max()) + 1, level, slots)
      token = token.at[:, nodes].set(target_ids(params, ids)[:, rank[nodes]])
      if q_probs is not None:
        laws = draft_laws.to_target(laws, params["head"].get("target_id"), config.vocab_size)
        q_probs = q_probs.at[:, nodes].set(laws[:, rank[nodes]])
      if confidence:
        going &= draft_laws.confident(logits, confidence)[:, None]
        parent = parent.at[:, nodes].set(jnp.where(going, parent[:, nodes], NO_PARENT))
    return DraftTree(token, parent, q_probs), state

  return Drafter(lambda num_slots, num_pages: (), propose,
                 lambda params, state, slots, committed: state, num_nodes, shape.max_depth,
                 (target.num_layers,), sampled)


def build(options: MedusaOptions, setup: DrafterSetup):
  config, head = load_head(options, setup, "medusa")
  shape = tree.shape_of(options.tree_paths or draft_trees.of_widths(
      (1,) * (setup.num_draft or config.num_heads)))
  if shape.max_depth > config.num_heads:
    what = "the draft tree's depth " if options.tree_paths else "num_speculative_tokens="
    raise ValueError(f"{what}{shape.max_depth} exceeds the {config.num_heads} heads of "
                     f"{options.model}")
  vocab_size = config.draft_vocab_size or config.vocab_size
  if max(shape.rank) >= vocab_size:
    raise ValueError(f"the draft tree asks for the token of rank {max(shape.rank)}, but the heads "
                     f"of {options.model} know {vocab_size}")
  drafter = medusa(config, shape, setup.target,
                   sampled=options.is_sampled,
                   confidence=options.draft_confidence_threshold, how=setup.execution)
  return drafter, head_params(head, config, setup.target_params)
