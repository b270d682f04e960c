"""Checkpoint formats of drafting heads -> what the head is and where each leaf of its tree lies.

Every format of a method gives the same tree, the one that heads/config.py documents.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.head_files import HeadFiles
from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.tensors import Leaf, Part, StoredTensor, WeightsError, as_it_is
from jspec.checkpoints.weights import checkpoint_shapes, hf_names
from jspec.config import MAX_REAL, MAX_SIZE, ModelConfig
from jspec.config.checks import check_flag, check_int, check_mapping, check_number
from jspec.heads.config import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig
from jspec.model.params import Path

_SPECULATORS_DRAFT_VOCAB = 32000  # what Eagle3SpeculatorConfig assumes
_EAGLE_LAYER = {("layers", 0, "embed_norm", "scale"): "layers.0.input_layernorm.weight",
                ("layers", 0, "feature_norm", "scale"): "layers.0.hidden_norm.weight",
                ("final_norm", "scale"): "norm.weight"}
EMBED, LM_HEAD, FINAL_NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
# EAGLE-1 trains none of these: what is there are copies of the target's, if nobody says otherwise.
_EAGLE1_COPIES = (EMBED, LM_HEAD, FINAL_NORM)
_MEDUSA_PREFIX = re.compile(r"(model\.)?medusa_heads?\.")


class HeadLayout(NamedTuple):
  """A head and the tensors it is made of."""

  format: str  # for people
  config: HeadConfig
  tensors: Mapping[str, StoredTensor]  # by the names that the leaves use
  leaves: Mapping[Path, Leaf]
  target_id: np.ndarray | None  # i32[Vd]
  harmless: Callable[[str], bool]  # may this tensor stay unused?
  copies: tuple[str, ...] = ()  # tensors taken for repetitions of the target's, which are used


def _leaf(name: str, shape: tuple[int, ...],
          join: Callable[[np.ndarray], np.ndarray] = as_it_is) -> Leaf:
  """A leaf that is one tensor."""
  return Leaf((Part(name, shape),), join)


def head_layout(files: HeadFiles, method: str, target: ModelConfig,
                own: Collection[str] = ()) -> HeadLayout:
  """What the config and the tensors' names say; whether the tensors are all there is not checked.

  Args:
    target: gives the sizes that some Medusa checkpoints leave out.
    own: of what would be `copies`, those that are not: the head's own.
  """
  try:
    if method == "medusa":
      return _medusa(files, target)
    if method == "mlp_speculator":
      return _mlp_speculator(files)
    return _eagle(files, 3 if method == "eagle3" else 1, own)
  except WeightsError:
    raise
  except ValueError as error:
    raise ValueError(f"{files.where}: {error}") from None
  except (TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
    raise ValueError(f"{files.where}: config.json is damaged: {error}") from None


def _integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
  """The first of the keys that is there."""
  value = next((config[key] for key in keys if config.get(key) is not None), default)
  if value is None:
    raise ValueError(f"config.json: {keys[0]!r} is missing")
  return check_int(f"config.json: {keys[0]}", value, 0, MAX_SIZE)


def _switch(config: Mapping[str, Any], key: str) -> bool:
  """Whether it is on; null says no more than leaving it out."""
  value = config.get(key)
  return False if value is None else check_flag(f"config.json: {key}", value)


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
  value = config.get(key)
  return {} if value is None else check_mapping(f"config.json: {key}", value)


def _renamed(files: HeadFiles, rename: Callable[[str], str]) -> dict[str, StoredTensor]:
  tensors: dict[str, StoredTensor] = {}
  for name, tensor in files.tensors.items():
    if rename(name) in tensors:
      raise WeightsError(f"{files.where}: tensor {name} is there twice, under two names")
    tensors[rename(name)] = tensor
  return tensors


def _read_table(files: HeadFiles, tensors: Mapping[str, StoredTensor], name: str,
                size: int) -> np.ndarray:
  """A table of integers or booleans, which is part of what the head is."""
  if name not in tensors:
    raise WeightsError(f"{files.where}: missing tensor {name}, which a draft vocabulary needs")
  table = tensors[name]
  if table.shape != (size,) or table.dtype.kind not in "iub":
    raise WeightsError(f"{files.where}: tensor {name} has shape {table.shape} and dtype "
                       f"{table.dtype}, the config needs ({size},) and integers")
  return np.asarray(table.read()).astype(np.int64)


def _check_in_vocabulary(where: str, name: str, ids: np.ndarray, vocab_size: int) -> None:
  bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if bad.size:
    raise WeightsError(f"{where}: {name} maps draft token {bad[0]} to token {ids[bad[0]]}, outside "
                       f"the vocabulary of {vocab_size}")


# ------------------------------------------------------------ Medusa


def _medusa(files: HeadFiles, target: ModelConfig) -> HeadLayout:
  """Heads alone, or inside the whole model they were trained with (Medusa-2, ModelOpt)."""
  inside = any(_MEDUSA_PREFIX.match(name) for name in files.tensors)
  own = HeadFiles(files.where, files.config, {
    name: tensor for name, tensor in files.tensors.items()
    if not inside or _MEDUSA_PREFIX.match(name) or name == "token_map"})
  tensors = _renamed(own, lambda name: _MEDUSA_PREFIX.sub("", name, count=1))
  if any(name.startswith("blocks.") for name in tensors):
    return _vllm_medusa(own, tensors)
  return _original_medusa(own, tensors, target)


def _original_medusa(files: HeadFiles, tensors: Mapping[str, StoredTensor],
                     target: ModelConfig) -> HeadLayout:
  """{head}.{layer}.linear.*, then {head}.{number of layers}.weight; sizes are the tensors'."""
  found = [match for name in tensors if (match := re.match(r"(\d+)\.(\d+)\.linear\.", name))]
  heads, layers = (1 + max((int(match[i]) for match in found), default=0) for i in (1, 2))
  shares_head = not any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in tensors)
  first = tensors.get("0.0.linear.weight")
  if first is None or len(first.shape) != 2:
    raise WeightsError(f"{files.where}: tensor 0.0.linear.weight is missing or not a matrix")
  width, vocab_size = first.shape[0], target.vocab_size
  if not shares_head and f"0.{layers}.weight" in tensors:
    vocab_size = tensors[f"0.{layers}.weight"].shape[0]
  has_bias = any(name.endswith(".linear.bias") for name in tensors)
  config = MedusaConfig(width, vocab_size, heads, layers, has_bias, shares_head)
  leaves = _medusa_blocks(config, "{}.{}.linear")
  if not shares_head:
    leaves.update({("heads", i, "head", "w"): _leaf(f"{i}.{layers}.weight", (vocab_size, width))
                   for i in range(heads)})
  return HeadLayout("Medusa (FasterDecoding)", config, tensors, leaves, None, lambda name: False)


