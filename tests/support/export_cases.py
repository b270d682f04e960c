"""Heads and models with random parameters, in every style in which they can be exported."""

from __future__ import annotations

import dataclasses

import head_checkpoints as hc
import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from jspec.config import RopeScaling
from jspec.heads.config import EagleConfig, MedusaConfig, MlpSpeculatorConfig
from jspec.heads.init import init_head
from jspec.model.params import init_params

BF16, F32 = ml_dtypes.bfloat16, np.float32
TARGET, NAME = hc.TARGET, "org/target"
LAYER = dataclasses.replace(TARGET, num_layers=1)
WIDE = dataclasses.replace(
  LAYER, num_layers=2, rope_theta=5e5, qkv_bias=True, out_bias=True, mlp_bias=True,
  rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32), norm_eps=1e-6, activation="gelu_tanh")
MEDUSA = MedusaConfig(hc.E, hc.V, 3)
MLP = MlpSpeculatorConfig(hc.E, hc.V, 3, 24, top_k_tokens_per_head=(4, 3, 2))
EAGLE = EagleConfig(1, LAYER, hc.E, num_taps=1)
EAGLE3 = EagleConfig(3, LAYER, hc.E, hc.VD, has_head=True)
QWEN3 = dataclasses.replace(LAYER, family="qwen3", qk_norm=True)
GEMMA3 = dataclasses.replace(
  LAYER, family="gemma3", num_layers=2, qk_norm=True, post_norms=True, embed_scale=4.0,
  activation="gelu_tanh", rope_theta_local=1e4, window=8, sliding_layers=(0,), attn_scale=0.25,
  tie_embeddings=True)
HEADS = {  # what is exported, and in which style
  "medusa": (MEDUSA, "fasterdecoding"),
  "medusa shared": (dataclasses.replace(MEDUSA, num_layers=2, shares_head=True), "fasterdecoding"),
  "medusa vllm": (dataclasses.replace(MEDUSA, num_layers=2), "vllm"),
  "medusa vllm cut": (dataclasses.replace(MEDUSA, has_bias=False, draft_vocab_size=hc.VD,
                                          logit_scale=0.5), "vllm"),
  "mlp": (MLP, "ibm"),
  "mlp tied": (dataclasses.replace(MLP, tie_weights=True, scale_input=True, n_candidates=7), "ibm"),
  "eagle": (EAGLE, "safeailab"),
  "eagle wide": (dataclasses.replace(EAGLE, layer=WIDE), "safeailab"),
  "eagle3": (EAGLE3, "specforge"),
  "eagle3 whole": (dataclasses.replace(EAGLE3, draft_vocab_size=0), "specforge"),
  "eagle3 3.1": (dataclasses.replace(EAGLE3, layer=WIDE, fc_norm=True, norm_output=True, num_taps=2,
                                     has_embed=True, feature_layers=(1, 8)), "specforge"),
  "speculators": (EAGLE3, "speculators"),
  "speculators 3.1": (dataclasses.replace(
    EAGLE3, layer=WIDE, norm_before_fc=True, norm_before_residual=True, norm_output=True,
    feature_layers=(0, 3, 4, 8), num_taps=4), "speculators"),
  "speculators shared": (dataclasses.replace(EAGLE3, draft_vocab_size=0, has_head=False,
                                             fc_norm=True), "speculators"),
  "compact": (EAGLE3, "compact"),
  "compact shared": (dataclasses.replace(
    EAGLE3, layer=dataclasses.replace(WIDE, qk_norm=True, out_bias=False), draft_vocab_size=0,
    has_head=False, has_embed=True, norm_before_residual=True), "compact"),
}


def random_tree(shapes, seed: int):
  """Arrays for every leaf, norms and biases too."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: (rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[0])).astype(F32), shapes)


def head_of(config, seed: int = 1):
  params = random_tree(jax.eval_shape(lambda: init_head(jax.random.key(0), config)), seed)
  if "target_id" in params:
    params["target_id"] = hc.IDS.astype(np.int32)
  if config.method == "mlp_speculator" and config.tie_weights:
    first, second, *_ = params["stages"]
    params["stages"] = [first] + [first | {"proj": second["proj"]}] * (config.n_predict - 1)
  return params


def model_of(config, seed: int = 3):
  return random_tree(jax.eval_shape(lambda: init_params(jax.random.key(0), config)), seed)


def is_norm(path) -> bool:
  return hasattr(path[-1], "key") and path[-1].key in ("scale", "bias")


def assert_same(params, expected, dtype=F32):
  """Same structure and bits, where matrices have been rounded to dtype."""
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  for (path, leaf), (_, array) in zip(jax.tree_util.tree_leaves_with_path(params),
                                      jax.tree_util.tree_leaves_with_path(expected), strict=True):
    array = np.asarray(array)
    if array.dtype.kind == "f" and not is_norm(path):
      array = array.astype(dtype).astype(F32)
    np.testing.assert_array_equal(np.asarray(leaf), array, jax.tree_util.keystr(path), strict=True)


def tensors_of(folder) -> dict[str, np.ndarray]:
  file, = folder.glob("*.safetensors")
  return safetensors.numpy.load_file(file)
