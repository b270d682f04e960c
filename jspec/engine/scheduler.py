"""Queues, admission, preemption: which request gets which slot and pages. No jax."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import Any

from jspec.engine.pages import PageAllocator, PageKeys
from jspec.engine.request import Request


@dataclasses.dataclass(eq=False)
class Tenant:
  """A request in a slot. Preempted, it comes back as another tenant."""

  request: Request
  slot: int
  order: tuple[int, int]  # priority, arrival
  text: list[int]  # to prefill: the prompt, and what was generated before but the last token
  pages: list[int]
  done: int  # tokens of text in the cache, or on their way there
  keys: PageKeys
  has_begun: bool = False  # the device knows it
  is_active: bool = False  # all of text was prefilled: the device takes steps for it
  in_flight: int = 0  # tokens at most that steps under way may commit

  @property
  def committed(self) -> int:
    """Tokens whose KV is known to be in the cache, or on its way there by prefill."""
    if not self.is_active:
      return self.done
    request = self.request
    return len(request.prompt_ids) + max(0, len(request.tokens) - 1)

  def reach(self, more: int) -> int:
    """Tokens that may be committed once what is in flight has landed, and so many more."""
    most = len(self.request.prompt_ids) + self.request.limit
    return min(self.committed + self.in_flight + more, most)


class Scheduler:
  """By priority, then first come, first served.

  A request that needs its prompt's log-probabilities has all of it computed: pages that are found
  again have none. What it writes is found by others.

  A request is admitted when a slot is free, and pages for its text and a step beyond it; it gets
  more as it grows. Where none are left, the last in order is preempted: it gives up its slot
  and pages and waits at its old place in the queue, to have its text computed again.

  Args:
    lookahead: positions a step may write beyond the committed tokens.
    caching: whether pages are found again by their contents (prefix caching).
  """

  def __init__(self, num_slots: int, num_pages: int, page_size: int, lookahead: int,
               caching: bool = True):
    self.page_size = page_size
    self.lookahead = lookahead
    self.caching = caching
    self.allocator = PageAllocator(num_pages)
    self.running: dict[int, Tenant] = {}  # by slot
    self._waiting: list[tuple[tuple[int, int], Request]] = []  # in order
    self._free_slots = list(range(num_slots - 1, -1, -1))
    self._arrivals = itertools.count()
    self.prefix_queries = self.prefix_hits = self.num_preemptions = 0

  @property
  def waiting(self) -> list[Request]:
    return [request for _, request in self._waiting]

  @property
  def num_waiting(self) -> int:
    return len(self._waiting)

  def counts(self) -> dict[str, Any]:
    """Its part of EngineStats, by field."""
    return dict(num_running=len(self.running), num_waiting=self.num_waiting,
                num_pages=self.allocator.num_pages, num_free_pages=self.allocator.num_free,
                prefix_queries=self.prefix_queries, prefix_hits=self.prefix_hits,
                num_preemptions=self.num_preemptions)

  def _pages(self, num_tokens: int) -> int:
    return -(-num_tokens // self.page_size)

  def most_pages(self, request: Request) -> int:
    """With its longest output, and the draft tokens of the last step."""
    return self._pages(len(request.prompt_ids) + request.limit + self.lookahead)

  def add(self, request: Request) -> None:
    if self.most_pages(request) > self.allocator.num_pages:
      raise ValueError(
          f"request {request.request_id} needs {self.most_pages(request)} pages of "
          f"{self.page_size} tokens, but the cache has {self.allocator.num_pages}: raise num_pages "
          "or lower max_tokens")
    self._enqueue((request.priority, next(self._arrivals)), request)

  def _enqueue(self, order: tuple[int, int], request: Request) -> None:
    bisect.insort(self._waiting, (order, request), key=lambda entry: entry[0])

  @property
  def next(self) -> Request | None:
    """Whose turn it is to be admitted."""
    return self._waiting[0][1] if self._waiting else None

  def admit_next(self) -> Tenant | None:
    """Moves the first request of the queue into a slot, if there is one with room for it."""
    if not self._waiting or not self._free_slots:
      return None
    tenant = self._place(*self._waiting[0])
    if tenant is not None:
      del self._waiting[0]
      self.running[tenant.slot] = tenant
    return tenant

  def _place(self, order: tuple[int, int], request: Request) -> Tenant | None:
    """The request in a free slot, on pages with its text's beginning where these are there."""
    text = [*request.prompt_ids, *request.tokens[:-1]]
    keys = PageKeys(self.page_size, request.cache_salt)
    found = self.allocator.find(keys.upto(text, len(text))) if self._looks_up(request) else []
    needed = self._pages(len(text) + self.lookahead) - len(found)
    # The others' next pages: whoever comes in must not throw somebody out at once.
    spare = self.allocator.num_free - self.allocator.num_idle(found) - len(self.running)
    if needed > spare:
      return None
    self.allocator.share(found)
    pages = [*found, *self.allocator.allocate(needed)]
    return Tenant(request, self._free_slots.pop(), order, text, pages,
                  len(found) * self.page_size, keys)

  def _looks_up(self, request: Request) -> bool:
    return self.caching and not request.lacks_prompt_logprobs

  def begin(self, tenant: Tenant) -> None:
    """To be called before its first prefill: by now others may have written its beginning."""
    if not self._looks_up(tenant.request):
      return
    had = tenant.done // self.page_size
    found = self.allocator.find(tenant.keys.upto(tenant.text, len(tenant.text)))
    if len(found) > had:
      self.allocator.share(found[had:])
      self.allocator.free(tenant.pages[had:len(found)])
      tenant.pages[had:len(found)] = found[had:]
      tenant.done = len(found) * self.page_size
    if not tenant.request.admitted_at:  # else it comes back after a preemption
      self.prefix_queries += len(tenant.text)
      self.prefix_hits += tenant.done

  def missing(self, tenant: Tenant, num_tokens: int) -> int:
    """Pages it lacks for that many tokens and a step beyond."""
    return max(0, self._pages(num_tokens + self.lookahead) - len(tenant.pages))

  def grow(self, tenant: Tenant, num_tokens: int) -> bool:
    """Gives the tenant pages for that many tokens and a step beyond; False if too few are free."""
    missing = self.missing(tenant, num_tokens)
    if missing > self.allocator.num_free:
      return False
    tenant.pages += self.allocator.allocate(missing)
    return True

  def last(self) -> Tenant:
    """Whom to preempt."""
    return max(self.running.values(), key=lambda tenant: tenant.order)

  def preempt(self, tenant: Tenant) -> None:
    """Back into the queue, with the tokens it has."""
    self.num_preemptions += 1
    self.finish(tenant)
    self._enqueue(tenant.order, tenant.request)

  def finish(self, tenant: Tenant) -> None:
    """Its slot and pages are free; what the pages hold may be found again."""
    self.publish(tenant)
    self._vacate(tenant)

  def _vacate(self, tenant: Tenant) -> None:
    del self.running[tenant.slot]
    self.allocator.free(tenant.pages)
    self._free_slots.append(tenant.slot)

  def publish(self, tenant: Tenant) -> None:
    """Lets others find the tenant's full pages."""
    if self.caching:
      request = tenant.request
      keys = tenant.keys.upto([*request.prompt_ids, *request.tokens], tenant.committed)
      self.allocator.publish(tenant.pages[:len(keys)], keys)

  def abort(self, request: Request) -> Tenant | None:
    """Forgets a request that waits or runs; its tenant, if it had a slot."""
    tenant = self._tenant(request)
    if tenant is not None:
      self.finish(tenant)
    self._leave_queue(request)
    return tenant

  def drop(self, request: Request) -> Tenant | None:
    """`abort` of a request that failed: what its pages hold is not to be found again."""
    tenant = self._tenant(request)
    if tenant is not None:
      self.allocator.withdraw(tenant.pages)
      self._vacate(tenant)
    self._leave_queue(request)
    return tenant

  def _tenant(self, request: Request) -> Tenant | None:
    return next((t for t in self.running.values() if t.request is request), None)

  def _leave_queue(self, request: Request) -> None:
    self._waiting = [entry for entry in self._waiting if entry[1] is not request]

  def knows(self, request: Request) -> bool:
    """Whether it waits or runs."""
    return self._tenant(request) is not None or any(
        other is request for _, other in self._waiting)
