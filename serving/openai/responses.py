"""OpenAI's newer interface, /v1/responses: text in, text out, nothing kept on the server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from jspec import RequestOutput
from jspec.serving.http.gate import to_json
from jspec.serving.openai.answers import ChatAnswer, Json
from jspec.serving.openai.api import NOT_DONE, Call, Sampling
from jspec.serving.openai.chat import Message
from jspec.serving.openai.errors import Refused
from jspec.serving.openai.fields import FIRST, Int, Text, unsupported
from jspec.serving.service import Conversation, num_tokens

LOGPROBS = "message.output_text.logprobs"  # of `include`
# Members of fields that are objects -> values that ask for nothing.
TEXT = {"format": (None, {"type": "text"}), "verbosity": (None, "medium")}
REASONING = {"effort": (None, "none"), "summary": (None,), "generate_summary": (None,)}


def _messages(value: Any) -> Any:
  """The input as messages."""
  if isinstance(value, str):
    return [{"role": "user", "content": value}]
  if not isinstance(value, list) or not value:
    raise ValueError("must be a string or a list of messages, and not an empty one")
  for i, item in enumerate(value):
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind != "message":
      raise ValueError(f"item {i} must be a message; {kind!r:.40} is not supported")
    if item.get("role") == "tool":
      raise ValueError(f"item {i}: messages of tools are not supported")
  return value


class ResponsesRequest(Sampling):
  input: Annotated[list[Message], FIRST, BeforeValidator(_messages)]
  instructions: Text | None = None
  max_output_tokens: Int | None = None
  metadata: dict[str, str] | None = None  # comes back with the answer
  top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
  include: Annotated[list[str], FIRST, Field(max_length=16)] | None = None
  text: dict[str, Any] | None = None
  reasoning: dict[str, Any] | None = None
  # Labels, which ask for nothing.
  safety_identifier: str | None = None
  prompt_cache_key: str | None = None
  asks_nothing = {
      **NOT_DONE, "previous_response_id": (None,), "conversation": (None,), "store": (None, False),
      "background": (None, False), "prompt": (None,), "tools": (None, []),
      "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, False, True),
      "max_tool_calls": (None,), "truncation": (None, "disabled"),
      "service_tier": (None, "auto", "default"), "prompt_cache_retention": (None, "in_memory"),
      "stream_options": (None, {}, {"include_obfuscation": False}), "context_management": (None,),
      # Of the older interfaces.
      "messages": (None,), "max_tokens": (None,), "max_completion_tokens": (None,), "n": (None, 1),
      "best_of": (None, 1), "logprobs": (None, False), "prompt_logprobs": (None,),
      "echo": (None, False), "chat_template": (None,), "chat_template_kwargs": (None, {}),
      "return_token_ids": (None, False), "return_tokens_as_token_ids": (None, False)}

  @model_validator(mode="after")
  def _check(self) -> ResponsesRequest:
    for name, neutral in (("text", TEXT), ("reasoning", REASONING)):
      for key, value in (getattr(self, name) or {}).items():
        if value not in neutral.get(key, (None,)):
          raise unsupported(f"{name}.{key[:80]}")
    for wanted in self.include or ():
      if wanted != LOGPROBS:
        raise unsupported("include", f"{wanted[:80]!r} is not supported; only {LOGPROBS!r} is")
    return self

  @property
  def wants_logprobs(self) -> bool:
    return LOGPROBS in (self.include or ())

  @property
  def conversation(self) -> Conversation:
    told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
    return Conversation([*told, *(message.plain for message in self.input)])

  def call(self, prompt: list[int], defaults: Mapping[str, Any]) -> Call:
    """prompt: the conversation through the model's template."""
    if self.top_logprobs and not self.wants_logprobs:
      raise Refused(f"top_logprobs is only allowed with include=[{LOGPROBS!r}]", "top_logprobs")
    logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
    try:
      params = self.sampling_params(defaults, max_tokens=self.max_output_tokens, logprobs=logprobs)
    except Refused as error:
      if error.body["error"]["param"] == "max_tokens":  # its name here
        error.body["error"]["param"] = "max_output_tokens"
      raise
    return Call([prompt], params, self.priority or 0, self.cache_salt, self.request_id,
                stream=bool(self.stream))


