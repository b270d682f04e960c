"""jspec: lossless speculative decoding for LLM inference in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jspec.async_llm import AsyncLLM, Draining, EngineDead, QueueFull, RequestFailed
  from jspec.config.checks import FieldError, PromptTooLong
  from jspec.config.speculative import SpeculativeConfig
  from jspec.llm import LLM
  from jspec.outputs import (
    CompletionOutput,
    EngineStats,
    Logprob,
    RequestOutput,
    SpeculativeStats,
    Timing,
  )
  from jspec.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Draining", "EngineDead", "EngineStats",
           "FieldError", "Logprob", "PromptTooLong", "QueueFull", "RequestFailed", "RequestOutput",
           "SamplingParams", "SpeculativeConfig", "SpeculativeStats", "Timing"]
_WHERE = {
  "llm": ("LLM",),
  "async_llm": ("AsyncLLM", "Draining", "EngineDead", "QueueFull", "RequestFailed"),
  "outputs": ("CompletionOutput", "EngineStats", "Logprob", "RequestOutput", "SpeculativeStats",
              "Timing"),
  "sampling_params": ("SamplingParams",),
  "config.checks": ("FieldError", "PromptTooLong"),
  "config.speculative": ("SpeculativeConfig",),
}


def __getattr__(name: str) -> Any:
  """What a name needs is imported when it is asked for: jax takes a second, numpy a moment."""
  for module, names in _WHERE.items():
    if name in names:
      return getattr(importlib.import_module(f"jspec.{module}"), name)
  raise AttributeError(f"module 'jspec' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
