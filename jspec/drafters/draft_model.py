"""A smaller model of the same vocabulary as drafter (Leviathan et al. 2023; Chen et al. 2023).

Its KV lives in pages of its own under the target's page ids. Drafts are greedy (a point mass: the
likeliest tokens, best first) or sampled at the request's temperature (q kept; siblings are
independent draws), in a chain or in a tree of fixed widths.
"""

from __future__ import annotations

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.config.methods.draft_model import DraftModelOptions
from jspec.drafters.draft_laws import confident, draft_law, draft_uniforms
from jspec.model import cache, transformer
from jspec.model.control import run_if
from jspec.model.execution import FAST, Execution
from jspec.model.rows import chain_mask, rows_of_all
from jspec.speculation import sampling, tree
from jspec.speculation.drafter import Drafter, DrafterSetup
from jspec.types import NO_PARENT, DraftTree, KVPages, Rows


class DraftModelState(flax.struct.PyTreeNode):
  pages: KVPages
  # What propose left in the pages beyond the committed length, so that observe need not compute
  # it again: the tokens whose KV lie at scribble_at + 0, 1, ...
  scribble: jax.Array  # i32[slots, C]
  scribble_at: jax.Array  # i32[slots], -1: nothing
  # The last committed token may still lack its KV; the next propose computes it with the root.
  # Never the last token of a page: pages are complete as soon as the target's are.
  behind: jax.Array  # i32[slots], 0 or 1
  last: jax.Array  # i32[slots], that token


