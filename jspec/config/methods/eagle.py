"""Options of methods "eagle" and "eagle3"."""

from __future__ import annotations

import dataclasses

from jspec.config.checks import check_int
from jspec.config.draft_trees import check_size
from jspec.config.methods.options import HeadOptions


@dataclasses.dataclass(frozen=True)
class EagleOptions(HeadOptions):
  tree_top_k: int = 0  # dynamic trees (EAGLE-2): nodes expanded at each depth, 0: a static shape
  tree_total_tokens: int = 0  # nodes of a dynamic tree, root included

  def __post_init__(self):
    super().__post_init__()
    for name in ("tree_total_tokens", "tree_top_k"):
      check_size(name, check_int(name, getattr(self, name), 0))
    if bool(self.tree_top_k) != bool(self.tree_total_tokens):
      raise ValueError("a dynamic tree needs tree_top_k and tree_total_tokens, got "
                       f"tree_top_k={self.tree_top_k}, tree_total_tokens={self.tree_total_tokens}")
    self.check_one_shape(("a static tree", self.tree_paths), ("tree_top_k", self.tree_top_k))
    self.check_not_sampled(self.tree_top_k)
