"""What an engine can hold, and what a request may ask of it."""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
from collections.abc import Sequence

from jspec.config import EngineConfig, ModelConfig
from jspec.config.checks import FieldError, PromptTooLong
from jspec.sampling_params import SamplingParams
from jspec.text.tokenizer import Tokenizer


def check_request(params: SamplingParams, num_prompt: int, config: EngineConfig,
                  max_depth: int) -> int:
  """The most tokens the request may generate; ValueError if it cannot be served as asked."""
  if num_prompt == 0:
    raise FieldError("prompt", "the prompt is empty: at least one token is needed")
  room = config.max_model_len - num_prompt
  needed = 0 if params.max_tokens == 0 else 1
  if room < needed:
    raise PromptTooLong("prompt", f"the prompt has {num_prompt} tokens, but max_model_len="
                        f"{config.max_model_len} allows at most {config.max_model_len - needed}")
  if params.min_tokens > room:
    raise FieldError("min_tokens", f"min_tokens={params.min_tokens} does not fit: {num_prompt} "
                                   f"prompt tokens leave {room} of "
                                   f"max_model_len={config.max_model_len}")
  draft = params.num_speculative_tokens
  if draft is not None and draft > max_depth:
    raise FieldError("num_speculative_tokens",
                     f"num_speculative_tokens={draft} exceeds the engine's {max_depth}")
  return room if params.max_tokens is None else min(room, params.max_tokens)


def check_prompt(ids: Sequence[int], vocab_size: int) -> None:
  """ValueError for a token that the model has not."""
  for token in ids:
    if (isinstance(token, bool) or not isinstance(token, numbers.Integral)
        or not 0 <= token < vocab_size):
      raise FieldError("prompt", f"prompt token {reprlib.repr(token)} is not in the vocabulary of "
                                 f"{vocab_size} tokens")


def truncated_prompt(ids: tuple[int, ...], params: SamplingParams,
                     max_model_len: int) -> tuple[int, ...]:
  """The last params.truncate_prompt_tokens of them; of -1 what leaves room for an answer, if any.
  """
  keep = params.truncate_prompt_tokens
  if keep is None:
    return ids
  answer = 0 if params.max_tokens == 0 else max(1, params.min_tokens)
  return ids[-(max(1, max_model_len - answer) if keep == -1 else keep):]


def check_characters(count: int, tokenizer: Tokenizer, max_model_len: int) -> None:
  """Refuses what is too long whatever its tokens are: to find them would take its time."""
  if count > max_model_len * tokenizer.longest_token:
    raise PromptTooLong("prompt", f"the prompt has {count} characters, more than any text of "
                                  f"max_model_len={max_model_len} tokens")


def check_rates(rates: Sequence[float], max_depth: int) -> None:
  """Synthetic acceptance rates, if any, are those of all depths."""
  if rates and len(rates) != max_depth:
    raise ValueError(f"there are {len(rates)} synthetic acceptance rates, but drafts are up to "
                     f"{max_depth} tokens deep")


def check_priority(priority: int) -> None:
  if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
    raise FieldError("priority", f"priority must be an integer, got {reprlib.repr(priority)}")


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
  """ValueError where the model has no row for a token that it can't do without.

  Added tokens without a row are let be: Gemma 3's text models have one, of which nothing is made.
  A prompt that spells one is refused, and the model cannot generate it.
  """
  added = tokenizer.backend.get_added_tokens_decoder()
  largest = max(tokenizer.backend.get_vocab(with_added_tokens=False).values(), default=0)
  needed = {"an ordinary token": () if largest in added else (largest,),
            "the end token": tokenizer.eos_ids,
            "the begin token": () if tokenizer.bos_id is None else (tokenizer.bos_id,)}
  for what, ids in needed.items():
    beyond = [i for i in ids if not 0 <= i < vocab_size]
    if beyond:
      raise ValueError(f"the tokenizer has {what} {beyond[0]}, but the model has rows for "
                       f"{vocab_size} tokens only: they don't belong together")


def engine_config(model: ModelConfig, num_nodes: int, **fields) -> EngineConfig:
  """EngineConfig with num_pages chosen so that every slot can reach max_model_len."""
  config = EngineConfig(**fields)
  if config.max_model_len > model.max_positions:
    raise ValueError(f"max_model_len={config.max_model_len} exceeds the model's "
                     f"{model.max_positions} positions")
  if config.num_pages:
    return config
  return dataclasses.replace(
      config, num_pages=config.max_num_seqs * config.pages_per_slot(num_nodes))
