"""OpenAI's requests, with vLLM's extra fields, as calls to jspec.

Every field is applied exactly or refused: what jspec does not do is refused by name as soon as it
asks for something, and so is a field that nobody knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
  AfterValidator,
  BaseModel,
  BeforeValidator,
  ConfigDict,
  FailFast,
  Field,
  model_validator,
)
from pydantic_core import PydanticCustomError

from jspec import SamplingParams
from serving.openai_errors import Refused, refusal

MAX_CHOICES = 1024  # of one request: prompts times n
MAX_STOPS = 64  # strings, each of which is looked for after every token
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat has none

_OWN = ("max_tokens", "logprobs")  # SamplingParams that the two requests spell differently
_SAME = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in _OWN]

Prompt = str | list[int]


@dataclasses.dataclass(frozen=True)
class Call:
  """What a request asks for."""

  prompts: list[Prompt]
  params: SamplingParams
  priority: int
  stream: bool
  include_usage: bool
  echo: bool = False


class _FailFast(FailFast):
  __hash__ = object.__hash__  # typing's unions need one


_FIRST = _FailFast()  # of a list with a million bad elements pydantic would report them all


class _Known(BaseModel):
  """A JSON object without unknown fields, and of the known ones each with its very type."""

  model_config = ConfigDict(strict=True)
  asks_nothing: ClassVar[Mapping[str, tuple]] = {}  # field that we don't do -> values we can ignore

  @model_validator(mode="before")
  @classmethod
  def _refuse_unknown(cls, content: Any) -> Any:
    # By hand, as pydantic lists all unknown fields, of which a body has room for a million.
    for name in content if isinstance(content, dict) else ():
      if name in cls.model_fields:
        continue
      if name not in cls.asks_nothing:
        raise PydanticCustomError("unknown", "there is no such field", {"field": name[:80]})
      if content[name] not in cls.asks_nothing[name]:
        raise PydanticCustomError("unsupported", "this is not supported: leave it out",
                                  {"field": name})
    return content


def _as_list(value: Any) -> Any:
  if not isinstance(value, (str, list)):
    raise ValueError("must be a string or a list of strings")
  return [value] if isinstance(value, str) else value


def _unicode(text: str) -> str:
  if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
    raise ValueError("must be valid Unicode text")
  return text


def _small_map(value: Any) -> Any:
  """Pydantic would list every bad entry."""
  if isinstance(value, dict) and any(type(v) not in (int, float) for v in value.values()):
    raise ValueError("must map token ids to numbers")
  return value


_Text = Annotated[str, AfterValidator(_unicode)]


class _StreamOptions(_Known):
  include_usage: bool | None = None
  asks_nothing = {"include_obfuscation": (None, False)}


class _Sampling(_Known):
  """What both kinds of request have. A field left out, or null, has SamplingParams' default."""

  model: str
  stream: bool | None = None
  stream_options: _StreamOptions | None = None
  n: int | None = None
  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  logit_bias: Annotated[dict[str, float], BeforeValidator(_small_map)] | None = None
  seed: int | None = None
  stop: Annotated[list[_Text], _FIRST, Field(max_length=MAX_STOPS),
                  BeforeValidator(_as_list)] | None = None
  # As in vLLM.
  top_k: int | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  min_tokens: int | None = None
  ignore_eos: bool | None = None
  stop_token_ids: Annotated[list[int], _FIRST] | None = None
  include_stop_str_in_output: bool | None = None
  skip_special_tokens: bool | None = None
  bad_words: Annotated[list[_Text], _FIRST] | None = None
  priority: int | None = None
  # jspec's own.
  num_speculative_tokens: int | None = None
  # Labels, which ask for nothing.
  user: str | None = None
  metadata: dict[str, Any] | None = None

  def _call(self, prompts: list[Prompt], max_tokens: int | None, logprobs: int | None,
            echo: bool = False) -> Call:
    given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
    try:
      params = SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)
    except (ValueError, OverflowError) as error:
      raise refusal(ValueError(*error.args)) from None
    if len(prompts) * params.n > MAX_CHOICES:
      raise Refused(f"{len(prompts)} prompts times n={params.n} are more than the {MAX_CHOICES} "
                    "choices that a request may have", "n")
    if self.stream_options is not None and not self.stream:
      raise Refused("stream_options is only allowed with stream=true", "stream_options")
    include_usage = bool(self.stream_options and self.stream_options.include_usage)
    return Call(prompts, params, self.priority or 0, bool(self.stream), include_usage, echo)


# ------------------------------------------------------------------------------------- completions


def _prompts(value: Any) -> list[Prompt]:
  """The four forms of a prompt as a list of prompts."""
  if isinstance(value, str):
    return [value]
  if isinstance(value, list) and value:
    if all(type(t) is int for t in value):
      return [value]
    if all(isinstance(p, str) for p in value):
      return value
    if all(isinstance(p, list) and all(type(t) is int for t in p) for p in value):
      return value
  raise ValueError("must be a string, a list of strings, a list of token ids or a list of such "
                   "lists, and not an empty one")


