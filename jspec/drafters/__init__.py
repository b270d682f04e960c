"""Every drafter, by the name `speculative_config["method"]` knows it under."""

from __future__ import annotations

import dataclasses
from typing import Any

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

# name -> build(DrafterSetup) -> (Drafter, its parameters)
DRAFTERS = {
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


def build(setup: DrafterSetup) -> tuple[Drafter, Any]:
  """The drafter of setup.spec.method, two of them for a joined one such as "ngram+eagle3"."""
  if len(setup.spec.parts) == 1:
    return DRAFTERS[setup.spec.method](setup)
  lookup, neural = setup.spec.parts
  second, second_params = DRAFTERS[neural](setup)
  tokens = setup.spec.num_lookup_tokens or setup.spec.num_speculative_tokens or second.max_depth
  spec = dataclasses.replace(setup.spec, num_speculative_tokens=tokens, tree_paths=None,
                             tree_widths=None, num_lookup_tokens=0)
  first, first_params = DRAFTERS[lookup](dataclasses.replace(setup, spec=spec))
  return combined.combine(first, first_params, second, second_params)


__all__ = ["DRAFTERS", "Drafter", "DrafterSetup", "build"]
