"""jspec's outputs in the shapes of OpenAI's answers, whole and in chunks."""

from __future__ import annotations

import collections
import dataclasses
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec import CompletionOutput, Logprob, RequestOutput, SpeculativeStats
from jspec.serving.http.gate import event
from jspec.serving.openai.api import Call
from jspec.serving.openai.errors import Refused
from jspec.serving.service import num_tokens

LEAST_LOGPROB = -9999.0  # OpenAI's word for "very unlikely": JSON has no infinity

Json = dict[str, Any]
Row = Mapping[int, Logprob]


class Answer:
  """One call's answer, under one id.

  Args:
    tokenizer: the model's, as LLM has it.
    show_cached: usage has cached_tokens.
  """

  id_prefix = name = chunk_name = ""
  last_event = b"data: [DONE]\n\n"

  def __init__(self, call: Call, model: str, tokenizer: Any, show_cached: bool = False):
    self.call, self.tokenizer, self._show_cached = call, tokenizer, show_cached
    self.id = f"{self.id_prefix}-{call.request_id or uuid.uuid4().hex}"
    self._head = {"created": int(time.time()), "model": model}
    self._latest: dict[int, RequestOutput] = {}  # delta, by prompt
    self._generated: collections.Counter[int] = collections.Counter()  # tokens streamed, by prompt

  def whole(self, outputs: Sequence[RequestOutput]) -> Json:
    """`outputs`: finished, one for each prompt."""
    choices = [self.choice(self.index(i, out.index), out, output)
               for i, output in enumerate(outputs) for out in output.outputs]
    return {"id": self.id, "object": self.name, **self._head, "choices": choices,
            "usage": self.usage(outputs, sum(map(num_tokens, outputs))),
            **self.about_prompt(outputs[0])}

  def chunks(self, prompt: int, delta: RequestOutput) -> Iterator[Json]:
    """What the outputs of a prompt have gained."""
    begins = prompt not in self._latest
    self._latest[prompt] = delta
    self._generated[prompt] += num_tokens(delta)
    if begins:
      for i in range(self.call.params.n):
        for content in self.first(self.index(prompt, i), delta):
          yield self._chunk([content]) | (self.about_prompt(delta) if i == 0 else {})
    for new in delta.news:
      for content in self.parts(self.index(prompt, new.index), new):
        yield self._chunk([content])

  def closing(self) -> Iterator[Json]:
    """The chunks after the last token."""
    if self.call.include_usage:
      yield self._chunk([]) | {"usage": self._usage_so_far()}

  def event(self, chunk: Json) -> bytes:
    """A chunk on the wire."""
    return event(chunk)

  def failure(self, error: Refused) -> bytes:
    """What ends a stream that cannot go on."""
    return event(error.body)

  def index(self, prompt: int, output: int) -> int:
    return prompt * self.call.params.n + output

  def usage(self, outputs: Sequence[RequestOutput], generated: int) -> Json:
    return usage(outputs, generated, self._show_cached)

  def _usage_so_far(self) -> Json:
    return self.usage([*self._latest.values()], self._generated.total())

  def _chunk(self, choices: list[Json]) -> Json:
    chunk: Json = {"id": self.id, "object": self.chunk_name, **self._head, "choices": choices}
    if self.call.include_usage:
      chunk["usage"] = self._usage_so_far() if self.call.continuous_usage else None
    return chunk

  def _token_ids(self, of: CompletionOutput) -> Json:
    return {"token_ids": list(of.token_ids)} if self.call.return_token_ids else {}

  def _prompt_facts(self, output: RequestOutput) -> Json:
    facts: Json = {}
    if self.call.prompt_logprobs:
      facts["prompt_logprobs"] = [row and {
          str(token): {**dataclasses.asdict(lp), "logprob": finite(lp.logprob)}
          for token, lp in row.items()} for row in output.prompt_logprobs or ()]
    if self.call.return_token_ids:
      facts["prompt_token_ids"] = list(output.prompt_token_ids)
    return facts

  def token_name(self, token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if self.call.tokens_as_ids else logprob.decoded_token

  # What differs: of ChatAnswer and CompletionAnswer.

  def about_prompt(self, output: RequestOutput) -> Json:
    """Beside the choices."""
    return {}

  def first(self, index: int, output: RequestOutput) -> Iterator[Json]:
    raise NotImplementedError

  def parts(self, index: int, delta: CompletionOutput) -> Iterator[Json]:
    raise NotImplementedError

  def choice(self, index: int, out: CompletionOutput, output: RequestOutput) -> Json:
    raise NotImplementedError


class ChatAnswer(Answer):
  id_prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

  def about_prompt(self, output: RequestOutput) -> Json:
    return self._prompt_facts(output)

  def first(self, index: int, output: RequestOutput) -> Iterator[Json]:
    yield self._part(index, {"role": "assistant", "content": ""})

  def parts(self, index: int, delta: CompletionOutput) -> Iterator[Json]:
    if delta.text or delta.logprobs or (self.call.return_token_ids and delta.token_ids):
      yield (self._part(index, {"content": delta.text}, self.logprobs(delta.logprobs))
             | self._token_ids(delta))
    if delta.finish_reason:
      yield self._part(index, {}) | _end(delta)

  def choice(self, index: int, out: CompletionOutput, output: RequestOutput) -> Json:
    message = {"role": "assistant", "content": out.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": self.logprobs(out.logprobs),
            **_end(out), **self._token_ids(out)}

  def _part(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

  def logprobs(self, rows: Sequence[Row] | None) -> Json | None:
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
    return {"token": self.token_name(token, logprob), "logprob": finite(logprob.logprob),
            "bytes": None if spelled is None else list(spelled)}


class CompletionAnswer(Answer):
  id_prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

  def __init__(self, call: Call, model: str, tokenizer: Any, show_cached: bool = False):
    super().__init__(call, model, tokenizer, show_cached)
    self._at: dict[int, int] = {}  # choice -> characters its tokens have begun, for text_offset

  def first(self, index: int, output: RequestOutput) -> Iterator[Json]:
    if self.call.echo or self.call.return_token_ids:
      yield self._choice(index, *self._echo(index, output)) | self._prompt_facts(output)

  def parts(self, index: int, delta: CompletionOutput) -> Iterator[Json]:
    if delta.text or delta.logprobs or delta.finish_reason or (
        self.call.return_token_ids and delta.token_ids):
      prompt_ids = self._latest[index // self.call.params.n].prompt_token_ids
      yield (self._choice(index, delta.text, self._logprobs(index, delta.logprobs, prompt_ids))
             | _end(delta) | self._token_ids(delta))

  def choice(self, index: int, out: CompletionOutput, output: RequestOutput) -> Json:
    text, before = self._echo(index, output)
    own = self._logprobs(index, out.logprobs, output.prompt_token_ids)
    both = own if before is None or own is None else {k: before[k] + own[k] for k in own}
    return (self._choice(index, text + out.text, both) | _end(out) | self._token_ids(out)
            | self._prompt_facts(output))

  def _choice(self, index: int, text: str, logprobs: Json | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

  def _echo(self, index: int, output: RequestOutput) -> tuple[str, Json | None]:
    """The prompt before the text, and before the text's log-probabilities those of the prompt."""
    if self.call.echo is None:
      return "", None
    given = self.call.echo[index // self.call.params.n]
    text = given if isinstance(given, str) else None
    if text is None or self.call.truncated:
      text = self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    if output.prompt_logprobs is None or self.call.params.logprobs is None:
      return text, None
    shown: list[tuple[int, Row | None]] = list(
        zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
    offsets = [self._offset(index, token, text) for token, _ in shown]
    self._at[index] = len(text)
    return text, {
        "tokens": [self._prompt_token(token, row) for token, row in shown],
        "token_logprobs": [row and finite(row[token].logprob) for token, row in shown],
        "top_logprobs": [row and self._by_name(row) for _, row in shown], "text_offset": offsets}

  def _prompt_token(self, token: int, row: Row | None) -> str:
    """The first token has no log-probability: there is nothing before it."""
    lp = Logprob(0.0, 1, self.tokenizer.token_text(token)) if row is None else row[token]
    return self.token_name(token, lp)

  def _logprobs(self, index: int, rows: Sequence[Row] | None,
                prompt_ids: Sequence[int]) -> Json | None:
    if rows is None:
      return None
    sampled = [next(iter(row.items())) for row in rows]
    if sampled and index not in self._at and self._loses_space(sampled[0][0], prompt_ids):
      self._at[index] = -1
    return {"tokens": [self.token_name(*item) for item in sampled],
            "token_logprobs": [finite(lp.logprob) for _, lp in sampled],
            "top_logprobs": [self._by_name(row) for row in rows],
            "text_offset": [self._offset(index, token) for token, _ in sampled]}

  def _loses_space(self, token: int, prompt_ids: Sequence[int]) -> bool:
    """Whether it begins a text, and with a space that the tokenizer puts there itself."""
    hidden = self.tokenizer.special_ids if self.call.params.skip_special_tokens else ()
    return (all(i in hidden for i in prompt_ids)
            and self.tokenizer.token_text(token).startswith(" ")
            and not self.tokenizer.decode([token]).startswith(" "))

  def _by_name(self, row: Row) -> dict[str, float]:
    """The sampled token and the likeliest; of several with one text the first."""
    out: dict[str, float] = {}
    for token, lp in row.items():
      out.setdefault(self.token_name(token, lp), finite(lp.logprob))
    return out

  def _offset(self, index: int, token: int, echoed: str | None = None) -> int:
    """Where in the text the character is with which the token begins.

    echoed: the prompt's text, where the token is of the prompt.
    """
    at = self._at.get(index, 0)
    spelled = self.tokenizer.token_bytes(token)
    if spelled is None:
      spelled = self.tokenizer.token_text(token).encode()
    special = token in self.tokenizer.special_ids
    if echoed is None:
      shown = not (special and self.call.params.skip_special_tokens)
    else:  # a tokenizer may begin a prompt with what is not in its text
      shown = not special or echoed.startswith(spelled.decode(errors="replace"), at)
      if at == 0 and spelled.startswith(b" ") and not echoed.startswith(" "):
        spelled = spelled[1:]
    begun = [byte & 0xC0 != 0x80 for byte in spelled] if shown else []  # others continue one
    self._at[index] = at + sum(begun)
    return max(0, at - 1 if begun and not begun[0] else at)


def _end(of: CompletionOutput) -> Json:
  return {"finish_reason": of.finish_reason, "stop_reason": of.stop_reason}


def finite(logprob: float) -> float:
  """OpenAI's number for what JSON has none for."""
  return max(logprob, LEAST_LOGPROB)


def usage(outputs: Sequence[RequestOutput], completion: int, show_cached: bool) -> Json:
  """Tokens of all prompts and outputs; draft tokens where OpenAI counts predicted ones.

  completion: tokens generated for all of them.
  """
  cached = sum(o.num_cached_tokens for o in outputs)
  prompt = sum(len(o.prompt_token_ids) for o in outputs)
  stats = sum((o.speculation for o in outputs), SpeculativeStats())
  rejected = stats.num_draft_tokens - stats.num_accepted_tokens
  return {"prompt_tokens": prompt, "completion_tokens": completion,
          "total_tokens": prompt + completion,
          "prompt_tokens_details": {"cached_tokens": cached} if show_cached else None,
          "completion_tokens_details": {"accepted_prediction_tokens": stats.num_accepted_tokens,
                                        "rejected_prediction_tokens": rejected}}
