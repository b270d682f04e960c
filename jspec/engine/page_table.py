"""The host's copy of the device's page table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.model.cache import NOWHERE


class PageTable:
  """Which pages each slot has, in order; beyond them a row leads out of the pool: writes drop.

  rows: i32[B, max_pages], never written in place: the device may be reading it.
  """

  def __init__(self, num_slots: int, max_pages: int):
    self.rows = np.full((num_slots, max_pages), NOWHERE, np.int32)

  def write(self, slot: int, pages: Sequence[int]) -> bool:
    """Whether that changed anything."""
    row = np.full(self.rows.shape[1], NOWHERE, np.int32)
    row[:len(pages)] = pages
    if (row == self.rows[slot]).all():
      return False
    self.rows = self.rows.copy()
    self.rows[slot] = row
    return True
