"""Every drafter, by the name `speculative_config["method"]` knows it under."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jspec.config.speculative import SpeculativeConfig
from jspec.drafters import (
  combined,
  draft_model,
  eagle,
  hidden_states,
  medusa,
  mlp_speculator,
  ngram,
  none,
  suffix,
)
from jspec.speculation.drafter import Drafter, DrafterSetup

# name -> build(its options, DrafterSetup) -> (Drafter, its parameters)
DRAFTERS: dict[str, Callable[[Any, DrafterSetup], tuple[Drafter, Any]]] = {
    "none": none.build,
    "ngram": ngram.build,
    "suffix": suffix.build,
    "draft_model": draft_model.build,
    "medusa": medusa.build,
    "mlp_speculator": mlp_speculator.build,
    "eagle": eagle.build_eagle,
    "eagle3": eagle.build_eagle3,
    "extract_hidden_states": hidden_states.build,
}


def build(spec: SpeculativeConfig, setup: DrafterSetup) -> tuple[Drafter, Any]:
  """The drafter of spec.method, two of them for a joined one such as "ngram+eagle3"."""
  drafter, params = DRAFTERS[spec.parts[-1]](spec.options[-1], setup)
  if len(spec.parts) == 1:
    return drafter, params
  tokens = spec.num_lookup_tokens or spec.num_speculative_tokens or drafter.max_depth
  lookup, lookup_params = DRAFTERS[spec.parts[0]](
      spec.options[0], dataclasses.replace(setup, num_draft=tokens))
  return combined.combine(lookup, lookup_params, drafter, params)


__all__ = ["DRAFTERS", "Drafter", "DrafterSetup", "build"]
