"""What the host hands to the device: numpy, alike in all processes of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.config.speculative import SpeculativeConfig
from jspec.engine.goodput import Clock
from jspec.engine.request import Request
from jspec.engine.scheduler import Tenant
from jspec.engine.slot_sampling import sampling_row
from jspec.model.cache import NOWHERE
from jspec.speculation.drafter import Feed
from jspec.types import SlotRequest, StepInputs

STRAGGLERS, EVERYBODY = 2.0, 1000.0  # whose tokens count, see plan.plan

Blaming = Callable[[Request], contextlib.AbstractContextManager[None]]  # an error ends it alone


class PageTable:
  """The host's copy: which pages each slot has; beyond them a row leads nowhere, and writes drop.

  rows: i32[B, max_pages], never written in place: the device may be reading it.
  """

  def __init__(self, num_slots: int, max_pages: int):
    self.rows = np.full((num_slots, max_pages), NOWHERE, np.int32)
    self._is_stale = False  # whether the device has not seen the latest rows

  def write(self, tenant: Tenant) -> None:
    row = np.full(self.rows.shape[1], NOWHERE, np.int32)
    row[:len(tenant.pages)] = tenant.pages
    if (row == self.rows[tenant.slot]).all():
      return
    self.rows = self.rows.copy()
    self.rows[tenant.slot] = row
    self._is_stale |= tenant.is_active  # else `admit` brings it along

  def take_news(self) -> np.ndarray | None:
    """The rows, if the device has not seen them; it has from now on."""
    stale, self._is_stale = self._is_stale, False
    return self.rows if stale else None


class Inputs:
  """Makes the StepInputs of each device loop.

  Args:
    target, draft: parameter trees; where the drafter has a feed, its own come from that.
    cost: f32[W] of the steps' widths, see Clock.correction.
  """

  def __init__(self, target: Any, draft: Any, feed: Feed | None, spec: SpeculativeConfig,
               num_slots: int, clock: Clock):
    self.target, self.draft, self.feed, self.spec, self.clock = target, draft, feed, spec, clock
    self._num_slots = num_slots
    self._fed: dict[int, Request] = {}  # by slot, for whom `draft` was made
    if feed is not None:
      self.draft = feed.params([None] * num_slots)

  def feed_new(self, running: dict[int, Request], blaming: Blaming) -> None:
    """`feed_all`, if somebody is new here."""
    if any(self._fed.get(slot) is not request for slot, request in running.items()):
      self.feed_all(running, blaming)

  def feed_all(self, running: dict[int, Request], blaming: Blaming) -> None:
    """Makes the drafter's parameters from the texts as they are, if they come from the host."""
    if self.feed is None:
      return
    ends: list[tuple[int, ...] | None] = [None] * self._num_slots
    for slot, request in running.items():
      with blaming(request):
        ends[slot] = request.last_tokens(self.feed.context)
    self._fed, self.draft = running, self.feed.params(ends)

  def drafting(self, running: dict[int, Request]) -> bool:
    """Whether the next loop, of these, may draft."""
    return (self.spec.draft_tokens_at(len(running)) > 0
            and any(r.params.num_speculative_tokens != 0 for r in running.values())
            and self.clock.drafts(len(running)))

  def of_step(self, num_running: int = 1, drafting: bool = True,
              lag: float = EVERYBODY) -> StepInputs:
    most = self.spec.draft_tokens_at(num_running) if drafting else 0
    fields: dict[str, Any] = dict(max_draft=np.int32(most), lag=np.float32(lag),
                                  cost=self.clock.correction(drafting))
    return StepInputs(self.target, self.draft, **fields)


def slot_request(tenant: Tenant, page_row: np.ndarray, max_depth: int,
                 vocab_size: int) -> SlotRequest:
  """max_depth: of the drafter's drafts, where the request does not say how deep they may be."""
  request, draft = tenant.request, tenant.request.params.num_speculative_tokens
  fields: dict[str, Any] = dict(
      page_table=page_row, length=np.int32(tenant.done), limit=np.int32(request.limit),
      max_draft=np.int32(max_depth if draft is None else draft), key=request.key,
      sampling=sampling_row(request.row, request.prompt_ids, vocab_size, request.tokens))
  return SlotRequest(**fields)


def prompt_chunk(tenant: Tenant, size: int, count: int) -> np.ndarray:
  """i32[size + 1]: `count` tokens from where the tenant is, and what follows them."""
  request: Request = tenant.request
  text = [*tenant.text[tenant.done:tenant.done + count + 1], *request.tokens[-1:]][:count + 1]
  chunk = np.zeros(size + 1, np.int32)
  chunk[:len(text)] = text
  return chunk
