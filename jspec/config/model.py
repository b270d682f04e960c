"""What a model is: frozen, hashable, checked when built."""

from __future__ import annotations

import dataclasses
import math

from jspec.config.checks import check_flag, check_int, check_number

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000  # anything beyond is a damaged file
MAX_REAL = 1e30


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3 frequency scaling (`rope_type: llama3`); `linear` has only a factor."""

  kind: str  # "llama3" | "linear"
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int = 8192

  def __post_init__(self):
    if self.kind not in ("llama3", "linear"):
      raise ValueError(f"rope scaling {self.kind!r} is not supported; use 'llama3' or 'linear'")
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
      check_number(f"rope scaling {name}", getattr(self, name), 0, MAX_REAL, above=True)
    check_int("rope scaling original_max_positions", self.original_max_positions, 1, MAX_SIZE)
    if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(f"rope scaling low_freq_factor={self.low_freq_factor} must be less than "
                       f"high_freq_factor={self.high_freq_factor}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer. Families differ in these fields and in nothing else."""

  family: str  # "llama", ...: how its files are read (checkpoints/families); no maths asks
  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  max_positions: int
  norm: str = "rms"  # "rms" | "layer"
  norm_eps: float = 1e-5
  activation: str = "silu"
  gated_mlp: bool = True
  qkv_bias: bool = False
  out_bias: bool = False  # on the attention output projection
  mlp_bias: bool = False
  qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
  post_norms: bool = False  # Gemma: norms after attention and after the MLP as well
  embed_scale: float = 1.0
  learned_positions: bool = False  # OPT: added to the embedding; no RoPE then
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  rope_theta_local: float | None = None  # for sliding-window layers; None: rope_theta, scaled alike
  attn_scale: float | None = None  # None: head_dim ** -0.5
  attn_soft_cap: float | None = None
  final_soft_cap: float | None = None
  window: int | None = None  # sliding layers see this many tokens, their own included
  sliding_layers: tuple[int, ...] = ()
  tie_embeddings: bool = False
  vocab_parts: int = 1  # devices that share the vocabulary, see sharding.split_config

  def __post_init__(self):
    for name in ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                 "mlp_dim", "max_positions"):
      check_int(f"model config: {name}", getattr(self, name), 1,
                MAX_LAYERS if name == "num_layers" else MAX_SIZE)
    for name in ("gated_mlp", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "post_norms",
                 "learned_positions", "tie_embeddings"):
      check_flag(f"model config: {name}", getattr(self, name))
    for name in ("norm_eps", "embed_scale", "rope_theta", "rope_theta_local", "attn_scale",
                 "attn_soft_cap", "final_soft_cap"):
      if getattr(self, name) is not None:
        check_number(f"model config: {name}", getattr(self, name), 0, MAX_REAL,
                     above=name != "norm_eps")
    if self.window is not None:
      check_int("model config: window", self.window, 1, MAX_SIZE)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"model config: num_kv_heads={self.num_kv_heads} must divide "
                       f"num_heads={self.num_heads}")
    if self.activation not in ACTIVATIONS:
      raise ValueError(f"model config: activation {self.activation!r} is not one of {ACTIVATIONS}")
    if self.norm not in ("rms", "layer"):
      raise ValueError(f"model config: norm {self.norm!r} is not 'rms' or 'layer'")
    if self.head_dim % 2 and not self.learned_positions:
      raise ValueError(f"model config: RoPE needs an even head_dim, got {self.head_dim}")
    if self.sliding_layers and not self.window:
      raise ValueError("model config: sliding_layers given without a window")
    if any(not 0 <= i < self.num_layers for i in self.sliding_layers):
      raise ValueError(f"model config: sliding_layers {self.sliding_layers} must lie in "
                       f"0..{self.num_layers - 1}")

  @property
  def scale(self) -> float:
    return self.attn_scale if self.attn_scale is not None else 1.0 / math.sqrt(self.head_dim)
