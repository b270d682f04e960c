"""The step of an engine as shapes on devices that are not there, and its compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec.build import drafter_setup
from jspec.compile_check import chips, hlo, models
from jspec.compile_check.case import Case, missing_compiler
from jspec.compile_check.chips import Chip
from jspec.config import EngineConfig, ModelConfig
from jspec.config.methods import OPTIONS, HeadOptions
from jspec.config.speculative import SpeculativeConfig
from jspec.config.speculative_parse import parse_speculative
from jspec.drafters import build as build_drafter
from jspec.engine.loop import MAX_STEPS
from jspec.engine.placement import place
from jspec.engine.programs import initial_state
from jspec.heads.config import HeadConfig
from jspec.heads.init import init_head
from jspec.model import attention, sharding
from jspec.model.params import init_params
from jspec.sampling_params import MAX_LOGPROBS
from jspec.speculation import step
from jspec.types import StepInputs

# Without these libtpu asks the network who it is, locks itself and writes logs.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled",
               "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
               "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


class Program(NamedTuple):
  """A step, traced but not lowered."""

  traced: jax.stages.Traced  # of (inputs, state, num_steps) -> (state, StepOutput), state donated
  state: Any  # shapes with shardings
  mesh: Mesh
  page_shape: tuple[int, ...]  # of one layer's keys on one device
  trace_seconds: float


def prepare() -> None:
  """Sets what the compilers read from the environment; keeps JAX off any real accelerator."""
  for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  jax.config.update("jax_platforms", "cpu")


def devices_of(chip: Chip, count: int) -> list[Any]:
  """Devices that the compiler knows, and nobody else."""
  problem = missing_compiler(chip.platform)
  if problem:
    raise ValueError(problem)
  if chip.platform == "tpu":
    name = next(name for size, name in chip.topologies if size >= count)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
  else:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{count}",
        target_config=chips.target_config(chip))
  return topology.devices[:count]


def build(case: Case, config: ModelConfig, devices: list[Any]) -> Program:
  """The engine's program for these devices, with the first attention that can do the case.

  Args:
    config: the case's model, perhaps with fewer layers.

  Raises:
    ValueError: where no attention can do the case, with each one's reason.
  """
  platform = chips.find(case.chip).platform
  backends = [case.attention]
  if case.attention == "kernel":
    backends = [name for name in attention.PREFERENCE[platform] if name != "reference"]
  refused = []
  for backend in backends:
    try:
      return _build(case, config, devices, platform, backend)
    except NotImplementedError as error:
      refused.append(str(error))
  raise ValueError(f"{case.name}: {'; '.join(refused)}")


def _build(case: Case, config: ModelConfig, devices: list[Any], platform: str,
           backend: str) -> Program:
  engine = EngineConfig(
      dtype=case.dtype, kv_cache_dtype=case.kv_cache_dtype, max_model_len=case.context,
      max_num_seqs=case.batch, page_size=case.page_size, attention_backend=backend,
      tensor_parallel_size=case.tp, widths=widths(case))
  (placement,) = place(engine, platform, devices=devices)
  held, _ = placement.target(config)
  target = _param_shapes(held, case.dtype)
  spec = speculation(case)
  setup = drafter_setup(
      spec.num_speculative_tokens, held, target, placement, case.context, case.page_size,
      lambda _: _draft_model(case), lambda _: _head(case, config.num_layers))
  drafter, draft_params = build_drafter(spec, setup)
  if drafter.feed is not None:
    draft_params = drafter.feed.params([None] * case.batch)
  engine = dataclasses.replace(engine, num_pages=case.batch * engine.pages_per_slot(case.nodes))
  step_config = step.StepConfig(held, engine.widths, max_logprobs=MAX_LOGPROBS,
                                execution=placement.execution)
  run = step.make_multi_step(step_config, drafter, MAX_STEPS)

  # A single device needs no mesh to run, but a sharding to be compiled for.
  mesh = placement.mesh or sharding.make_mesh(devices)
  everywhere = NamedSharding(mesh, P())
  scalar: Any = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=everywhere)
  state = jax.eval_shape(
      lambda: initial_state(jax.random.key(0), held, drafter, engine, placement.kv_dtype))
  state_shardings = sharding.state_shardings(mesh, state, placement.draft_tp)
  inputs = StepInputs(  # shapes in place of arrays
      _placed(target, sharding.param_shardings(mesh, target, case.tp)),
      _placed(draft_params, _draft_shardings(mesh, draft_params, case.tp)),
      scalar(jnp.int32), scalar(jnp.float32))
  placed_state = _placed(state, state_shardings)
  if platform == "tpu":
    state_shardings = sharding.with_tpu_layouts(state_shardings, state)
  jitted = jax.jit(run, donate_argnums=1, in_shardings=(None, state_shardings, None),
                   out_shardings=(state_shardings, everywhere))
  started = time.perf_counter()
  with _known_chip(mesh):
    traced = jitted.trace(inputs, placed_state, scalar(jnp.int32))
  pages = state.pages.k[0].shape
  return Program(traced, placed_state, mesh, (*pages[:2], pages[2] // case.tp),
                 time.perf_counter() - started)


def _draft_shardings(mesh: Mesh, params: Any, tp: int) -> Any:
  """Of a drafter's parameters: whole on each device, but for what it shares with the target."""
  shardings = sharding.param_shardings(mesh, params, 1)
  if isinstance(params, dict) and "target" in params:
    shardings["target"] = sharding.param_shardings(mesh, params["target"], tp)
  return shardings


