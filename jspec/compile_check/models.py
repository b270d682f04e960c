"""The model shapes that compile-check knows: configurations only, no weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.config import ModelConfig, RopeScaling
from jspec.heads.config import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig

_LLAMA3: dict[str, Any] = dict(
  family="llama", vocab_size=128256, head_dim=128, num_kv_heads=8, max_positions=131072,
  rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
_QWEN3: dict[str, Any] = dict(
  family="qwen3", vocab_size=151936, head_dim=128, num_kv_heads=8, max_positions=40960,
  rope_theta=1000000.0, qk_norm=True, norm_eps=1e-6)

# Hugging Face: meta-llama/Llama-3.1-8B, Llama-3.3-70B-Instruct and Llama-3.2-1B, Qwen/Qwen3-8B and
# Qwen3-0.6B, HuggingFaceTB/SmolLM2-135M-Instruct; their config.json.
MODELS: dict[str, ModelConfig] = {
  "llama-3.1-8b": ModelConfig(
    **_LLAMA3, width=4096, num_layers=32, num_heads=32, mlp_dim=14336),
  "llama-3.3-70b": ModelConfig(
    **_LLAMA3, width=8192, num_layers=80, num_heads=64, mlp_dim=28672),
  "qwen3-8b": ModelConfig(
    **_QWEN3, width=4096, num_layers=36, num_heads=32, mlp_dim=12288),
  "smollm2-135m": ModelConfig(
    family="llama", vocab_size=49152, width=576, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64, mlp_dim=1536, max_positions=8192, rope_theta=100000.0, tie_embeddings=True),
}

DRAFT_MODELS: dict[str, ModelConfig] = {
  "llama-3.2-1b": ModelConfig(**{
    **_LLAMA3, "head_dim": 64, "rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)},
    width=2048, num_layers=16, num_heads=32, mlp_dim=8192, tie_embeddings=True),
  "qwen3-0.6b": ModelConfig(**_QWEN3, width=1024, num_layers=28, num_heads=16, mlp_dim=3072,
                            tie_embeddings=True),
}
# target -> the small model of its family and vocabulary
DRAFT_MODEL_OF = {"llama-3.1-8b": "llama-3.2-1b", "llama-3.3-70b": "llama-3.2-1b",
                  "qwen3-8b": "qwen3-0.6b"}


def canonical(name: str) -> str:
  """The name as MODELS spells it."""
  if name.lower() not in MODELS:
    raise ValueError(f"model {name!r} is unknown; known: {', '.join(MODELS)}")
  return name.lower()


def find(name: str) -> ModelConfig:
  return MODELS[canonical(name)]


def draft_model_of(target: str) -> ModelConfig:
  if target not in DRAFT_MODEL_OF:
    raise ValueError(f"no draft model is known for {target!r}; "
                     f"known for: {', '.join(DRAFT_MODEL_OF)}")
  return DRAFT_MODELS[DRAFT_MODEL_OF[target]]


def head_of(target: str, method: str, num_layers: int, num_tokens: int) -> HeadConfig:
  """A head as they are published for such models: a layer of the target, up to 32,000 tokens.

  num_layers: of the target as it is compiled; its features come from the first, middle and last.
  num_tokens: that Medusa and MLPSpeculator heads predict.
  """
  c = find(target)
  if method == "medusa":
    return MedusaConfig(c.width, c.vocab_size, num_heads=num_tokens)
  if method == "mlp_speculator":
    return MlpSpeculatorConfig(c.width, c.vocab_size, n_predict=num_tokens, inner_dim=c.width)
  layer = dataclasses.replace(with_depth(c, 1), family="llama", qk_norm=False)
  if method == "eagle":
    return EagleConfig(1, layer, c.width)
  return EagleConfig(3, layer, c.width, draft_vocab_size=min(32000, c.vocab_size // 4),
                     feature_layers=(0, num_layers // 2, num_layers), has_head=True)


def with_depth(config: ModelConfig, num_layers: int) -> ModelConfig:
  return dataclasses.replace(
    config, num_layers=num_layers,
    sliding_layers=tuple(i for i in config.sliding_layers if i < num_layers))
