"""Prompts into slots: admission, and prefill in chunks."""

from __future__ import annotations

import collections
import math
import time

from jspec.config import EngineConfig
from jspec.engine.inputs import Blaming, Inputs, PageTable, prompt_chunk, slot_request
from jspec.engine.programs import Device
from jspec.engine.results import Flight
from jspec.engine.scheduler import Scheduler, Tenant


class Prompts:
  """The half of an engine's turn that comes before its device loop.

  Args:
    flights: where the device's results are put, in order.
    max_depth: of drafts. vocab_size: the target's.
  """

  def __init__(self, config: EngineConfig, scheduler: Scheduler, device: Device, inputs: Inputs,
               table: PageTable, flights: collections.deque[Flight], max_depth: int,
               vocab_size: int):
    self.config, self.scheduler, self.device, self.inputs = config, scheduler, device, inputs
    self._table, self._flights = table, flights
    self._max_depth, self._vocab_size = max_depth, vocab_size
    self.num_tokens = 0  # of all prompts that have got a slot

  def admit(self, blaming: Blaming) -> None:
    """Moves requests from the queue into slots, in order, as long as there is room."""
    while (request := self.scheduler.next) is not None:
      with blaming(request):
        if self.scheduler.admit_next() is None:
          return

  def prefill(self, whole: bool, blaming: Blaming) -> None:
    """Runs chunks of prompts, in order, up to a budget of tokens; at least the smallest one.

    whole: all of them, whoever waits.
    """
    budget = math.inf if whole else self.config.max_num_batched_tokens
    tenants = [t for t in self.scheduler.running.values() if not t.is_active]
    budget -= len(self.scheduler.running) - len(tenants)
    budget = max(budget, self.config.prefill_chunks[0])
    for tenant in sorted(tenants, key=lambda tenant: tenant.order):
      with blaming(tenant.request):
        if budget > 0 and not tenant.has_begun:
          self._begin(tenant)
        while not tenant.is_active and budget > 0:
          budget -= self._chunk(tenant, budget)

  def _begin(self, tenant: Tenant) -> None:
    """Makes the tenant known to the device."""
    self.scheduler.begin(tenant)
    tenant.has_begun = True
    request = tenant.request
    if not request.admitted_at:
      request.admitted_at = time.perf_counter()
      request.num_cached_tokens = tenant.done
      self.num_tokens += len(request.prompt_ids)
    if request.key is None:
      request.key = self.device.key(request.params.seed, request.number)
    self._table.write(tenant)
    self.device.admit(tenant.slot, slot_request(
        tenant, self._table.rows[tenant.slot], self._max_depth, self._vocab_size))
    self.inputs.clock.disturb()

  def _chunk(self, tenant: Tenant, budget: float) -> int:
    """One chunk; the last one makes the tenant active. Returns its tokens, or the program's."""
    request, left = tenant.request, len(tenant.text) - tenant.done
    size, count = self.config.prefill_chunk(
        min(left, max(int(min(budget, left)), self.config.prefill_chunks[0])))
    is_last = count == left
    if left or not request.tokens:
      draws = is_last and not request.tokens
      inputs, chunk = self.inputs.of_step(), prompt_chunk(tenant, size, count)
      first, hidden = self.device.prefill(size, inputs, tenant.slot, chunk, count, draws)
      scored = range(tenant.done + 1, min(tenant.done + count + 1, len(request.prompt_ids)))
      if scored and request.lacks_prompt_logprobs:
        scores = self.device.scores(size, inputs, hidden, chunk)
        self._flights.append(Flight({tenant.slot: tenant}, scores, scored=scored))
      if draws:
        self._flights.append(Flight({tenant.slot: tenant}, first))
    tenant.done += count
    self.scheduler.publish(tenant)
    if is_last:
      tenant.is_active = True
      if request.tokens:  # it was preempted
        self.device.resume(tenant.slot, request.tokens[-1], len(request.tokens))
    self.inputs.clock.disturb()
    return max(count, 1)
