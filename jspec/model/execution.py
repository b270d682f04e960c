"""How a model is computed, as against what it is (ModelConfig)."""

from __future__ import annotations

import dataclasses

from jspec.model.attention import Attend
from jspec.pallas import reference


@dataclasses.dataclass(frozen=True)
class Execution:
  """Static choices of whoever runs a model, the same for all of its layers."""

  attend: Attend = reference.paged_attention  # over KV pages
  bitwise: bool = False  # a row's result does not depend on how many rows go with it


FAST = Execution()
