"""How an engine's models are computed, and where: platform, mesh, attention, page dtype."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec.config import EngineConfig, ModelConfig
from jspec.model import attention, cache, sharding
from jspec.model.attention import Attend
from jspec.model.execution import Execution
from jspec.model.params import Place, on_device
from jspec.types import SpecState


@dataclasses.dataclass(frozen=True)
class Placement:
  """Made by `place`."""

  platform: str
  mesh: Mesh | None  # one axis "tp"; None on a single CPU or GPU
  draft_tp: int  # devices that share a draft model: 1 (each has all of it) or all of "tp"
  execution: Execution  # of the target
  draft_execution: Execution
  kv_dtype: jnp.dtype  # of all KV pages

  @property
  def everywhere(self) -> NamedSharding | None:
    return None if self.mesh is None else NamedSharding(self.mesh, P())

  def shardings(self, state: SpecState) -> Any:
    """Of a SpecState (of arrays or their shapes); on TPU layouts, too."""
    if self.mesh is None:
      return None
    shardings = sharding.state_shardings(self.mesh, state, self.draft_tp)
    return sharding.with_tpu_layouts(shardings, state) if self.platform == "tpu" else shardings

  def target(self, config: ModelConfig) -> tuple[ModelConfig, Place]:
    """The target as it is held, and how to put its parameters on the devices."""
    return self._held(config, 1 if self.mesh is None else self.mesh.shape["tp"], "the model")

  def draft(self, config: ModelConfig) -> tuple[ModelConfig, Place]:
    """The same for a draft model."""
    return self._held(config, self.draft_tp, "the draft model")

  @property
  def head(self) -> Place:
    """How to put a head's parameters on the devices: whole on each."""
    return on_device if self.mesh is None else sharding.replicator(self.mesh)

  def _held(self, config: ModelConfig, tp: int, role: str) -> tuple[ModelConfig, Place]:
    held = sharding.split_config(config, tp, role)
    return held, on_device if self.mesh is None else sharding.placer(self.mesh, config, tp)


def place(config: EngineConfig, platform: str, draft_tp: int = 1, interpret: object = False,
          devices: Sequence[jax.Device] | None = None) -> list[Placement]:
  """One for each data-parallel engine, on the first devices (of all processes).

  Raises ValueError where the devices or the attention backend cannot do what config asks for.
  """
  tp = config.tensor_parallel_size
  if draft_tp not in (1, tp):
    raise ValueError(f"draft_tensor_parallel_size={draft_tp} must be 1 or "
                     f"tensor_parallel_size={tp}")
  backend = config.attention_backend
  if config.numerics == "bitwise":
    if backend not in ("auto", "reference"):
      raise ValueError(f"numerics='bitwise' needs attention_backend 'reference', not {backend!r}: "
                       "kernels round differently for different numbers of draft tokens")
    if tp > 1:
      raise ValueError(f"numerics='bitwise' is for tensor_parallel_size=1, not {tp}")
    backend = "reference"
  needed = tp * config.data_parallel_size
  devices = jax.devices() if devices is None else devices
  if needed > len(devices):
    raise ValueError(f"tensor_parallel_size={tp} times data_parallel_size="
                     f"{config.data_parallel_size} needs {needed} devices, there are "
                     f"{len(devices)}")
  if config.data_parallel_size > 1 and jax.process_count() > 1:
    raise ValueError(f"data_parallel_size={config.data_parallel_size} is for a single process: "
                     f"with {jax.process_count()} processes start an engine for each group of them")
  if config.dynamic_speculation and jax.process_count() > 1:
    raise ValueError("dynamic_speculation is for a single process: the others would measure other "
                     "times, and all must do the same")
  kv_dtype = cache.stored_dtype(config.kv_cache_dtype, config.dtype, platform)

  def on(devices: Sequence[jax.Device]) -> Placement:
    alone = needed == 1 and jax.process_count() == 1 and platform != "tpu"
    mesh = None if alone else sharding.make_mesh(devices)

    def execution(split: bool) -> Execution:
      attend = attention.choose(platform, backend, interpret=interpret, mesh=mesh,
                                split_heads=split)
      return Execution(attend, config.numerics == "bitwise")

    return Placement(platform, mesh, draft_tp, execution(True), execution(draft_tp > 1), kv_dtype)

  return [on(devices[i:i + tp]) for i in range(0, needed, tp)]


def check_attention(attend: Attend, model: ModelConfig, config: EngineConfig, kv_dtype,
                    num_nodes: int) -> None:
  """ValueError, before anything is compiled, where no attention can do the model's shapes.

  model: as sharding.split_config gives it.
  """
  b = config.max_num_seqs
  shape = jax.ShapeDtypeStruct
  pages = shape((config.num_pages, config.page_size, model.num_kv_heads * model.head_dim), kv_dtype)
  scale = shape((config.num_pages, model.num_kv_heads, config.page_size),
                jnp.float32) if cache.is_scaled(kv_dtype) else None
  def run(q, pages, table, length, ancestors, scale):
    return attend(q, pages, pages, table, length, ancestors, scale=model.scale,
                  soft_cap=model.attn_soft_cap, window=model.window, k_scale=scale, v_scale=scale)
  try:
    jax.eval_shape(
        run, shape((b, num_nodes, model.num_heads, model.head_dim), jnp.dtype(config.dtype)), pages,
        shape((b, config.pages_per_slot(num_nodes)), jnp.int32), shape((b,), jnp.int32),
        shape((b, num_nodes, -(-num_nodes // 32)), jnp.uint32), scale)
  except NotImplementedError as error:
    raise ValueError(f"attention_backend={config.attention_backend!r} cannot run this model: "
                     f"{error}") from None


def use_compilation_cache(folder: pathlib.Path) -> None:
  """Compiled programs are kept there between runs, unless the user has set jax up otherwise."""
  if jax.config.values["jax_compilation_cache_dir"] is None:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=folder).close()  # may it be written to?
    except OSError as error:
      warnings.warn(f"compiled programs can't be kept in {folder} ({error.strerror}): each start "
                    "compiles anew", stacklevel=3)
      return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
