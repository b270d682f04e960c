"""Qwen3: q and k are normed head by head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.families import gguf_keys, hf_keys, qwen2
from jspec.checkpoints.families.family import Family
from jspec.config import ModelConfig


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
  model = hf_keys.rotary_config(config, "qwen3", hf_keys.rope_of(config))
  return dataclasses.replace(qwen2.with_windows(config, model), qk_norm=True)


def _from_gguf(keys: gguf_keys.GGUFKeys) -> ModelConfig:
  return dataclasses.replace(gguf_keys.rotary_config(keys), qk_norm=True)


FAMILY = Family(
  name="qwen3", model_type="qwen3", architecture="Qwen3ForCausalLM", from_hf=_from_hf,
  defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28,
            "head_dim": 128},
  to_hf=hf_keys.rotary_keys, from_gguf=_from_gguf)
