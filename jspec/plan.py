"""How much of a proposal to verify: the width of a step, from what past steps taught."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jspec import tree
from jspec.config import ModelConfig
from jspec.types import Committed, DraftTree, SpecState, Verdict

PRIOR = (1.4, 2.0)  # accepted, tested: what a new request's drafts are trusted with
DECAY = 0.9  # of both per step with a draft


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """Static choices of a step."""

  model: ModelConfig
  widths: tuple[tuple[int, int], ...]  # (rows, nodes per slot), ascending; the first is plain
  rows_per_pass: float  # rows whose arithmetic takes as long as reading all the weights once
  max_logprobs: int = 20
  bitwise: bool = False


def default_widths(num_slots: int, num_nodes: int) -> tuple[tuple[int, int], ...]:
  """Plain decoding, then more rows up to every node of every slot.

  A few widths, since each is compiled: with many slots twice the rows are worth a program of
  their own, with one slot two rows cost what four do.
  """
  factors = sorted({f for f in (1, 2, 4) if f < num_nodes} | {num_nodes})
  if num_slots == 1:
    return tuple((f, f) for f in factors if f != 2 or num_nodes == 2)
  return tuple((num_slots * f, 1 if f == 1 else num_nodes) for f in factors)


def plan(draft: DraftTree, state: SpecState, config: StepConfig):
  """Which nodes to verify (bool[B, N]), and at which of the widths (i32[]).

  A node at depth d is worth its slot's acceptance rate to the power d; a pass over R rows costs
  1 + R / rows_per_pass readings of the weights. The width with the best ratio is filled with its
  most promising nodes. The choice looks at past steps only, never at the drafted tokens, so it
  cannot bias them. Sampled drafts are verified whole: cutting one because of the company would
  make a seeded request's text depend on the batch.
  """
  b, n = draft.token.shape
  active, used = state.active, tree.used(draft.parent)
  drafted = used & (jnp.arange(n) > 0) & active[:, None]
  num_active = active.sum()
  rate = jnp.clip(state.accepted / state.tested, 0, 1)
  depth = tree.ancestors(draft.parent, n - 1).sum(-1) - 1
  worth = jnp.where(drafted, rate[:, None] ** depth, -1.0).reshape(-1)
  rows, nodes = (jnp.array(x) for x in zip(*config.widths, strict=True))
  room = rows - num_active
  node = jnp.tile(jnp.arange(n), b)
  if draft.q_probs is not None:
    fits = (drafted.sum() <= room) & (jnp.where(drafted, jnp.arange(n), 0).max() < nodes)
    choice = jnp.argmax(fits)
  else:
    order = jnp.argsort(-worth, stable=True)
    ranked = worth[order]
    within = (node[order] < nodes[:, None]) & (ranked > 0)
    taken = within & (jnp.cumsum(within, -1) <= room[:, None])
    gain = num_active + jnp.where(taken, ranked, 0).sum(-1)
    choice = jnp.argmax(gain / (1 + rows / config.rows_per_pass))
  eligible = drafted.reshape(-1) & (node < nodes[choice])
  order = jnp.argsort(jnp.where(eligible, -worth, 2.0), stable=True)
  rank = jnp.zeros(b * n, jnp.int32).at[order].set(jnp.arange(b * n))
  keep = (eligible & (rank < room[choice])).reshape(b, n)
  return keep.at[:, 0].set(active), choice


def learned(state: SpecState, proposal: DraftTree, draft: DraftTree, verdict: Verdict,
            committed: Committed):
  """(accepted, tested) of the state after a step, f32[B] each.

  A chain is compared as far as the emitted tokens reach even where it was not verified: that is
  free, and a drafter that was cut off for bad drafts is seen to recover.
  """
  num_emitted = committed.next_token.shape[1]
  step = jnp.arange(num_emitted)
  if proposal.token.shape[1] > 1 and proposal.q_probs is None:
    token, parent = proposal.token[:, 1:num_emitted + 1], proposal.parent[:, 1:num_emitted + 1]
    on_chain = jnp.cumprod((parent == jnp.arange(token.shape[1])).astype(jnp.int32), 1)
    span = jnp.minimum(on_chain.sum(1), committed.count)
    same = (token == committed.next_token[:, :token.shape[1]]) & (
        step[:token.shape[1]] < span[:, None])
    agreed = jnp.cumprod(same.astype(jnp.int32), 1).sum(1)
    agreed = jnp.maximum(agreed, jnp.minimum(verdict.num_accepted, committed.count))
  else:
    depth = tree.ancestors(draft.parent, max(num_emitted - 1, 1)).sum(-1) - 1
    span = jnp.minimum(depth.max(1), committed.count)
    agreed = jnp.minimum(verdict.num_accepted, span)
  tested = jnp.minimum(agreed + 1, jnp.maximum(span, agreed))
  update = lambda old, new: jnp.where(tested > 0, DECAY * old + new, old)
  return update(state.accepted, agreed), update(state.tested, tested)
