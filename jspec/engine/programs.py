"""What an engine has on its devices: the state, and the programs that change it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig, ModelConfig
from jspec.engine.placement import Placement
from jspec.engine.slot_sampling import empty_sampling
from jspec.model import cache
from jspec.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jspec.speculation import step
from jspec.speculation.drafter import Drafter
from jspec.speculation.plan import StepConfig
from jspec.types import FirstToken, PromptScores, SlotRequest, SpecState, StepInputs, StepOutput

MEASURED_STEPS, MEASUREMENTS = 2, 5  # steps at each width, and how often


class Device:
  """Each program is compiled once for its shapes; all take and give the one state, in order.

  Arguments are numpy arrays and numbers, which every process of a mesh has the same.

  Args:
    max_steps: of one device loop.
  """

  def __init__(self, config: EngineConfig, step_config: StepConfig, drafter: Drafter,
               devices: Placement, max_steps: int):
    self.traces: dict[str, int] = {}  # by compiled function: once each, if all goes well
    self._config, self._step_config, self._drafter = config, step_config, drafter
    make = lambda key: initial_state(key, step_config.model, drafter, config, devices.kv_dtype)
    key = jax.random.key(config.seed)
    self._everywhere = devices.everywhere
    self._shardings = devices.shardings(jax.eval_shape(make, key))
    self._run = self._jit("step", step.make_multi_step(step_config, drafter, max_steps), 3, 1)
    self._admit = self._jit("admit", step.admit, 3, 0, has_output=False)
    self._resume = self._jit("resume", step.resume, 4, 0, has_output=False)
    self._release = self._jit("release", step.release, 2, 0, has_output=False)
    self._put_table = self._jit("put_table", _put_table, 2, 0, has_output=False)
    self._prefills: dict[int, Any] = {}
    self._scores: dict[int, Any] = {}
    # The key of a seeded request depends on its seed alone; others each get one of their own.
    self._seed_key = jax.jit(lambda low, high: jax.random.fold_in(jax.random.key(low), high),
                             out_shardings=self._everywhere)
    self._next_key = jax.jit(lambda i: jax.random.fold_in(jax.random.key(config.seed), i),
                             out_shardings=self._everywhere)
    self.state: SpecState = jax.jit(lambda: make(jax.random.key(config.seed)),
                                    out_shardings=self._shardings)()

  def _jit(self, name: str, function: Any, num_arguments: int, state_argument: int,
           has_output: bool = True) -> Any:
    """Compiled with its state donated, its output on every device; counts traces."""
    out = (self._shardings, self._everywhere) if has_output else self._shardings
    takes = [None] * num_arguments
    takes[state_argument] = self._shardings
    return jax.jit(self._counted(name, function), donate_argnums=state_argument,
                   in_shardings=tuple(takes), out_shardings=out)

  def _counted(self, name: str, function: Any) -> Any:
    def traced(*args):
      self.traces[name] = self.traces.get(name, 0) + 1
      return function(*args)

    return traced

  @property
  def is_lost(self) -> bool:
    """Whether a program took the state and did not give it back: nothing can go on."""
    return self.state.root.is_deleted()

  def key(self, seed: int | None, number: int) -> jax.Array:
    """Of a request's random numbers. number: sets those without a seed apart."""
    if seed is None:
      return self._next_key(np.uint32(number & 0xFFFFFFFF))
    return self._seed_key(np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF))

  def admit(self, slot: int, request: SlotRequest) -> None:
    self.state = self._admit(self.state, np.int32(slot), request)

  def prefill(self, size: int, inputs: StepInputs, slot: int, token: np.ndarray, count: int,
              draws: bool) -> tuple[FirstToken, jax.Array]:
    """The program for chunks of up to `size` tokens; see step.make_prefill."""
    if size not in self._prefills:
      self._prefills[size] = self._jit(
          f"prefill{size}", step.make_prefill(self._step_config, self._drafter, size), 6, 1)
    self.state, out = self._prefills[size](inputs, self.state, np.int32(slot), token,
                                           np.int32(count), np.bool_(draws))
    return out

  def scores(self, size: int, inputs: StepInputs, hidden: jax.Array,
             token: np.ndarray) -> PromptScores:
    """Of a chunk that prefill has just read; see step.make_scores."""
    if size not in self._scores:
      score = step.make_scores(self._step_config)
      self._scores[size] = jax.jit(self._counted(f"scores{size}", score),
                                   out_shardings=self._everywhere)
    return self._scores[size](inputs.target, hidden, token)

  def resume(self, slot: int, root: int, num_output: int) -> None:
    self.state = self._resume(self.state, np.int32(slot), np.int32(root), np.int32(num_output))

  def release(self, slot: int) -> None:
    self.state = self._release(self.state, np.int32(slot))

  def put_table(self, table: np.ndarray) -> None:
    self.state = self._put_table(self.state, table)

  def run(self, inputs: StepInputs, num_steps: int) -> StepOutput:
    """A device loop, under way: nobody has waited for it yet."""
    self.state, out = self._run(inputs, self.state, np.int32(num_steps))
    return out

  def compiled_step(self, inputs: StepInputs, compiler_options: dict[str, Any] | None) -> Any:
    return self._run.lower(inputs, self.state, np.int32(1)).compile(compiler_options)

  # ------------------------------------------------------------- warm-up

  def warm_up(self, inputs: StepInputs) -> Iterator[str]:
    """Compiles everything; yields what comes next. No slot may be in use.

    A request that never stops is left in slot 0, about to be answered.
    """
    endless = jax.tree.map(lambda x: np.asarray(x[0]), empty_sampling(
        1, self._step_config.model.vocab_size, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS))
    nowhere = np.full(self.state.page_table.shape, cache.NOWHERE, np.int32)
    yield "keys"
    self.key(0, 0)
    row: Any = dict(page_table=nowhere[0], length=np.int32(0), limit=np.int32(2**30),
                    max_draft=np.int32(0), key=self.key(None, 0), sampling=endless)
    yield "admission"
    self.admit(0, SlotRequest(**row))
    self.put_table(nowhere)
    for size in self._config.prefill_chunks:
      yield f"prefill of {size} tokens"
      token = np.zeros(size + 1, np.int32)
      _, hidden = self.prefill(size, inputs, 0, token, 0, False)
      jax.block_until_ready(self.scores(size, inputs, hidden, token))
    yield "speculation step"
    jax.block_until_ready(self.run(inputs, 1))
    self.release(0)
    self.resume(0, 0, 1)

  def step_seconds(self, inputs: StepInputs) -> np.ndarray:
    """f[W], medians of measured steps at each width, nan where the drafter's step takes no orders.

    After warm_up, whose request is answered.
    """
    num_widths = len(self._step_config.widths)
    seconds: list[list[float]] = [[] for _ in range(num_widths)]
    for width in [*range(num_widths)] * MEASUREMENTS:
      cost = np.where(np.arange(num_widths) == width, np.float32(1e-6), np.float32(1))
      start = time.perf_counter()
      out = self.run(inputs.replace(cost=cost), MEASURED_STEPS)
      ran = np.asarray(out.ran)
      if ran[width] == MEASURED_STEPS:
        seconds[width].append((time.perf_counter() - start) / MEASURED_STEPS)
    return np.array([np.median(s) if s else np.nan for s in seconds])


def _put_table(state: SpecState, page_table: jax.Array) -> SpecState:
  return state.replace(page_table=page_table)


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
