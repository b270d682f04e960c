"""What a model family is to its files: how they say its config, and what they call its tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jspec.checkpoints.families.gguf_keys import GGUFKeys
from jspec.config import ModelConfig

# The name of a leaf's node, ("layers", 3, NAME, "w") or (NAME, "scale") -> its tensor's, without
# what stands before ("model.layers.3.") and after it (".weight").
LAYER_NAMES: Mapping[str, str] = {
  "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
  "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
  "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj",
  "up": "mlp.up_proj", "down": "mlp.down_proj"}
OUTER_NAMES: Mapping[str, str] = {"embed": "embed_tokens", "final_norm": "norm"}
GGUF_LAYER_NAMES: Mapping[str, str] = {
  "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
  "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
  "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "attn_post_norm": "post_attention_norm",
  "mlp_post_norm": "post_ffw_norm"}
NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Family(NamedTuple):
  """One family. What would change the maths and is not applied, from_hf and from_gguf refuse."""

  name: str  # ModelConfig.family
  model_type: str  # in config.json
  architecture: str  # in config.json, "LlamaForCausalLM"
  from_hf: Callable[[Mapping[str, Any]], ModelConfig]  # config.json with the defaults filled in
  defaults: Mapping[str, Any] = NOTHING  # what transformers assumes where config.json says nothing
  applied: tuple[str, ...] = ()  # of hf_keys.MOSTLY_REFUSED, what from_hf reads
  wrapper: str | None = None  # model_type of a config.json that has this one's in its text_config
  to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None  # from_hf's inverse
  from_gguf: Callable[[GGUFKeys], ModelConfig] | None = None  # its architecture is `name`

  layer_names: Mapping[str, str] = LAYER_NAMES
  outer_names: Mapping[str, str] = OUTER_NAMES
  prefixes: tuple[str, ...] = ("model.", "")  # what may stand before a name, the usual first
  harmless: tuple[str, ...] = ()  # beginnings of names of tensors that may stay unused
  norm_offset: float = 0.0  # a norm's factor less what safetensors hold
  position_offset: int = 0  # rows of the table of positions before that of position 0
  gguf_layer_names: Mapping[str, str] = GGUF_LAYER_NAMES
  gguf_rotates_pairs: bool = False  # q and k in GGUF: adjacent rows are rotated, not halves
