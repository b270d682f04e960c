"""Slots to run the cases of tiny_cases.py in: the tiny target, and every kind of drafter on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_cases import CASES, DRAFT, MAX_LEN, PAGE, TARGET, VOCAB, params_of, target_params

from jspec.engine.slot_sampling import empty_sampling
from jspec.model import cache
from jspec.model.attention import Attend
from jspec.model.control import run_if
from jspec.model.execution import Execution
from jspec.pallas import reference
from jspec.speculation import step
from jspec.speculation.drafter import Drafter
from jspec.speculation.plan import CostModel, StepConfig
from jspec.types import PAD_TOKEN, SlotRequest, Slots, SpecState, StepInputs

__all__ = ["CASES", "DRAFT", "MAX_LEN", "PAGE", "TARGET", "VOCAB", "params_of", "target_params"]

PREFILL = 16  # chunk size of a prompt's two halves


# The same drafter as another case, with other parameters, another shape or another rule for ties:
# each costs a compilation, so by default its sister alone is run.
VARIANTS = ("ngram_latest", "draft_model_confident", "draft_model_confident_sampled",
            "draft_model_tree", "draft_model_self", "draft_model_self_sampled",
            "draft_model_self_tree", "draft_model_self_tree_sampled",
            "draft_model_contrary_sampled", "suffix", "suffix+draft_model_tree",
            "medusa_confident", "medusa_sampled", "medusa_tree", "mlp_speculator",
            "mlp_speculator_tree_sampled", "eagle_tree", "eagle3_sampled", "eagle3_dynamic",
            # Their draws are those of law 5, which laws/test_laws.py tries by default.
            "eagle_confident", "medusa_tree_sampled", "eagle_tree_sampled")


def quick_cases(slow=lambda name: False, cases=tuple(CASES)) -> list:
  """The cases; the variants are slow, and what else is."""
  return [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS or slow(name) else name
          for name in cases]


def with_kernels(*quick: tuple[str, str]) -> list:
  """Every case with every kernel that an interpreter runs fast enough; all but some are slow."""
  assert all(name in CASES for name, _ in quick)
  return [pytest.param(name, kernel, marks=() if (name, kernel) in quick else pytest.mark.slow)
          for name in CASES for kernel in ("tpu", "triton")]


def page_table(num_slots: int, num_nodes: int, max_len: int, seed: int = 1):
  """i32[B, max_pages], no page in its natural place, and the number of pages (some unowned)."""
  per_slot = -(-(max_len + num_nodes) // PAGE)
  num_pages = num_slots * per_slot + 3
  order = jax.random.permutation(jax.random.key(seed), num_pages)[:num_slots * per_slot]
  return order.reshape(num_slots, per_slot).astype(jnp.int32), num_pages


def sampling_for(num_slots: int, **fields):
  """Greedy slots, with the given fields of SlotSampling: a value for all or one per slot."""
  empty = empty_sampling(num_slots, VOCAB, num_words=1, word_len=2)
  put = lambda old, value: jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
  return empty.replace(**{k: put(getattr(empty, k), v) for k, v in fields.items()})


def step_config(drafter: Drafter, num_slots: int, widths=None, rows_per_pass=1e9,
                attend: Attend = reference.paged_attention, model=TARGET) -> StepConfig:
  """By default every draft is verified whole, at one of two widths."""
  n = drafter.num_nodes
  widths = widths or ((num_slots, 1), (num_slots * n, n))[:1 if n == 1 else 2]
  return StepConfig(model, widths, CostModel(rows_per_pass), max_logprobs=1,
                    execution=Execution(attend))


def compiled(function, donate: int):
  """(jitted, a list that grows with each trace)."""
  traces: list[int] = []

  def traced(*args):
    traces.append(1)
    return function(*args)

  return jax.jit(traced, donate_argnums=donate), traces


@dataclasses.dataclass(frozen=True, eq=False)
class Rig:
  """One case, compiled for a number of slots."""

  config: StepConfig
  drafter: Drafter
  params: Any
  num_slots: int
  fill: Callable  # see _make_fill
  step: Callable  # the jitted make_step
  traces: list[int]  # of step


@functools.cache
def rig(name: str, num_slots: int, widths=None, rows_per_pass=1e9,
        attend: Attend = reference.paged_attention) -> Rig:
  drafter, draft_params = CASES[name](TARGET, attend)
  params = StepInputs(target_params(), draft_params, jnp.int32(99), jnp.float32(1000))
  config = step_config(drafter, num_slots, widths, rows_per_pass, attend)
  return Rig(config, drafter, params, num_slots, *_programs(config, drafter))


@functools.cache
def _programs(config: StepConfig, drafter: Drafter):
  """Shared by the cases that differ in parameters only."""
  fill, _ = compiled(_make_fill(config, drafter), 1)
  return fill, *compiled(step.make_step(config, drafter), 1)


def _make_fill(config: StepConfig, drafter: Drafter) -> Callable:
  """Admits and prefills every slot, each prompt in two chunks."""
  prefill = step.make_prefill(config, drafter, PREFILL)

  def fill_half(params, requests, tokens, count, i, state):
    slot, is_last = i // 2, i % 2 == 1
    request = jax.tree.map(lambda x: x[slot], requests)
    state = run_if(~is_last, lambda state: step.admit(state, slot, request), state)
    first = jnp.minimum(count[slot] // 2, PREFILL // 2)
    at = jnp.where(is_last, first, 0)
    chunk = jax.lax.dynamic_slice_in_dim(tokens[slot], at, PREFILL + 1)
    return prefill(params, state, slot, chunk, jnp.where(is_last, count[slot] - first, first),
                   is_last)[0]

  def fill(params, state, requests, tokens, count):
    half = lambda i, state: fill_half(params, requests, tokens, count, i, state)
    return jax.lax.fori_loop(0, 2 * tokens.shape[0], half, state)

  return fill


def start(rig: Rig, prompts, *, keys=None, max_draft=99, limit=10**6, sampling=None,
          params=None) -> SpecState:
  """Slots with their prompts prefilled and their roots drawn."""
  b = rig.num_slots
  table, num_pages = page_table(b, rig.drafter.lookahead, MAX_LEN)
  keys = jax.random.split(jax.random.key(0), b) if keys is None else keys
  requests = SlotRequest(table, *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), (b,)) for x in (
      0, limit, max_draft)), keys, sampling_for(b) if sampling is None else sampling)
  return admit_all(rig, empty_state(rig.drafter, b, table, num_pages), requests, prompts, params)


def empty_state(drafter: Drafter, b: int, table, num_pages: int, model=TARGET) -> SpecState:
  feature_width = len(drafter.feature_layers) * model.width
  zeros = lambda dtype=jnp.int32: jnp.zeros(b, dtype)
  return SpecState(
      pages=cache.init_pages(model, num_pages, PAGE, jnp.float32),
      tails=cache.init_tails(num_pages, model.width, feature_width),
      feature=jnp.zeros((b, feature_width)), page_table=jnp.zeros_like(table), length=zeros(),
      root=zeros(), active=zeros(bool), num_output=zeros(), limit=zeros(), max_draft=zeros(),
      accepted=zeros(jnp.float32), tested=zeros(jnp.float32) + 1,
      key=jax.random.split(jax.random.key(9), b), sampling=sampling_for(b),
      draft=drafter.init(b, num_pages))


def admit_all(rig: Rig, state: SpecState, requests: SlotRequest, prompts, params=None) -> SpecState:
  """Every slot taken anew; prompts[i] is what request i's length leaves of its prompt."""
  tokens = np.zeros((rig.num_slots, 2 * PREFILL + 1), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    assert len(prompt) <= PREFILL // 2 + PREFILL
    row[:len(prompt)] = prompt
  count = jnp.array([len(p) for p in prompts])
  return rig.fill(params or rig.params, state, requests, tokens, count)


def copy(state: SpecState) -> SpecState:
  """For a step to donate."""
  return jax.tree.map(lambda x: x.copy(), state)


def random_prompts(num: int, seed: int = 3) -> list[list[int]]:
  """Lengths from 2 up, page multiples and their neighbours among them."""
  rng = np.random.default_rng(seed)
  return [rng.integers(0, VOCAB, 2 + i % 20).tolist() for i in range(num)]


def generate(rig: Rig, state: SpecState, num_tokens: int, step_function=None, params=None):
  """Steps until every slot has num_tokens tokens or is finished; the state is used up.

  Returns the tokens of each slot, root first, and each step's StepOutput.
  """
  params = params or rig.params
  text, outputs = [[int(t)] for t in np.array(state.root)], []
  running = np.array(state.active)
  while any(r and len(t) < num_tokens for r, t in zip(running, text, strict=True)):
    state, out = (step_function or rig.step)(params, state)
    outputs.append(jax.tree.map(np.array, out))
    running = np.array(state.active)
    for row, tokens, n in zip(text, outputs[-1].tokens, outputs[-1].num_tokens, strict=True):
      assert (tokens[:n] >= 0).all() and (tokens[n:] == PAD_TOKEN).all()
      row.extend(tokens[:n].tolist())
  return [t[:num_tokens] for t in text], outputs


def slots_of(table, length, index=None, temperature=0.9, seed=5, feature=None) -> Slots:
  """What a drafter is told of slots `index` (all of them by default), whose feature[i] is given."""
  index = jnp.arange(table.shape[0]) if index is None else jnp.asarray(index)
  keys = jax.random.split(jax.random.key(seed), table.shape[0])[index]
  feature = jnp.zeros((len(index), 0)) if feature is None else jnp.asarray(feature, jnp.float32)
  return Slots(index, table[index], jnp.asarray(length, jnp.int32)[index],
               jnp.full(len(index), temperature), keys, feature)
