"""The engine: slots and pages on the host, one compiled step on the device, a loop in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache, step
from jspec.config import EngineConfig, ModelConfig
from jspec.drafters.base import Drafter
from jspec.outputs import EngineStats, SpeculativeStats
from jspec.placement import Placement
from jspec.plan import CostModel
from jspec.request import NewToken, Request
from jspec.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams
from jspec.scheduler import Scheduler
from jspec.slot_sampling import empty_sampling, sampling_row
from jspec.spec_config import SpeculativeConfig
from jspec.types import FirstToken, SlotRequest, SpecState, StepOutput

MAX_STEPS = 16  # of one device loop
FED_STEPS = 4  # the same where a drafter waits for what the host finds: it is one loop behind
STRAGGLERS, EVERYBODY = 2.0, 1000.0  # whose tokens count, see plan.plan


class Engine:
  """Runs requests through the speculation step. `step()` is one turn of the loop.

  Args:
    params: the target's parameter tree; draft_params: the drafter's.
    spec: for the draft length by batch size and the rule of acceptance. cost: of the step's widths.
    devices: how the model is computed and where its arrays live.
  """

  def __init__(self, model: ModelConfig, params: Any, drafter: Drafter, draft_params: Any,
               config: EngineConfig, spec: SpeculativeConfig, cost: CostModel,
               devices: Placement):
    self.model, self.config, self.spec, self.drafter = model, config, spec, drafter
    self.devices = devices
    self.scheduler = Scheduler(config.max_num_seqs, config.num_pages, config.page_size,
                               drafter.lookahead)
    self._params = {"target": params, "draft": draft_params}
    self._step_config = step.StepConfig(
        model, config.widths or step.default_widths(config.max_num_seqs, drafter.num_nodes),
        cost, MAX_LOGPROBS, config.numerics == "bitwise", devices.attend, spec.verification,
        spec.adaptive_draft_length)
    self.traces: dict[str, int] = {}  # by compiled function
    self._prefills: dict[int, Any] = {}
    state = lambda key: initial_state(key, model, drafter, config, devices.kv_dtype)
    key = jax.random.key(config.seed)
    self._shardings = devices.shardings(jax.eval_shape(state, key))
    self._run = self._jit("step", step.make_multi_step(
        self._step_config, drafter, MAX_STEPS), 3, 1)
    self._admit = self._jit("admit", step.admit, 3, 0, has_output=False)
    self._release = self._jit("release", step.release, 2, 0, has_output=False)
    # The key of a seeded request depends on its seed alone; others each get one of their own.
    self._seed_key = jax.jit(lambda low, high: jax.random.fold_in(jax.random.key(low), high),
                             out_shardings=devices.everywhere)
    self._next_key = jax.jit(lambda i: jax.random.fold_in(jax.random.key(config.seed), i),
                             out_shardings=devices.everywhere)
    self._unseeded = 0
    self._fed: dict[int, Request] = {}  # by slot, whom the drafter's params were made for
    if drafter.feed is not None:
      self._feed({})
    self._state = jax.jit(lambda: state(jax.random.key(config.seed)),
                          out_shardings=self._shardings)()

  def _jit(self, name: str, function: Any, num_arguments: int, state_argument: int,
           has_output: bool = True) -> Any:
    """Compiled with its state donated, its output on every device; counts traces."""
    def traced(*args):
      self.traces[name] = self.traces.get(name, 0) + 1
      return function(*args)

    out = (self._shardings, self.devices.everywhere) if has_output else self._shardings
    takes = [None] * num_arguments
    takes[state_argument] = self._shardings
    return jax.jit(traced, donate_argnums=state_argument, in_shardings=tuple(takes),
                   out_shardings=out)

  # ------------------------------------------------------------- the loop

  def add(self, request: Request) -> None:
    self.scheduler.add(request)

  def abort(self, request: Request) -> None:
    slot = self.scheduler.abort(request)
    if slot is not None:
      self._state = self._release(self._state, np.int32(slot))

  @property
  def busy(self) -> bool:
    return bool(self.scheduler.waiting or self.scheduler.running)

  @property
  def num_requests(self) -> int:
    return len(self.scheduler.waiting) + len(self.scheduler.running)

  def stats(self) -> EngineStats:
    """What it has done so far. May be called from any thread."""
    scheduler = self.scheduler
    return EngineStats(
        num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
        num_pages=scheduler.allocator.num_pages, num_free_pages=scheduler.allocator.num_free)

  def step(self, num_steps: int = MAX_STEPS, batch: bool = False) -> list[Request]:
    """Admits and prefills what fits, runs up to num_steps steps; the requests that changed.

    batch: what counts is when the last request is done, not how fast each one goes.
    """
    return self.start_step(num_steps, batch)()

  def start_step(self, num_steps: int, batch: bool) -> Callable[[], list[Request]]:
    """`step`, without waiting for the device; call the result for what step returns."""
    changed = []
    for slot, request, pages in self.scheduler.admit():
      self._prefill(slot, request, pages)
      changed.append(request)
    running = {s: r for s, r in self.scheduler.running.items() if not r.finished}
    out = self._start_loop(running, num_steps, batch) if running else None

    def finish() -> list[Request]:
      if out is not None:
        self._take(running, jax.tree.map(np.asarray, out))
      for slot, request in list(self.scheduler.running.items()):
        if request.finished:
          if self.drafter.collect is not None:  # its pages are still its own
            request.hidden_states = self._collect(slot, request)
          self.scheduler.finish(slot)
          if self.drafter.feed is not None:
            self.drafter.feed.finished(request.prompt_ids, request.tokens)
      return list(dict.fromkeys([*changed, *running.values()]))

    return finish

  def _start_loop(self, running: dict[int, Request], num_steps: int, batch: bool) -> StepOutput:
    if any(r.params.stop for r in running.values()):
      num_steps = 1  # only the host sees a stop string
    if self.drafter.feed is not None:
      num_steps = min(num_steps, FED_STEPS)
    # A batch that nobody waits behind is done when its last request is.
    lag = STRAGGLERS if batch and not self.scheduler.waiting else EVERYBODY
    if self.drafter.feed is not None and any(
        self._fed.get(slot) is not request for slot, request in running.items()):
      self._feed(running)  # somebody is new here
    self._state, out = self._run(self._step_params(len(running), lag), self._state,
                                 np.int32(num_steps))
    if self.drafter.feed is not None:
      self._feed(running)  # for the next loop, while the device is busy with this one
    return out

  def _feed(self, running: dict[int, Request]) -> None:
    """Makes the drafter's params, which come from the host."""
    feed = self.drafter.feed
    assert feed is not None
    ends = [running[slot].last_tokens(feed.context) if slot in running else None
            for slot in range(self.config.max_num_seqs)]
    self._fed, self._params["draft"] = dict(running), feed.params(ends)

  def _collect(self, slot: int, request: Request) -> np.ndarray:
    """What the drafter kept of every token but the last, which no pass has seen."""
    assert self.drafter.collect is not None
    count = len(request.prompt_ids) + len(request.tokens) - 1
    return self.drafter.collect(self._state.draft, self._table(self.scheduler.pages(slot)), count)

  def _table(self, pages: list[int]) -> np.ndarray:
    """A slot's row of the page table. Beyond its pages it leads out of the pool: such writes drop.
    """
    table = np.full(self._state.page_table.shape[1], cache.NOWHERE, np.int32)
    table[:len(pages)] = pages
    return table

  def _take(self, running: dict[int, Request], out: StepOutput) -> None:
    """Hands a device loop's tokens to their requests."""
    for slot, request in running.items():
      before = len(request.tokens)
      for new in _tokens(out, slot, request.params.logprobs):
        request.push(new)
      request.stats += _stats(out, slot, len(request.tokens) - before)
      if request.finished and not out.finished[slot]:
        self._state = self._release(self._state, np.int32(slot))

  def _step_params(self, num_running: int, lag: float = EVERYBODY) -> dict[str, Any]:
    return {**self._params, "max_draft": np.int32(self.spec.draft_tokens_at(num_running)),
            "lag": np.float32(lag)}

  def _prefill(self, slot: int, request: Request, pages: list[int]) -> None:
    params = request.params
    depth = self.drafter.max_depth
    draft = depth if params.num_speculative_tokens is None else params.num_speculative_tokens
    fields: dict[str, Any] = dict(  # numpy: every process of a mesh has the same
        page_table=self._table(pages), length=np.int32(0), limit=np.int32(request.limit),
        max_draft=np.int32(draft), key=self._request_key(request),
        sampling=sampling_row(params, request.prompt_ids, request.tokenizer,
                              self.model.vocab_size))
    row = SlotRequest(**fields)
    self._state = self._admit(self._state, np.int32(slot), row)
    ids, done = request.prompt_ids, 0
    while done < len(ids):
      size, count = self.config.prefill_chunk(len(ids) - done)
      token = np.zeros(size + 1, np.int32)
      chunk = ids[done:done + count + 1]
      token[:len(chunk)] = chunk
      done += count
      self._state, first = self._prefill_program(size)(
          self._step_params(1), self._state, np.int32(slot), token, np.int32(count),
          np.bool_(done == len(ids)))
    first = jax.tree.map(np.asarray, first)
    request.push(_first_token(first, params.logprobs))
    if request.finished and not first.finished:
      self._state = self._release(self._state, np.int32(slot))

  def _prefill_program(self, size: int) -> Any:
    if size not in self._prefills:
      self._prefills[size] = self._jit(
          f"prefill{size}", step.make_prefill(self._step_config, self.drafter, size), 6, 1)
    return self._prefills[size]

  def _request_key(self, request: Request) -> jax.Array:
    seed = request.params.seed
    if seed is None:
      self._unseeded += 1
      return self._next_key(np.uint32(self._unseeded))
    return self._seed_key(np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF))

  def compiled_step(self) -> Any:
    """The step, lowered and compiled for the engine's shapes: for memory and cost analysis."""
    return self._run.lower(self._step_params(1), self._state, np.int32(1)).compile()


