"""The draft tree that suits a head's measured accuracies: Medusa's search."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from jspec.config.draft_trees import Path


def search(accuracy: Sequence[Sequence[float]], num_nodes: int) -> tuple[Path, ...]:
  """The tree of num_nodes draft tokens that Medusa's greedy search finds, best node first.

  A node is accepted with the product of the accuracies along its path (Cai et al. 2024, section
  2.3.3), taking heads as independent; the sum over the nodes is the expected accepted length.
  Where accuracies fall with the rank no tree of that size has more. Of equals, the shallower node
  is first, then the one of lower ranks.

  Args:
    accuracy: [head][rank], how often the true token has that rank, as `measure` counts it.
  """
  room, below = 0, 1
  for ranks in accuracy:
    below *= len(ranks)
    room += below
  if not 1 <= num_nodes <= room:
    raise ValueError(f"{num_nodes=} must lie in 1..{room}, the paths that these accuracies of "
                     f"{len(accuracy)} heads are about")
  found: list[Path] = []
  # Next siblings and first children of the nodes found; entries compare in the order of choice.
  best: list[tuple[float, int, Path, float]]  # ..., what the parent is accepted with
  best = [(-float(accuracy[0][0]), 1, (0,), 1.0)]
  while len(found) < num_nodes:
    negative, depth, path, parent = heapq.heappop(best)
    found.append(path)
    sibling = path[-1] + 1
    if sibling < len(accuracy[depth - 1]):
      heapq.heappush(best, (-parent * float(accuracy[depth - 1][sibling]), depth,
                            (*path[:-1], sibling), parent))
    if depth < len(accuracy) and len(accuracy[depth]):
      heapq.heappush(best, (negative * float(accuracy[depth][0]), depth + 1, (*path, 0),
                            -negative))
  return tuple(found)


def expected_length(accuracy: Sequence[Sequence[float]], paths: Sequence[Path]) -> float:
  """Draft tokens accepted per step, taking heads as independent."""
  return float(sum(np.prod([accuracy[d][rank] for d, rank in enumerate(path)]) for path in paths))


def measure(top: np.ndarray, true: np.ndarray) -> np.ndarray:
  """float64[H, R]: how often the token that head h was to predict is its r-th likeliest.

  Args:
    top: int[T, H, R], tokens at each position, likeliest first.
    true: int[T, H], the tokens there were; negative where there was none.
  """
  known = true >= 0
  if not known.any(0).all():
    raise ValueError(f"head {int(np.argmin(known.any(0)))} has no position to be measured at")
  hit = (top == true[..., None]) & known[..., None]
  return hit.sum(0) / known.sum(0)[:, None]
