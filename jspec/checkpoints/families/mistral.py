"""Mistral: Llama with a sliding window on every layer; its GGUF files say that they are Llama's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.families import hf_keys
from jspec.checkpoints.families.family import Family
from jspec.config import ModelConfig


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
  model = hf_keys.rotary_config(config, "mistral", hf_keys.rope_of(config))
  layers = model.num_layers
  window, sliding = hf_keys.windows(config, layers, config.get("sliding_window"),
                                    lambda: range(layers))
  return dataclasses.replace(model, window=window, sliding_layers=sliding)


FAMILY = Family(
  name="mistral", model_type="mistral", architecture="MistralForCausalLM", from_hf=_from_hf,
  defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8})
