"""StepOutput: empty, filled by one step, and summed over many."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.model.control import run_if
from jspec.speculation import sampling
from jspec.speculation.drafter import Drafter
from jspec.types import PAD_TOKEN, Committed, SpecState, StepOutput, Verdict


def empty_output(state: SpecState, size: int, drafter: Drafter, num_top: int,
                 num_widths: int) -> StepOutput:
  b = state.root.shape[0]
  zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((b, *shape), dtype)
  return StepOutput(
      tokens=zeros(size) + PAD_TOKEN, num_tokens=zeros(), logprob=zeros(size, dtype=jnp.float32),
      top_token=zeros(size, num_top), top_logprob=zeros(size, num_top, dtype=jnp.float32),
      rank=zeros(size), drafted=zeros(size, dtype=bool), finished=zeros(dtype=bool),
      failed=zeros(dtype=bool), num_steps=zeros(), num_drafts=zeros(),
      drafted_at=zeros(drafter.num_nodes), accepted_at=zeros(drafter.max_depth + 1),
      ran=jnp.zeros(num_widths, jnp.int32))


def describe(output: StepOutput, logits, vocab_parts: int, row, verdict: Verdict,
             committed: Committed, keep, finished, failed, state: SpecState) -> StepOutput:
  """Fills the step's output, wide enough for the deepest tree, from one width's results."""
  b, num_emitted = committed.next_token.shape
  count, step = committed.count, jnp.arange(num_emitted)
  real = step < count[:, None]
  put = lambda old, new: old.at[:, :num_emitted].set(new)

  def with_logprobs(output):
    raw = jnp.take(logits, row.reshape(-1), axis=0, mode="clip")
    values = sampling.logprobs(raw, committed.next_token.reshape(-1), output.top_token.shape[-1],
                               vocab_parts)
    logprob, rank, top, top_logprob = (x.reshape(b, num_emitted, *x.shape[1:]) for x in values)
    return output.replace(logprob=put(output.logprob, logprob), rank=put(output.rank, rank),
                          top_token=put(output.top_token, top),
                          top_logprob=put(output.top_logprob, top_logprob))

  output = run_if((state.sampling.logprobs & state.active).any(), with_logprobs, output)
  num_drafted = keep.sum(1) - state.active
  accepted = jnp.minimum(verdict.num_accepted, count)
  drafted = state.active & (num_drafted > 0)
  histogram = lambda x, size, real: jax.nn.one_hot(
      jnp.where(real, x, -1), size, dtype=jnp.int32)
  return output.replace(
      tokens=put(output.tokens, jnp.where(real, committed.next_token, PAD_TOKEN)),
      num_tokens=count, drafted=put(output.drafted, step < accepted[:, None]),
      finished=finished, failed=failed, num_steps=state.active.astype(jnp.int32),
      num_drafts=drafted.astype(jnp.int32),
      drafted_at=histogram(num_drafted, output.drafted_at.shape[1], state.active),
      accepted_at=histogram(accepted, output.accepted_at.shape[1], drafted))


def append(total: StepOutput, new: StepOutput) -> StepOutput:
  """Adds a step's tokens behind those so far, and its counts to the counts."""
  slot = jnp.arange(new.tokens.shape[0])[:, None]
  step = jnp.arange(new.tokens.shape[1])
  at = total.num_tokens[:, None] + step
  at = jnp.where(step < new.num_tokens[:, None], at, total.tokens.shape[1])
  per_token = ("tokens", "logprob", "top_token", "top_logprob", "rank", "drafted")
  fields = {}
  for name in StepOutput.__dataclass_fields__:
    old, value = getattr(total, name), getattr(new, name)
    if name in per_token:
      fields[name] = old.at[slot, at].set(value, mode="drop")
    else:
      fields[name] = old | value if name in ("finished", "failed") else old + value
  return StepOutput(**fields)
