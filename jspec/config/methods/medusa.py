"""Options of method "medusa"."""

from __future__ import annotations

import dataclasses

from jspec.config.methods.options import HeadOptions


@dataclasses.dataclass(frozen=True)
class MedusaOptions(HeadOptions):

  def __post_init__(self):
    super().__post_init__()
    self.check_one_shape(("a static tree", self.tree_paths))