def draft_model(config: ModelConfig, widths: tuple[int, ...], page_size: int, dtype,
                sampled: bool, how: Execution = FAST, confidence: float = 0.0,
                num_tokens: int | None = None) -> Drafter:
  """widths[d] children per node at depth d; all ones is a chain.

  Args:
    dtype: of the KV pages. confidence: a chain stops where no token has this probability.
    num_tokens: only ids below it are drafted, the vocabulary's other rows are padding; None: all.
  """
  num_tokens = config.vocab_size if num_tokens is None else num_tokens
  if max(widths) > num_tokens:
    raise ValueError(f"a draft tree of widths {list(widths)} needs more than {num_tokens} tokens")
  parents = tree.from_widths(widths)
  depth = np.array(tree.depths(parents))
  num_nodes = len(parents)
  # Nodes 0..chained-1 are a chain from the root: their KV is right wherever they are accepted.
  chained = next((i for i, p in enumerate(parents) if p != i - 1), num_nodes)
  chained = min(chained, num_nodes - math.prod(widths))  # the leaves are never computed

  def init(num_slots, num_pages):
    zeros = lambda *shape: jnp.zeros((num_slots, *shape), jnp.int32)
    return DraftModelState(cache.init_pages(config, num_pages, page_size, dtype), zeros(chained),
                           scribble_at=zeros() + NO_PARENT, behind=zeros(), last=zeros())

  def run(params, token, mask, rows, pages, slots, length):
    # All but a tree's own levels are chains.
    is_chain = token.shape[1] != num_nodes or num_nodes == len(widths) + 1
    return transformer.forward(params, config, token, mask, rows, pages, slots.page_table, length,
                         how=how, is_chain=is_chain)

  def token_logits(params, hidden):
    logits = transformer.logits(params, config, hidden, how)
    if num_tokens == config.vocab_size:
      return logits
    return jnp.where(jnp.arange(config.vocab_size) < num_tokens, logits, -jnp.inf)

  def behind_of(state, slots):
    """At a page's start nothing is owed, there a request may begin: not by the last tenant's."""
    return jnp.where(slots.length % page_size > 0, state.behind[slots.index], 0)

  def run_root(params, state, root, slots):
    """Logits after the root, computing a token left behind in the same pass."""
    b = root.shape[0]
    behind = behind_of(state, slots)
    token = jnp.stack([jnp.where(behind, state.last[slots.index], root), root], 1)
    keep = jnp.stack([jnp.ones(b, bool), behind > 0], 1)
    hidden, _, pages = run(params, token, chain_mask(b, 2), rows_of_all(keep),
                           state.pages, slots, slots.length - behind)
    hidden = jnp.take_along_axis(hidden.reshape(b, 2, -1), behind[:, None, None], 1)[:, 0]
    return token_logits(params, hidden), pages

  def run_level(params, level, token, mask, pages, slots):
    """Logits [B, nodes, V] after the nodes of one level of the tree."""
    b = token.shape[0]
    nodes = np.flatnonzero(depth == level)
    of_node = np.full(num_nodes, b * len(nodes))
    of_node[nodes] = np.arange(len(nodes))
    of_node = np.minimum(of_node[None] + len(nodes) * np.arange(b)[:, None], b * len(nodes))
    rows = Rows(jnp.repeat(jnp.arange(b), len(nodes)), jnp.tile(jnp.array(nodes), b),
                jnp.ones(b * len(nodes), bool), jnp.array(of_node))
    hidden, _, pages = run(params, token, mask, rows, pages, slots, slots.length)
    return token_logits(params, hidden).reshape(b, len(nodes), -1), pages

  def children(logits, width, level, slots):
    """`width` tokens [B, nodes, width] after each node, and q [B, nodes, V] if sampled."""
    if not sampled:
      return sampling.top_k(logits, width, config.vocab_parts)[1], None
    q = draft_law(logits, slots.temperature)
    u = draft_uniforms(slots.key, level, (logits.shape[1], width))
    rows = jnp.repeat(q.reshape(-1, q.shape[-1]), width, axis=0)
    return sampling.inverse_cdf(rows, u.reshape(-1)).reshape(u.shape), q

  def propose(params, state, root, slots):
    b = root.shape[0]
    fixed = jnp.broadcast_to(jnp.array(parents, jnp.int32), (b, num_nodes))
    mask = tree.ancestors(fixed, len(widths))

    def descend(level, carry):
      """Draws the children of one level; a chain goes on where the draft model is confident."""
      token, parent, q_probs, scribble, pages, alive = carry
      if level == 0:
        logits, pages = run_root(params, state, root, slots)
        logits = logits[:, None]
      else:
        logits, pages = run_level(params, level, token, mask, pages, slots)
      if level < chained:
        scribble = scribble.at[:, level].set(token[:, level])
      drawn, q = children(logits, widths[level], level, slots)
      nodes = np.flatnonzero(depth == level + 1)
      token = token.at[:, nodes].set(drawn.reshape(b, -1))
      if sampled:
        q_probs = q_probs.at[:, nodes].set(jnp.repeat(q, widths[level], axis=1))
      if confidence:
        alive = alive & confident(logits[:, 0], confidence)
        parent = parent.at[:, nodes].set(jnp.where(alive[:, None], level, NO_PARENT))
      return token, parent, q_probs, scribble, pages, alive

    token = jnp.zeros((b, num_nodes), jnp.int32).at[:, 0].set(root)
    q_probs = jnp.zeros((b, num_nodes, config.vocab_size)) if sampled else None
    scribble = jnp.full((b, chained), NO_PARENT, jnp.int32)  # matches no token
    parent = jnp.full_like(fixed, NO_PARENT) if confidence else fixed
    owned = slots.page_table[:, 0] != cache.NOWHERE  # else nobody is there
    carry = token, parent, q_probs, scribble, state.pages, owned
    for level in range(len(widths)):
      if confidence and level:
        carry = run_if(carry[-1].any(), functools.partial(descend, level), carry)
      else:
        carry = descend(level, carry)
    token, parent, q_probs, scribble, pages, _ = carry
    scribble_at = jnp.where(owned, slots.length, NO_PARENT)
    state = state.replace(pages=pages, scribble=state.scribble.at[slots.index].set(scribble),
                          scribble_at=state.scribble_at.at[slots.index].set(scribble_at))
    return DraftTree(token, parent, q_probs), state

  def observe(params, state, slots, committed):
    b, t = committed.token.shape
    behind = behind_of(state, slots)
    count = committed.count
    overlap = min(t, chained)
    same = (state.scribble[slots.index, :overlap] == committed.token[:, :overlap]) & (
        jnp.arange(overlap) < count[:, None])
    known = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(1)
    known = jnp.where(state.scribble_at[slots.index] == slots.length, known, 0)
    missing = jnp.where(count > 0, count - known, 0)

    def compute(pages):
      """All committed tokens as a chain, after the one left behind (if any and not yet done)."""
      late = (behind > 0) & (known == 0) & (count > 0)
      token = jnp.concatenate([state.last[slots.index][:, None], committed.token], 1)
      token = jnp.where(late[:, None], token, jnp.roll(token, -1, 1))
      num = jnp.where(missing > 0, count + late, 0)
      rows = rows_of_all(jnp.arange(t + 1) < num[:, None])
      return run(params, token, chain_mask(b, t + 1), rows, pages, slots,
                 slots.length - late)[2]

    # One missing token waits for the next propose, unless a page ends; more are computed now.
    can_wait = (missing == 0) | ((missing == 1) & ~((behind > 0) & (known == 0))
                                 & ((slots.length + count) % page_size > 0))
    pages = run_if(~can_wait.all(), compute, state.pages)
    left = jnp.where(can_wait.all() & (missing == 1), 1, 0)
    end = jnp.take_along_axis(committed.token, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    kept = lambda new, old: jnp.where(count > 0, new, old[slots.index])
    put = lambda old, new: old.at[slots.index].set(kept(new, old))
    return state.replace(pages=pages, behind=put(state.behind, left), last=put(state.last, end),
                         scribble_at=put(state.scribble_at, jnp.full(b, NO_PARENT)))

  return Drafter(init, propose, observe, num_nodes, len(widths), (), sampled)


def build(options: DraftModelOptions, setup: DrafterSetup):
  config, params, num_tokens = setup.load_draft(options.model)
  widths = options.tree_widths or (1,) * setup.num_draft
  drafter = draft_model(config, widths, setup.page_size, setup.kv_dtype,
                        options.is_sampled, setup.execution,
                        options.draft_confidence_threshold, num_tokens)
  return drafter, params
