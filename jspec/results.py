"""What the device hands back, for one slot, as the host uses it."""

from __future__ import annotations

import numpy as np

from jspec.outputs import SpeculativeStats
from jspec.request import NewToken
from jspec.types import FirstToken, StepOutput


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
