"""The speculation step: propose -> forward -> verify -> commit -> observe, in one program.

The step is compiled once. Its cost follows the drafts: among a few fixed widths (rows computed,
nodes per slot) it runs the forward that promises the most tokens per unit of time, so a step in
which the drafter has nothing to say costs what plain decoding costs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.model import cache, transformer
from jspec.model.control import run_if
from jspec.model.rows import chain_mask, pack
from jspec.speculation import sampling, tree
from jspec.speculation.drafter import Drafter
from jspec.speculation.judge import judge
from jspec.speculation.plan import PRIOR, StepConfig, learned, plan
from jspec.speculation.step_output import append, describe, empty_output
from jspec.types import (
  NO_PARENT,
  Committed,
  DraftTree,
  FirstToken,
  PromptScores,
  SlotRequest,
  Slots,
  SpecState,
  StepInputs,
  StepOutput,
  Verdict,
)

# Rows of the prompt whose logits are there at once: with 150,000 tokens in float32, 38 MB.
SCORED_ROWS = 64


def make_step(config: StepConfig, drafter: Drafter) -> Callable:
  """step(inputs, state) -> (state, StepOutput). Not jitted: the caller jits it, donating the state.
  """
  def step(inputs: StepInputs, state: SpecState) -> tuple[SpecState, StepOutput]:
    if config.widths[-1][0] < state.root.shape[0] * drafter.num_nodes:
      raise ValueError(f"widths {config.widths} hold no full trees of {drafter.num_nodes} nodes")
    with jax.named_scope("propose"):
      draft, draft_state = _propose(inputs, state, drafter)
      state = state.replace(draft=draft_state)
      draft = _within_limits(draft, state, inputs.max_draft, drafter.max_depth)
    keep, choice = plan(draft, state, config, inputs.lag, inputs.cost)
    output = empty_output(state, drafter.max_depth + 1, drafter, config.max_logprobs,
                          len(config.widths))
    carry = state, output.replace(ran=output.ran.at[choice].set(1))
    for i, (num_rows, num_nodes) in enumerate(config.widths):
      narrow, narrow_keep = jax.tree.map(lambda x, n=num_nodes: x[:, :n], (draft, keep))
      run = functools.partial(_advance, inputs, draft, narrow, narrow_keep, num_rows, config,
                              drafter)
      carry = run_if(choice == i, run, carry)
    return carry

  return step


def make_multi_step(config: StepConfig, drafter: Drafter, max_steps: int) -> Callable:
  """run(inputs, state, num_steps) -> (state, StepOutput of up to max_steps steps).

  Stops early when a slot finishes (the host may have somebody waiting) or none is active.
  """
  step = make_step(config, drafter)
  width = drafter.max_depth + 1

  def run(inputs: StepInputs, state: SpecState,
          num_steps: jax.Array) -> tuple[SpecState, StepOutput]:
    def go_on(carry):
      i, state, output = carry
      return (i < num_steps) & state.active.any() & ~output.finished.any()

    def body(carry):
      i, state, output = carry
      state, new = step(inputs, state)
      return i + 1, state, append(output, new)

    output = empty_output(state, max_steps * width, drafter, config.max_logprobs,
                          len(config.widths))
    num_steps = jnp.minimum(num_steps, max_steps)
    return jax.lax.while_loop(go_on, body, (jnp.int32(0), state, output))[1:]

  return run


def make_prefill(config: StepConfig, drafter: Drafter, num_tokens: int) -> Callable:
  """prefill(inputs, state, slot, token i32[T + 1], count, is_last) -> (state, (first, hidden)).

  One chunk of one slot's prompt: a chain whose tokens are all accepted. token[count] is the next
  chunk's first token; after the last chunk the first output token is drawn instead, a FirstToken.
  A last chunk may be empty where whole pages were there already: then the first token is drawn
  from what the last page kept. hidden [T, E] is for make_scores.
  """
  c = config.model
  # Chunks are of fixed sizes, whoever runs beside them: their sums need no order.
  how = dataclasses.replace(config.execution, bitwise=False)

  def prefill(inputs: StepInputs, state: SpecState, slot, token, count, is_last):
    slots = _slots(state, slot[None])
    mask = chain_mask(1, num_tokens)
    rows = pack(jnp.arange(num_tokens)[None] < count, num_tokens)
    hidden, feature, pages = transformer.forward(
        inputs.target, c, token[None, :-1], mask, rows, state.pages, slots.page_table,
        slots.length, how=how, is_chain=True, feature_layers=drafter.feature_layers)
    feature = feature.astype(jnp.float32)
    page_size = pages.k[0].shape[1]
    kept = cache.tail_before(state.tails, slots.page_table, slots.length, page_size)
    state = state.replace(pages=pages, tails=cache.write_tails(
        state.tails, slots.page_table, slots.length, count[None], page_size, hidden[None],
        feature[None]))
    end = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[None, None], axis=0)
    end = jnp.where(count > 0, end, kept.hidden.astype(end.dtype))
    state, first = run_if(
        is_last, lambda carry: _emit_first(inputs, carry[0], slot, count, end, config),
        (state, _no_token(token[count], config.max_logprobs)))
    at_end = jnp.arange(num_tokens) == count - 1
    committed = Committed(token[None, :-1], jnp.where(at_end, first.token, token[1:])[None],
                          feature[None], count[None])
    draft = drafter.observe(inputs.draft, state.draft, slots, committed)
    return state.replace(draft=draft, length=state.length.at[slot].add(count),
                         feature=state.feature.at[slot].set(_last(committed, slots)[0])), (
                             first, hidden)

  return prefill


def make_scores(config: StepConfig) -> Callable:
  """scores(target's params, hidden [T, E], token i32[T + 1]) -> PromptScores of token[1:].

  A program of its own: prefill makes no logits but those of the token to draw. hidden: prefill's.
  """
  c = config.model

  def of_rows(params, rows) -> PromptScores:
    hidden, token = rows
    logits = transformer.logits(params, c, hidden, config.execution)
    logprob, rank, top, top_logprob = sampling.logprobs(
        logits, token, config.max_logprobs, c.vocab_parts)
    return PromptScores(logprob, rank, top, top_logprob, sampling.broken(logits))

  def scores(params, hidden, token) -> PromptScores:
    num_tokens = hidden.shape[0]
    size = min(num_tokens, SCORED_ROWS)
    blocks = jax.tree.map(
        lambda x: jnp.pad(x, [(0, -num_tokens % size)] + [(0, 0)] * (x.ndim - 1)).reshape(
            -1, size, *x.shape[1:]), (hidden, token[1:]))
    found = jax.lax.map(functools.partial(of_rows, params), blocks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], found)

  return scores


def admit(state: SpecState, slot: jax.Array, request: SlotRequest) -> SpecState:
  """Puts a request into a slot; prefill of what request.length leaves of the prompt follows."""
  put = lambda old, new: old.at[slot].set(new)
  kept = cache.tail_before(state.tails, request.page_table[None], request.length[None],
                           state.pages.k[0].shape[1])
  return state.replace(
      page_table=put(state.page_table, request.page_table),
      length=put(state.length, request.length), feature=put(state.feature, kept.feature[0]),
      active=put(state.active, False), num_output=put(state.num_output, 0),
      limit=put(state.limit, request.limit), max_draft=put(state.max_draft, request.max_draft),
      accepted=put(state.accepted, PRIOR[0]), tested=put(state.tested, PRIOR[1]),
      key=put(state.key, request.key),
      sampling=jax.tree.map(put, state.sampling, request.sampling))


def resume(state: SpecState, slot: jax.Array, root: jax.Array, num_output: jax.Array) -> SpecState:
  """Goes on with a request whose text was prefilled again, its last token `root` excepted."""
  return state.replace(root=state.root.at[slot].set(root), active=state.active.at[slot].set(True),
                       num_output=state.num_output.at[slot].set(num_output))


def release(state: SpecState, slot: jax.Array) -> SpecState:
  """Takes a slot out of the running, e.g. at a stop string that only the host can see."""
  return state.replace(active=state.active.at[slot].set(False))


# ------------------------------------------------------------------ parts


def _slots(state: SpecState, index: jax.Array) -> Slots:
  length = state.length[index]
  keys = sampling.fold_keys(state.key[index], length + 1, sampling.DRAFT)
  return Slots(index, state.page_table[index], length, state.sampling.temperature[index], keys,
               state.feature[index])


def _last(committed: Committed, slots: Slots) -> jax.Array:
  """f32[B, F], the feature at the end of what was committed."""
  at = jnp.maximum(committed.count - 1, 0)[:, None, None]
  last = jnp.take_along_axis(committed.feature, at, 1)[:, 0]
  return jnp.where(committed.count[:, None] > 0, last, slots.feature)


def _all_slots(state: SpecState) -> Slots:
  return _slots(state, jnp.arange(state.root.shape[0]))


def _propose(inputs: StepInputs, state: SpecState, drafter: Drafter):
  """The drafter's tree and state; nothing is run where no slot may draft."""
  slots = _all_slots(state)
  # A slot that runs nothing owns no pages: what is scribbled for it must not reach a tenant's.
  slots = slots.replace(
      page_table=jnp.where(state.active[:, None], slots.page_table, cache.NOWHERE))
  run = lambda: drafter.propose(inputs.draft, state.draft, state.root, slots)
  shape = jax.eval_shape(run)[0]
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
  nothing = nothing.replace(token=nothing.token.at[:, 0].set(state.root),
                            parent=nothing.parent + NO_PARENT)
  wanted = state.active & (jnp.minimum(state.max_draft, inputs.max_draft) > 0) & (
      state.limit - state.num_output > 1)
  return run_if(
      wanted.any(),
      lambda carry: drafter.propose(inputs.draft, carry[1], state.root, slots),
      (nothing, state.draft))


def _within_limits(draft: DraftTree, state: SpecState, max_draft, max_depth: int) -> DraftTree:
  """Cuts nodes deeper than the request, the engine or the room left allows."""
  depth = tree.ancestors(draft.parent, max_depth).sum(-1) - 1
  room = jnp.minimum(jnp.minimum(state.max_draft, max_draft), state.limit - state.num_output - 1)
  allowed = (depth <= room[:, None]) & state.active[:, None]
  return draft.replace(parent=jnp.where(allowed, draft.parent, NO_PARENT))


def _advance(inputs: StepInputs, proposal: DraftTree, draft: DraftTree, keep, num_rows: int,
             config: StepConfig, drafter: Drafter, carry: tuple[SpecState, StepOutput]):
  """Forward, verify, commit and observe at one width."""
  state, output = carry
  draft = draft.replace(parent=jnp.where(keep, draft.parent, NO_PARENT))
  mask = tree.ancestors(draft.parent, draft.token.shape[1] - 1)
  rows = pack(keep, num_rows)
  with jax.named_scope("forward"):
    hidden, feature, pages = transformer.forward(
        inputs.target, config.model, draft.token, mask, rows, state.pages, state.page_table,
        state.length, how=config.execution, is_chain=drafter.is_chain,
        feature_layers=drafter.feature_layers)
    logits = transformer.logits(inputs.target, config.model, hidden, config.execution)
  with jax.named_scope("verify"):
    verdict, broken = judge(logits, draft, mask, rows, state, drafter.sampled, config.verification)
    verdict = verdict.replace(path=verdict.path[:, :drafter.max_depth + 1])
  with jax.named_scope("commit"):
    if not drafter.is_chain:
      pages = cache.commit(pages, state.page_table, state.length, verdict)
    row = tree.along_path(rows.of_node, verdict.path)
    committed, finished, failed = _cut(draft, verdict, broken, feature, row, state)
    tails = cache.write_tails(
        state.tails, state.page_table, state.length, committed.count, pages.k[0].shape[1],
        jnp.take(hidden, row, axis=0, mode="clip"), committed.feature)
    output = describe(output, logits, config.model.vocab_parts, row, verdict, committed, keep,
                      finished, failed, state)
  with jax.named_scope("observe"):
    slots = _all_slots(state)
    draft_state = drafter.observe(inputs.draft, state.draft, slots, committed)
    state = state.replace(pages=pages, tails=tails, draft=draft_state,
                          feature=_last(committed, slots))
    state = _update(state, proposal, draft, verdict, committed, finished)
  return state, output


def _cut(draft: DraftTree, verdict: Verdict, broken, feature, row, state: SpecState):
  """The accepted run up to its first stop token or the request's limit; who finished, and failed.

  broken: bool[B], there is no bonus token. row: i32[B, D + 1], of the nodes on the path.
  """
  token = tree.along_path(draft.token, verdict.path)
  step = jnp.arange(token.shape[1])
  next_token = jnp.where(step == verdict.num_accepted[:, None], verdict.bonus[:, None],
                         jnp.roll(token, -1, 1))
  count = verdict.num_accepted + 1 - broken
  flags = sampling.pick(state.sampling.token_flags, next_token)
  stops = (flags & sampling.STOPS > 0) & (step < count[:, None])
  upto = jnp.where(stops.any(1), jnp.argmax(stops, 1) + 1, count)
  count = jnp.where(state.active, jnp.minimum(upto, state.limit - state.num_output), 0)
  failed = broken & ~stops.any(1)
  finished = failed | (stops & (step < count[:, None])).any(1) | (
      state.num_output + count >= state.limit)
  feature = jnp.take(feature, row, axis=0, mode="clip").astype(jnp.float32)
  return (Committed(token, next_token, feature, count), finished & state.active,
          failed & state.active)


def _update(state: SpecState, proposal: DraftTree, draft: DraftTree, verdict: Verdict,
            committed: Committed, finished) -> SpecState:
  count = committed.count
  last = jnp.take_along_axis(committed.next_token, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
  accepted, tested = learned(state, proposal, draft, verdict, committed)
  return state.replace(
      length=state.length + count,
      root=jnp.where(count > 0, last, state.root), active=state.active & ~finished,
      num_output=state.num_output + count, accepted=accepted, tested=tested,
      sampling=sampling.record(state.sampling, committed.next_token, count))


def _emit_first(inputs: StepInputs, state: SpecState, slot, count, hidden, config: StepConfig):
  """Draws the token after the prompt, as the slot's root."""
  s = state.sampling
  logits = transformer.logits(inputs.target, config.model, hidden, config.execution)
  position = (state.length[slot] + count)[None]
  u = sampling.uniforms(state.key[slot][None], position, sampling.TARGET)
  zero = jnp.zeros(1, jnp.int32)
  context = sampling.NodeContext(slot[None], jnp.zeros((1, 0), jnp.int32), zero)
  this = jnp.arange(state.root.shape[0]) == slot
  failed = sampling.broken(logits)[0]
  root = jnp.where(failed, 0, sampling.choose(logits, s, state.num_output, this, context, u))
  first = _no_token(root[0], config.max_logprobs)

  def with_logprobs(first):
    logprob, rank, top, top_logprob = sampling.logprobs(
        logits, root, config.max_logprobs, config.model.vocab_parts)
    return first.replace(logprob=logprob[0], rank=rank[0], top_token=top[0],
                         top_logprob=top_logprob[0])

  first = run_if(s.logprobs[slot], with_logprobs, first)
  stops = sampling.pick(s.token_flags[slot][None], root[None])[0, 0] & sampling.STOPS > 0
  finished = stops | (state.limit[slot] <= 1) | failed
  return state.replace(
      root=state.root.at[slot].set(root[0]), num_output=state.num_output.at[slot].set(1),
      active=state.active.at[slot].set(~finished),
      sampling=sampling.record(s, jnp.where(this, root[0], 0)[:, None], this.astype(jnp.int32))
  ), first.replace(finished=finished, failed=failed)


def _no_token(token: jax.Array, num_top: int) -> FirstToken:
  return FirstToken(token, jnp.float32(0), jnp.zeros(num_top, jnp.int32),
                    jnp.zeros(num_top), jnp.int32(0), jnp.bool_(False), jnp.bool_(False))
