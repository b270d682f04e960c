"""Gemma 3: norms around attention and MLP, sliding layers with a rotation of their own.

Safetensors keep w of a norm's factor 1 + w; GGUF files keep the factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.families import gguf_keys, hf_keys
from jspec.checkpoints.families.family import LAYER_NAMES, Family
from jspec.config import ModelConfig, RopeScaling
from jspec.config.checks import check_mapping

_PATTERN = 6  # every so many layers one sees all


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
  theta, scaling, local_theta = _rope(config)
  model = hf_keys.rotary_config(config, "gemma3", (theta, scaling), "hidden_activation")
  layers = model.num_layers

  def default() -> list[int]:
    pattern = hf_keys.size(config, "sliding_window_pattern",
                           hf_keys.size(config, "_sliding_window_pattern", _PATTERN))
    return [i for i in range(layers) if (i + 1) % pattern]

  window, sliding = hf_keys.windows(config, layers, config.get("sliding_window"), default)
  return dataclasses.replace(
    _with_parts(model), window=window, sliding_layers=sliding, rope_theta_local=local_theta,
    attn_scale=hf_keys.real(config, "query_pre_attn_scalar") ** -0.5,
    attn_soft_cap=hf_keys.maybe_real(config, "attn_logit_softcapping"),
    final_soft_cap=hf_keys.maybe_real(config, "final_logit_softcapping"))


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
  """(theta, scaling, theta of the sliding layers), from transformers 4 or 5 keys."""
  theta, (parameters, scaling) = hf_keys.real(config, "rope_theta", 1e6), hf_keys.rope_keys(config)
  if parameters is None:
    parameters = {"full_attention": scaling or {}}
  elif "full_attention" not in parameters and "sliding_attention" not in parameters:
    parameters = {"full_attention": parameters}
  full, local = (check_mapping(f"config.json: rope_parameters.{key}", parameters.get(key) or {})
                 for key in ("full_attention", "sliding_attention"))
  if hf_keys.rope_scaling(local) is not None:
    raise ValueError("config.json: rope scaling on sliding layers is not supported")
  local_theta = hf_keys.real(local, "rope_theta",
                             hf_keys.real(config, "rope_local_base_freq", 1e4))
  return hf_keys.real(full, "rope_theta", theta), hf_keys.rope_scaling(full), local_theta


def _with_parts(model: ModelConfig) -> ModelConfig:
  return dataclasses.replace(model, qk_norm=True, post_norms=True,
                             embed_scale=math.sqrt(model.width))


def _from_gguf(keys: gguf_keys.GGUFKeys) -> ModelConfig:
  model = gguf_keys.rotary_config(keys)
  layers = model.num_layers
  # llama.cpp: only the 27B (62 layers) scales queries by width / heads
  per_query = model.width / model.num_heads if layers == 62 else model.head_dim
  sliding = tuple(i for i in range(layers) if (i + 1) % _PATTERN) if model.window else ()
  return dataclasses.replace(
    _with_parts(model), activation="gelu_tanh", sliding_layers=sliding,
    rope_theta_local=keys.real("rope.freq_base_swa", 1e4), attn_scale=per_query ** -0.5)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
  keys = hf_keys.rotary_keys(config)
  activation, _ = keys.pop("hidden_act"), keys.pop("mlp_bias")
  sliding = {"rope_type": "default", "rope_theta": config.rope_theta_local}
  return keys | {
    "hidden_activation": activation, "sliding_window": config.window,
    "query_pre_attn_scalar": round(config.scale ** -2),
    "layer_types": [("full", "sliding")[i in config.sliding_layers] + "_attention"
                    for i in range(config.num_layers)],
    "rope_parameters": {"full_attention": keys["rope_parameters"], "sliding_attention": sliding}}


FAMILY = Family(
  name="gemma3", model_type="gemma3_text", architecture="Gemma3ForCausalLM", from_hf=_from_hf,
  defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
  applied=hf_keys.MOSTLY_REFUSED, wrapper="gemma3", to_hf=_to_hf, from_gguf=_from_gguf,
  layer_names={**LAYER_NAMES, "attn_post_norm": "post_attention_layernorm",
               "mlp_norm": "pre_feedforward_layernorm",
               "mlp_post_norm": "post_feedforward_layernorm"},
  prefixes=("model.", "language_model.model.", "model.language_model.", ""),
  harmless=("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
            "model.multi_modal_projector."),
  norm_offset=1.0)
