"""Configuration of models, engines and the rule of acceptance. Knows no jax."""

from jspec.config.engine import (
  ATTENTION_BACKENDS,
  CHUNK_COST,
  DTYPES,
  KV_DTYPES,
  NUMERICS,
  EngineConfig,
)
from jspec.config.model import ACTIVATIONS, MAX_LAYERS, MAX_REAL, MAX_SIZE, ModelConfig, RopeScaling
from jspec.config.verification import VERIFICATIONS, Verification

__all__ = ["ACTIVATIONS", "ATTENTION_BACKENDS", "CHUNK_COST", "DTYPES", "KV_DTYPES", "MAX_LAYERS",
           "MAX_REAL", "MAX_SIZE", "NUMERICS", "VERIFICATIONS", "EngineConfig", "ModelConfig",
           "RopeScaling", "Verification"]