def _vllm_medusa(files: HeadFiles, tensors: Mapping[str, StoredTensor]) -> HeadLayout:
  """blocks.{head}.layers.{layer}.* and lm_heads.{head}.weight; sizes are the config's."""
  # As vLLM reads it: any spelling, such as medusa_num_heads.
  spelt = {what: key for key in files.config for what in ("heads", "layers")
           if "num" in key and what in key}
  heads = _integer(files.config, spelt.get("heads", "num_heads"))
  layers = _integer(files.config, spelt.get("layers", "num_hidden_layers"), default=1)
  width, vocab_size = (_integer(files.config, key) for key in ("hidden_size", "vocab_size"))
  size = _integer(files.config, "truncated_vocab_size", default=vocab_size)
  has_bias = _switch(files.config, "medusa_fc_bias")
  if files.config.get("medusa_fc_bias") is None:
    has_bias = any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in tensors)
  shared = next((name for name in ("lm_head.weight", "lm_heads.0.weight") if name in tensors), None)
  one_head = _switch(files.config, "original_lm_head")
  truncated = size != vocab_size
  scale = files.config.get("logit_scale")
  config = MedusaConfig(width, vocab_size, heads, layers, has_bias,
                        one_head and shared is None and not truncated, size if truncated else 0,
                        1.0 if scale is None else check_number(
                            "config.json: logit_scale", scale, -MAX_REAL, MAX_REAL))
  target_id = None
  if truncated:
    target_id = _read_table(files, tensors, "token_map", size)
    _check_in_vocabulary(files.where, "token_map", target_id, vocab_size)
    if len(np.unique(target_id)) != size:
      raise WeightsError(f"{files.where}: token_map maps two draft tokens to the same token")
  cut = lambda rows: rows[target_id]
  leaves = _medusa_blocks(config, "blocks.{}.layers.{}")
  for i in range(0 if config.shares_head else heads):
    name = (shared or "lm_heads.0.weight") if one_head else f"lm_heads.{i}.weight"
    # A head that still has all rows of the target's is cut to those of token_map.
    whole = truncated and name in tensors and tensors[name].shape[:1] == (vocab_size,)
    leaves["heads", i, "head", "w"] = _leaf(name, (vocab_size if whole else size, width),
                                            cut if whole else as_it_is)

  def harmless(name: str) -> bool:
    return name == "token_map" or one_head and name.startswith("lm_heads.")

  return HeadLayout("Medusa (vLLM)", config, tensors, leaves, target_id, harmless)


