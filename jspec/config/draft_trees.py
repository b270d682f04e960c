"""Static draft trees as Medusa writes them: lists of paths, a path being a rank for every depth.

[(0,), (1,), (0, 0)] is the two likeliest tokens after the root, and the likeliest after the first.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.config.checks import check_int

Path = tuple[int, ...]
# Tokens of a draft. A step lays out, for every slot, which of them sees which, and memory and time
# go with the square of their number.
MAX_DRAFT = 1024

# As published beside the heads (FasterDecoding/Medusa).
CHOICES: Mapping[str, tuple[Path, ...]] = {
  "mc_sim_7b_63": (
    (0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3), (4,), (0, 4),
    (2, 0), (0, 5), (0, 0, 1), (5,), (0, 6), (6,), (0, 7), (0, 1, 0), (1, 1), (7,), (0, 8),
    (0, 0, 2), (3, 0), (0, 9), (8,), (9,), (1, 0, 0), (0, 2, 0), (1, 2), (0, 0, 3), (4, 0), (2, 1),
    (0, 0, 4), (0, 0, 5), (0, 0, 0, 0), (0, 1, 1), (0, 0, 6), (0, 3, 0), (5, 0), (1, 3), (0, 0, 7),
    (0, 0, 8), (0, 0, 9), (6, 0), (0, 4, 0), (1, 4), (7, 0), (0, 1, 2), (2, 0, 0), (3, 1), (2, 2),
    (8, 0), (0, 5, 0), (1, 5), (1, 0, 1), (0, 2, 1), (9, 0), (0, 6, 0), (0, 0, 0, 1), (1, 6),
    (0, 7, 0)),
}


def parse(value: Any) -> tuple[Path, ...]:
  """The paths of a tree given by name, as lists, or as vLLM's text of a list of tuples."""
  if isinstance(value, str):
    if value in CHOICES:
      return CHOICES[value]
    try:
      value = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
      raise ValueError(f"draft tree {value!r} is neither a list of paths such as "
                       f"[(0,), (1,), (0, 0)] nor one of {', '.join(CHOICES)}") from None
  if not _is_list(value) or not value:
    raise ValueError(f"a draft tree is a list of paths such as [(0,), (1,), (0, 0)], got {value!r}")
  for path in value:
    if not _is_list(path) or not path or not all(_is_rank(x) for x in path):
      raise ValueError(f"draft tree path {path!r} is not a list of ranks, whole numbers from 0")
  paths = tuple(tuple(path) for path in value)
  seen = set(paths)
  for path in paths:
    if path not in seen:
      raise ValueError(f"draft tree path {path} is there twice")
    seen.remove(path)
  known = {(), *paths}
  for path in paths:
    if path[:-1] not in known:
      raise ValueError(f"draft tree path {path} has no parent: {path[:-1]} is not a path")
  return paths


def _is_list(value: Any) -> bool:
  return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_rank(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def of_widths(widths: Sequence[int]) -> tuple[Path, ...]:
  """The paths of the tree whose nodes at depth d have widths[d] children each, breadth-first."""
  paths: list[Path] = []
  frontier: list[Path] = [()]
  for width in widths:
    frontier = [(*path, rank) for path in frontier for rank in range(width)]
    paths += frontier
  return tuple(paths)


def parse_widths(value: Any) -> tuple[int, ...]:
  """The numbers of children per node at each depth."""
  if not _is_list(value) or not value:
    raise ValueError("tree_widths must be a list with one number of children per depth, such as "
                     f"[4, 2, 1], got {value!r}")
  check_widths(value)
  return tuple(value)


def check_widths(widths: Sequence[int]) -> None:
  """ValueError unless these are numbers of children per node, of a tree that is no giant."""
  nodes, level = 0, 1
  for width in widths:
    level *= check_int("each of tree_widths", width, 1)
    nodes += level
    check_size("the number of nodes of tree_widths", nodes)


def check_size(name: str, size: Any) -> None:
  if isinstance(size, int) and size > MAX_DRAFT:
    raise ValueError(f"{name} must be <= {MAX_DRAFT}, got {size}: each step has a mask of all "
                     "drafted tokens by all drafted tokens")
