"""jspec: lossless speculative decoding for LLM inference in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jspec.outputs import (
  CompletionOutput,
  EngineStats,
  Logprob,
  RequestOutput,
  SpeculativeStats,
  Timing,
)
from jspec.sampling_params import SamplingParams
from jspec.spec_config import SpeculativeConfig

if TYPE_CHECKING:
  from jspec.async_llm import AsyncLLM, Draining, EngineDead, QueueFull, RequestFailed
  from jspec.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Draining", "EngineDead", "EngineStats",
           "Logprob", "QueueFull", "RequestFailed", "RequestOutput", "SamplingParams",
           "SpeculativeConfig", "SpeculativeStats", "Timing"]
_BRING_JAX = {"LLM": "llm", "AsyncLLM": "async_llm", "QueueFull": "async_llm",
              "Draining": "async_llm", "EngineDead": "async_llm", "RequestFailed": "async_llm"}


def __getattr__(name: str) -> Any:
  """LLM and AsyncLLM bring jax along, which takes a second: only who asks for them waits."""
  if name in _BRING_JAX:
    return getattr(importlib.import_module(f"jspec.{_BRING_JAX[name]}"), name)
  raise AttributeError(f"module 'jspec' has no attribute {name!r}")
