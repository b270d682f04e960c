"""OpenAI's requests, with vLLM's extra fields, as calls to jspec: what all kinds of them share.

Every field is applied exactly or refused: what jspec does not do is refused by name as soon as it
asks for something. Names that nobody knows pass, as in vLLM, unless the server is strict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from jspec import SamplingParams
from jspec.serving.openai.errors import Refused, refusal
from jspec.serving.openai.fields import (
  Fields,
  Float,
  Int,
  Text,
  TextOrTexts,
  Texts,
  TokenBias,
  Tokens,
)
from jspec.serving.service import any_seed

MAX_CHOICES = 1024  # of one request: prompts times n
MAX_STOPS = 64  # strings, each of which is looked for after every token
MAX_NAME = 200  # characters of what a client calls its request
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat has none

_SAME = (  # fields that are passed on as they come
  "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "stop",
  "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "num_speculative_tokens",
  "skip_special_tokens", "truncate_prompt_tokens")

Prompt = str | list[int]

# Of vLLM, of other servers, and what asks for nothing there.
NOT_DONE: Mapping[str, tuple] = {
  "use_beam_search": (None, False), "length_penalty": (None, 1), "early_stopping": (None, False),
  "num_beams": (None, 1), "typical_p": (None, 1),
  "guided_json": (None,), "guided_regex": (None,), "guided_choice": (None,),
  "guided_grammar": (None,), "guided_decoding_backend": (None,),
  "guided_whitespace_pattern": (None,), "structural_tag": (None,),
  "structured_outputs": (None, {}), "response_format": (None, {"type": "text"}),
  "json_schema": (None,), "regex": (None,), "ebnf": (None,), "grammar": (None, ""),
  "logits_processors": (None, []), "thinking_token_budget": (None,),
  "repetition_detection": (None,), "spaces_between_special_tokens": (None, True),
  "detokenize": (None, True), "lora": (None,), "lora_name": (None,), "lora_path": (None,),
  "lora_request": (None,), "mm_processor_kwargs": (None, {}), "media_io_kwargs": (None, {}),
  "kv_transfer_params": (None,), "vllm_xargs": (None, {}),
}


@dataclasses.dataclass(frozen=True)
class Call:
  """What a request asks of the engine, and of its answer."""

  prompts: list[Prompt]
  params: SamplingParams
  priority: int = 0
  cache_salt: str | None = None
  request_id: str | None = None
  stream: bool = False
  include_usage: bool = False
  continuous_usage: bool = False  # in every chunk
  echo: list[Prompt] | None = None  # the prompts as they were given, to be repeated
  truncated: bool = False  # prompts may lose their beginning
  prompt_logprobs: bool = False  # asked for by that name
  return_token_ids: bool = False
  tokens_as_ids: bool = False  # in log-probabilities, instead of their texts


class StreamOptions(Fields):
  include_usage: bool | None = None
  continuous_usage_stats: bool | None = None
  asks_nothing = {"include_obfuscation": (None, False)}


class Sampling(Fields):
  """What all kinds of request have. A field left out, or null, has the server's default."""

  model: str | None = None
  stream: bool | None = None
  temperature: Float | None = None
  top_p: Float | None = None
  presence_penalty: Float | None = None
  frequency_penalty: Float | None = None
  seed: Int | None = None
  logit_bias: TokenBias | None = None
  stop: Annotated[TextOrTexts, Field(max_length=MAX_STOPS)] | None = None
  # As in vLLM.
  top_k: Int | None = None
  min_p: Float | None = None
  repetition_penalty: Float | None = None
  min_tokens: Int | None = None
  ignore_eos: bool | None = None
  stop_token_ids: Tokens | None = None
  allowed_token_ids: Tokens | None = None
  include_stop_str_in_output: bool | None = None
  skip_special_tokens: bool | None = None
  truncate_prompt_tokens: Int | None = None
  bad_words: Texts | None = None
  priority: Int | None = None
  cache_salt: Annotated[Text, Field(min_length=1)] | None = None
  request_id: Annotated[Text, Field(min_length=1, max_length=MAX_NAME)] | None = None
  # jspec's own.
  num_speculative_tokens: Int | None = None
  # Labels, which ask for nothing.
  user: str | None = None
  metadata: dict[str, Any] | None = None

  def sampling_params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
    """SamplingParams of the fields, of `own` ones, which go first, and of the server's defaults."""
    given = {name: value for name in _SAME if (value := getattr(self, name, None)) is not None}
    asked = {**defaults, **given, "seed": any_seed(self.seed), **own}
    try:
      return SamplingParams(**asked)
    except ValueError as error:
      raise refusal(error) from None


class Choices(Sampling):
  """What completions and chats have in common."""

  stream_options: StreamOptions | None = None
  n: Int | None = None
  max_tokens: Int | None = None
  prompt_logprobs: Int | None = None
  best_of: Int | None = None
  return_token_ids: bool | None = None
  return_tokens_as_token_ids: bool | None = None
  asks_nothing = NOT_DONE

  def make_call(self, prompts: list[Prompt], defaults: Mapping[str, Any], *,
                max_tokens: int | None, logprobs: int | None, echo: bool = False) -> Call:
    about_prompt = self.prompt_logprobs
    if about_prompt is not None and self.stream:
      raise Refused("prompt_logprobs are only in answers that are not streamed", "prompt_logprobs")
    if echo and about_prompt is None:
      about_prompt = logprobs  # those of the prompt are before those of the text
    own = {} if about_prompt is None else {"prompt_logprobs": about_prompt}
    params = self.sampling_params(defaults, max_tokens=max_tokens, logprobs=logprobs, **own)
    if self.best_of is not None and self.best_of != params.n:
      raise Refused(f"best_of={self.best_of} must equal n={params.n}: no completion is made "
                    "only to be left out", "best_of")
    if len(prompts) * params.n > MAX_CHOICES:
      raise Refused(f"{len(prompts)} prompts times n={params.n} are more than the {MAX_CHOICES} "
                    "choices that a request may have", "n")
    options = self.stream_options or StreamOptions()
    if self.stream_options is not None and not self.stream:
      raise Refused("stream_options is only allowed with stream=true", "stream_options")
    usage = bool(options.include_usage)
    return Call(
        prompts, params, self.priority or 0, self.cache_salt, self.request_id,
        stream=bool(self.stream), include_usage=usage,
        continuous_usage=usage and bool(options.continuous_usage_stats),
        echo=prompts if echo else None, truncated=self.truncate_prompt_tokens is not None,
        prompt_logprobs=self.prompt_logprobs is not None,
        return_token_ids=bool(self.return_token_ids),
        tokens_as_ids=bool(self.return_tokens_as_token_ids))


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


class CompletionRequest(Choices):
  prompt: Annotated[Any, BeforeValidator(_prompts)]
  logprobs: Int | None = None
  echo: bool | None = None
  add_special_tokens: bool | None = None
  asks_nothing = {
      **NOT_DONE, "suffix": (None, ""), "prompt_embeds": (None, []), "top_logprobs": (None,),
      "max_completion_tokens": (None,), "messages": (None,), "tools": (None, []),
      "tool_choice": (None, "none", "auto"), "chat_template": (None,),
      "chat_template_kwargs": (None, {}), "continue_final_message": (None, False)}

  def call(self, defaults: Mapping[str, Any]) -> Call:
    """defaults: of sampling parameters that are left out."""
    limit = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
    return self.make_call(self.prompt, defaults, max_tokens=limit, logprobs=self.logprobs,
                          echo=bool(self.echo))
