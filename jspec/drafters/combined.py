"""Two drafters as one: per slot and step, a free one drafts where it says enough.

As Arctic Inference pairs suffix decoding with a draft head: the first drafter, which costs next to
nothing, takes over where its proposal is at least as deep as the second's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jspec.model import cache
from jspec.model.control import run_if
from jspec.speculation import tree
from jspec.speculation.drafter import Drafter, Feed, root_only
from jspec.types import NO_PARENT, DraftTree


def combine(first: Drafter, first_params: Any, second: Drafter,
            second_params: Any) -> tuple[Drafter, Any]:
  """The drafter and its parameters, a pair. The first must be point-mass and read no features."""
  if first.sampled or first.feature_layers:
    raise ValueError("the first of two drafters must draft without sampling and without features, "
                     f"got {first.sampled=}, {first.feature_layers=}")
  max_depth = max(first.max_depth, second.max_depth)
  num_nodes = max(first.num_nodes, second.num_nodes)
  if num_nodes == max_depth + 1 and not (first.is_chain and second.is_chain):
    num_nodes += 1  # else a branching tree would pass for a chain

  def init(num_slots, num_pages):
    return first.init(num_slots, num_pages), second.init(num_slots, num_pages)

  def propose_second(params, state, root, slots, undecided):
    """Its tree and state; nothing is run where nobody waits for it."""
    run = lambda carry: second.propose(params, carry[1], root, slots)
    shape = jax.eval_shape(run, (None, state))[0]
    nothing = root_only(root, second.num_nodes)
    if second.sampled:
      nothing = nothing.replace(q_probs=jnp.zeros(shape.q_probs.shape, shape.q_probs.dtype))
    return run_if(undecided.any(), run, (nothing, state))

  def propose(params, state, root, slots):
    draft, first_state = first.propose(params[0], state[0], root, slots)
    reach = _deepest(draft, first.max_depth)
    owned = slots.page_table[:, 0] != cache.NOWHERE  # idle slots wait for nothing
    other, second_state = propose_second(params[1], state[1], root, slots,
                                         owned & (reach < second.max_depth))
    # How deep a sampled proposal is may depend on its own tokens: a choice by that would bias them.
    wanted = second.max_depth if second.sampled else _deepest(other, second.max_depth)
    return _chosen(reach >= wanted, draft, other, num_nodes), (first_state, second_state)

  def observe(params, state, slots, committed):
    return (first.observe(params[0], state[0], slots, committed),
            second.observe(params[1], state[1], slots, committed))

  both = (first, first_params), (second, second_params)
  drafter = Drafter(init, propose, observe, num_nodes, max_depth, second.feature_layers,
                    second.sampled, max(first.num_scratch, second.num_scratch), _feed(both))
  return drafter, (first_params, second_params)


def _deepest(draft: DraftTree, max_depth: int) -> jax.Array:
  """i32[B], the depth of the deepest node in use."""
  return tree.ancestors(draft.parent, max_depth).sum(-1).max(-1) - 1


def _chosen(takes: jax.Array, first: DraftTree, second: DraftTree, num_nodes: int) -> DraftTree:
  """The first's tree where takes bool[B], else the second's, widened to num_nodes."""
  pad = lambda x, value: jnp.pad(x, ((0, 0), (0, num_nodes - x.shape[1])), constant_values=value)
  pick = lambda a, b, value: jnp.where(takes[:, None], pad(a, value), pad(b, value))
  token = pick(first.token, second.token, 0)
  parent = pick(first.parent, second.parent, NO_PARENT)
  if second.q_probs is None:
    return DraftTree(token, parent, None)
  q = jax.nn.one_hot(token, second.q_probs.shape[-1], dtype=second.q_probs.dtype)
  drawn = jnp.where(takes[:, None, None], q[:, :second.q_probs.shape[1]], second.q_probs)
  return DraftTree(token, parent, q.at[:, :second.q_probs.shape[1]].set(drawn))


def _feed(drafters) -> Feed | None:
  if all(drafter.feed is None for drafter, _ in drafters):
    return None

  def params(texts):
    return tuple(params if drafter.feed is None else drafter.feed.params(texts)
                 for drafter, params in drafters)

  context = max(drafter.feed.context for drafter, _ in drafters if drafter.feed is not None)

  def finished(prompt, output):
    for drafter, _ in drafters:
      if drafter.feed is not None:
        drafter.feed.finished(prompt, output)

  def forget():
    for drafter, _ in drafters:
      if drafter.feed is not None:
        drafter.feed.forget()

  return Feed(params, context, finished, forget)
