"""Token trees: shapes as tuples of parents on the host, masks and paths on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import draft_trees
from jspec.types import NO_PARENT


class Shape(NamedTuple):
  """A static tree whose nodes are ranks: child 0 is the likeliest token after its parent."""

  parents: tuple[int, ...]  # breadth-first, root first
  rank: tuple[int, ...]  # 0 for the root

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @property
  def depth(self) -> tuple[int, ...]:
    return depths(self.parents)

  @property
  def max_depth(self) -> int:
    return max(self.depth)

  @property
  def is_chain(self) -> bool:
    return self.num_nodes == self.max_depth + 1

  def children(self, node: int) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(self.parents) if p == node)


def shape_of(paths: Sequence[Sequence[int]]) -> Shape:
  """The tree of Medusa-style choices: each path holds a rank for every depth."""
  ordered = sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
  return Shape(from_paths(ordered), (0, *(p[-1] for p in ordered)))


def chain(num_draft: int) -> tuple[int, ...]:
  """Parents of a root followed by num_draft tokens, one after another."""
  return tuple(range(NO_PARENT, num_draft))


def from_paths(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
  """Parents of Medusa-style choices, e.g. [(0,), (1,), (0, 0)]: breadth-first, root first."""
  nodes = [()] + sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
  if len(set(nodes)) != len(nodes):
    raise ValueError(f"tree paths repeat: {sorted(p for p in nodes if nodes.count(p) > 1)}")
  missing = [p for p in nodes if p and p[:-1] not in nodes]
  if missing:
    raise ValueError(f"tree path {missing[0]} has no parent {missing[0][:-1]} among the paths")
  return tuple(NO_PARENT if not p else nodes.index(p[:-1]) for p in nodes)


def from_widths(widths: Sequence[int]) -> tuple[int, ...]:
  """Parents of the tree whose nodes at depth d have widths[d] children each."""
  return from_paths(draft_trees.of_widths(widths))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
  """Depth of each node of a host-side tree."""
  out: list[int] = []
  for p in parents:
    out.append(0 if p == NO_PARENT else out[p] + 1)
  return tuple(out)


def ancestors(parent: jax.Array, max_depth: int) -> jax.Array:
  """bool[B, N, N]: whether column j is row i's ancestor or i itself."""
  n = parent.shape[-1]
  reach = jax.nn.one_hot(parent, n, dtype=jnp.float32) + jnp.eye(n)
  for _ in range(math.ceil(math.log2(max(max_depth, 1)))):
    reach = jnp.minimum(reach @ reach, 1.0)
  return reach > 0


def used(parent: jax.Array) -> jax.Array:
  """bool[B, N]: the root and every node with a parent."""
  return (parent != NO_PARENT) | (jnp.arange(parent.shape[-1]) == 0)


def along_path(x: jax.Array, path: jax.Array) -> jax.Array:
  """x[B, N, ...] at the nodes path[B, D + 1]."""
  return jnp.take_along_axis(x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1)
