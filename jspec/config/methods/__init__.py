"""The options of every method, by the name `speculative_config["method"]` knows it under."""

from __future__ import annotations

from jspec.config.methods.draft_model import DraftModelOptions
from jspec.config.methods.eagle import EagleOptions
from jspec.config.methods.hidden_states import HiddenStatesOptions
from jspec.config.methods.medusa import MedusaOptions
from jspec.config.methods.mlp_speculator import MlpSpeculatorOptions
from jspec.config.methods.ngram import NgramOptions
from jspec.config.methods.options import HeadOptions, LookupOptions, ModelOptions, Options
from jspec.config.methods.suffix import SuffixOptions

OPTIONS: dict[str, type[Options]] = {
  "none": Options,
  "ngram": NgramOptions,
  "suffix": SuffixOptions,
  "draft_model": DraftModelOptions,
  "medusa": MedusaOptions,
  "mlp_speculator": MlpSpeculatorOptions,
  "eagle": EagleOptions,
  "eagle3": EagleOptions,
  "extract_hidden_states": HiddenStatesOptions,
}

__all__ = ["OPTIONS", "HeadOptions", "LookupOptions", "ModelOptions", "Options"]
