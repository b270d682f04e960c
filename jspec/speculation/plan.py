"""How much of a proposal to verify: the width of a step, from what past steps taught."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, Verification
from jspec.model.execution import FAST, Execution
from jspec.speculation import tree
from jspec.types import Committed, DraftTree, SpecState, Verdict

# accepted, tested: what a new request's drafts are trusted with. Little, as looking on is free.
PRIOR = (0.4, 2.0)
DECAY = 0.9  # of both per step with a draft
MARGIN = 0.1  # share by which a wide step must promise more: the best of several guesses flatters


@dataclasses.dataclass(frozen=True)
class CostModel:
  """What a step costs, in readings of all the weights ("passes"). See `step_cost`."""

  rows_per_pass: float = 24.0  # rows whose arithmetic takes as long as one pass
  one_row_pass: float = 1.0  # the pass for a single row, where that is cheaper
  kv_pass: float = 0.0  # reading one cached token of one slot
  attention_pass: float = 0.0  # the arithmetic of one node on one cached token


def cpu_cost(config: ModelConfig, single_rows: bool) -> CostModel:
  """Two Zen 5 cores, SmolLM2-135M, 1 to 64 rows, 100 to 1200 tokens, 29 Nov 2026.

  In float32 and in bfloat16 24 rows took as long as a pass; a single row in float32 0.83 of the
  pass that several rows share (`single_rows`: rows are not padded). The reference attention takes
  2.5 times as long as its bytes and 4.5 times as long as its arithmetic would at those rates.
  """
  c = config
  weights = c.vocab_size * c.width + c.num_layers * (
      c.width * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
      + c.width * c.mlp_dim * (3 if c.gated_mlp else 2))
  cached = 2 * c.num_layers * c.num_kv_heads * c.head_dim
  products = 2 * c.num_layers * c.num_heads * c.head_dim
  return CostModel(24.0, 0.83 if single_rows else 1.0, 2.5 * cached / weights,
                   4.5 * products / weights / 24.0)


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """Static choices of a step."""

  model: ModelConfig
  # (rows, nodes per slot), ascending. The first with a row for each slot is plain decoding; those
  # before it are for when fewer slots are active.
  widths: tuple[tuple[int, int], ...]
  cost: CostModel = CostModel()
  max_logprobs: int = 20
  execution: Execution = FAST
  verification: Verification = Verification()
  adaptive: bool = True  # else every draft is verified whole
  measured: bool = False  # whether the widths' costs are corrected by what was measured


def default_widths(num_slots: int, num_nodes: int) -> tuple[tuple[int, int], ...]:
  """Plain decoding, then more rows up to every node of every slot: a few, as each is compiled."""
  if num_slots == 1:
    return tuple((n, n) for n in sorted({1, min(4, num_nodes), num_nodes}))
  narrower = [(1, 1), (2, min(4, num_nodes)), (4, num_nodes)]
  return (*((num_slots * f, n) for f, n in narrower if f < num_nodes),
          (num_slots * num_nodes, num_nodes))


def cpu_widths(num_slots: int, num_nodes: int) -> tuple[tuple[int, int], ...]:
  """The same where rows cost arithmetic even when nobody uses them: narrower ones, too."""
  narrow = ((1, 1), (4, min(4, num_nodes))) if num_slots >= 8 else ()
  return narrow + default_widths(num_slots, num_nodes)


def step_costs(config: StepConfig, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
  """For each width, in passes: what a step costs, and each cached token its attention walks."""
  rows, nodes = (np.array(x) for x in zip(*config.widths, strict=True))
  c = config.cost
  fixed = np.where(rows == 1, c.one_row_pass, 1.0) + rows / c.rows_per_pass
  return fixed, num_slots * (c.kv_pass + nodes * c.attention_pass)


def plan(draft: DraftTree, state: SpecState, config: StepConfig, lag: jax.Array,
         correction: jax.Array | None = None):
  """Which nodes to verify (bool[B, N]), and at which of the widths (i32[]).

  A node at depth d is worth its slot's acceptance rate to the power d. The width with the best
  ratio of expected tokens to cost is filled with its most promising nodes. The choice looks at
  past steps only, never at the drafted tokens, so it cannot bias them. Sampled drafts are verified
  whole: cutting one because of the company would make a seeded request's text depend on the batch.
  So are drafts under a lossy rule: what passes there says nothing about the drafter.
  And so is every draft where config.adaptive is False.

  Args:
    lag: f32[], tokens. Progress is the soft minimum over the slots of how far each has come on its
      way to its limit, with this softness: small where a batch is done when its last request is,
      so that only the stragglers' tokens save time; large where every token counts alike.
  """
  b, n = draft.token.shape
  active, used = state.active, tree.used(draft.parent)
  drafted = used & (jnp.arange(n) > 0) & active[:, None]
  num_active = active.sum()
  rate = jnp.clip(state.accepted / state.tested, 0, 1)
  depth = tree.ancestors(draft.parent, n - 1).sum(-1) - 1
  left = jnp.where(active, state.limit - state.num_output, 0)
  weight = jnp.where(active, jnp.exp((left - left.max()) / lag), 0)  # of each slot's tokens
  value = jnp.where(drafted, rate[:, None] ** depth, -1.0)
  worth = (weight[:, None] * value).reshape(-1)
  rows, nodes = (jnp.array(x) for x in zip(*config.widths, strict=True))
  room = rows - num_active
  node = jnp.tile(jnp.arange(n), b)
  if draft.q_probs is not None or config.verification.is_lossy or not config.adaptive:
    fits = (drafted.sum() <= room) & (jnp.where(drafted, jnp.arange(n), 0).max() < nodes)
    choice = jnp.argmax(fits)
  else:
    order = jnp.argsort(-worth, stable=True)
    ranked = worth[order]
    within = (node[order] < nodes[:, None]) & (ranked > 0)
    taken = within & (jnp.cumsum(within, -1) <= room[:, None])
    tokens = jnp.where(taken, value.reshape(-1)[order], 0) @ jax.nn.one_hot(order // n, b)
    progress = 1 - lag * jnp.log(jnp.exp(-tokens / lag) @ weight / weight.sum())
    plain = jnp.argmax(room >= 0)  # the narrowest that holds every active slot
    gain = jnp.where(rows > rows[plain], progress * (1 - MARGIN), progress)
    gain = jnp.where(room >= 0, gain, 0)
    fixed, per_token = map(jnp.float32, step_costs(config, b))
    cost = fixed + per_token * jnp.where(active, state.length, 0).max()
    choice = jnp.argmax(gain / (cost if correction is None else cost * correction))
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
