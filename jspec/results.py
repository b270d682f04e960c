"""What the device hands back, and one slot's part of it as the host uses it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jspec.outputs import SpeculativeStats
from jspec.request import NewToken
from jspec.scheduler import Tenant
from jspec.types import FirstToken, StepOutput


class Flight(NamedTuple):
  """Results that the device is still computing."""

  tenants: dict[int, Tenant]  # by slot, at the time
  out: StepOutput | FirstToken
  num_tokens: int = 0  # at most, for each of them
  drafting: bool = True
  started: float = 0.0
  alone: bool = False  # whether the device did nothing else since the loop before


def tokens_of(out: StepOutput, slot: int, num_top: int | None) -> list[NewToken]:
  """The slot's tokens of a device loop."""
  tokens = []
  for i in range(int(out.num_tokens[slot])):
    top = tuple(zip(out.top_token[slot, i, :num_top].tolist(),
                    out.top_logprob[slot, i, :num_top].tolist(), strict=True)) if num_top else ()
    tokens.append(NewToken(int(out.tokens[slot, i]), bool(out.drafted[slot, i]),
                           float(out.logprob[slot, i]), int(out.rank[slot, i]), top))
  return tokens


def first_of(first: FirstToken, num_top: int | None) -> NewToken:
  """The token after a prompt."""
  top = tuple(zip(first.top_token[:num_top].tolist(), first.top_logprob[:num_top].tolist(),
                  strict=True)) if num_top else ()
  return NewToken(int(first.token), False, float(first.logprob), int(first.rank), top)


def stats_of(out: StepOutput, slot: int, generated: int) -> SpeculativeStats:
  """generated: of the slot's tokens, those that count."""
  drafted, accepted = out.drafted_at[slot], out.accepted_at[slot]
  total = lambda histogram: int((histogram * np.arange(len(histogram))).sum())
  return SpeculativeStats(
      int(out.num_steps[slot]), int(out.num_drafts[slot]), total(drafted), total(accepted),
      generated, tuple(accepted.tolist()), tuple(drafted.tolist()))


def broken_logits(num_tokens: int) -> str:
  """What to say where the token after so many of an answer could not be told."""
  return (f"the model gave NaN or infinite logits for token {num_tokens + 1} of the answer: its "
          "weights are damaged, or too large for the precision they are computed in")
