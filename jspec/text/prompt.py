"""What users give as prompts: text, token ids, vLLM's dicts of either, and lists of all these."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.config.checks import FieldError
from jspec.sampling_params import SamplingParams

# Of a dict: "prompt" is text, "prompt_token_ids" are ids; with both the text is for people to read.
# "cache_salt": see LLM.prepare.
PromptDict = Mapping[str, Any]
Prompt = str | Sequence[int] | PromptDict
Messages = Sequence[Mapping[str, Any]]
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Given(NamedTuple):
  """A prompt as it was given: at least one of text and ids."""

  text: str | None
  ids: tuple[int, ...] | None
  cache_salt: str | None = None


def read_prompt(prompt: Prompt, cache_salt: str | None = None) -> Given:
  """ValueError for what is no prompt. The ids are not looked at. cache_salt: unless it has one."""
  given = _read(prompt)
  for salt in (given.cache_salt, cache_salt):
    if salt is not None and (not isinstance(salt, str) or not salt):
      raise FieldError("cache_salt",
                       f"cache_salt must be text that is not empty, got {reprlib.repr(salt)}")
  if None not in (given.cache_salt, cache_salt) and given.cache_salt != cache_salt:
    raise FieldError("cache_salt", "the prompt has one cache_salt, and the call another")
  return given._replace(cache_salt=given.cache_salt or cache_salt)


def _read(prompt: Prompt) -> Given:
  if isinstance(prompt, str):
    return Given(prompt, None)
  if not isinstance(prompt, Mapping):
    return Given(None, _ids(prompt))
  unknown = [key for key, value in prompt.items() if key not in _KEYS and value is not None]
  if unknown:
    raise FieldError(
        "prompt", f"a prompt's keys are {', '.join(_KEYS)}, got {reprlib.repr(unknown[0])}")
  text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
  if text is None and ids is None:
    raise FieldError("prompt", "a prompt needs the key prompt or prompt_token_ids")
  if text is not None and not isinstance(text, str):
    raise FieldError("prompt", f"the prompt must be text, got {reprlib.repr(text)}")
  return Given(text, None if ids is None else _ids(ids), prompt.get("cache_salt"))


def _ids(ids: Any) -> tuple[int, ...]:
  if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
    raise FieldError("prompt", "a prompt must be text, a list of token ids, or a dict with one of "
                               f"these, got {reprlib.repr(ids)}")
  return tuple(ids)


def listed_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
  """One prompt or many, a generator's among them, as a list."""
  if isinstance(prompts, (str, Mapping)):
    return [prompts]
  if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
    raise ValueError("prompts must be text, token ids, a dict with one of these, or a list of "
                     f"such, got {reprlib.repr(prompts)}")
  found: list[Any] = list(prompts)
  return [found] if found and isinstance(found[0], numbers.Integral) else found


def listed_params(params: Any, count: int) -> list[SamplingParams]:
  """SamplingParams for each of so many prompts: one for all, or a sequence of them."""
  if params is None or isinstance(params, SamplingParams):
    return [params or SamplingParams()] * count
  if isinstance(params, Mapping) or not isinstance(params, Iterable):
    raise ValueError(f"sampling_params must be SamplingParams, got a {type(params).__name__}: "
                     "SamplingParams(temperature=0.7, ...) makes one")
  found = [check_params(one) for one in params]
  if len(found) != count:
    raise ValueError(f"{count} prompts, but {len(found)} SamplingParams")
  return found


def check_params(params: Any) -> SamplingParams:
  if not isinstance(params, SamplingParams):
    raise ValueError(f"sampling_params must be SamplingParams, got a {type(params).__name__}")
  return params


def listed_conversations(messages: Messages | Iterable[Messages]) -> list[Messages]:
  """One conversation or many, as a list."""
  if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
    raise ValueError("messages must be a list of {\"role\": ..., \"content\": ...}, or a list of "
                     f"such lists, got a {type(messages).__name__}; generate() takes plain text")
  found: list[Any] = list(messages)
  return [found] if found and isinstance(found[0], Mapping) else found
