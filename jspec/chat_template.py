"""Chat messages -> prompt text, by the model's own jinja2 template, run in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


def render_chat(template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                special_tokens: Mapping[str, str] | None = None) -> str:
  """The prompt text of a conversation.

  Args:
    special_tokens: what templates call bos_token, eos_token and so on.
  """
  check_messages(messages)
  try:
    return _compiled(template).render(
      messages=[dict(message) for message in messages],
      add_generation_prompt=add_generation_prompt, tools=None, documents=None,
      **(special_tokens or {}))
  except jinja2.TemplateError as error:
    raise ValueError(f"the chat template refused these messages: {error}") from None


def check_messages(messages: Sequence[Message]) -> None:
  """ValueError unless this is a non-empty list of {"role": str, "content": str}."""
  if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
    raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}, "
                     f"got {messages!r:.60}")
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping):
      raise ValueError(f"message {i} must be {{'role': ..., 'content': ...}}, got {message!r:.60}")
    for key in ("role", "content"):
      if not isinstance(message.get(key), str):
        raise ValueError(f"message {i}: {key!r} must be a string, got {message.get(key)!r:.60}")


class _Generation(jinja2.ext.Extension):
  """`{% generation %}...{% endgeneration %}` marks assistant text for training: render it as is."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
  """jinja2's own filter escapes HTML; transformers' doesn't, and templates rely on that."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                    sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
  return datetime.datetime.now().strftime(pattern)
