"""What the public checkpoint formats of heads and draft models say: config.json, and tensor names.

The readers are jspec/checkpoints/head_formats.py and jspec/checkpoints/weights.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.families import FAMILIES
from jspec.checkpoints.hf_config import (
  hf_config_from_model,
  model_config_from_hf,
  written_families,
)
from jspec.checkpoints.weights import hf_names
from jspec.config import ModelConfig
from jspec.heads.config import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig
from jspec.model.params import Path

# By method, the default first. "compact" is SpecForge's with less in it: no t2d, which d2t implies,
# no lm_head that is the target's rows, and int8 where that is asked for.
STYLES = {
  "medusa": ("fasterdecoding", "vllm"),
  "mlp_speculator": ("ibm",),
  "eagle": ("safeailab",),
  "eagle3": ("specforge", "speculators", "compact"),
  "draft_model": ("huggingface",),
}
_SPECULATIVE_TOKENS = 3  # what a speculators config proposes to draft, as its published heads do
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Format(NamedTuple):
  """A checkpoint but for its numbers."""

  file: str  # of the tensors
  config: dict[str, Any]  # config.json
  names: dict[Path, str]  # of each leaf's tensor; leaves of one tensor are the same array
  tables: dict[str, np.ndarray]  # tensors of integers or booleans


def method_of(config: HeadConfig | ModelConfig) -> str:
  return "draft_model" if isinstance(config, ModelConfig) else config.method


def sayable(config: HeadConfig | ModelConfig) -> HeadConfig | ModelConfig:
  """The config as its checkpoint will be read: without what has no effect on a head's drafts."""
  if isinstance(config, ModelConfig):
    known = config.family in written_families()
    return config if known else dataclasses.replace(config, family="llama")
  if isinstance(config, MlpSpeculatorConfig) and not config.top_k_tokens_per_head:
    # vLLM refuses a config without them, or with another number of them.
    return dataclasses.replace(config, top_k_tokens_per_head=(1,) * config.n_predict)
  if not isinstance(config, EagleConfig):
    return config
  layer = dataclasses.replace(config.layer, family="llama", tie_embeddings=False)
  num_taps = 1 if config.version == 1 else config.num_taps
  return dataclasses.replace(config, layer=layer, num_taps=num_taps)


def format_of(config: HeadConfig | ModelConfig, target: ModelConfig, target_name: str, style: str,
              dtype: str, target_id: np.ndarray | None, has_fc_bias: bool = False) -> Format:
  """The checkpoint of a head or a draft model.

  Args:
    config: as `sayable` gives it.
    dtype: of the matrices, as config.json names it.
    target_id: i32[Vd], of the parameter tree; None: it has none.
    has_fc_bias: of EAGLE's fc, which the tree decides.
  """
  if isinstance(config, ModelConfig):
    return Format("model.safetensors", _hf_config(config, dtype), hf_names(config), {})
  common = {"torch_dtype": dtype, "base_model_name_or_path": target_name}
  if isinstance(config, MedusaConfig):
    make = _vllm_medusa if style == "vllm" else _original_medusa
    return make(config, common, target_id)
  if isinstance(config, MlpSpeculatorConfig):
    return _mlp_speculator(config, common)
  if config.layer.qk_norm and style != "compact":
    raise ValueError(f"style {style!r} cannot say qk_norm=True: its layers are Llama's")
  if has_fc_bias and config.version == 3 and style != "compact":
    raise ValueError(f"style {style!r} cannot say a bias of fc: its readers have none")
  layer, names = _hf_config(config.layer, dtype), _eagle_names(config, has_fc_bias)
  alone = config.layer.qkv_bias and not config.layer.out_bias
  if alone and style in ("specforge", "speculators"):  # SafeAILab's code reads a key for it
    raise ValueError(f"style {style!r} cannot say qkv_bias=True without out_bias=True")
  if style == "speculators":
    given = _speculators_config(config, layer, target, target_name)
  else:
    given = layer | common | ({"qkv_bias": True} if alone else {})
    if config.version == 1:
      return Format("model.safetensors", given | {"bias": has_fc_bias}, names, {})
    given |= _flat_eagle3_config(config)
    if style == "compact" and config.draft_vocab_size and not config.has_head:
      given["tie_lm_head"] = True
    names = {path: name.replace("layers.0.", "midlayer.") for path, name in names.items()}
  return Format("model.safetensors", given, names, _offsets(config, style, target_id))


