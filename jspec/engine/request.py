"""One output sequence on the host: its tokens, its text, and where it ends. No jax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.outputs import CompletionOutput, Logprob, RequestOutput, SpeculativeStats, Timing
from jspec.sampling_params import SamplingParams
from jspec.text.tokenizer import Detokenizer, Tokenizer


class NewToken(NamedTuple):
  """A token as a step emits it, or as it was found in a prompt."""

  token: int
  drafted: bool = False
  logprob: float = 0.0
  rank: int = 0
  top: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


@dataclasses.dataclass(eq=False)
class Request:
  """A sequence being generated. `limit` is the most tokens it may have; 0 reads the prompt."""

  request_id: str
  index: int  # which of the prompt's n outputs
  prompt_ids: tuple[int, ...]
  params: SamplingParams
  limit: int
  tokenizer: Tokenizer
  row: Any = None  # slot_sampling.RowInputs, of params
  number: int = 0  # sets the draws of requests without a seed apart
  priority: int = 0  # the lower, the sooner
  cache_salt: str | None = None  # pages are shared with requests of the same one
  added: float = dataclasses.field(default_factory=time.perf_counter)
  admitted_at: float = 0.0  # to its first slot
  first_token_at: float = 0.0
  finished_at: float = 0.0
  tokens: list[int] = dataclasses.field(default_factory=list)
  drafted: list[bool] = dataclasses.field(default_factory=list)
  logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
  # Of prompt tokens, as many as are known; before the first one is nothing.
  prompt_logprobs: list[dict[int, Logprob] | None] = dataclasses.field(
      default_factory=lambda: [None])
  text: str = ""
  finish_reason: str | None = None
  stop_reason: int | str | None = None
  stats: SpeculativeStats = SpeculativeStats()
  hidden_states: np.ndarray | None = None
  logprob: float = 0.0  # of all tokens together, where log-probabilities are kept
  num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
  key: Any = None  # of its random numbers, once it has one

  def __post_init__(self):
    self._detokenizer = Detokenizer(self.tokenizer, self.params.skip_special_tokens,
                                    self.prompt_ids)
    self._told = 0, 0, False  # tokens, characters, and whether its end, of the deltas so far

  @property
  def finished(self) -> bool:
    return self.finish_reason is not None

  @property
  def lacks_prompt_logprobs(self) -> bool:
    """Whether it asked for them, and they are not all there yet."""
    return (self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < len(self.prompt_ids))

  def read(self, start: int, scored: Sequence[NewToken]) -> None:
    """Takes in log-probabilities of prompt tokens from `start` on; those it has stay."""
    known = len(self.prompt_logprobs)
    if start > known:
      raise ValueError(f"prompt tokens {known}..{start - 1} have no log-probabilities")
    for new in scored[known - start:]:
      self.prompt_logprobs.append(self._logprobs(new, self.params.prompt_logprobs))

  def last_tokens(self, count: int) -> tuple[int, ...]:
    """Up to `count` tokens at the end of prompt and output."""
    output = self.tokens[-count:]
    missing = count - len(output)
    return (*(self.prompt_ids[-missing:] if missing else ()), *output)

  def push(self, new: NewToken) -> None:
    """Appends one token; ends the request if it is the last. Later tokens are ignored.

    In this order: a stop string, a stop token, the limit - so text, ids and log-probabilities end
    at the same token, however many the step emitted.
    """
    if self.finished:
      return None
    if not self.limit:  # its prompt was to be read, no more
      return self._finish("length", None)
    params = self.params
    self.tokens.append(new.token)
    self.drafted.append(new.drafted)
    if not self.first_token_at:
      self.first_token_at = time.perf_counter()
    if params.logprobs is not None:
      self.logprobs.append(self._logprobs(new, params.logprobs))
      self.logprob += new.logprob
    own_end = new.token in self.tokenizer.eos_ids and not params.ignore_eos
    stops = own_end or new.token in params.stop_token_ids
    at_limit = len(self.tokens) >= self.limit
    seen = len(self.text)
    if not stops or params.include_stop_str_in_output:
      self.text += self._detokenizer.push([new.token])
    if stops or at_limit:
      self.text += self._detokenizer.flush()
    if len(self.tokens) > params.min_tokens and self._cut_at_stop_string(seen):
      return
    if stops:
      self._finish("stop", None if own_end else new.token)
    elif at_limit:
      self._finish("length", None)

  def _cut_at_stop_string(self, seen: int) -> bool:
    """Ends at the first stop string that reaches into the text beyond `seen` characters."""
    found = [(at, stop) for stop in self.params.stop
             if (at := self.text.find(stop, max(0, seen - len(stop) + 1))) >= 0]
    if not found:
      return False
    at, stop = min(found)
    self.text = self.text[:at + (len(stop) if self.params.include_stop_str_in_output else 0)]
    self._finish("stop", stop)
    return True

  def fail(self, reason: str) -> None:
    """Ends it by no fault or wish of its own, with the text it has."""
    self._finish("error", reason)

  def _finish(self, reason: str, stop_reason: int | str | None) -> None:
    self.finish_reason, self.stop_reason = reason, stop_reason
    self.finished_at = time.perf_counter()

  def _logprobs(self, new: NewToken, num_top: int | None) -> dict[int, Logprob]:
    text = self.tokenizer.token_text
    out = {new.token: Logprob(new.logprob, new.rank, text(new.token))}
    for rank, (token, logprob) in enumerate(new.top[:num_top], 1):
      out.setdefault(token, Logprob(logprob, rank, text(token)))
    return out

  def output(self, delta: bool = False) -> CompletionOutput:
    """A snapshot, or what is new since the last delta.

    While running, text that may turn out to begin a stop string is held back.
    """
    size = len(self.text)
    if not self.finished and not self.params.include_stop_str_in_output:
      size = max(0, size + 1 - max((len(stop) for stop in self.params.stop), default=1))
    start, begin, told = self._told if delta else (0, 0, False)
    if delta:
      self._told = len(self.tokens), size, self.finished
    wants = self.params.logprobs is not None
    return CompletionOutput(
        self.index, self.text[begin:size], tuple(self.tokens[start:]),
        None if told else self.finish_reason, None if told else self.stop_reason,
        tuple(self.logprobs[start:]) if wants else None, self.logprob if wants else None,
        self.stats, tuple(self.drafted[start:]), None if told else self.hidden_states)


def failure(error: BaseException) -> str:
  """What to tell whom a request belonged to that an exception ended."""
  return f"the request failed: {type(error).__name__}: {error}"


@dataclasses.dataclass(eq=False)
class Group:
  """A prompt and its n requests, of which the first has the prompt's log-probabilities."""

  request_id: str
  prompt: str | None
  requests: list[Request]
  shown: tuple[int, int] = (0, 0)  # tokens, and requests that had ended, at the last `news`
  prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None  # once all are known

  def news(self) -> bool:
    """Whether there are tokens, or an end, that the last call had not seen."""
    before = self.shown
    self.shown = (sum(len(r.tokens) for r in self.requests),
                  sum(r.finished for r in self.requests))
    return self.shown != before

  @property
  def most_tokens(self) -> int:
    """Of its prompt and its answers, as far as these may grow, over all outputs."""
    return sum(len(r.prompt_ids) + r.limit for r in self.requests)

  @property
  def error(self) -> str | None:
    """Why the first one that failed did."""
    failed = (r.stop_reason for r in self.requests if r.finish_reason == "error")
    return next((str(reason) for reason in failed), None)

  def output(self, delta: bool = False) -> RequestOutput:
    """A snapshot, or what is new since the last delta: as large as that, however long it grows."""
    finished = all(r.finished for r in self.requests)
    added = self.requests[0].added
    first = min((r.first_token_at for r in self.requests if r.first_token_at), default=added)
    last = max(r.finished_at for r in self.requests)
    admitted = min((r.admitted_at for r in self.requests if r.admitted_at), default=added)
    timing = Timing(first - added, last - added if finished else 0.0, admitted - added)
    return self._output(tuple(r.output(delta=delta) for r in self.requests), finished, timing)

  def failure(self, reason: str) -> RequestOutput:
    """In place of an output that cannot be made."""
    outputs = tuple(CompletionOutput(r.index, "", (), "error", reason) for r in self.requests)
    return self._output(outputs, True, Timing())

  def _output(self, outputs: tuple[CompletionOutput, ...], finished: bool,
              timing: Timing) -> RequestOutput:
    first = self.requests[0]
    if (self.prompt_logprobs is None and first.params.prompt_logprobs is not None
        and not first.lacks_prompt_logprobs):
      self.prompt_logprobs = tuple(first.prompt_logprobs)
    return RequestOutput(self.request_id, self.prompt, first.prompt_ids, outputs, finished, timing,
                         first.num_cached_tokens, self.prompt_logprobs)
