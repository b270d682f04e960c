"""Tiny models of each family, with what transformers makes of them."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.tensors import write_safetensors
from jspec.checkpoints.weights import load_params

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
FAMILIES = ("llama_tied", "llama_untied", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma3",
            "opt")
PAGE_SIZE = 16


def family(name, folder):
  """Config, parameters (through a safetensors file), ids and golden logits of a tiny model."""
  with np.load(GOLDENS / "families.npz") as file:
    arrays = {key.removeprefix(f"{name}/"): file[key] for key in file if key.startswith(f"{name}/")}
  config = model_config_from_hf(json.loads(str(arrays["config"])))
  weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w/")}
  write_safetensors(folder / "model.safetensors",
                    {key: value.shape for key, value in weights.items()}, weights.__getitem__)
  return config, load_params(folder, config), arrays["ids"], arrays["logits"]
