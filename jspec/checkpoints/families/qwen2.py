"""Qwen2 and 2.5: biases on q, k and v; a window from some layer on, where it is switched on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.families import gguf_keys, hf_keys
from jspec.checkpoints.families.family import Family
from jspec.config import MAX_SIZE, ModelConfig
from jspec.config.checks import check_int


def with_windows(config: Mapping[str, Any], model: ModelConfig) -> ModelConfig:
  """The model with Qwen's windows, of which Qwen3 has the same keys."""
  layers = model.num_layers

  def default() -> range:
    first = check_int("config.json: max_window_layers", config["max_window_layers"], 0, MAX_SIZE)
    return range(min(first, layers), layers)

  used = hf_keys.flag(config, "use_sliding_window")
  window, sliding = hf_keys.windows(config, layers, config.get("sliding_window") if used else None,
                                    default)
  return dataclasses.replace(model, window=window, sliding_layers=sliding)


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
  model = hf_keys.rotary_config(config, "qwen2", hf_keys.rope_of(config))
  return dataclasses.replace(with_windows(config, model), qkv_bias=True)


def _from_gguf(keys: gguf_keys.GGUFKeys) -> ModelConfig:
  return dataclasses.replace(gguf_keys.rotary_config(keys), qkv_bias=True)


FAMILY = Family(
  name="qwen2", model_type="qwen2", architecture="Qwen2ForCausalLM", from_hf=_from_hf,
  defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28},
  to_hf=hf_keys.rotary_keys, from_gguf=_from_gguf)
