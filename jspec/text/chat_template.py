"""Chat messages -> prompt text, by the model's own jinja2 template, run in a sandbox."""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from jspec.config.checks import FieldError

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}

# Variables of a template that are parameters of their own.
_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


def render_chat(template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                special_tokens: Mapping[str, str] | None = None,
                continue_final_message: bool = False,
                chat_template_kwargs: Mapping[str, Any] | None = None,
                tools: Sequence[Mapping[str, Any]] | None = None) -> str:
  """The prompt text of a conversation, as transformers' apply_chat_template writes it.

  A content that is a list of text parts goes to templates that read such lists as it is; others get
  its texts joined by line breaks.

  Args:
    special_tokens: what templates call bos_token, eos_token and so on.
    continue_final_message: the text ends where the final message's content does.
    chat_template_kwargs: more variables for the template, which may read them or not.
    tools: descriptions of functions, for templates that read them.

  Raises:
    ValueError: for messages and tools that this template cannot write.
  """
  check_messages(messages)
  if continue_final_message and add_generation_prompt:
    raise FieldError("continue_final_message",
                     "continue_final_message needs add_generation_prompt=False: the final message "
                     "is gone on with, or answered")
  variables = {"documents": None, **(special_tokens or {}), **_checked(chat_template_kwargs),
               "tools": _listed_tools(template, tools),
               "add_generation_prompt": add_generation_prompt}
  if any(isinstance(message.get("content"), list) for message in messages):
    messages = _with_parts(template, messages, variables)
  if continue_final_message:
    return _unfinished(template, messages, variables)
  return _render(template, messages, variables)


def check_messages(messages: Sequence[Message]) -> None:
  """ValueError unless this is a non-empty list of {"role": str, "content": str or text parts}.

  A message with tool_calls may do without content.
  """
  if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
    raise FieldError("messages",
                     "messages must be a non-empty list of {'role': ..., 'content': ...}, "
                     f"got {messages!r:.60}")
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping):
      raise FieldError("messages",
                       f"message {i} must be {{'role': ..., 'content': ...}}, got {message!r:.60}")
    if not isinstance(message.get("role"), str):
      raise FieldError("messages",
                       f"message {i}: 'role' must be a string, got {message.get('role')!r:.60}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
      continue
    if not isinstance(content, list) or not content:
      raise FieldError("messages",
                       f"message {i}: 'content' must be a string or a list of text parts, got "
                       f"{content!r:.60}")
    for part in content:
      if (not isinstance(part, Mapping) or part.get("type") != "text"
          or not isinstance(part.get("text"), str)):
        raise FieldError("messages",
                         f"message {i}: a part of its 'content' must be {{'type': 'text', 'text': "
                         f"...}}, got {part!r:.60}")


def strings(value: Any) -> Iterator[str]:
  """All strings in nested lists and dicts, keys included."""
  stack = [value]
  while stack:
    value = stack.pop()
    if isinstance(value, str):
      yield value
    elif isinstance(value, Mapping):
      stack += value.keys()
      stack += value.values()
    elif isinstance(value, (list, tuple)):
      stack += value


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
  """The same nested lists and dicts with every string changed, keys included."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, Mapping):
    return {map_strings(k, change): map_strings(v, change) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [map_strings(v, change) for v in value]
  return value


def unused_characters(*given: Any) -> Iterator[str]:
  """Private characters that occur in none of the strings of `given`, nor as JSON escapes them."""
  text = "\n".join(strings(given))
  for code in itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0x10FFFE)):
    if chr(code) not in text and json.dumps(chr(code))[1:-1] not in text:
      yield chr(code)
  raise FieldError("messages",
                   "the messages hold every character that Unicode sets aside for private use")


def _checked(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
  if kwargs is not None and (not isinstance(kwargs, Mapping)
                             or any(not isinstance(name, str) for name in kwargs)):
    raise FieldError("chat_template_kwargs",
                     f"chat_template_kwargs must map names to values, got {kwargs!r:.60}")
  if own := [name for name in kwargs or () if name in _OWN]:
    raise FieldError("chat_template_kwargs",
                     f"chat_template_kwargs cannot set {own[0]!r}, which is a parameter of its own")
  return kwargs or {}


def _listed_tools(template: str, tools: Any) -> list[Mapping[str, Any]] | None:
  if tools is None or (isinstance(tools, Sequence) and not tools):
    return None
  if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or any(
      not isinstance(tool, Mapping) for tool in tools):
    raise FieldError("tools",
                     f"tools must be a list of descriptions of functions, got {tools!r:.60}")
  if "tools" not in _variables(template):
    raise FieldError("tools",
                     "tools are not supported by this model's chat template: it does not read them")
  return list(tools)


def _with_parts(template: str, messages: Sequence[Message],
                variables: Mapping[str, Any]) -> Sequence[Message]:
  """Lists of text parts joined to texts, unless the template writes both alike."""
  try:
    one, other = (_render(template, [{"role": "user", "content": content}], variables)
                  for content in ("text", [{"type": "text", "text": "text"}]))
    if one == other:
      return messages
  except ValueError:
    pass
  return [message if not isinstance(message.get("content"), list) else
          {**message, "content": "\n".join(part["text"] for part in message["content"])}
          for message in messages]


def _unfinished(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
  """The text up to the end of the final content, found by what is written behind it."""
  end = next(unused_characters(messages, template)) + " "
  *before, final = copy.deepcopy([dict(message) for message in messages])
  content = final.get("content")
  if isinstance(content, str):
    final["content"] = content + end
  elif content:
    content[-1] = {**content[-1], "text": content[-1]["text"] + end}
  else:
    raise FieldError("continue_final_message",
                     "continue_final_message: the final message has no content to go on with")
  text = _render(template, [*before, final], variables)
  at = text.rfind(end[0])
  if at < 0:
    raise FieldError("continue_final_message",
                     "continue_final_message: the chat template leaves out the end of the final "
                     "message")
  # Without the space behind it the template has trimmed the content.
  return text[:at] if text.startswith(end, at) else text[:at].rstrip()


def _render(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
  compiled = _compiled(template)
  try:
    return compiled.render(messages=[dict(message) for message in messages], **variables)
  except jinja2.TemplateError as error:
    raise FieldError("messages", f"the chat template refused these messages: {error}") from None
  except RecursionError:
    raise FieldError("messages",
                     "the chat template cannot write what is nested so deeply") from None
  except Exception as error:  # a template is a program
    raise FieldError("messages",
                     "the chat template fails at these messages: "
                     f"{type(error).__name__}: {error}") from None


class _Generation(jinja2.ext.Extension):
  """`{% generation %}...{% endgeneration %}` marks assistant text for training: render it as is."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
  try:
    return _environment().from_string(template)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f"the chat template is no valid jinja2: {error}") from None


@functools.lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
  """What the template reads and does not set itself."""
  _compiled(template)  # refuses what is no template
  return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


def _environment() -> jinja2.Environment:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
  """jinja2's own filter escapes HTML; transformers' doesn't, and templates rely on that."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                    sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
  return datetime.datetime.now().strftime(pattern)
