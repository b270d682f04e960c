"""Options of method "draft_model"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jspec.config import draft_trees
from jspec.config.checks import check_int
from jspec.config.methods.options import ModelOptions


@dataclasses.dataclass(frozen=True)
class DraftModelOptions(ModelOptions):
  tree_widths: tuple[int, ...] | None = None  # children per node at each depth; None: a chain
  draft_tensor_parallel_size: int = 1  # devices that share the draft model; 1: each has all of it

  @classmethod
  def of_keys(cls, keys: Mapping[str, Any]) -> Self:
    if "tree_widths" not in keys:
      return cls(**keys)
    return cls(**{**keys, "tree_widths": draft_trees.parse_widths(keys["tree_widths"])})

  def __post_init__(self):
    super().__post_init__()
    check_int("draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1)
    if self.tree_widths is not None:
      draft_trees.check_widths(self.tree_widths)
    self.check_one_shape(("a static tree", self.tree_widths))

  @property
  def default_tokens(self) -> int | None:
    return None if self.tree_widths is None else len(self.tree_widths)

  def check_tokens(self, tokens: int) -> None:
    check_int("num_speculative_tokens", tokens, 1)
    if self.tree_widths is not None and len(self.tree_widths) != tokens:
      raise ValueError(f"tree_widths must have one number per depth: got {len(self.tree_widths)} "
                       f"for num_speculative_tokens={tokens}")

  @property
  def is_sampled_chain(self) -> bool:
    return self.is_sampled and self.tree_widths is None