def _medusa_blocks(config: MedusaConfig, name: str) -> dict[Path, Leaf]:
  leaves: dict[Path, Leaf] = {}
  for i in range(config.num_heads):
    for j in range(config.num_layers):
      path, layer = ("heads", i, "blocks", j), name.format(i, j)
      leaves[*path, "w"] = _leaf(f"{layer}.weight", (config.width, config.width))
      if config.has_bias:
        leaves[*path, "b"] = _leaf(f"{layer}.bias", (config.width,))
  return leaves


# ------------------------------------------------------------ MLPSpeculator


def _mlp_speculator(files: HeadFiles) -> HeadLayout:
  """{emb, proj, head, ln}.{stage}; tied stages share all but the first projection."""
  given = files.config
  width, vocab_size = _integer(given, "emb_dim", "hidden_size"), _integer(given, "vocab_size")
  inner, stages = _integer(given, "inner_dim", default=0) or width, _integer(given, "n_predict")
  tied = _switch(given, "tie_weights")
  config = MlpSpeculatorConfig(width, vocab_size, stages, inner,
                               _switch(given, "scale_input"), tied,
                               tuple(given.get("top_k_tokens_per_head") or ()),
                               _integer(given, "n_candidates", default=5))
  tensors = _renamed(files, lambda name: name.removeprefix("speculator."))

  def name(part: str, stage: int, ending: str = "weight") -> str:
    """Of tied stages a checkpoint has all copies or any one of them."""
    group = range(stage, stage + 1)
    if tied:
      group = range(1, stages) if part == "proj" and stage else range(
          1 if part == "proj" else stages)
    candidates = [f"{part}.{i}.{ending}" for i in group]
    return next((c for c in candidates if c in tensors), candidates[0])

  leaves: dict[Path, Leaf] = {}
  for i in range(stages):
    leaves["stages", i, "emb"] = _leaf(name("emb", i), (vocab_size, inner))
    leaves["stages", i, "proj", "w"] = _leaf(name("proj", i), (inner, inner if i else width))
    leaves["stages", i, "ln", "scale"] = _leaf(name("ln", i), (inner,))
    leaves["stages", i, "ln", "bias"] = _leaf(name("ln", i, "bias"), (inner,))
    leaves["stages", i, "head", "w"] = _leaf(name("head", i), (vocab_size, inner))
  copies = re.compile(r"(emb|proj|head|ln)\.\d+\.(weight|bias)")
  return HeadLayout("MLPSpeculator", config, tensors, leaves, None,
                    lambda name: tied and copies.fullmatch(name) is not None)


# ------------------------------------------------------------ EAGLE


def _eagle(files: HeadFiles, version: int, own: Collection[str]) -> HeadLayout:
  """EAGLE-1, and EAGLE-3 as SafeAILab, SpecForge, AngelSlim, ModelOpt or speculators name it."""
  tensors = _renamed(files, lambda name: re.sub(r"^midlayer\.", "layers.0.",
                                                name.removeprefix("model.")))
  config = _eagle_config(files, tensors, version)
  target_id = _eagle_target_ids(files, tensors, config) if version == 3 else None
  if target_id is None:
    config = dataclasses.replace(config, draft_vocab_size=0)
  copies = tuple(name for name in _EAGLE1_COPIES
                 if version == 1 and name in tensors and name not in own)
  if version == 1:
    config = dataclasses.replace(config, has_embed=EMBED in own, has_head=LM_HEAD in own)

  def harmless(name: str) -> bool:
    tables = version == 3 and name in ("d2t", "t2d")
    return name in copies or tables or name.endswith("rotary_emb.inv_freq")

  leaves = _eagle_leaves(config)
  # EAGLE-3 has none to speak of.
  has_bias = version == 1 and _switch(files.config, "bias")
  if has_bias or ((version == 3 or files.config.get("bias") is None) and "fc.bias" in tensors):
    leaves["fc", "b"] = _leaf("fc.bias", (config.width,))
  origin = " (speculators)" if "speculators_model_type" in files.config else ""
  for name in copies:
    shape = (config.width,) if name == FINAL_NORM else (config.vocab_size, config.width)
    if tensors[name].shape != shape:
      raise WeightsError(f"{files.where}: tensor {name} has shape {tensors[name].shape}, a copy of "
                         f"the target's has {shape}")
  return HeadLayout(f"EAGLE-{version}{origin}", config, tensors, leaves, target_id, harmless,
                    copies)


