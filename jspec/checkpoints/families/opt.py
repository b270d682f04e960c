"""OPT: LayerNorm, learned positions, biases everywhere and no gate.

Its table of positions starts with two rows that no token uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.families import hf_keys
from jspec.checkpoints.families.family import LAYER_NAMES, OUTER_NAMES, Family
from jspec.config import MAX_LAYERS, ModelConfig


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
  width = hf_keys.size(config, "hidden_size")
  heads = hf_keys.size(config, "num_attention_heads")
  projection = config.get("word_embed_proj_dim", width)
  if projection != width:  # opt-350m, which also norms after the residual
    raise ValueError(f"OPT with word_embed_proj_dim={projection} != hidden_size={width} "
                     "(as opt-350m) is not supported")
  bias = hf_keys.flag(config, "enable_bias", True)
  return ModelConfig(
    family="opt", vocab_size=hf_keys.size(config, "vocab_size"), width=width,
    num_layers=hf_keys.size(config, "num_hidden_layers", most=MAX_LAYERS), num_heads=heads,
    num_kv_heads=heads, head_dim=width // heads, mlp_dim=hf_keys.size(config, "ffn_dim"),
    max_positions=hf_keys.size(config, "max_position_embeddings"), norm="layer", norm_eps=1e-5,
    activation=hf_keys.activation(config["activation_function"]), gated_mlp=False, qkv_bias=bias,
    out_bias=bias, mlp_bias=bias, learned_positions=True,
    tie_embeddings=hf_keys.flag(config, "tie_word_embeddings"))


FAMILY = Family(
  name="opt", model_type="opt", architecture="OPTForCausalLM", from_hf=_from_hf,
  defaults={"tie_word_embeddings": True, "activation_function": "relu"},
  layer_names={**LAYER_NAMES, "attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
               "o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
  outer_names={**OUTER_NAMES, "positions": "embed_positions", "final_norm": "final_layer_norm"},
  prefixes=("model.decoder.", "decoder.", ""), position_offset=2)
