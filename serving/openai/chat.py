"""OpenAI's chat requests, and those about tokens, which may be about a chat, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from jspec.serving.openai.api import NOT_DONE, Call, Choices
from jspec.serving.openai.errors import Refused
from jspec.serving.openai.fields import FIRST, Fields, Int, Text, Tokens, unsupported, wrong
from jspec.serving.service import Conversation

TEXT_PARTS = ("text", "input_text", "output_text")  # the last two are of /v1/responses
PART_FIELDS = {"type", "text", "annotations", "logprobs", "cache_control"}
NEED_TEXT = 'must be a string or a list of {"type": "text", "text": ...}'


def _text_of(content: Any, run: ValidationInfo) -> Any:
  """A message's content: a string, or parts, each of which is a line of text, as in vLLM."""
  if content is None or isinstance(content, str):
    return content
  if not isinstance(content, list) or not content:
    raise ValueError(NEED_TEXT)
  for i, part in enumerate(content):
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
      raise ValueError(f'part {i} must be {{"type": "text", "text": ...}}')
    if kind not in TEXT_PARTS:
      raise ValueError(f"part {i} is of type {kind!r:.40}; only text is supported")
    if not isinstance(part.get("text"), str):
      raise ValueError(f'part {i} must have a "text", a string')
    if run.context is not None and run.context["strict"] and (more := set(part) - PART_FIELDS):
      raise ValueError(f"part {i} has {min(more)!r:.40}; there is no such field")
  return "\n".join(part["text"] for part in content)


def _tool_call(value: Any) -> Any:
  """One of an assistant's tool calls; its arguments, JSON in a string, become an object.

  Templates write them as JSON themselves.
  """
  function = value.get("function") if isinstance(value, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise ValueError('must be {"type": "function", "function": {"name": ..., "arguments": ...}}')
  arguments = function.get("arguments") or {}
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except (ValueError, RecursionError):
      arguments = None
  if not isinstance(arguments, dict):
    raise ValueError("the function's arguments must be a JSON object")
  return {**value, "function": {**function, "arguments": arguments}}


class Message(Fields):
  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: Annotated[Text | None, BeforeValidator(_text_of)] = None
  # For templates that know them.
  name: Text | None = None
  tool_calls: Annotated[list[Annotated[dict[str, Any], BeforeValidator(_tool_call)]],
                        FIRST] | None = None
  tool_call_id: Text | None = None
  reasoning_content: Text | None = None
  reasoning: Text | None = None
  # Labels. Clients also send the fields of answers back as they came.
  type: str | None = None  # lm-evaluation-harness says "text"
  id: str | None = None
  status: str | None = None
  cache_control: Any = None
  asks_nothing = {"refusal": (None,), "annotations": (None, []), "audio": (None,),
                  "function_call": (None,)}

  @model_validator(mode="after")
  def _check(self) -> Message:
    if self.tool_calls and self.role != "assistant":
      raise wrong("tool_calls", f"are of the role assistant, not {self.role}")
    if self.content is None and not (self.role == "assistant" and self.tool_calls):
      raise wrong("content", f"{NEED_TEXT}; only a message with tool_calls may do without")
    return self

  @property
  def plain(self) -> dict[str, Any]:
    """For a chat template, which knows OpenAI's "developer" under its older name."""
    role = "system" if self.role == "developer" else self.role
    told = {name: value for name in ("name", "tool_calls", "tool_call_id", "reasoning_content")
            if (value := getattr(self, name))}
    if self.reasoning and not self.reasoning_content:
      told["reasoning_content"] = self.reasoning  # vLLM's newer name; templates know the older one
    return {"role": role, "content": self.content or "", **told}


Messages = Annotated[list[Message], FIRST, Field(min_length=1)]


class Chatting(Fields):
  """How messages become a prompt."""

  add_generation_prompt: bool | None = None
  continue_final_message: bool | None = None
  chat_template_kwargs: dict[str, Any] | None = None
  tools: list[dict[str, Any]] | None = None

  def conversation_of(self, messages: list[Message]) -> Conversation:
    if self.continue_final_message and self.add_generation_prompt:
      raise Refused("add_generation_prompt and continue_final_message exclude each other: the "
                    "final message is gone on with, or answered", "continue_final_message")
    opening = not self.continue_final_message and self.add_generation_prompt is not False
    return Conversation([m.plain for m in messages], opening, bool(self.continue_final_message),
                        self.chat_template_kwargs or None, self.tools or None)


class ChatRequest(Choices, Chatting):
  messages: Messages
  max_completion_tokens: Int | None = None
  logprobs: bool | None = None
  top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
  tool_choice: Any = None
  # Labels, which ask for nothing.
  safety_identifier: str | None = None
  prompt_cache_key: str | None = None
  asks_nothing = {
      **NOT_DONE, "echo": (None, False), "add_special_tokens": (None, False), "prompt": (None,),
      "documents": (None, []), "chat_template": (None,), "include_reasoning": (None, True),
      "parallel_tool_calls": (None, False, True), "functions": (None, []),
      "function_call": (None, "none", "auto"), "modalities": (None, ["text"]), "audio": (None,),
      "prediction": (None,), "reasoning_effort": (None, "none"), "verbosity": (None, "medium"),
      "web_search_options": (None,), "moderation": (None,), "store": (None, False),
      "service_tier": (None, "auto", "default"), "prompt_cache_options": (None,),
      "prompt_cache_retention": (None, "in_memory")}

  @model_validator(mode="after")
  def _check(self) -> ChatRequest:
    if self.tool_choice not in (None, "none", "auto"):
      raise unsupported("tool_choice")
    if self.tools and self.tool_choice != "none":
      raise unsupported("tools", 'calls are not supported: leave it out, or let tool_choice be '
                                 '"none" and the model only read of tools')
    return self

  @property
  def conversation(self) -> Conversation:
    return self.conversation_of(self.messages)

  def call(self, prompt: list[int], defaults: Mapping[str, Any]) -> Call:
    """prompt: the conversation through the model's template. defaults: as in completions."""
    if self.top_logprobs is not None and not self.logprobs:
      raise Refused("top_logprobs is only allowed with logprobs=true", "top_logprobs")
    limit = self.max_completion_tokens
    if limit is None:
      limit = self.max_tokens
    elif self.max_tokens not in (None, limit):
      raise Refused(f"max_completion_tokens={limit} and max_tokens={self.max_tokens} are the same "
                    "field: give one of them", "max_tokens")
    return self.make_call([prompt], defaults, max_tokens=limit,
                          logprobs=(self.top_logprobs or 0) if self.logprobs else None)


# -------------------------------------------------------------------------- tokens, as vLLM has it


class TokenizeRequest(Chatting):
  model: str | None = None
  prompt: str | None = None
  messages: Messages | None = None
  add_special_tokens: bool | None = None
  return_token_strs: bool | None = None
  asks_nothing = {"chat_template": (None,), "mm_processor_kwargs": (None, {})}

  @property
  def conversation(self) -> Conversation | None:
    """None where it is a plain prompt."""
    if (self.prompt is None) == (self.messages is None):
      raise Refused("give either prompt or messages", "prompt")
    if self.messages is not None:
      if self.add_special_tokens:
        raise Refused("add_special_tokens goes with a prompt: a chat template has all the tokens "
                      "it wants", "add_special_tokens")
      return self.conversation_of(self.messages)
    for name in Chatting.model_fields:
      if getattr(self, name):
        raise Refused(f"{name} goes with messages", name)
    return None


class DetokenizeRequest(Fields):
  model: str | None = None
  tokens: Tokens
