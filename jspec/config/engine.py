"""Shapes and policies of an engine: frozen, hashable, checked when built."""

from __future__ import annotations

import dataclasses
import functools

from jspec.config.checks import check_flag, check_int
from jspec.config.model import MAX_SIZE

DTYPES = ("float32", "bfloat16")
NUMERICS = ("fast", "bitwise")
ATTENTION_BACKENDS = ("auto", "reference", "tpu", "mosaic_gpu", "triton")  # see model/attention.py
KV_DTYPES = {  # kv_cache_dtype, in vLLM's spelling -> array dtype; "auto" is the model's
  "auto": None,
  "int8": "int8",
  "fp8": "float8_e4m3fn",
  "fp8_e4m3": "float8_e4m3fn",
  "fp8_e5m2": "float8_e5m2",
}
CHUNK_COST = 24  # rows whose arithmetic takes as long as one more pass over the weights


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
