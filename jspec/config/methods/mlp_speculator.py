"""Options of method "mlp_speculator"."""

from __future__ import annotations

import dataclasses

from jspec.config.checks import check_int
from jspec.config.methods.options import HeadOptions


@dataclasses.dataclass(frozen=True)
class MlpSpeculatorOptions(HeadOptions):
  n_candidates: int = 0  # complete paths kept of a candidate tree, 0 is none

  def __post_init__(self):
    super().__post_init__()
    check_int("n_candidates", self.n_candidates, 0)
    self.check_one_shape(("a static tree", self.tree_paths),
                         ("n_candidates", self.n_candidates and not self.tree_paths))
    self.check_not_sampled(self.n_candidates)