def _known_chip(mesh: Mesh):
  """A kernel may ask which chip it is for: the mesh in use tells it."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def widths(case: Case) -> tuple[tuple[int, int], ...]:
  """Plain decoding and the whole tree: widths in between cost compile time, not memory."""
  return tuple(dict.fromkeys([(case.batch, 1), (case.batch * case.nodes, case.nodes)]))


def speculation(case: Case) -> SpeculativeConfig:
  keys: dict[str, Any] = {"method": case.drafter}
  if case.nodes > 1:
    keys["num_speculative_tokens"] = case.nodes - 1
  if case.drafter == "draft_model":
    keys["model"] = models.DRAFT_MODEL_OF[case.model]
  elif issubclass(OPTIONS[case.drafter], HeadOptions):
    keys["model"] = f"a head for {case.model}"
  return parse_speculative(keys)


def _head(case: Case, num_layers: int) -> tuple[HeadConfig, Any]:
  config = models.head_of(case.model, case.drafter, num_layers, case.nodes - 1)
  return config, jax.eval_shape(
      lambda: init_head(jax.random.key(0), config, jnp.dtype(case.dtype)))


def _draft_model(case: Case) -> tuple[ModelConfig, Any, int]:
  config = models.draft_model_of(case.model)
  return config, _param_shapes(config, case.dtype), config.vocab_size


def _param_shapes(config: ModelConfig, dtype: str) -> Any:
  """Shapes of a model's parameters."""
  return jax.eval_shape(
      lambda: init_params(jax.random.key(0), config, jnp.dtype(dtype)))


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                      shapes, shardings)


def compile_step(program: Program) -> dict[str, Any]:
  """Lowers and compiles; all the figures that the compiled program gives."""
  started = time.perf_counter()
  with _known_chip(program.mesh):
    lowered = program.traced.lower()
  lowered_at = time.perf_counter()
  compiled = lowered.compile()
  compiled_at = time.perf_counter()
  text = compiled.as_text()
  memory = compiled.memory_analysis()
  cost = compiled.cost_analysis() or {}
  return {
    "lower_seconds": round(program.trace_seconds + lowered_at - started, 1),
    "compile_seconds": round(compiled_at - lowered_at, 1),
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "temp_bytes": memory.temp_size_in_bytes,
    "code_bytes": memory.generated_code_size_in_bytes,
    "state_bytes": bytes_per_device(program.state),
    "flops": cost.get("flops"),  # a GPU's compiler gives none
    "bytes_accessed": cost.get("bytes accessed"),
    "collectives": hlo.collectives(text),
    "largest_collective": hlo.largest_collective(text),
    "kernels": hlo.kernels(text),
    "pool_copies": len(hlo.copies_of(text, program.page_shape)),
    "pool_stagings": len(hlo.staged(text, program.page_shape)),
  }


def bytes_per_device(shapes: Any) -> int:
  return sum(int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * _itemsize(x)
             for x in jax.tree.leaves(shapes))


def _itemsize(x) -> int:
  with contextlib.suppress(TypeError):
    return jnp.dtype(x.dtype).itemsize
  return 8  # a PRNG key: two words
