"""Sequences -> training batches: packed or padded rows, any step by its number alone."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from jspec.training.data.shards import Sequences
from jspec.training.types import Batch

LAYOUTS = ("packed", "padded")


class Batches:
  """The batches of a training run.

  A batch is a pure function of (sequences, seed, step): the position in the data is the step
  number, there is nothing else to save. Each epoch takes every sequence once. That leaves nothing
  for a loader library such as grain to do: sequences are already at hand by number, those larger
  than memory lie in memory-mapped files, and one thread reads ahead faster than a step computes.

  Args:
    rows, length: of a batch, in rows and tokens.
    layout: "packed": several whole sequences per row, told apart by Batch.segment; the same ones
      share a row in every epoch. "padded": one sequence per row, in batches of similar lengths.
    layers: the target's hidden states that become Batch.feature, in this order; (): none.
    hidden: the one that becomes Batch.hidden; None: none.
    limit: tokens of a sequence; 0: `length`.
    cut: shorten sequences longer than the limit, which are refused otherwise.
    buckets: lengths of padded batches, beside `length`; (): a quarter and half of it.
  """

  def __init__(self, sequences: Sequences, rows: int, length: int, seed: int,
               layout: str = "packed", *, layers: Sequence[int] = (), hidden: int | None = None,
               limit: int = 0, cut: bool = False, buckets: Sequence[int] = ()):
    _check_shape(rows, length, layout, buckets)
    self.sequences, self.rows, self.seed = sequences, rows, seed
    self.layers, self.hidden = tuple(layers), hidden
    self._columns = [_layer_columns(sequences, layer)
                     for layer in (*layers, *(() if hidden is None else (hidden,)))]
    self.size = _usable_sizes(sequences, limit or length, cut)  # tokens taken of each, 0: left out
    # By length of the batch: its rows, each a tuple of sequences.
    self._content = (_packed(self.size, length, seed) if layout == "packed" else
                     _padded(self.size, sorted({*(buckets or (length // 4, length // 2)), length})))
    self.epoch_steps = sum(-(-len(content) // rows) for content in self._content.values())
    self._plan = functools.lru_cache(maxsize=2)(self._plan_epoch)

  def batch(self, step: int) -> Batch:
    """Numpy arrays. The last batch of an epoch and length may have rows of padding only."""
    if step < 0:
      raise ValueError(f"{step=} must be >= 0")
    epoch, place = divmod(step, self.epoch_steps)
    length, members = self._plan(epoch)[place]
    shape = (self.rows, length)
    token, segment, position = (np.zeros(shape, np.int32) for _ in range(3))
    loss = np.zeros(shape, bool)
    states = np.zeros((*shape, len(self._columns) * self.sequences.width), ml_dtypes.bfloat16)
    for row, sequences in enumerate(members):
      begin = 0
      for number, i in enumerate(sequences, start=1):
        size = int(self.size[i])
        here = slice(begin, begin + size)
        own = self.sequences.span(i)
        token[row, here] = self.sequences.token[own][:size]
        loss[row, here] = self.sequences.loss[own][:size]
        segment[row, here], position[row, here] = number, np.arange(size)
        if self._columns:
          self._gather(i, states[row, here])
        begin += size
    split = len(self.layers) * self.sequences.width
    fields: dict[str, Any] = dict(
        token=token, segment=segment, position=position, loss=loss,
        feature=states[..., :split] if self.layers else None,
        hidden=None if self.hidden is None else states[..., split:])
    return Batch(**fields)

  def stream(self, step: int = 0) -> Generator[Batch, None, None]:
    """The batches from this step on, without end; a thread makes the next one ahead of time."""
    with ThreadPoolExecutor(1) as thread:
      ahead = thread.submit(self.batch, step)
      while True:
        step += 1
        ready, ahead = ahead.result(), thread.submit(self.batch, step)
        yield ready

  def _gather(self, i: int, out: np.ndarray) -> None:
    """Fills [tokens, (layers and hidden) * E] with hidden states of sequence i."""
    width, stored = self.sequences.width, self.sequences.feature(i, len(out))
    for to, column in enumerate(self._columns):
      out[:, to * width:(to + 1) * width] = stored[:, column * width:(column + 1) * width]

  def _plan_epoch(self, epoch: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """(length, rows) of each batch of an epoch."""
    rng = np.random.default_rng([self.seed, epoch])
    batches = []
    for length, content in self._content.items():
      order = rng.permutation(len(content))
      for begin in range(0, len(content), self.rows):
        batches.append((length, [content[i] for i in order[begin:begin + self.rows]]))
    return [batches[i] for i in rng.permutation(len(batches))]


def _packed(size: np.ndarray, length: int, seed: int) -> dict[int, list[tuple[int, ...]]]:
  """Best fit, the longest first, in shuffled order among equals: rows are nearly full."""
  order = np.random.default_rng(seed).permutation(np.flatnonzero(size))
  content: list[list[int]] = []
  free: list[tuple[int, int]] = []  # (room left, row), ascending
  for i in order[np.argsort(-size[order], kind="stable")].tolist():
    at = bisect.bisect_left(free, (int(size[i]), -1))
    if at == len(free):
      free.append((length, len(content)))
      content.append([])
    room, row = free.pop(at)
    content[row].append(i)
    bisect.insort(free, (room - int(size[i]), row))
  return {length: [tuple(row) for row in content]}


def _padded(size: np.ndarray, buckets: list[int]) -> dict[int, list[tuple[int, ...]]]:
  content: dict[int, list[tuple[int, ...]]] = {}
  for i in np.flatnonzero(size).tolist():
    content.setdefault(buckets[bisect.bisect_left(buckets, int(size[i]))], []).append((i,))
  return dict(sorted(content.items()))


def _usable_sizes(sequences: Sequences, limit: int, cut: bool) -> np.ndarray:
  """i64[N], how much to take of each sequence: nothing of one without a token to learn."""
  size = sequences.length
  long = size > limit
  if long.any() and not cut:
    raise ValueError(f"{long.sum()} of {len(size)} sequences are longer than {limit} tokens, the "
                     f"longest has {size.max()} tokens: raise it, or cut them")
  size = np.minimum(size, limit)
  for i in range(len(size)):
    # The first token of a sequence is predicted from nothing.
    if not sequences.loss[sequences.span(i)][1:size[i]].any():
      size[i] = 0
  if not size.any():
    raise ValueError(f"none of {len(size)} sequences has a token to learn within {limit} tokens")
  return size


def _layer_columns(sequences: Sequences, layer: int) -> int:
  """Which of the stored hidden states is this layer's."""
  stored = sequences.origin.layers if sequences.files else ()
  if layer not in stored:
    raise ValueError(f"the hidden states of layer {layer} are not with the sequences, which have "
                     f"those of {list(stored) or 'no layer'}: generate them with --features")
  return stored.index(layer)


def _check_shape(rows: int, length: int, layout: str, buckets: Sequence[int]) -> None:
  if rows < 1 or length < 2:
    raise ValueError(f"a batch needs rows >= 1 and length >= 2, got {rows=}, {length=}")
  if layout not in LAYOUTS:
    raise ValueError(f"layout {layout!r} is not one of {LAYOUTS}")
  if buckets and (layout != "padded" or min(buckets) < 2 or max(buckets) > length):
    raise ValueError(f"buckets={list(buckets)} must lie in 2..{length=} and belong to layout "
                     f"'padded', got {layout!r}")