def initial_state(key: jax.Array, model: ModelConfig, drafter: Drafter, config: EngineConfig,
                  kv_dtype: Any) -> SpecState:
  """Empty slots and pages. kv_dtype: of the pages, see cache.stored_dtype."""
  c, b = config, config.max_num_seqs
  zeros = lambda dtype=jnp.int32: jnp.zeros(b, dtype)
  feature_width = len(drafter.feature_layers) * model.width
  return SpecState(
      pages=cache.init_pages(model, c.num_pages, c.page_size, kv_dtype),
      tails=cache.init_tails(c.num_pages, model.width, feature_width),
      page_table=jnp.zeros((b, c.pages_per_slot(drafter.lookahead)), jnp.int32),
      length=zeros(), feature=jnp.zeros((b, feature_width)), root=zeros(), active=zeros(bool),
      num_output=zeros(), limit=zeros(),
      max_draft=zeros(), accepted=zeros(jnp.float32), tested=zeros(jnp.float32) + 1,
      key=jax.random.split(key, b),
      sampling=empty_sampling(b, model.vocab_size, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
      draft=drafter.init(b, c.num_pages))


def check_request(params: SamplingParams, num_prompt: int, model: ModelConfig,
                  config: EngineConfig, max_depth: int) -> int:
  """The most tokens the request may generate; ValueError if it cannot be served as asked."""
  if num_prompt == 0:
    raise ValueError("the prompt is empty: at least one token is needed")
  room = config.max_model_len - num_prompt
  if room < 1:
    raise ValueError(f"the prompt has {num_prompt} tokens, but max_model_len="
                     f"{config.max_model_len} allows at most {config.max_model_len - 1}")
  if params.min_tokens > room:
    raise ValueError(f"min_tokens={params.min_tokens} does not fit: {num_prompt} prompt tokens "
                     f"leave {room} of max_model_len={config.max_model_len}")
  draft = params.num_speculative_tokens
  if draft is not None and draft > max_depth:
    raise ValueError(f"num_speculative_tokens={draft} exceeds the engine's {max_depth}")
  for name, tokens in (("logit_bias", params.logit_bias or ()),
                       ("stop_token_ids", params.stop_token_ids)):
    bad = [t for t in tokens if not 0 <= t < model.vocab_size]
    if bad:
      raise ValueError(f"{name} names token {bad[0]}, but the vocabulary has "
                       f"{model.vocab_size} tokens")
  return room if params.max_tokens is None else min(room, params.max_tokens)


def _tokens(out: StepOutput, slot: int, num_top: int | None) -> list[NewToken]:
  """The slot's tokens of a device loop."""
  tokens = []
  for i in range(int(out.num_tokens[slot])):
    top = tuple(zip(out.top_token[slot, i, :num_top].tolist(),
                    out.top_logprob[slot, i, :num_top].tolist(), strict=True)) if num_top else ()
    tokens.append(NewToken(int(out.tokens[slot, i]), bool(out.drafted[slot, i]),
                           float(out.logprob[slot, i]), int(out.rank[slot, i]), top))
  return tokens


def _first_token(first: FirstToken, num_top: int | None) -> NewToken:
  top = tuple(zip(first.top_token[:num_top].tolist(), first.top_logprob[:num_top].tolist(),
                  strict=True)) if num_top else ()
  return NewToken(int(first.token), False, float(first.logprob), int(first.rank), top)


def _stats(out: StepOutput, slot: int, generated: int) -> SpeculativeStats:
  drafted, accepted = out.drafted_at[slot], out.accepted_at[slot]
  total = lambda histogram: int((histogram * np.arange(len(histogram))).sum())
  return SpeculativeStats(
      int(out.num_steps[slot]), int(out.num_drafts[slot]), total(drafted), total(accepted),
      generated, tuple(accepted.tolist()), tuple(drafted.tolist()))


def engine_config(model: ModelConfig, num_nodes: int, **fields) -> EngineConfig:
  """EngineConfig with num_pages chosen so that every slot can reach max_model_len."""
  config = EngineConfig(**fields)
  if config.max_model_len > model.max_positions:
    raise ValueError(f"max_model_len={config.max_model_len} exceeds the model's "
                     f"{model.max_positions} positions")
  if config.num_pages:
    return config
  return dataclasses.replace(
      config, num_pages=config.max_num_seqs * config.pages_per_slot(num_nodes))
