"""Model and engine configuration: frozen, hashable, validated when built."""

from __future__ import annotations

import dataclasses
import functools
import math

from jspec.checks import check_flag, check_int, check_number

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
DTYPES = ("float32", "bfloat16")
NUMERICS = ("fast", "bitwise")
ATTENTION_BACKENDS = ("auto", "reference", "tpu", "mosaic_gpu", "triton")  # see attention.py
KV_DTYPES = {  # kv_cache_dtype, in vLLM's spelling -> array dtype; "auto" is the model's
  "auto": None,
  "int8": "int8",
  "fp8": "float8_e4m3fn",
  "fp8_e4m3": "float8_e4m3fn",
  "fp8_e5m2": "float8_e5m2",
}
VERIFICATIONS = ("lossless", "block", "lossy_typical", "lossy_synthetic")
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000  # of a model: anything beyond is a damaged file
MAX_REAL = 1e30
CHUNK_COST = 24  # rows whose arithmetic takes as long as one more pass over the weights


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

  family: str  # "llama", "qwen3", ...: for messages only, no code branches on it
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


@dataclasses.dataclass(frozen=True)
class Verification:
  """The rule by which draft tokens are accepted: all but those named lossy keep the target's law.

  "block" is lossless too: chains of sampled drafts are judged as a whole (see verify_block).
  """

  name: str = "lossless"  # one of VERIFICATIONS
  posterior_threshold: float = 0.09  # of lossy_typical
  posterior_alpha: float = 0.3
  rates: tuple[float, ...] = ()  # of lossy_synthetic: chance that draft token i and all before pass

  @property
  def is_lossy(self) -> bool:
    return self.name.startswith("lossy")

  def __post_init__(self):
    if self.name not in VERIFICATIONS:
      raise ValueError(f"verification {self.name!r} is not one of {VERIFICATIONS}")
    for name in ("posterior_threshold", "posterior_alpha"):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number in (0, 1], got {value!r}")
    if (self.name == "lossy_synthetic") != bool(self.rates):
      raise ValueError("synthetic acceptance rates belong to verification 'lossy_synthetic' alone, "
                       f"got {self.rates} with {self.name!r}")
    if any(not 0 <= r <= 1 for r in self.rates) or list(self.rates) != sorted(
        self.rates, reverse=True):
      raise ValueError("synthetic acceptance rates must lie in [0, 1] and never rise, got "
                       f"{list(self.rates)}")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Shapes and policies of one engine."""

  dtype: str = "float32"
  kv_cache_dtype: str = "auto"  # a key of KV_DTYPES
  max_model_len: int = 2048  # prompt and output, tokens
  max_num_seqs: int = 8  # slots
  page_size: int = 128  # tokens
  num_pages: int = 0  # of the pool, for all slots; 0: enough for every slot at max_model_len
  tensor_parallel_size: int = 1  # devices that share the weights and the KV heads
  data_parallel_size: int = 1  # groups of devices that share the slots and the pages
  attention_backend: str = "auto"  # one of ATTENTION_BACKENDS
  numerics: str = "fast"  # "bitwise": a token's logits do not depend on how many ran beside it
  enable_prefix_caching: bool = True  # pages are found again by their contents
  max_num_batched_tokens: int = 512  # of prompts, per turn of the loop: others need not wait longer
  dynamic_speculation: bool = False  # by measured costs of steps: may pause drafting
  prefill_chunks: tuple[int, ...] = (16, 32, 64, 128, 256)  # tokens, ascending
  widths: tuple[tuple[int, int], ...] = ()  # of the step, see StepConfig; (): the default
  seed: int = 0

  def __post_init__(self):
    for name in ("max_model_len", "max_num_seqs", "page_size", "tensor_parallel_size",
                 "data_parallel_size", "max_num_batched_tokens"):
      check_int(name, getattr(self, name), 1, MAX_SIZE)
    for name in ("enable_prefix_caching", "dynamic_speculation"):
      check_flag(name, getattr(self, name))
    check_int("num_pages", self.num_pages, 0, MAX_SIZE)
    check_int("seed", self.seed, -2**63, 2**63 - 1)
    for name in ("max_num_seqs", "num_pages"):
      if getattr(self, name) % self.data_parallel_size:
        raise ValueError(f"{name}={getattr(self, name)} must be a multiple of "
                         f"data_parallel_size={self.data_parallel_size}")
    if self.dtype not in DTYPES:
      raise ValueError(f"dtype {self.dtype!r} is not one of {DTYPES}")
    if self.kv_cache_dtype not in tuple(KV_DTYPES):
      raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of {tuple(KV_DTYPES)}")
    if self.attention_backend not in ATTENTION_BACKENDS:
      raise ValueError(f"attention_backend {self.attention_backend!r} is not one of "
                       f"{ATTENTION_BACKENDS}")
    if self.numerics not in NUMERICS:
      raise ValueError(f"numerics {self.numerics!r} is not one of {NUMERICS}")
    for size in self.prefill_chunks:
      check_int("each of prefill_chunks", size, 1, MAX_SIZE)
    if not self.prefill_chunks or list(self.prefill_chunks) != sorted(set(self.prefill_chunks)):
      raise ValueError(f"prefill_chunks must ascend, got {self.prefill_chunks}")

  def pages_per_slot(self, num_nodes: int) -> int:
    """Pages that hold max_model_len tokens and one step's tree beyond them."""
    return -(-(self.max_model_len + num_nodes) // self.page_size)

  def prefill_chunk(self, remaining: int) -> tuple[int, int]:
    """(program size, prompt tokens) of the next chunk, with this many tokens to go."""
    size = _best_chunk(remaining, self.prefill_chunks)[1]
    return size, min(size, remaining)


@functools.cache
def _best_chunk(remaining: int, sizes: tuple[int, ...]) -> tuple[int, int]:
  """(cost in rows, size of the first chunk) of prefilling this many tokens at the least cost."""
  largest = sizes[-1]
  if remaining > largest:
    return remaining, largest
  whole = next(c for c in sizes if c >= remaining)
  options = [(whole + CHUNK_COST, whole)]
  for size in sizes:
    if size < remaining:
      options.append((size + CHUNK_COST + _best_chunk(remaining - size, sizes)[0], size))
  return min(options)
