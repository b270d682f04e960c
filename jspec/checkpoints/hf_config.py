"""config.json (Hugging Face) or GGUF metadata -> ModelConfig, by the family that they name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.families import FAMILIES
from jspec.checkpoints.families.gguf_keys import GGUFKeys
from jspec.checkpoints.families.hf_keys import NULL_SAYS, brief, refuse
from jspec.config import ModelConfig
from jspec.config.checks import check_mapping


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
  """The ModelConfig of a Hugging Face config.json; ValueError names what is not supported."""
  model_type = config.get("model_type")
  families = {kind: family for family in FAMILIES.values()
              for kind in (family.wrapper, family.model_type) if kind is not None}
  if not isinstance(model_type, str) or model_type not in families:
    raise ValueError(f"model_type {brief(model_type)} is not supported; "
                     f"supported: {', '.join(families)}")
  family = families[model_type]
  if model_type == family.wrapper:
    refuse(config, model_type, family.applied)
    text = check_mapping("config.json: text_config", config.get("text_config") or {})
    tied = config.get("tie_word_embeddings")
    config = text if text.get("tie_word_embeddings") is not None else {
        **text, "tie_word_embeddings": tied}
  said = {key: value for key, value in config.items() if value is not None or key in NULL_SAYS}
  config = {**family.defaults, **said}
  refuse(config, family.model_type, family.applied)
  return family.from_hf(config)


def hf_config_from_model(config: ModelConfig) -> dict[str, Any]:
  """config.json of a model; model_config_from_hf is its inverse.

  Raises ValueError for families of which nothing is written.
  """
  family = FAMILIES[config.family]
  if family.to_hf is None:
    raise ValueError(f"no config.json is written for models of family {family.name!r}, only for "
                     f"{', '.join(written_families())}")
  return {"model_type": family.model_type, "architectures": [family.architecture],
          **family.to_hf(config)}


def written_families() -> list[str]:
  """The families that hf_config_from_model knows."""
  return [family.name for family in FAMILIES.values() if family.to_hf is not None]


def model_config_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str] = (),
                           rope_factors: np.ndarray | None = None) -> ModelConfig:
  """The ModelConfig of a GGUF file.

  Args:
    metadata: the file's key-value pairs.
    tensor_names: names of its tensors; without `output.weight` the embeddings are tied.
    rope_factors: its `rope_freqs.weight`, where Llama 3 files keep their frequency scaling.
  """
  architecture = metadata.get("general.architecture")
  readers = {family.name: family.from_gguf for family in FAMILIES.values()
             if family.from_gguf is not None}
  if not isinstance(architecture, str) or architecture not in readers:
    raise ValueError(f"GGUF architecture {architecture!r} is not supported; "
                     f"supported: {', '.join(readers)}")
  return readers[architecture](GGUFKeys(architecture, metadata, tensor_names, rope_factors))
