"""Hugging Face folders of small random models."""

from __future__ import annotations

import numpy as np
import safetensors.numpy

from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.weights import (
  checkpoint_shapes,
  hf_names,
)

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 16, "head_dim": 8}
OPT = {"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
       "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128}
CONFIGS = {name: model_config_from_hf(config) for name, config in {
  "llama": LLAMA, "tied": {**LLAMA, "tie_word_embeddings": True},
  "biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
  "qwen2": {**LLAMA, "model_type": "qwen2"}, "qwen3": {**LLAMA, "model_type": "qwen3"},
  "mistral": {**LLAMA, "model_type": "mistral"}, "gemma": GEMMA, "opt": OPT}.items()}
CONFIG = CONFIGS["llama"]


def random_tensors(config, prefix=None):
  names, rng = hf_names(config, prefix), np.random.default_rng(0)
  return {names[path]: rng.normal(size=shape).astype(np.float32)
          for path, shape in checkpoint_shapes(config).items()}


def save(folder, tensors, name="model.safetensors"):
  safetensors.numpy.save_file(tensors, folder / name)
  return folder
