"""jspec: lossless speculative decoding for LLM inference in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jspec.outputs import CompletionOutput, Logprob, RequestOutput, SpeculativeStats
from jspec.sampling_params import SamplingParams
from jspec.spec_config import SpeculativeConfig

if TYPE_CHECKING:
  from jspec.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams",
           "SpeculativeConfig", "SpeculativeStats"]


def __getattr__(name: str) -> Any:
  """LLM brings jax along, which takes a second: only who asks for it waits."""
  if name == "LLM":
    from jspec.llm import LLM
    return LLM
  raise AttributeError(f"module 'jspec' has no attribute {name!r}")
