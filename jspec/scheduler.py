"""Queues and admission: which request gets which slot and pages. No jax."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from jspec.pages import PageAllocator
from jspec.request import Request


class Scheduler:
  """First come, first served. A request is admitted when a slot and all its pages are free.

  All its pages: those for its prompt, its longest output and the draft tokens of a last step. So
  an admitted request never has to wait for another one to finish.
  """

  def __init__(self, num_slots: int, num_pages: int, page_size: int, lookahead: int):
    self.page_size = page_size
    self.lookahead = lookahead  # positions a step may write beyond the committed tokens
    self.allocator = PageAllocator(num_pages)
    self.waiting: collections.deque[Request] = collections.deque()
    self.running: dict[int, Request] = {}  # by slot
    self._free_slots = list(range(num_slots - 1, -1, -1))
    self._pages: dict[int, list[int]] = {}

  def pages_for(self, request: Request) -> int:
    tokens = len(request.prompt_ids) + request.limit + self.lookahead
    return -(-tokens // self.page_size)

  def add(self, request: Request) -> None:
    if self.pages_for(request) > self.allocator.num_pages:
      raise ValueError(
          f"request {request.request_id} needs {self.pages_for(request)} pages of "
          f"{self.page_size} tokens, but the cache has {self.allocator.num_pages}: raise num_pages "
          "or lower max_tokens")
    self.waiting.append(request)

  def admit(self) -> Iterator[tuple[int, Request, list[int]]]:
    """Moves requests from the queue into slots, in order, as long as there is room."""
    while self.waiting and self._free_slots:
      needed = self.pages_for(self.waiting[0])
      if needed > self.allocator.num_free:
        return
      request = self.waiting.popleft()
      slot = self._free_slots.pop()
      self._pages[slot] = self.allocator.allocate(needed)
      self.running[slot] = request
      yield slot, request, self._pages[slot]

  def pages(self, slot: int) -> list[int]:
    return self._pages[slot]

  def finish(self, slot: int) -> None:
    del self.running[slot]
    self.allocator.free(self._pages.pop(slot))
    self._free_slots.append(slot)

  def abort(self, request: Request) -> int | None:
    """Forgets the request; its slot if it had one."""
    if request in self.waiting:
      self.waiting.remove(request)
      return None
    slot = next((s for s, r in self.running.items() if r is request), None)
    if slot is not None:
      self.finish(slot)
    return slot