def _hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """config.json of a model or a head's layers, with the rotary keys of transformers 4 and 5."""
  given = hf_config_from_model(config)
  read = model_config_from_hf(given)
  lost = [what for what in ("learned_positions", "post_norms")
          if getattr(config, what) and not getattr(read, what)]
  if lost:
    raise ValueError(f"a model with {lost[0]} has no public checkpoint format here: families are "
                     f"{', '.join(written_families())}")
  given |= {"torch_dtype": dtype, "dtype": dtype}
  rope = given["rope_parameters"]
  if "rope_theta" not in rope:  # by kind of layer, which transformers 4 cannot say in these keys
    return given
  scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
  return given | {
    "rope_theta": config.rope_theta, "rope_scaling": scaling if config.rope_scaling else None}


# ------------------------------------------------------------ Medusa, MLPSpeculator


def _original_medusa(config: MedusaConfig, common: dict[str, Any],
                     target_id: np.ndarray | None) -> Format:
  del target_id  # unused: these heads know all tokens
  if not config.has_bias:
    raise ValueError("style 'fasterdecoding' cannot say has_bias=False: its readers would add "
                     "random biases; use style 'vllm'")
  given = common | {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
  given |= {"version": "2"} if config.shares_head else {}
  names = _medusa_names(config, "{}.{}.linear", f"{{}}.{config.num_layers}.weight")
  return Format("medusa_lm_head.safetensors", given, names, {})


def _vllm_medusa(config: MedusaConfig, common: dict[str, Any],
                 target_id: np.ndarray | None) -> Format:
  if config.shares_head:
    raise ValueError("style 'vllm' cannot say shares_head=True: its readers want the heads' own "
                     "lm_heads; use style 'fasterdecoding'")
  size = config.draft_vocab_size or config.vocab_size
  given = common | {
    "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": config.width,
    "vocab_size": config.vocab_size, "num_heads": config.num_heads,
    "num_hidden_layers": config.num_layers, "truncated_vocab_size": size,
    "medusa_fc_bias": config.has_bias, "logit_scale": config.logit_scale}
  names = _medusa_names(config, "blocks.{}.layers.{}", "lm_heads.{}.weight")
  return Format("model.safetensors", given, names,
                {} if target_id is None else {"token_map": target_id.astype(np.int64)})


def _medusa_names(config: MedusaConfig, block: str, head: str) -> dict[Path, str]:
  names: dict[Path, str] = {}
  for i in range(config.num_heads):
    for j in range(config.num_layers):
      path = ("heads", i, "blocks", j)
      names[*path, "w"] = f"{block.format(i, j)}.weight"
      if config.has_bias:
        names[*path, "b"] = f"{block.format(i, j)}.bias"
    if not config.shares_head:
      names["heads", i, "head", "w"] = head.format(i)
  return names


def _mlp_speculator(config: MlpSpeculatorConfig, common: dict[str, Any]) -> Format:
  given = common | {
    "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"],
    "emb_dim": config.width, "inner_dim": config.inner_dim, "vocab_size": config.vocab_size,
    "n_predict": config.n_predict, "n_candidates": config.n_candidates,
    "top_k_tokens_per_head": list(config.top_k_tokens_per_head),
    "tie_weights": config.tie_weights, "scale_input": config.scale_input}
  names: dict[Path, str] = {}
  for i in range(config.n_predict):
    first, proj = (0, min(i, 1)) if config.tie_weights else (i, i)
    names["stages", i, "emb"] = f"speculator.emb.{first}.weight"
    names["stages", i, "proj", "w"] = f"speculator.proj.{proj}.weight"
    names["stages", i, "ln", "scale"] = f"speculator.ln.{first}.weight"
    names["stages", i, "ln", "bias"] = f"speculator.ln.{first}.bias"
    names["stages", i, "head", "w"] = f"speculator.head.{first}.weight"
  return Format("model.safetensors", given, names, {})


