"""A tiny target, every kind of drafter on it, and slots to run them in.

A new drafter adds rows to CASES, named `<its key in DRAFTERS>` or `<key>_<variant>`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache, step
from jspec.attention import Attend
from jspec.config import ModelConfig
from jspec.drafters.base import Drafter
from jspec.drafters.draft_model import draft_model
from jspec.drafters.ngram import ngram
from jspec.drafters.none import none
from jspec.model import init_params
from jspec.pallas import reference
from jspec.plan import CostModel, StepConfig
from jspec.slot_sampling import empty_sampling
from jspec.types import NO_PARENT, PAD_TOKEN, DraftTree, SlotRequest, Slots, SpecState

VOCAB, PAGE, MAX_LEN = 12, 4, 96
TARGET = ModelConfig("tiny", vocab_size=VOCAB, width=32, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=8, mlp_dim=48, max_positions=512)
DRAFT = ModelConfig("tiny", vocab_size=VOCAB, width=16, num_layers=1, num_heads=2,
                    num_kv_heads=1, head_dim=8, mlp_dim=32, max_positions=512)
PREFILL = (8, 16)  # chunk sizes of a prompt's two halves


def params_of(config: ModelConfig, seed: int, sharpness: float) -> Any:
  """Random parameters; logits have a standard deviation of about `sharpness`."""
  params = init_params(jax.random.key(seed), config)
  # The smaller the embedding, the more the context counts: greedy text loops less.
  return {**params, "embed": 0.7 * params["embed"], "head": {"w": sharpness * params["head"]["w"]}}


@functools.cache
def target_params() -> Any:
  return params_of(TARGET, 5, 2.0)


def noisy_params() -> Any:
  """Nearly the target: its drafts are good, not perfect."""
  noise = params_of(TARGET, 6, 2.0)
  return jax.tree.map(lambda x, e: x + 0.25 * e, target_params(), noise)


def contrary_params() -> Any:
  """Likes what the target likes least."""
  return params_of(TARGET, 5, -2.0)


def small_params() -> Any:
  """Of 400 seeds the one that agrees best with the target: 29 % of argmaxes."""
  return params_of(DRAFT, 157, 1.5)


_draft_model = functools.cache(draft_model)


def _draft(widths, sampled, config=DRAFT, params=small_params):
  def case(target: ModelConfig, attend: Attend = reference.paged_attention):
    assert config.vocab_size == target.vocab_size
    return _draft_model(config, widths, PAGE, jnp.float32, sampled, attend=attend), params()
  return case


def _plain(make: Callable[[ModelConfig], Drafter]):
  """The case of a drafter without a model of its own."""
  return lambda target, attend=None: (make(target), ())


def random_trees(num_nodes: int, vocab_size: int) -> Drafter:
  """Point-mass trees of random shape, size and tokens (siblings repeat), from the slot's key."""

  def propose_slot(root, key):
    keys = jax.random.split(key, 3)
    token = jax.random.randint(keys[0], (num_nodes,), 0, vocab_size).at[0].set(root)
    u = jax.random.uniform(keys[1], (num_nodes,))
    parent = [jnp.int32(NO_PARENT), jnp.int32(0), jnp.int32(0)]  # node 2 keeps it from a chain
    for i in range(3, num_nodes):  # parents never fall: breadth-first
      parent.append(parent[-1] + (u[i] * (i - parent[-1])).astype(jnp.int32))
    size = jax.random.randint(keys[2], (), 1, num_nodes + 1)
    return token, jnp.where(jnp.arange(num_nodes) < size, jnp.stack(parent), NO_PARENT)

  def propose(params, state, root, slots):
    del params  # unused
    return DraftTree(*jax.vmap(propose_slot)(root, slots.key), None), state

  return Drafter(lambda num_slots, num_pages: (), propose,
                 lambda params, state, slots, committed: state, num_nodes, num_nodes - 2)


CASES: dict[str, Callable[..., tuple[Drafter, Any]]] = {  # (target, attend) -> drafter, params
    "none": _plain(lambda target: none()),
    "ngram": _plain(lambda target: ngram(4, 2, 1, MAX_LEN + 1)),
    "ngram_latest": _plain(lambda target: ngram(3, 3, 1, MAX_LEN + 1, latest=True)),
    "draft_model": _draft((1, 1, 1), False, TARGET, noisy_params),
    "draft_model_sampled": _draft((1, 1, 1), True),
    "draft_model_tree": _draft((3, 2), False, TARGET, noisy_params),
    "draft_model_tree_sampled": _draft((3, 2, 1), True),
    "draft_model_self": _draft((1, 1, 1), False, TARGET, target_params),
    "draft_model_self_sampled": _draft((1, 1, 1), True, TARGET, target_params),
    "draft_model_self_tree": _draft((3, 2), False, TARGET, target_params),
    "draft_model_self_tree_sampled": _draft((2, 2), True, TARGET, target_params),
    "draft_model_contrary_sampled": _draft((1, 1), True, TARGET, contrary_params),
    "random_trees": _plain(lambda target: random_trees(7, target.vocab_size)),
}


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
                attend: Attend = reference.paged_attention) -> StepConfig:
  """By default every draft is verified whole, at one of two widths."""
  n = drafter.num_nodes
  widths = widths or ((num_slots, 1), (num_slots * n, n))[:1 if n == 1 else 2]
  return StepConfig(TARGET, widths, CostModel(rows_per_pass), max_logprobs=1, attend=attend)


