"""What a request gets back: text, token ids, log-probabilities and speculation statistics."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class SpeculativeStats:
  """Acceptance of one request or of many, defined as in vLLM.

  `num_drafts` counts steps that verified at least one draft token, `num_draft_tokens` the tokens
  verified, `num_accepted_tokens` those accepted, bonus tokens not counted.
  """

  num_steps: int = 0  # target forward passes after prefill
  num_drafts: int = 0
  num_draft_tokens: int = 0
  num_accepted_tokens: int = 0
  num_generated_tokens: int = 0  # by those steps: every token but the first
  accepted_histogram: tuple[int, ...] = ()  # drafting steps by draft tokens accepted, 0..K
  drafted_histogram: tuple[int, ...] = ()  # steps by draft tokens verified, 0..K

  @property
  def acceptance_rate(self) -> float:
    """Accepted / drafted tokens; 0 where nothing was drafted."""
    return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

  @property
  def mean_acceptance_length(self) -> float:
    """1 + accepted / drafts: tokens per step over the steps that drafted; 1 without drafts."""
    return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

  @property
  def tokens_per_step(self) -> float:
    """Generated tokens per target forward pass, over all steps."""
    return self.num_generated_tokens / self.num_steps if self.num_steps else 0.0

  @property
  def acceptance_per_position(self) -> tuple[float, ...]:
    """Share of drafting steps whose draft token at each position (1..K) was accepted."""
    counts = self.accepted_histogram
    return tuple(sum(counts[i:]) / self.num_drafts if self.num_drafts else 0.0
                 for i in range(1, len(counts)))

  def __add__(self, other: SpeculativeStats) -> SpeculativeStats:
    def add(a, b):
      if not isinstance(a, tuple):
        return a + b
      size = max(len(a), len(b))
      a, b = (x + (0,) * (size - len(x)) for x in (a, b))
      return tuple(x + y for x, y in zip(a, b, strict=True))

    return SpeculativeStats(*(add(getattr(self, f.name), getattr(other, f.name))
                              for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Logprob:
  logprob: float
  rank: int  # 1 is the likeliest token
  decoded_token: str


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
  """One of a request's n outputs. Ids, log-probabilities and text end at the same token.

  Of a delta it has the text, ids and log-probabilities that are new, and its end with the last of
  them; statistics are those so far.
  """

  index: int
  text: str
  token_ids: tuple[int, ...]
  finish_reason: str | None = None  # "stop", "length", "error", or None while running
  # The stop token or string, None for the model's own end; of an error, what happened.
  stop_reason: int | str | None = None
  logprobs: tuple[dict[int, Logprob], ...] | None = None  # per token: sampled first, then top
  cumulative_logprob: float | None = None
  speculation: SpeculativeStats = SpeculativeStats()
  # For each token, whether the drafter had proposed it.
  drafted: tuple[bool, ...] = ()
  # bfloat16 [prompt and output tokens but the last, layers * E], the layers in the order asked for;
  # of finished outputs under method "extract_hidden_states".
  hidden_states: np.ndarray | None = None

  def finished(self) -> bool:
    return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds since the request was added."""

  first_token: float = 0.0
  finished: float = 0.0
  admitted: float = 0.0  # it had waited that long for a slot

  # vLLM's names, on a clock that starts when the request is added.
  arrival_time = queued_ts = 0.0

  @property
  def time_in_queue(self) -> float:
    return self.admitted

  @property
  def first_token_latency(self) -> float:
    return self.first_token

  first_scheduled_time = scheduled_ts = time_in_queue
  first_token_time = first_token_ts = first_token_latency

  @property
  def finished_time(self) -> float:
    return self.finished

  last_token_time = last_token_ts = finished_time


@dataclasses.dataclass(frozen=True)
class RequestOutput:
  """A request's outputs so far, or a delta: what they have gained since the one before.

  The properties are those of its first output.
  """

  request_id: str
  prompt: str | None
  prompt_token_ids: tuple[int, ...]
  outputs: tuple[CompletionOutput, ...]
  finished: bool = False
  timing: Timing = Timing()
  num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
  # Per prompt token: it first, then the likeliest; None for the first one, before which is nothing.
  prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

  @classmethod
  def joined(cls, deltas: Sequence[RequestOutput]) -> RequestOutput:
    """Deltas in their order as one; of all of a request's, its whole output."""
    last = deltas[-1]
    return dataclasses.replace(last, outputs=tuple(
        _joined([delta.outputs[i] for delta in deltas]) for i in range(len(last.outputs))))

  @property
  def news(self) -> list[CompletionOutput]:
    """Of a delta, the outputs that have gained something."""
    return [o for o in self.outputs if o.text or o.token_ids or o.finish_reason is not None]

  @property
  def metrics(self) -> Timing:
    return self.timing

  @property
  def text(self) -> str:
    return self.outputs[0].text

  @property
  def token_ids(self) -> tuple[int, ...]:
    return self.outputs[0].token_ids

  @property
  def logprobs(self):
    return self.outputs[0].logprobs

  @property
  def finish_reason(self) -> str | None:
    return self.outputs[0].finish_reason

  @property
  def speculation(self) -> SpeculativeStats:
    """Over all outputs of the request."""
    return sum((out.speculation for out in self.outputs[1:]), self.outputs[0].speculation)


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
  end = next((part for part in parts if part.finish_reason is not None), parts[-1])
  chain = lambda rows: tuple(itertools.chain.from_iterable(rows))
  return dataclasses.replace(
      parts[-1], text="".join(part.text for part in parts),
      token_ids=chain(part.token_ids for part in parts),
      finish_reason=end.finish_reason, stop_reason=end.stop_reason,
      logprobs=None if end.logprobs is None else chain(part.logprobs or () for part in parts),
      drafted=chain(part.drafted for part in parts), hidden_states=end.hidden_states)


def raise_failure(output: RequestOutput) -> None:
  """ValueError if an output failed: for whom a part of an answer is of no use."""
  for out in output.outputs:
    if out.finish_reason == "error":
      raise ValueError(str(out.stop_reason))


@dataclasses.dataclass(frozen=True)
class EngineStats:
  """What an engine has done since its start, and what it is doing."""

  num_running: int = 0  # requests in slots
  num_waiting: int = 0
  num_pages: int = 0
  num_free_pages: int = 0  # pages that only the prefix cache holds are free, too
  prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, once per request
  prefix_hits: int = 0  # of those, the ones that were there
  num_preemptions: int = 0
  prompt_tokens: int = 0  # of requests that have got a slot
  generation_tokens: int = 0
  # (reason, requests): "stop", "length", "abort", "error"
  finished: tuple[tuple[str, int], ...] = ()
  speculation: SpeculativeStats = SpeculativeStats()
  corrupted_requests: int = 0  # ended because their logits were NaN or infinite

  @property
  def kv_cache_usage(self) -> float:
    """Share of the pages that requests hold, 0..1."""
    return 1 - self.num_free_pages / self.num_pages if self.num_pages else 0.0

  def __add__(self, other: EngineStats) -> EngineStats:
    def add(a, b):
      if not isinstance(a, tuple):
        return a + b
      counts = dict(a)
      for name, count in b:
        counts[name] = counts.get(name, 0) + count
      return tuple(counts.items())

    return EngineStats(*(add(getattr(self, f.name), getattr(other, f.name))
                         for f in dataclasses.fields(self)))
