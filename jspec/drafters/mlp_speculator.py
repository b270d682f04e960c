"""MLPSpeculator (Wertheimer et al. 2024): a stack of small MLPs, each fed the state of the last.

Stage i takes the state of a node's parent and the node's token, and predicts the tokens after it.
The first state is the target's hidden state at length - 1, the first token the root.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, draft_trees
from jspec.config.methods.mlp_speculator import MlpSpeculatorOptions
from jspec.drafters import draft_laws
from jspec.heads import mlp_speculator as arithmetic
from jspec.heads.config import MlpSpeculatorConfig
from jspec.model.execution import FAST, Execution
from jspec.speculation import sampling, tree
from jspec.speculation.drafter import Drafter, DrafterSetup, load_head
from jspec.types import NO_PARENT, DraftTree


class Level(NamedTuple):
  """The nodes of one depth that have children, and those children."""

  expanded: np.ndarray  # nodes that a state is computed for, m of them
  source: np.ndarray  # [m], which state of the level above each one starts from
  nodes: np.ndarray  # the children, n of them
  row: np.ndarray  # [n], which of the m is the parent
  rank: np.ndarray  # [n]

  @property
  def width(self) -> int:
    return int(self.rank.max()) + 1


def levels_of(shape: tree.Shape) -> list[Level]:
  parents, depth, rank = (np.array(x) for x in (shape.parents, shape.depth, shape.rank))
  levels: list[Level] = []
  above = np.array([NO_PARENT])
  for d in range(shape.max_depth):
    nodes = np.flatnonzero(depth == d + 1)
    expanded = np.unique(parents[nodes])
    levels.append(Level(expanded, np.searchsorted(above, parents[expanded]), nodes,
                        np.searchsorted(expanded, parents[nodes]), rank[nodes]))
    above = expanded
  return levels


def mlp_speculator(config: MlpSpeculatorConfig, shape: tree.Shape, target: ModelConfig, *,
                   n_candidates: int = 0, sampled: bool = False, confidence: float = 0.0,
                   how: Execution = FAST) -> Drafter:
  """Drafts a tree of ranks, likeliest tokens first. params: {"head": see MlpSpeculatorConfig}.

  Args:
    n_candidates: of the tree's deepest paths keep only this many, the likeliest; 0 keeps the tree.
    sampled: siblings are drawn without replacement.
    confidence: a chain stops before the first token whose head is less sure than this.
  """
  draft_laws.check_stop(confidence, shape)
  if n_candidates and sampled:
    raise ValueError(f"{n_candidates=} chooses tokens by their probability: they are no longer "
                     "drawn from q, so drafts must be greedy")
  num_nodes, levels = shape.num_nodes, levels_of(shape)
  num_kept = num_nodes if not n_candidates else sum(
      min(n_candidates, shape.depth.count(d)) if d else 1 for d in range(shape.max_depth + 1))

  def children(logits, width, level, slots):
    """Tokens [B, m, width] after the nodes, and the law [B, m, width, V] that each was drawn from,
    or its log-probability [B, m, width] if it was not."""
    if sampled:
      u = draft_laws.draft_uniforms(slots.key, level, (logits.shape[1], width))
      return draft_laws.siblings(logits, slots.temperature, u)
    best, token = sampling.top_k(logits, width)
    return token, best - jax.nn.logsumexp(logits, -1, keepdims=True)

  def propose(params, state, root, slots):
    b, stages = root.shape[0], params["head"]["stages"]
    token = jnp.zeros((b, num_nodes), jnp.int32).at[:, 0].set(root)
    parent = jnp.broadcast_to(jnp.array(shape.parents, jnp.int32), (b, num_nodes))
    # Of every node: log-probability of its path, or the law of its token.
    carried = jnp.zeros((b, num_nodes, config.vocab_size) if sampled else (b, num_nodes))
    states = arithmetic.first_state(stages, config, slots.feature[:, None], how)
    going = jnp.ones((b, 1), bool)
    for i, (stage, level) in enumerate(zip(stages, levels, strict=False)):
      expanded = token[:, level.expanded]
      above = arithmetic.projected(stage, states, how)[:, level.source]
      states = arithmetic.next_state(stage, config, above, expanded, how)
      logits = arithmetic.logits(stage, states, how)
      drawn, new = children(logits, level.width, i, slots)
      new = new[:, level.row, level.rank]
      if not sampled:
        new = new + carried[:, level.expanded][:, level.row]
      carried = carried.at[:, level.nodes].set(new)
      token = token.at[:, level.nodes].set(drawn[:, level.row, level.rank])
      if confidence:
        going &= draft_laws.confident(logits[:, 0], confidence)[:, None]
        parent = parent.at[:, level.nodes].set(
            jnp.where(going, parent[:, level.nodes], NO_PARENT))
    if n_candidates:
      return likeliest_paths(shape, token, carried, n_candidates, num_kept), state
    return DraftTree(token, parent, carried if sampled else None), state

  return Drafter(lambda num_slots, num_pages: (), propose,
                 lambda params, state, slots, committed: state, num_kept, shape.max_depth,
                 (target.num_layers,), sampled)


def likeliest_paths(shape: tree.Shape, token: jax.Array, log_prob: jax.Array, num_paths: int,
                    num_kept: int) -> DraftTree:
  """The tree of the num_paths best paths to the deepest nodes, by log_prob f32[B, N] of the path.

  It has num_kept nodes; as many as paths share are not in use.
  """
  deepest = np.flatnonzero(np.array(shape.depth) == shape.max_depth)
  on_path = np.zeros((len(deepest), shape.num_nodes), bool)
  for row, node in enumerate(deepest.tolist()):
    while node != NO_PARENT:
      on_path[row, node] = True
      node = shape.parents[node]
  _, best = jax.lax.top_k(log_prob[:, deepest], min(num_paths, len(deepest)))
  keep = jnp.array(on_path)[best].any(1)  # [B, N]
  place = jnp.where(keep, jnp.cumsum(keep, -1) - 1, num_kept)  # still breadth-first
  parents = jnp.where(np.array(shape.parents) == NO_PARENT, NO_PARENT,
                      place[:, np.maximum(shape.parents, 0)])
  slot = jnp.arange(token.shape[0])[:, None]
  packed = lambda x, fill: jnp.full((token.shape[0], num_kept), fill, jnp.int32).at[
      slot, place].set(x, mode="drop")
  return DraftTree(packed(token, 0), packed(parents, NO_PARENT), None)


def build(options: MlpSpeculatorOptions, setup: DrafterSetup):
  config, head = load_head(options, setup, "mlp_speculator")
  num_draft = setup.num_draft or config.n_predict
  widths = config.top_k_tokens_per_head if options.n_candidates else (1,) * num_draft
  shape = tree.shape_of(options.tree_paths or draft_trees.of_widths(widths[:num_draft]))
  if max(num_draft, shape.max_depth) > config.n_predict:
    what = "the draft tree's depth " if options.tree_paths else "num_speculative_tokens="
    raise ValueError(f"{what}{max(num_draft, shape.max_depth)} exceeds the {config.n_predict} "
                     f"tokens that {options.model} predicts")
  if not shape.max_depth:
    raise ValueError(f"n_candidates={options.n_candidates} needs tree_widths: {options.model} "
                     "has no top_k_tokens_per_head")
  if max(shape.rank) >= config.vocab_size:
    raise ValueError(f"the draft tree asks for the token of rank {max(shape.rank)}, but "
                     f"{options.model} knows {config.vocab_size}")
  drafter = mlp_speculator(config, shape, setup.target, n_candidates=options.n_candidates,
                           sampled=options.is_sampled,
                           confidence=options.draft_confidence_threshold, how=setup.execution)
  return drafter, {"head": head}