class CompletionRequest(_Sampling):
  prompt: Annotated[Any, BeforeValidator(_prompts)]
  logprobs: int | None = None
  echo: bool | None = None
  best_of: int | None = None
  asks_nothing = {"suffix": (None, "")}

  def call(self) -> Call:
    if self.best_of is not None and self.best_of != (self.n or 1):
      raise Refused(f"best_of={self.best_of} must equal n={self.n or 1}: no completion is made "
                    "only to be left out", "best_of")
    if self.echo and self.logprobs is not None:
      raise Refused("echo is not supported together with logprobs: those of a prompt are not "
                    "computed", "echo")
    limit = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
    return self._call(self.prompt, limit, self.logprobs, bool(self.echo))


# -------------------------------------------------------------------------------------------- chat


def _text(content: Any) -> str:
  """A message's content: a string, or parts, each of which is a line of text, as in vLLM."""
  if isinstance(content, str):
    return content
  if not isinstance(content, list) or not content:
    raise ValueError('must be a string or a list of {"type": "text", "text": ...}')
  for i, part in enumerate(content):
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
      raise ValueError(f'part {i} must be {{"type": "text", "text": ...}}')
    if kind != "text":
      raise ValueError(f"part {i} is of type {kind!r:.40}; only text is supported")
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
      raise ValueError(f'part {i} must have nothing but "type" and "text", a string')
  return "\n".join(part["text"] for part in content)


class _Message(_Known):
  role: Literal["system", "developer", "user", "assistant"]
  content: Annotated[str, BeforeValidator(_text)]
  # The fields of OpenAI's answers: clients send those back as they came.
  asks_nothing = {"name": (None,), "refusal": (None,), "annotations": (None, []), "audio": (None,),
                  "function_call": (None,), "tool_calls": (None, []), "tool_call_id": (None,)}


_Messages = Annotated[list[_Message], _FIRST, Field(min_length=1)]


def _conversation(messages: list[_Message]) -> list[dict[str, str]]:
  """For a chat template, which knows OpenAI's "developer" under its older name."""
  return [{"role": "system" if m.role == "developer" else m.role, "content": m.content}
          for m in messages]


class ChatRequest(_Sampling):
  messages: _Messages
  max_completion_tokens: int | None = Field(None, ge=1)
  logprobs: bool | None = None
  top_logprobs: int | None = Field(None, ge=0, le=20)
  # Labels, which ask for nothing.
  safety_identifier: str | None = None
  prompt_cache_key: str | None = None
  asks_nothing = {
      "tools": (None, []), "tool_choice": (None, "none", "auto"),
      "parallel_tool_calls": (None, False, True), "functions": (None, []),
      "function_call": (None, "none", "auto"), "response_format": (None, {"type": "text"}),
      "modalities": (None, ["text"]), "audio": (None,), "prediction": (None,),
      "reasoning_effort": (None, "none"), "verbosity": (None, "medium"),
      "web_search_options": (None,), "moderation": (None,), "store": (None, False),
      "service_tier": (None, "auto", "default"), "prompt_cache_options": (None,),
      "prompt_cache_retention": (None, "in_memory")}

  @property
  def conversation(self) -> list[dict[str, str]]:
    return _conversation(self.messages)

  def call(self, prompt: list[int]) -> Call:
    """`prompt`: the conversation through the model's template."""
    if self.top_logprobs is not None and not self.logprobs:
      raise Refused("top_logprobs is only allowed with logprobs=true", "top_logprobs")
    limit = self.max_completion_tokens
    if limit is None:
      limit = self.max_tokens
    elif self.max_tokens not in (None, limit):
      raise Refused(f"max_completion_tokens={limit} and max_tokens={self.max_tokens} are the same "
                    "field: give one of them", "max_tokens")
    return self._call([prompt], limit, (self.top_logprobs or 0) if self.logprobs else None)


# -------------------------------------------------------------------------- tokens, as vLLM has it


class TokenizeRequest(_Known):
  model: str | None = None
  prompt: str | None = None
  messages: _Messages | None = None
  add_special_tokens: bool | None = None
  add_generation_prompt: bool | None = None
  return_token_strs: bool | None = None

  @property
  def conversation(self) -> list[dict[str, str]] | None:
    """None where it is a plain prompt."""
    if (self.prompt is None) == (self.messages is None):
      raise Refused("give either prompt or messages", "prompt")
    field, other = (("add_generation_prompt", "messages") if self.messages is None else
                    ("add_special_tokens", "a prompt: a chat template has all the tokens it wants"))
    if getattr(self, field) is not None:
      raise Refused(f"{field} goes with {other}", field)
    return None if self.messages is None else _conversation(self.messages)


class DetokenizeRequest(_Known):
  model: str | None = None
  tokens: Annotated[list[int], _FIRST]
