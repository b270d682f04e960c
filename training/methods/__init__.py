"""Every kind of drafter that can be trained, by the name TrainConfig.method knows it under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jspec.config import ModelConfig
from jspec.training.methods import draft_model, eagle1, eagle3, medusa, medusa2, mlp_speculator
from jspec.training.types import Method


class Recipe(NamedTuple):
  """A method before its options are chosen."""

  options: type  # a frozen dataclass
  make: Callable[..., Method]  # (options, target), and the draft vocabulary where it has one
  has_draft_vocabulary: bool
  speculative_method: str  # the drafter that uses what comes out


METHODS: dict[str, Recipe] = {
    "eagle3": Recipe(eagle3.Eagle3Options, eagle3.make, True, "eagle3"),
    "eagle": Recipe(eagle1.Eagle1Options, eagle1.make, False, "eagle"),
    "medusa": Recipe(medusa.MedusaOptions, medusa.make, True, "medusa"),
    "medusa2": Recipe(medusa2.Medusa2Options, medusa2.make, True, "medusa"),
    "mlp_speculator": Recipe(mlp_speculator.MlpSpeculatorOptions, mlp_speculator.make, False,
                             "mlp_speculator"),
    "draft_model": Recipe(draft_model.DraftModelOptions, draft_model.make, False, "draft_model"),
}


def make_method(name: str, options: Any, target: ModelConfig,
                target_id: np.ndarray | None) -> Method:
  """target_id: i32[Vd], the draft vocabulary; None: the target's own."""
  recipe = METHODS[name]
  if recipe.has_draft_vocabulary:
    return recipe.make(options, target, target_id)
  if target_id is not None:
    known = ", ".join(n for n, r in METHODS.items() if r.has_draft_vocabulary)
    raise ValueError(f"method {name!r} drafts from the target's whole vocabulary, got a draft "
                     f"vocabulary of {len(target_id)} tokens; {known} can have one")
  return recipe.make(options, target)


__all__ = ["METHODS", "Recipe", "make_method"]