def compiled(function, donate: int, level: int = 3):
  """(jitted, a list that grows with each trace). Level 0 compiles in half the time, runs slowly."""
  traces: list[int] = []

  def traced(*args):
    traces.append(1)
    return function(*args)

  options = {"xla_backend_optimization_level": level}
  return jax.jit(traced, donate_argnums=donate, compiler_options=options), traces


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
  params = {"target": target_params(), "draft": draft_params, "max_draft": jnp.int32(99),
            "lag": jnp.float32(1000)}
  config = step_config(drafter, num_slots, widths, rows_per_pass, attend)
  return Rig(config, drafter, params, num_slots, *_programs(config, drafter))


@functools.cache
def _programs(config: StepConfig, drafter: Drafter):
  """Shared by the cases that differ in parameters only."""
  fill, _ = compiled(_make_fill(config, drafter), 1, level=0)
  return fill, *compiled(step.make_step(config, drafter), 1)


def _make_fill(config: StepConfig, drafter: Drafter) -> Callable:
  """Admits and prefills every slot, each prompt in two chunks of different programs."""
  prefills = [step.make_prefill(config, drafter, size) for size in PREFILL]

  def fill_slot(params, requests, tokens, count, slot, state):
    state = step.admit(state, slot, jax.tree.map(lambda x: x[slot], requests))
    first = jnp.minimum(count[slot] // 2, PREFILL[0])
    for i, at, n in ((0, 0, first), (1, first, count[slot] - first)):
      chunk = jax.lax.dynamic_slice_in_dim(tokens[slot], at, PREFILL[i] + 1)
      state, _ = prefills[i](params, state, slot, chunk, n, jnp.bool_(i == 1))
    return state

  def fill(params, state, requests, tokens, count):
    run = lambda slot, state: fill_slot(params, requests, tokens, count, slot, state)
    return jax.lax.fori_loop(0, tokens.shape[0], run, state)

  return fill


def start(rig: Rig, prompts, *, keys=None, max_draft=99, limit=10**6, sampling=None) -> SpecState:
  """Slots with their prompts prefilled and their roots drawn."""
  b, drafter = rig.num_slots, rig.drafter
  table, num_pages = page_table(b, drafter.num_nodes, MAX_LEN)
  keys = jax.random.split(jax.random.key(0), b) if keys is None else keys
  whole = lambda value=0, dtype=jnp.int32: jnp.broadcast_to(jnp.asarray(value, dtype), (b,)) + 0
  sampling = sampling_for(b) if sampling is None else sampling
  state = SpecState(
      pages=cache.init_pages(TARGET, num_pages, PAGE, jnp.float32),
      page_table=jnp.zeros_like(table), length=whole(), root=whole(), active=whole() > 0,
      num_output=whole(), limit=whole(), max_draft=whole(), accepted=whole(0, jnp.float32),
      tested=whole(1, jnp.float32), key=jax.random.split(jax.random.key(9), b),
      sampling=sampling_for(b), draft=drafter.init(b, num_pages))
  requests = SlotRequest(table, whole(limit), whole(max_draft), keys, sampling)
  tokens = np.zeros((b, sum(PREFILL) + PREFILL[1] + 1), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    assert 2 <= len(prompt) <= sum(PREFILL)
    row[:len(prompt)] = prompt
  return rig.fill(rig.params, state, requests, tokens, jnp.array([len(p) for p in prompts]))


def copy(state: SpecState) -> SpecState:
  """For a step to donate."""
  return jax.tree.map(lambda x: x.copy(), state)


def random_prompts(num: int, seed: int = 3) -> list[list[int]]:
  """Lengths from 2 up, page multiples and their neighbours among them."""
  rng = np.random.default_rng(seed)
  return [rng.integers(0, VOCAB, 2 + i % 20).tolist() for i in range(num)]


def generate(rig: Rig, state: SpecState, num_tokens: int, step_function=None):
  """Steps until every slot has num_tokens tokens or is finished; the state is used up.

  Returns the tokens of each slot, root first, and each step's StepOutput.
  """
  text, outputs = [[int(t)] for t in np.array(state.root)], []
  running = np.array(state.active)
  while any(r and len(t) < num_tokens for r, t in zip(running, text, strict=True)):
    state, out = (step_function or rig.step)(rig.params, state)
    outputs.append(jax.tree.map(np.array, out))
    running = np.array(state.active)
    for row, tokens, n in zip(text, outputs[-1].tokens, outputs[-1].num_tokens, strict=True):
      assert (tokens[:n] >= 0).all() and (tokens[n:] == PAD_TOKEN).all()
      row.extend(tokens[:n].tolist())
  return [t[:num_tokens] for t in text], outputs


def slots_of(table, length, index=None, temperature=0.9, seed=5) -> Slots:
  """What a drafter is told of slots `index` (all of them by default)."""
  index = jnp.arange(table.shape[0]) if index is None else jnp.asarray(index)
  keys = jax.random.split(jax.random.key(seed), table.shape[0])[index]
  return Slots(index, table[index], jnp.asarray(length, jnp.int32)[index],
               jnp.full(len(index), temperature), keys)