def _eagle_config(files: HeadFiles, tensors: Mapping[str, StoredTensor],
                  version: int) -> EagleConfig:
  given, speculators = files.config, "speculators_model_type" in files.config
  layer_config = _object(given, "transformer_layer_config") if speculators else {
    **given, "model_type": "llama"}  # whatever the target is
  layer = model_config_from_hf(layer_config)
  if layer.post_norms or layer.learned_positions:
    raise ValueError(f"config.json: heads with layers of family {layer.family!r} are not supported")
  endings = {name.split(".", 2)[-1] for name in tensors if name.startswith("layers.")}
  layer = dataclasses.replace(
    layer, tie_embeddings=False,
    qkv_bias=layer.qkv_bias or _switch(given, "qkv_bias") or bool(
      {f"self_attn.{part}_proj.bias" for part in "qkv"} & endings),
    out_bias=layer.out_bias or "self_attn.o_proj.bias" in endings,
    mlp_bias=layer.mlp_bias or "mlp.down_proj.bias" in endings,
    qk_norm=layer.qk_norm or "self_attn.q_norm.weight" in endings)
  if version == 1:
    return EagleConfig(1, layer, layer.width, num_taps=1)
  if _object(given, "eagle_config").get("use_aux_hidden_state") is False:
    raise ValueError("config.json: use_aux_hidden_state=False is not supported for EAGLE-3")
  taps = _feature_layers(given)
  default = _SPECULATORS_DRAFT_VOCAB if speculators else layer.vocab_size
  switches = {name: _switch(given, name) for name in (
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
  vocabulary = _integer(given, "draft_vocab_size", default=default)
  # Of a draft vocabulary, only jspec's own files say that lm_head is the target's rows.
  needs_head = vocabulary < layer.vocab_size and not _switch(given, "tie_lm_head")
  return EagleConfig(
    3, layer, _integer(given, "target_hidden_size", default=layer.width), vocabulary, taps,
    len(taps) or 3, EMBED in tensors, needs_head or LM_HEAD in tensors,
    **switches)


def _feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
  """Hidden states as transformers counts them, k the input of layer k.

  speculators and vLLM count like that; SpecForge, SGLang and ModelOpt, whose ids are in
  eagle_config, name the layer of which a hidden state is the output.
  """
  key = "eagle_aux_hidden_state_layer_ids"
  outputs = _object(config, "eagle_config").get(key)
  ids = outputs or config.get(key) or ()
  if not isinstance(ids, (list, tuple)) or any(type(i) is not int for i in ids):
    raise ValueError(f"config.json: {key} must be a list of integers, got {ids!r}")
  return tuple(i + 1 if outputs else i for i in ids)


def _eagle_leaves(config: EagleConfig) -> dict[Path, Leaf]:
  layer, width, first = config.layer, config.width, ("layers", 0)
  names = hf_names(layer, "")
  of_both = {(*first, part, "w") for part in "qkv"}  # made for embedding and feature
  leaves: dict[Path, Leaf] = {}
  for path, shape in checkpoint_shapes(layer).items():
    if path[0] != "layers" or path[:3] == (*first, "attn_norm"):
      continue
    if config.version == 3 and path in of_both:
      shape = (shape[0], 2 * width)
    leaves[path] = _leaf(names[path], shape)
  features = config.num_taps * config.target_width if config.version == 3 else 2 * width
  leaves["fc", "w"] = _leaf("fc.weight", (width, features))
  if config.version == 3:
    leaves.update({path: _leaf(name, (width,)) for path, name in _EAGLE_LAYER.items()})
  if config.norm_before_fc:
    leaves["fc_norm", "scale"] = _leaf("input_norm.weight", (features,))
  if config.fc_norm:
    leaves.update({("fc_norm", i, "scale"): _leaf(f"fc_norm.{i}.weight", (config.target_width,))
                   for i in range(config.num_taps)})
  if config.has_embed:
    leaves["embed",] = _leaf(EMBED, (config.vocab_size, width))
  if config.has_head:
    rows = config.draft_vocab_size or config.vocab_size
    leaves["head", "w"] = _leaf(LM_HEAD, (rows, width))
  return leaves


def _eagle_target_ids(files: HeadFiles, tensors: Mapping[str, StoredTensor],
                      config: EagleConfig) -> np.ndarray | None:
  """d2t holds what to add to a draft token; None where both vocabularies are the same."""
  size, vocab_size, where = config.draft_vocab_size, config.vocab_size, files.where
  if size == vocab_size and "d2t" not in tensors:
    return None
  ids = _read_table(files, tensors, "d2t", size) + np.arange(size)
  _check_in_vocabulary(where, "d2t", ids, vocab_size)
  if np.any(np.diff(ids) <= 0):
    i = int(np.argmax(np.diff(ids) <= 0))
    raise WeightsError(f"{where}: d2t must map draft tokens to ascending tokens, but maps {i} to "
                       f"{ids[i]} and {i + 1} to {ids[i + 1]}")
  if "t2d" in tensors:
    members = np.flatnonzero(_read_table(files, tensors, "t2d", vocab_size))
    if not np.array_equal(members, ids):
      raise WeightsError(f"{where}: t2d marks {members.size} tokens, which are not the {size} that "
                         "d2t maps to")
  return ids if size < vocab_size else None
