"""Llama 2 and 3, SmolLM2 and all else that says it is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.families import gguf_keys, hf_keys
from jspec.checkpoints.families.family import Family
from jspec.config import ModelConfig


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
  model = hf_keys.rotary_config(config, "llama", hf_keys.rope_of(config))
  window, sliding = hf_keys.windows(config, model.num_layers, None)
  return dataclasses.replace(model, window=window, sliding_layers=sliding)


FAMILY = Family(
  name="llama", model_type="llama", architecture="LlamaForCausalLM", from_hf=_from_hf,
  defaults={"rms_norm_eps": 1e-6}, to_hf=hf_keys.rotary_keys,
  from_gguf=gguf_keys.rotary_config, gguf_rotates_pairs=True)
