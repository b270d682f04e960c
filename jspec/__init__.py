"""jspec: lossless speculative decoding for LLM inference in JAX."""

from jspec.llm import LLM
from jspec.outputs import CompletionOutput, Logprob, RequestOutput, SpeculativeStats
from jspec.sampling_params import SamplingParams
from jspec.spec_config import SpeculativeConfig

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams",
           "SpeculativeConfig", "SpeculativeStats"]
