"""What the gRPC and the HTTP door share: requests to the engine, answers as deltas."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator, Sequence

from jspec import AsyncLLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from serving.metrics import Metrics

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def sampling_field(message: str) -> str | None:
  """The field of SamplingParams that a ValueError of jspec's begins with; None if with none."""
  if message.startswith("a bad word"):
    return "bad_words"
  word = re.split(r"\W", message, maxsplit=1)[0]
  return word if word in _FIELDS else None


@dataclasses.dataclass(frozen=True)
class Delta:
  """What one of a request's n outputs has gained. Text never splits a character."""

  index: int
  text: str
  token_ids: tuple[int, ...]
  logprobs: tuple[dict[int, Logprob], ...] | None  # per token: sampled first, then top
  finish_reason: str | None  # "stop" or "length" with the output's last delta
  stop_reason: int | str | None


class Service:
  """An engine under the name by which clients know its model.

  Args:
    engine: takes the requests. model_name: as /v1/models and ModelInfo show it.
  """

  def __init__(self, engine: AsyncLLM, model_name: str, metrics: Metrics):
    self.engine, self.model_name, self.metrics = engine, model_name, metrics

  async def stream(self, prompt: str | Sequence[int], params: SamplingParams, *,
                   request_id: str | None = None, priority: int = 0
                   ) -> AsyncGenerator[tuple[RequestOutput, list[Delta]], None]:
    """Each snapshot of the request with what is new in it; the last one is finished.

    Raises what AsyncLLM.generate raises. Leaving it ends the request.
    """
    shown: dict[int, CompletionOutput] = {}
    snapshots = self.engine.generate(prompt, params, request_id=request_id, priority=priority)
    with self.metrics.request(params) as observe:
      async with contextlib.aclosing(snapshots):  # leaving it is what frees the slot
        async for output in snapshots:
          observe(output)
          deltas = [_delta(shown.get(out.index), out) for out in output.outputs]
          shown = {out.index: out for out in output.outputs}
          yield output, [d for d in deltas if d is not None]

  async def complete(self, prompt: str | Sequence[int], params: SamplingParams, *,
                     request_id: str | None = None, priority: int = 0) -> RequestOutput:
    """The finished output."""
    stream = self.stream(prompt, params, request_id=request_id, priority=priority)
    async with contextlib.aclosing(stream):
      async for output, _ in stream:
        if output.finished:
          return output
    raise AssertionError("a stream ends with a finished output")


def _delta(before: CompletionOutput | None, now: CompletionOutput) -> Delta | None:
  """None where nothing is new."""
  text = now.text[len(before.text):] if before else now.text
  count = len(before.token_ids) if before else 0
  ended = now.finish_reason is not None and (before is None or before.finish_reason is None)
  if not text and count == len(now.token_ids) and not ended:
    return None
  logprobs = None if now.logprobs is None else now.logprobs[count:]
  return Delta(now.index, text, now.token_ids[count:], logprobs,
               now.finish_reason if ended else None, now.stop_reason if ended else None)
