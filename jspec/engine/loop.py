"""The engine: slots and pages on the host, one compiled step on the device, a loop in between."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig, ModelConfig
from jspec.config.speculative import SpeculativeConfig
from jspec.engine.goodput import Goodput, Loop
from jspec.engine.page_table import PageTable
from jspec.engine.placement import Placement
from jspec.engine.programs import Device
from jspec.engine.request import Request, failure
from jspec.engine.results import Flight, hand_over
from jspec.engine.scheduler import Scheduler, Tenant
from jspec.engine.slot_request import prompt_chunk, slot_request
from jspec.outputs import EngineStats, SpeculativeStats
from jspec.sampling_params import MAX_LOGPROBS
from jspec.speculation import step
from jspec.speculation.drafter import Drafter
from jspec.speculation.plan import CostModel, step_costs
from jspec.types import StepInputs, StepOutput

LOG = logging.getLogger("jspec")
MAX_STEPS = 16  # of one device loop
FED_STEPS = 4  # the same where a drafter waits for what the host finds: it is one loop behind
STRAGGLERS, EVERYBODY = 2.0, 1000.0  # whose tokens count, see plan.plan


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
    self.model, self.config, self.spec, self.drafter = model, config, spec, drafter
    self.scheduler = Scheduler(config.max_num_seqs, config.num_pages, config.page_size,
                               drafter.lookahead, config.enable_prefix_caching)
    plain: dict[str, Any] = dict(max_draft=np.int32(0), lag=np.float32(EVERYBODY))
    self._inputs = StepInputs(params, draft_params, **plain)
    self._step_config = step.StepConfig(
        model, config.widths or step.default_widths(config.max_num_seqs, drafter.num_nodes),
        cost, MAX_LOGPROBS, devices.execution, spec.verification,
        spec.adaptive_draft_length, config.dynamic_speculation)
    self._goodput = Goodput(np.array([rows for rows, _ in self._step_config.widths]),
                            *step_costs(self._step_config, config.max_num_seqs),
                            switches=config.dynamic_speculation and not drafter.sampled)
    self.device = Device(config, self._step_config, drafter, devices, MAX_STEPS)
    self._flights: collections.deque[Flight] = collections.deque()
    self._changed: dict[Request, None] = {}  # since the last `collect`
    self._landed = 0.0  # when the last loop's results were there
    self._alone = False  # whether nothing but loops was started since the last one
    self._stale = False  # whether the device has not seen the latest page table
    self._totals = EngineStats()
    self._fed: dict[int, Request] = {}  # by slot, whom the drafter's params were made for
    if drafter.feed is not None:
      self._feed({})
    self._table = PageTable(config.max_num_seqs, config.pages_per_slot(drafter.lookahead))

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
    if self.drafter.feed is not None:
      self.drafter.feed.forget()

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
    return dataclasses.replace(self._totals, **self.scheduler.counts())

  def step(self, num_steps: int = MAX_STEPS, batch: bool = False) -> list[Request]:
    """Admits and prefills what fits, starts up to num_steps steps; the requests that changed.

    batch: what counts is when the last request is done, not how fast each one goes.
    """
    self.start(num_steps, batch)
    return self.collect()

  def start(self, num_steps: int, batch: bool) -> None:
    """Gives the device work, without waiting for it."""
    self._admit()
    self._prefill(math.inf if batch else self.config.max_num_batched_tokens)
    tenants = sorted(self.scheduler.running.values(), key=lambda tenant: tenant.order)
    if not any(t.is_active for t in tenants):
      return
    if any(t.request.params.stop for t in tenants):
      num_steps = 1  # only the host sees a stop string
    if len(tenants) > sum(t.is_active for t in tenants):
      num_steps = 1  # somebody's prompt is waiting
    if self.drafter.feed is not None:
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
    keep = self._flights and self.drafter.feed is None and self._flights[-1].num_tokens
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
        self._learn(flight, out)
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
    if self.drafter.feed is not None:
      self.drafter.feed.finished(request.prompt_ids, request.tokens)

  def _count(self, tokens: int = 0, stats: SpeculativeStats | None = None,
             finished: str | None = None, prompt: int = 0, corrupted: int = 0) -> None:
    self._totals += EngineStats(
        generation_tokens=tokens, prompt_tokens=prompt, speculation=stats or SpeculativeStats(),
        finished=() if finished is None else ((finished, 1),), corrupted_requests=corrupted)

  # ----------------------------------------------------- prompts into slots

  def _admit(self) -> None:
    """Moves requests from the queue into slots, in order, as long as there is room."""
    while (request := self.scheduler.next) is not None:
      with self._blaming(request):
        if self.scheduler.admit_next() is None:
          return

  def _begin(self, tenant: Tenant) -> None:
    """Makes the tenant known to the device."""
    self.scheduler.begin(tenant)
    tenant.has_begun = True
    request = tenant.request
    if not request.admitted_at:
      request.admitted_at = time.perf_counter()
      request.num_cached_tokens = tenant.done
      self._count(prompt=len(request.prompt_ids))
    if request.key is None:
      request.key = self.device.key(request.params.seed, request.number)
    self._write_table(tenant)
    self.device.admit(tenant.slot, slot_request(
        tenant, self._table.rows[tenant.slot], self.drafter.max_depth, self.model.vocab_size))
    self._alone = False

  def _prefill(self, budget: float) -> None:
    """Runs chunks of prompts, in order, up to a budget of tokens; at least the smallest one."""
    tenants = [t for t in self.scheduler.running.values() if not t.is_active]
    budget -= len(self.scheduler.running) - len(tenants)
    budget = max(budget, self.config.prefill_chunks[0])
    for tenant in sorted(tenants, key=lambda tenant: tenant.order):
      with self._blaming(tenant.request):
        if budget > 0 and not tenant.has_begun:
          self._begin(tenant)
        while not tenant.is_active and budget > 0:
          budget -= self._prefill_chunk(tenant, budget)

  def _prefill_chunk(self, tenant: Tenant, budget: float) -> int:
    """One chunk; the last one makes the tenant active. Returns its tokens, or the program's."""
    request, left = tenant.request, len(tenant.text) - tenant.done
    size, count = self.config.prefill_chunk(
        min(left, max(int(min(budget, left)), self.config.prefill_chunks[0])))
    is_last = count == left
    if left or not request.tokens:
      draws = is_last and not request.tokens
      inputs, chunk = self._step_inputs(1, EVERYBODY, True), prompt_chunk(tenant, size, count)
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
    self._alone = False
    return max(count, 1)

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
        return self._write_table(tenant)
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

  def _write_table(self, tenant: Tenant) -> None:
    if self._table.write(tenant.slot, tenant.pages):
      self._stale |= tenant.is_active  # else `admit` brings it along

  def _loop(self, active: dict[int, Tenant], num_steps: int, lag: float) -> None:
    requests = {slot: tenant.request for slot, tenant in active.items()}
    if self.drafter.feed is not None and any(
        self._fed.get(slot) is not request for slot, request in requests.items()):
      self._feed(requests)  # somebody is new here
    if self._stale:
      self.device.put_table(self._table.rows)
      self._stale = False
    drafting = self.spec.draft_tokens_at(len(active)) > 0 and any(
        r.params.num_speculative_tokens != 0 for r in requests.values())
    if self._step_config.measured:
      drafting = drafting and self._goodput.drafts(len(active))
    compiled, started = self.traces.get("step"), time.perf_counter()
    out = self.device.run(self._step_inputs(len(active), lag, drafting), num_steps)
    alone = self._alone and self.traces["step"] == compiled
    num_tokens = num_steps * (self.drafter.max_depth + 1)
    for tenant in active.values():
      tenant.in_flight += num_tokens
    self._flights.append(Flight(active, out, num_tokens, drafting, started, alone))
    self._alone = True
    if self.drafter.feed is not None:
      self._feed(requests)  # for the next loop, while the device is busy with this one

  def _learn(self, flight: Flight, out: StepOutput) -> None:
    """What the loop's time says about the cost of steps."""
    now = time.perf_counter()
    seconds, self._landed = now - max(flight.started, self._landed), now
    if self._step_config.measured:
      length = max(tenant.committed for tenant in flight.tenants.values())
      self._goodput.observe(Loop(
          flight.drafting, np.asarray(out.ran), length, seconds, int(out.num_tokens.sum()),
          int(out.num_steps.sum()), len(flight.tenants), flight.alone))

  def _feed(self, running: dict[int, Request]) -> None:
    """Makes the drafter's params, which come from the host."""
    feed = self.drafter.feed
    assert feed is not None
    ends: list[tuple[int, ...] | None] = [None] * self.config.max_num_seqs
    for slot, request in running.items():
      with self._blaming(request):
        ends[slot] = request.last_tokens(feed.context)
    self._fed, self._inputs = running, self._inputs.replace(draft=feed.params(ends))

  def _collect(self, tenant: Tenant) -> np.ndarray:
    """What the drafter kept of every token but the last, which no pass has seen."""
    assert self.drafter.collect is not None
    self._write_table(tenant)
    return self.drafter.collect(self.device.state.draft, self._table.rows[tenant.slot],
                                tenant.committed)

  def _step_inputs(self, num_running: int, lag: float, drafting: bool) -> StepInputs:
    most = self.spec.draft_tokens_at(num_running) if drafting else 0
    cost = self._goodput.correction(drafting) if self._step_config.measured else None
    return self._inputs.replace(max_draft=np.int32(most), lag=np.float32(lag), cost=cost)

  def warm_up(self) -> Iterator[str]:
    """Compiles every program and, for dynamic speculation, times every width of the step.

    To be called before the first request. Yields what comes next.
    """
    if self.busy:
      raise ValueError("warm_up is for an engine without requests")
    inputs = self._step_inputs(1, EVERYBODY, False)
    yield from self.device.warm_up(inputs)
    if self._step_config.measured:
      yield "step times"
      self._goodput.prime(self.device.step_seconds(inputs))
    self.device.release(0)

  def compiled_step(self, compiler_options: dict[str, Any] | None = None) -> Any:
    """The step, lowered and compiled for the engine's shapes: for memory and cost analysis."""
    return self.device.compiled_step(self._step_inputs(1, EVERYBODY, True), compiler_options)
