"""jspec's outputs in the shapes of OpenAI's answers, whole and in chunks."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec import CompletionOutput, Logprob, RequestOutput, SpeculativeStats
from serving.openai_api import Call
from serving.service import Delta

LEAST_LOGPROB = -9999.0  # OpenAI's word for "very unlikely": JSON has no infinity

Json = dict[str, Any]
Row = Mapping[int, Logprob]


class Answer:
  """One call's answer, under one id.

  Args:
    tokenizer: the model's, as LLM has it.
  """

  id_prefix = name = chunk_name = ""

  def __init__(self, call: Call, model: str, tokenizer: Any):
    self.call, self.tokenizer = call, tokenizer
    self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
    self._head = {"created": int(time.time()), "model": model}

  def whole(self, outputs: Sequence[RequestOutput]) -> Json:
    """`outputs`: finished, one for each prompt."""
    choices = [self.choice(self.index(i, out.index), out)
               for i, output in enumerate(outputs) for out in output.outputs]
    return {"id": self.id, "object": self.name, **self._head, "choices": choices,
            "usage": usage(outputs)}

  def opening(self) -> Iterator[Json]:
    """The chunks before the first token."""
    for i, choice in itertools.product(range(len(self.call.prompts)), range(self.call.params.n)):
      for content in self.first(i, self.index(i, choice)):
        yield self._chunk([content])

  def chunks(self, prompt: int, deltas: Sequence[Delta]) -> Iterator[Json]:
    """What the outputs of a prompt have gained."""
    for delta in deltas:
      for content in self.parts(self.index(prompt, delta.index), delta):
        yield self._chunk([content])

  def closing(self, outputs: Sequence[RequestOutput]) -> Iterator[Json]:
    """The chunks after the last token."""
    if self.call.include_usage:
      yield self._chunk([]) | {"usage": usage(outputs)}

  def index(self, prompt: int, output: int) -> int:
    return prompt * self.call.params.n + output

  def _chunk(self, choices: list[Json]) -> Json:
    return {"id": self.id, "object": self.chunk_name, **self._head, "choices": choices,
            **({"usage": None} if self.call.include_usage else {})}

  # What differs: `first`, `parts` and `choice` are of ChatAnswer and CompletionAnswer.

  def first(self, prompt: int, index: int) -> Iterator[Json]:
    raise NotImplementedError

  def parts(self, index: int, delta: Delta) -> Iterator[Json]:
    raise NotImplementedError

  def choice(self, index: int, out: CompletionOutput) -> Json:
    raise NotImplementedError


class ChatAnswer(Answer):
  id_prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

  def first(self, prompt: int, index: int) -> Iterator[Json]:
    yield self._part(index, {"role": "assistant", "content": ""})

  def parts(self, index: int, delta: Delta) -> Iterator[Json]:
    if delta.text or delta.logprobs:
      yield self._part(index, {"content": delta.text}, self._logprobs(delta.logprobs))
    if delta.finish_reason:
      yield self._part(index, {}) | _end(delta)

  def choice(self, index: int, out: CompletionOutput) -> Json:
    message = {"role": "assistant", "content": out.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": self._logprobs(out.logprobs),
            **_end(out)}

  def _part(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

  def _logprobs(self, rows: Sequence[Row] | None) -> Json | None:
    if rows is None:
      return None
    content = []
    for row in rows:
      token, sampled = next(iter(row.items()))
      # The sampled token is in the row even if it is not one of the likeliest.
      likeliest = sorted(row.items(), key=lambda item: item[1].rank)[:self.call.params.logprobs]
      content.append(self._entry(token, sampled) |
                     {"top_logprobs": [self._entry(*item) for item in likeliest]})
    return {"content": content, "refusal": None}

  def _entry(self, token: int, logprob: Logprob) -> Json:
    spelled = self.tokenizer.token_bytes(token)
    return {"token": logprob.decoded_token, "logprob": max(logprob.logprob, LEAST_LOGPROB),
            "bytes": None if spelled is None else list(spelled)}


class CompletionAnswer(Answer):
  id_prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

  def __init__(self, call: Call, model: str, tokenizer: Any):
    super().__init__(call, model, tokenizer)
    self._at: dict[int, int] = {}  # choice -> characters its tokens have begun, for text_offset

  def first(self, prompt: int, index: int) -> Iterator[Json]:
    if self.call.echo:
      yield self._choice(index, self._echo(prompt))

  def parts(self, index: int, delta: Delta) -> Iterator[Json]:
    if delta.text or delta.logprobs or delta.finish_reason:
      yield self._choice(index, delta.text, self._logprobs(index, delta.logprobs)) | _end(delta)

  def choice(self, index: int, out: CompletionOutput) -> Json:
    text = self._echo(index // self.call.params.n) + out.text
    return self._choice(index, text, self._logprobs(index, out.logprobs)) | _end(out)

  def _choice(self, index: int, text: str, logprobs: Json | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

  def _echo(self, prompt: int) -> str:
    if not self.call.echo:
      return ""
    given = self.call.prompts[prompt]
    if isinstance(given, str):
      return given
    return self.tokenizer.decode(given, skip_special_tokens=False)

  def _logprobs(self, index: int, rows: Sequence[Row] | None) -> Json | None:
    if rows is None:
      return None
    sampled = [next(iter(row.items())) for row in rows]
    return {"tokens": [lp.decoded_token for _, lp in sampled],
            "token_logprobs": [max(lp.logprob, LEAST_LOGPROB) for _, lp in sampled],
            "top_logprobs": [_by_text(row) for row in rows],
            "text_offset": [self._offset(index, token, lp) for token, lp in sampled]}

  def _offset(self, index: int, token: int, logprob: Logprob) -> int:
    """Where in the text the character is with which the token begins."""
    spelled = self.tokenizer.token_bytes(token)
    if self.call.params.skip_special_tokens and token in self.tokenizer.special_ids:
      spelled = b""  # not in the text
    elif spelled is None:
      spelled = logprob.decoded_token.encode()
    begun = [byte & 0xC0 != 0x80 for byte in spelled]  # others continue a character
    at = self._at.get(index, 0)
    self._at[index] = at + sum(begun)
    return max(0, at - 1) if begun and not begun[0] else at


def _end(of: Delta | CompletionOutput) -> Json:
  return {"finish_reason": of.finish_reason, "stop_reason": of.stop_reason}


def _by_text(row: Row) -> dict[str, float]:
  """The sampled token and the likeliest; of several with one text the first."""
  out: dict[str, float] = {}
  for lp in row.values():
    out.setdefault(lp.decoded_token, max(lp.logprob, LEAST_LOGPROB))
  return out


def usage(outputs: Sequence[RequestOutput]) -> Json:
  """Tokens of all prompts and outputs; draft tokens where OpenAI counts predicted ones."""
  prompt = sum(len(o.prompt_token_ids) for o in outputs)
  completion = sum(len(out.token_ids) for o in outputs for out in o.outputs)
  stats = sum((o.speculation for o in outputs), SpeculativeStats())
  rejected = stats.num_draft_tokens - stats.num_accepted_tokens
  return {"prompt_tokens": prompt, "completion_tokens": completion,
          "total_tokens": prompt + completion,
          "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
          "completion_tokens_details": {"accepted_prediction_tokens": stats.num_accepted_tokens,
                                        "rejected_prediction_tokens": rejected}}