class ResponsesAnswer(ChatAnswer):
  """A response, whole, or as events that tell how it comes about."""

  id_prefix = "resp"
  last_event = b""

  def __init__(self, call: Call, model: str, tokenizer: Any, show_cached: bool,
               request: ResponsesRequest):
    super().__init__(call, model, tokenizer, show_cached)
    self.id = self.id.replace("-", "_", 1)
    self._request, self._item_id = request, f"msg_{uuid.uuid4().hex}"
    self._sent = 0  # events
    self._deltas: list[RequestOutput] = []

  def whole(self, outputs: Sequence[RequestOutput]) -> Json:
    return self._response(outputs[0])

  def chunks(self, prompt: int, delta: RequestOutput) -> Iterator[Json]:
    if not self._deltas:
      for name in ("response.created", "response.in_progress"):
        yield self._told(name, response=self._response(None))
      yield self._told("response.output_item.added", output_index=0,
                       item=self._message("in_progress", []))
      yield self._about_part("response.content_part.added", part=self._part_of("", None))
    self._deltas.append(delta)
    for new in delta.news:
      if new.text or new.logprobs:
        yield self._about_part("response.output_text.delta", delta=new.text,
                               logprobs=self._entries(new.logprobs))

  def closing(self) -> Iterator[Json]:
    output = RequestOutput.joined(self._deltas)
    part = self._part_of(output.text, output.logprobs)
    yield self._about_part("response.output_text.done", text=part["text"],
                           logprobs=part["logprobs"])
    yield self._about_part("response.content_part.done", part=part)
    response = self._response(output)
    yield self._told("response.output_item.done", output_index=0, item=response["output"][0])
    yield self._told(f"response.{response['status']}", response=response)

  def event(self, chunk: Json) -> bytes:
    return b"event: " + chunk["type"].encode() + b"\ndata: " + to_json(chunk) + b"\n\n"

  def failure(self, error: Refused) -> bytes:
    told = error.body["error"]
    return self.event(self._told("error", **{k: told[k] for k in ("code", "message", "param")}))

  def _told(self, name: str, **content: Any) -> Json:
    self._sent += 1
    return {"type": name, "sequence_number": self._sent - 1, **content}

  def _about_part(self, name: str, **content: Any) -> Json:
    return self._told(name, item_id=self._item_id, output_index=0, content_index=0, **content)

  def _entries(self, rows: Any) -> list[Json]:
    return [] if rows is None else self.logprobs(rows)["content"]  # type: ignore[index]

  def _part_of(self, text: str, rows: Any) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._entries(rows)}

  def _message(self, status: str, parts: list[Json]) -> Json:
    return {"id": self._item_id, "type": "message", "role": "assistant", "status": status,
            "content": parts}

  def _response(self, output: RequestOutput | None) -> Json:
    """output: None where none has begun."""
    asked, params = self._request, self.call.params
    cut = output is not None and output.finish_reason == "length"
    status = "in_progress" if output is None else "incomplete" if cut else "completed"
    items = [] if output is None else [
        self._message(status, [self._part_of(output.text, output.logprobs)])]
    return {
        "id": self.id, "object": "response", "created_at": self._head["created"],
        "status": status, "background": False, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None, "metadata": asked.metadata or {}, "model": self._head["model"],
        "output": items, "parallel_tool_calls": True, "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key, "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier, "service_tier": "default", "store": False,
        "temperature": params.temperature, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p, "truncation": "disabled", "user": asked.user,
        "usage": None if output is None else self._usage(output)}

  def _usage(self, output: RequestOutput) -> Json:
    """Its details are not optional: cached tokens that are not shown are 0."""
    usage = self.usage([output], num_tokens(output))
    cached = usage["prompt_tokens_details"] or {"cached_tokens": 0}
    return {"input_tokens": usage["prompt_tokens"], "input_tokens_details": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"]}
