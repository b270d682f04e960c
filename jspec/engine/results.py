"""What the device hands back, and one slot's part of it as the host uses it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jspec.engine.request import NewToken, Request
from jspec.engine.scheduler import Tenant
from jspec.outputs import SpeculativeStats
from jspec.types import FirstToken, PromptScores, StepOutput


class Flight(NamedTuple):
  """Results that the device is still computing."""

  tenants: dict[int, Tenant]  # by slot, at the time
  out: StepOutput | FirstToken | PromptScores
  num_tokens: int = 0  # at most, for each of them
  drafting: bool = True
  started: float = 0.0
  alone: bool = False  # whether the device did nothing else since the loop before
  scored: range = range(0)  # of the prompt, what PromptScores are about


class News(NamedTuple):
  """What a request has got from the device."""

  stats: SpeculativeStats = SpeculativeStats()
  ended: bool = False  # the device is done with its slot
  failed: str = ""  # why it can't go on


def hand_over(request: Request, flight: Flight, out: Any, slot: int) -> News:
  """Gives the request its part of what has landed. out: flight.out in numpy."""
  params, before = request.params, len(request.tokens)
  if isinstance(out, PromptScores):
    start, count = flight.scored.start, len(flight.scored)
    if out.broken[:count].any():  # of which token it began, a chunk does not tell
      return News(failed=_broken_logits("tokens of the prompt"))
    tokens = request.prompt_ids[start:start + count]
    request.read(start, [_new_token(token, False, out, i, params.prompt_logprobs)
                         for i, token in enumerate(tokens)])
    return News()
  if isinstance(out, FirstToken):
    stats, ended, failed = SpeculativeStats(), bool(out.finished), bool(out.failed)
    if not failed:
      request.push(_new_token(out.token, False, out, (), params.logprobs))
  else:
    for i in range(int(out.num_tokens[slot])):
      request.push(_new_token(out.tokens[slot, i], out.drafted[slot, i], out, (slot, i),
                              params.logprobs))
    stats = stats_of(out, slot, len(request.tokens) - before)
    ended, failed = bool(out.finished[slot]), bool(out.failed[slot])
  why = _broken_logits(f"token {len(request.tokens) + 1} of the answer") if failed else ""
  return News(stats, ended, why)


def _new_token(token, drafted, out, at: Any, num_top: int | None) -> NewToken:
  """at: where it stands in the log-probabilities of `out`."""
  top = tuple(zip(out.top_token[at][:num_top].tolist(), out.top_logprob[at][:num_top].tolist(),
                  strict=True)) if num_top else ()
  return NewToken(int(token), bool(drafted), float(out.logprob[at]), int(out.rank[at]), top)


def stats_of(out: StepOutput, slot: int, generated: int) -> SpeculativeStats:
  """generated: of the slot's tokens, those that count."""
  drafted, accepted = out.drafted_at[slot], out.accepted_at[slot]
  total = lambda histogram: int((histogram * np.arange(len(histogram))).sum())
  return SpeculativeStats(
      int(out.num_steps[slot]), int(out.num_drafts[slot]), total(drafted), total(accepted),
      generated, tuple(accepted.tolist()), tuple(drafted.tolist()))


def _broken_logits(what: str) -> str:
  return (f"the model gave NaN or infinite logits for {what}: its weights are damaged, or too "
          "large for the precision they are computed in")