# ------------------------------------------------------------ EAGLE


def _eagle_names(config: EagleConfig, has_fc_bias: bool) -> dict[Path, str]:
  """As SafeAILab's first release and speculators have them."""
  there = {"layers": True, "final_norm": config.version == 3, "embed": config.has_embed,
           "head": config.has_head}
  names = {path: name for path, name in hf_names(config.layer, "").items() if there[str(path[0])]}
  del names["layers", 0, "attn_norm", "scale"]
  names["fc", "w"] = "fc.weight"
  if has_fc_bias:
    names["fc", "b"] = "fc.bias"
  if config.version == 1:
    return names
  names["layers", 0, "embed_norm", "scale"] = "layers.0.input_layernorm.weight"
  names["layers", 0, "feature_norm", "scale"] = "layers.0.hidden_norm.weight"
  if config.norm_before_fc:
    names["fc_norm", "scale"] = "input_norm.weight"
  if config.fc_norm:
    names |= {("fc_norm", i, "scale"): f"fc_norm.{i}.weight" for i in range(config.num_taps)}
  return names


def _flat_eagle3_config(config: EagleConfig) -> dict[str, Any]:
  """What a SpecForge config has beside its Llama layer's."""
  given: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": config.target_width,
    "draft_vocab_size": config.draft_vocab_size or config.vocab_size}
  given |= {name: True for name in _SWITCHES if getattr(config, name)}
  if not config.feature_layers:
    return given
  if 0 in config.feature_layers:
    raise ValueError(f"feature_layers={config.feature_layers}: this style names the layer that a "
                     "hidden state is the output of, and 0 is the embedding; use 'speculators'")
  # SGLang counts outputs of layers, vLLM inputs: each has a place of its own.
  key = "eagle_aux_hidden_state_layer_ids"
  return given | {key: list(config.feature_layers), "eagle_config": {
    "use_aux_hidden_state": True, key: [i - 1 for i in config.feature_layers]}}


def _speculators_config(config: EagleConfig, layer: dict[str, Any], target: ModelConfig,
                        target_name: str) -> dict[str, Any]:
  verifier = FAMILIES[target.family].architecture
  proposal = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS,
              "verifier_accept_k": 1, "accept_tolerance": 0.0}
  given = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0", "torch_dtype": layer["dtype"], "dtype": layer["dtype"],
    "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
    "target_hidden_size": config.target_width if config.target_width != config.width else None,
    **{name: getattr(config, name) for name in _SWITCHES},
    "embed_requires_grad": config.has_embed, "tie_word_embeddings": False,
    "transformer_layer_config": layer,
    "speculators_config": {
      "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
      "verifier": {"name_or_path": target_name, "architectures": [verifier]}}}
  taps = list(config.feature_layers)
  return given | ({"eagle_aux_hidden_state_layer_ids": taps} if taps else {})


def _offsets(config: EagleConfig, style: str,
             target_id: np.ndarray | None) -> dict[str, np.ndarray]:
  """d2t holds what to add to a draft token, t2d which of the target's tokens have one."""
  if target_id is None:
    return {}
  ids = target_id.astype(np.int64)
  offsets = ids - np.arange(len(ids))
  if style == "compact":
    return {"d2t": offsets.astype(np.int32)}
  return {"d2t": offsets, "t2d": np.isin(np.arange(config.vocab_size), ids)}
