"""The engine: slots and pages on the host, one compiled step on the device, a loop in between."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig, ModelConfig
from jspec.config.speculative import SpeculativeConfig
from jspec.engine.goodput import Clock, Goodput
from jspec.engine.inputs import EVERYBODY, STRAGGLERS, Inputs, PageTable
from jspec.engine.placement import Placement
from jspec.engine.programs import Device
from jspec.engine.prompts import Prompts
from jspec.engine.request import Request, failure
from jspec.engine.results import Flight, hand_over
from jspec.engine.scheduler import Scheduler, Tenant
from jspec.outputs import EngineStats, SpeculativeStats
from jspec.sampling_params import MAX_LOGPROBS
from jspec.speculation import step
from jspec.speculation.drafter import Drafter
from jspec.speculation.plan import CostModel, default_widths, step_costs
from jspec.types import StepOutput

LOG = logging.getLogger("jspec")
MAX_STEPS = 16  # of one device loop
FED_STEPS = 4  # the same where a drafter waits for what the host finds: it is one loop behind


class Engine:
  """Runs requests through the speculation step. `step()` is one turn of the loop.

  The host looks at a device loop's tokens while the device is busy with the next one, so it never
  waits for Python. What that next loop computes for a request that has ended is not used.

  Args:
    params: the target's parameter tree; draft_params: the drafter's.
    spec: for the draft length by batch size and the rule of acceptance. cost: of the step's widths.
    devices: how the model is computed and where its arrays live.
  """

  def __init__(self, model: ModelConfig, params: Any, drafter: Drafter, draft_params: Any,
               config: EngineConfig, spec: SpeculativeConfig, cost: CostModel,
               devices: Placement):
    self.config, self.drafter = config, drafter
    self.scheduler = Scheduler(config.max_num_seqs, config.num_pages, config.page_size,
                               drafter.lookahead, config.enable_prefix_caching)
    steps = step.StepConfig(
        model, config.widths or default_widths(config.max_num_seqs, drafter.num_nodes),
        cost, MAX_LOGPROBS, devices.execution, spec.verification,
        spec.adaptive_draft_length, config.dynamic_speculation)
    goodput = Goodput(np.array([rows for rows, _ in steps.widths]),
                      *step_costs(steps, config.max_num_seqs),
                      switches=not drafter.sampled) if steps.measured else None
    self.device = Device(config, steps, drafter, devices, MAX_STEPS)
    self.inputs = Inputs(params, draft_params, drafter.feed, spec, config.max_num_seqs,
                         Clock(goodput))
    self._flights: collections.deque[Flight] = collections.deque()
    self._table = PageTable(config.max_num_seqs, config.pages_per_slot(drafter.lookahead))
    self.prompts = Prompts(config, self.scheduler, self.device, self.inputs, self._table,
                           self._flights, drafter.max_depth, model.vocab_size)
    self._changed: dict[Request, None] = {}  # since the last `collect`
    self._totals = EngineStats()

  @property
  def traces(self) -> dict[str, int]:
    """How often each program was traced: once, if all goes well."""
    return self.device.traces

  # ------------------------------------------------------------- the loop

  def add(self, request: Request) -> None:
    self.scheduler.add(request)

  def abort(self, request: Request) -> None:
    """Forgets a request, whatever the device is doing for it."""
    if not self.scheduler.knows(request):
      return
    with self._blaming(request):
      tenant = self.scheduler.abort(request)
      if tenant is not None:
        self.device.release(tenant.slot)
      self._count(finished="abort")
    self._forget_idle()

  def fail(self, request: Request, reason: str) -> None:
    """Ends a request that can't go on; what it has written to the cache is found by nobody."""
    LOG.warning("request %s failed: %s", request.request_id, reason)
    known = self.scheduler.knows(request)
    tenant = self.scheduler.drop(request)
    if tenant is not None:
      self.device.release(tenant.slot)
    if known or not request.finished:  # else its answer was complete
      request.fail(reason)
    self._changed[request] = None
    if known:
      self._count(finished="error")
    self._forget_idle()

  def forget(self) -> None:
    """Leaves new requests nothing of earlier ones: neither pages nor outputs to draft from."""
    self.scheduler.allocator.forget()
    if self.inputs.feed is not None:
      self.inputs.feed.forget()

  @contextlib.contextmanager
  def _blaming(self, request: Request) -> Iterator[None]:
    """An exception ends this request and no other, unless the device's state went with it."""
    try:
      yield
    except jax.errors.JaxRuntimeError:
      raise
    except Exception as error:
      if self.device.is_lost:
        raise
      LOG.exception("request %s raised", request.request_id)
      self.fail(request, failure(error))

  def _forget_idle(self) -> None:
    if not self.busy:
      self._flights.clear()

  @property
  def busy(self) -> bool:
    return bool(self.num_requests)

  @property
  def num_requests(self) -> int:
    return self.scheduler.num_waiting + len(self.scheduler.running)

  def stats(self) -> EngineStats:
    """What it has done so far. May be called from any thread."""
    return dataclasses.replace(self._totals, prompt_tokens=self.prompts.num_tokens,
                               **self.scheduler.counts())

  def step(self, num_steps: int = MAX_STEPS, batch: bool = False) -> list[Request]:
    """Admits and prefills what fits, starts up to num_steps steps; the requests that changed.

    batch: what counts is when the last request is done, not how fast each one goes.
    """
    self.start(num_steps, batch)
    return self.collect()

  def start(self, num_steps: int, batch: bool) -> None:
    """Gives the device work, without waiting for it."""
    self.prompts.admit(self._blaming)
    self.prompts.prefill(batch, self._blaming)
    tenants = sorted(self.scheduler.running.values(), key=lambda tenant: tenant.order)
    if not any(t.is_active for t in tenants):
      return
    if any(t.request.params.stop for t in tenants):
      num_steps = 1  # only the host sees a stop string
    if len(tenants) > sum(t.is_active for t in tenants):
      num_steps = 1  # somebody's prompt is waiting
    if self.inputs.feed is not None:
      num_steps = min(num_steps, FED_STEPS)
    num_steps = self._make_room([t for t in tenants if t.is_active], min(num_steps, MAX_STEPS))
    active = {slot: t for slot, t in self.scheduler.running.items() if t.is_active}
    if active:
      # A batch that nobody waits behind is done when its last request is.
      stragglers = batch and not self.scheduler.num_waiting
      self._loop(active, num_steps, STRAGGLERS if stragglers else EVERYBODY)

  def collect(self) -> list[Request]:
    """Takes in what the device has done but for the latest loop; the requests that changed."""
    # A drafter that is fed needs the text as it is now.
    keep = self._flights and self.inputs.feed is None and self._flights[-1].num_tokens
    self._land(len(self._flights) - bool(keep))
    self._forget_idle()
    changed, self._changed = self._changed, {}
    return list(changed)

  def _land(self, count: int) -> None:
    """Takes in the first `count` results."""
    for _ in range(count):
      flight = self._flights.popleft()
      out = jax.tree.map(np.asarray, flight.out)
      if isinstance(out, StepOutput):
        self.inputs.clock.land(flight, out)
      for slot, tenant in flight.tenants.items():
        if self.scheduler.running.get(slot) is tenant:  # neither aborted nor preempted since
          tenant.in_flight -= flight.num_tokens
          with self._blaming(tenant.request):
            self._take(tenant, flight, out)
          self._changed[tenant.request] = None

  def _take(self, tenant: Tenant, flight: Flight, out: Any) -> None:
    """Hands tokens to a request; its slot and pages are free if it has ended."""
    request, slot, before = tenant.request, tenant.slot, len(tenant.request.tokens)
    news = hand_over(request, flight, out, slot)
    request.stats += news.stats
    self._count(len(request.tokens) - before, news.stats)
    if not request.finished:  # a stop string may have come before what failed
      if news.failed:
        self._count(corrupted=1)
        self.fail(request, news.failed)
      return
    if not news.ended:
      self.device.release(slot)
    if self.drafter.collect is not None:  # its pages are still its own
      request.hidden_states = self._collect(tenant)
    self.scheduler.finish(tenant)
    self._count(finished=request.finish_reason)
    if self.inputs.feed is not None:
      self.inputs.feed.finished(request.prompt_ids, request.tokens)

  def _count(self, tokens: int = 0, stats: SpeculativeStats | None = None,
             finished: str | None = None, corrupted: int = 0) -> None:
    self._totals += EngineStats(
        generation_tokens=tokens, speculation=stats or SpeculativeStats(),
        finished=() if finished is None else ((finished, 1),), corrupted_requests=corrupted)

  # ------------------------------------------------------- the device loop

  def _make_room(self, tenants: list[Tenant], num_steps: int) -> int:
    """Gives everybody pages for the next loop: of fewer steps, or fewer tenants, if need be."""
    missing = sum(self.scheduler.missing(t, self._reach(t, num_steps)) for t in tenants)
    if missing > self.scheduler.allocator.num_free:
      num_steps = 1
    for tenant in tenants:
      with self._blaming(tenant.request):
        self._give_pages(tenant, num_steps)
    return num_steps

  def _give_pages(self, tenant: Tenant, num_steps: int) -> None:
    """Lets others end, or preempts the last of all, until the tenant has its pages, or is out."""
    while self.scheduler.running.get(tenant.slot) is tenant:
      if self.scheduler.grow(tenant, self._reach(tenant, num_steps)):
        return self._table.write(tenant)
      if self._flights:
        self._land(len(self._flights))  # somebody may have ended
      else:
        self._preempt(self.scheduler.last())
    return None

  def _reach(self, tenant: Tenant, num_steps: int) -> int:
    """Tokens that may be committed after so many steps more."""
    return tenant.reach(num_steps * (self.drafter.max_depth + 1))

  def _preempt(self, tenant: Tenant) -> None:
    with self._blaming(tenant.request):
      self.device.release(tenant.slot)
      self.scheduler.preempt(tenant)

  def _loop(self, active: dict[int, Tenant], num_steps: int, lag: float) -> None:
    requests = {slot: tenant.request for slot, tenant in active.items()}
    self.inputs.feed_new(requests, self._blaming)
    if (rows := self._table.take_news()) is not None:
      self.device.put_table(rows)
    drafting = self.inputs.drafting(requests)
    compiled, started = self.traces.get("step"), time.perf_counter()
    out = self.device.run(self.inputs.of_step(len(active), drafting, lag), num_steps)
    alone = self.inputs.clock.begin(self.traces["step"] != compiled)
    num_tokens = num_steps * (self.drafter.max_depth + 1)
    for tenant in active.values():
      tenant.in_flight += num_tokens
    self._flights.append(Flight(active, out, num_tokens, drafting, started, alone))
    # For the next loop, while the device is busy with this one.
    self.inputs.feed_all(requests, self._blaming)

  def _collect(self, tenant: Tenant) -> np.ndarray:
    """What the drafter kept of every token but the last, which no pass has seen."""
    assert self.drafter.collect is not None
    self._table.write(tenant)
    return self.drafter.collect(self.device.state.draft, self._table.rows[tenant.slot],
                                tenant.committed)

  def warm_up(self) -> Iterator[str]:
    """Compiles every program and, for dynamic speculation, times every width of the step.

    To be called before the first request. Yields what comes next.
    """
    if self.busy:
      raise ValueError("warm_up is for an engine without requests")
    inputs = self.inputs.of_step(drafting=False)
    yield from self.device.warm_up(inputs)
    if self.inputs.clock.goodput is not None:
      yield "step times"
      self.inputs.clock.goodput.prime(self.device.step_seconds(inputs))
    self.device.release(0)

  def compiled_step(self, compiler_options: dict[str, Any] | None = None) -> Any:
    """The step, lowered and compiled for the engine's shapes: for memory and cost analysis."""
    return self.device.compiled_step(self.inputs.of_step(), compiler_options)
