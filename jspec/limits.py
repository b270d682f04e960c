"""What an engine can hold, and what a request may ask of it."""

from __future__ import annotations

import dataclasses

from jspec.config import EngineConfig, ModelConfig
from jspec.sampling_params import SamplingParams


def check_request(params: SamplingParams, num_prompt: int, model: ModelConfig,
                  config: EngineConfig, max_depth: int) -> int:
  """The most tokens the request may generate; ValueError if it cannot be served as asked."""
  if num_prompt == 0:
    raise ValueError("the prompt is empty: at least one token is needed")
  room = config.max_model_len - num_prompt
  if room < 1:
    raise ValueError(f"the prompt has {num_prompt} tokens, but max_model_len="
                     f"{config.max_model_len} allows at most {config.max_model_len - 1}")
  if params.min_tokens > room:
    raise ValueError(f"min_tokens={params.min_tokens} does not fit: {num_prompt} prompt tokens "
                     f"leave {room} of max_model_len={config.max_model_len}")
  draft = params.num_speculative_tokens
  if draft is not None and draft > max_depth:
    raise ValueError(f"num_speculative_tokens={draft} exceeds the engine's {max_depth}")
  for name, tokens in (("logit_bias", params.logit_bias or ()),
                       ("stop_token_ids", params.stop_token_ids)):
    bad = [t for t in tokens if not 0 <= t < model.vocab_size]
    if bad:
      raise ValueError(f"{name} names token {bad[0]}, but the vocabulary has "
                       f"{model.vocab_size} tokens")
  return room if params.max_tokens is None else min(room, params.max_tokens)


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
