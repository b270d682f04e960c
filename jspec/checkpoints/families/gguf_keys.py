"""Reads the metadata that GGUF files of several families have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.config import MAX_LAYERS, MAX_REAL, MAX_SIZE, ModelConfig, RopeScaling
from jspec.config.checks import check_int, check_number


class GGUFKeys(NamedTuple):
  """What a GGUF file says of its model."""

  architecture: str  # what stands before the keys' names
  metadata: Mapping[str, Any]
  tensor_names: Collection[str]
  rope_factors: np.ndarray | None  # its rope_freqs.weight

  def size(self, key: str, default: int | None = None, low: int = 1, most: int = MAX_SIZE) -> int:
    return check_int(self._named(key), self._get(key, default), low, most)

  def real(self, key: str, default: float | None = None) -> float:
    return check_number(self._named(key), self._get(key, default), 0, MAX_REAL)

  def _named(self, key: str) -> str:
    return f"GGUF metadata: {self.architecture}.{key}"

  def _get(self, key: str, default: Any) -> Any:
    value = self.metadata.get(f"{self.architecture}.{key}", default)
    if value is None:
      raise ValueError(f"{self._named(key)} is missing")
    return value


def rotary_config(keys: GGUFKeys) -> ModelConfig:
  """Llama and what is like it: RMSNorm, rotary positions, a gated MLP, every layer the same.

  Without `output.weight` among the tensors the embeddings are tied.
  """
  width, heads = keys.size("embedding_length"), keys.size("attention.head_count")
  layers = keys.size("block_count", most=MAX_LAYERS)
  head_dim = keys.size("attention.key_length", width // heads)
  _refuse(keys, head_dim)
  theta = keys.real("rope.freq_base", 1e4)
  window = keys.size("attention.sliding_window", 0, low=0)
  tokens = keys.metadata.get("tokenizer.ggml.tokens")
  return ModelConfig(
    family=keys.architecture, width=width, num_layers=layers, num_heads=heads, head_dim=head_dim,
    vocab_size=keys.size("vocab_size", len(tokens) or None if isinstance(tokens, list) else None),
    num_kv_heads=keys.size("attention.head_count_kv", heads),
    mlp_dim=keys.size("feed_forward_length"), max_positions=keys.size("context_length"),
    norm_eps=_decimal(keys.real("attention.layer_norm_rms_epsilon")),
    qkv_bias="blk.0.attn_q.bias" in keys.tensor_names,
    out_bias="blk.0.attn_output.bias" in keys.tensor_names,
    mlp_bias="blk.0.ffn_down.bias" in keys.tensor_names,
    rope_theta=theta, rope_scaling=_rope_scaling(keys, theta, head_dim), window=window or None,
    sliding_layers=tuple(range(layers)) if window else (),
    tie_embeddings="output.weight" not in keys.tensor_names)


def _refuse(keys: GGUFKeys, head_dim: int) -> None:
  harmless = {"attention.value_length": head_dim, "rope.dimension_count": head_dim,
              "expert_count": 0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
              "attention.scale": 0.0, "logit_scale": 0.0, "attention.causal": True}
  for key, value in harmless.items():
    given = keys.metadata.get(f"{keys.architecture}.{key}", value)
    if given != value:
      raise ValueError(f"GGUF metadata: {keys.architecture}.{key}={given} is not supported; "
                       f"supported: {value}")


def _decimal(value: float) -> float:
  """9.999999747e-06, the float32 of 1e-5, back to 1e-5, so that both sources give one config."""
  return float(f"{value:.6g}")


def _rope_scaling(keys: GGUFKeys, theta: float, head_dim: int) -> RopeScaling | None:
  kind = keys.metadata.get(f"{keys.architecture}.rope.scaling.type", "none")
  if kind == "linear":
    factor = keys.metadata.get(f"{keys.architecture}.rope.scaling.factor")
    return RopeScaling("linear", check_number(
        f"GGUF metadata: {keys.architecture}.rope.scaling.factor", factor, 0, MAX_REAL,
        above=True))
  if kind != "none":
    raise ValueError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear")
  factors = keys.rope_factors
  if factors is None:
    return None
  # The file has only the divisors; every Llama 3.1 to 3.3 release uses 1, 4 and 8192.
  if factors.shape != (head_dim // 2,):
    raise ValueError(f"GGUF tensor rope_freqs.weight has shape {factors.shape}, a head of "
                     f"{head_dim} needs ({head_dim // 2},)")
  scaling = RopeScaling("llama3", float(np.max(factors)))
  if not np.allclose(factors, llama3_divisors(scaling, theta, head_dim), rtol=1e-4):
    raise ValueError("GGUF tensor rope_freqs.weight is not a Llama 3 frequency scaling")
  return scaling


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
  """What llama3 scaling divides each rotary frequency by, f64[head_dim / 2]."""
  wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  smooth = np.clip((scaling.original_max_positions / wavelength - low) / (high - low), 0, 1)
  return 1 / ((1 - smooth) / scaling.factor + smooth)
