"""Where arrays live on a mesh of devices: one table from what an axis means to the mesh's axes.

Tensor parallelism (Shoeybi et al. 2019, Megatron-LM) is the mesh axis "tp": heads, MLP and
vocabulary are split and XLA adds the sums; attention runs on each device's own heads. Slots are not
an axis of the mesh: loops whose number of turns differs between devices cannot hold collectives, so
data parallelism is one engine for each group of devices (engine/replicas.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec.config import ModelConfig
from jspec.model.params import Place, axes_of
from jspec.types import KVPages, SlotSampling, SpecState

MESH_AXES = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp", "width": None,
             "head_dim": None, "positions": None, "slots": None, "pages": None, None: None}
STATE_AXES: dict[str, tuple[str | None, ...]] = {  # fields of KVPages and SlotSampling
  "k": ("pages", None, "kv_heads"), "v": ("pages", None, "kv_heads"),
  "k_scale": ("pages", "kv_heads", None), "v_scale": ("pages", "kv_heads", None),
  "bias": ("slots", "vocab"), "token_flags": ("slots", "vocab"),
  "output_count": ("slots", "vocab"),
}  # all others are replicated


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """The mesh of one engine."""
  # Every axis is of type Auto: XLA derives how intermediate values are split.
  return Mesh(np.array(devices), ("tp",))


def split_config(config: ModelConfig, tp: int, role: str = "the model") -> ModelConfig:
  """The model as `tp` devices hold it: with fewer kv heads than devices each is held repeatedly.

  A vocabulary that does not divide is held whole by every device.

  Raises ValueError if its heads or its MLP cannot be split.
  """
  for name in ("num_heads", "mlp_dim"):
    if getattr(config, name) % tp:
      raise ValueError(f"{role} cannot be split over tensor_parallel_size={tp} devices: its "
                       f"{name}={getattr(config, name)} is not a multiple of it")
  if config.num_kv_heads % tp and tp % config.num_kv_heads:
    raise ValueError(f"{role} cannot be split over tensor_parallel_size={tp} devices: its "
                     f"num_kv_heads={config.num_kv_heads} neither divides it nor is a multiple")
  return dataclasses.replace(config, num_kv_heads=max(config.num_kv_heads, tp),
                             vocab_parts=1 if config.vocab_size % tp else tp)


def param_spec(path: Sequence[Any], shape: Sequence[int], tp: int) -> P:
  """How a parameter is split, by its path in the model's tree, e.g. ("layers", 3, "q", "w")."""
  axes = None if tp == 1 else axes_of(path)
  # A vocabulary that does not divide is held whole by everybody.
  return P(*(None if size % tp else MESH_AXES[axis]
             for axis, size in zip(axes or (None,) * len(shape), shape, strict=True)))


def placer(mesh: Mesh, config: ModelConfig, tp: int) -> Place:
  """place(path, array): a parameter, numpy or jax, on the devices that need it.

  Args:
    config: the model as in its checkpoint. tp: the size of the mesh's axis, or 1: replicated.
  """
  repeats = max(1, tp // config.num_kv_heads)

  def place(path, array) -> jax.Array:
    if repeats > 1 and path[-2:-1] and path[-2] in ("k", "v"):
      heads = array.reshape(*array.shape[:-1], config.num_kv_heads, config.head_dim)
      xp = jnp if isinstance(array, jax.Array) else np
      array = xp.repeat(heads, repeats, axis=-2).reshape(*array.shape[:-1], -1)
    return _put(array, NamedSharding(mesh, param_spec(path, array.shape, tp)))

  return place


def replicator(mesh: Mesh) -> Place:
  """place(path, array): whole on every device."""
  return lambda path, array: _put(array, NamedSharding(mesh, P()))


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
  if isinstance(array, jax.Array) and (array.sharding == sharding or jax.process_count() == 1):
    return jax.device_put(array, sharding)
  array = np.asarray(array)
  return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_params(params: Any, place: Place) -> Any:
  """A whole parameter tree, leaf by leaf."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: place(tuple(_key(entry) for entry in path), x), params)


def param_shardings(mesh: Mesh, params: Any, tp: int) -> Any:
  """Shardings of a parameter tree (of arrays or their shapes), or of a tree with such in it."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: NamedSharding(
          mesh, param_spec([_key(entry) for entry in path], x.shape, tp)), params)


def _key(entry: Any) -> Any:
  match entry:
    case jax.tree_util.DictKey(key=name) | jax.tree_util.SequenceKey(idx=name):
      return name
    case jax.tree_util.GetAttrKey(name=name):
      return name
  raise TypeError(f"no parameter tree has {entry!r}")


def state_shardings(mesh: Mesh, state: SpecState, draft_tp: int) -> SpecState:
  """Shardings of a SpecState (of arrays or their shapes); draft_tp splits the drafter's pages."""

  def of_fields(node: KVPages | SlotSampling, tp: int):
    def spec(name: str, x) -> NamedSharding:
      axes = STATE_AXES.get(name, ("slots",))
      mesh_axes = [MESH_AXES[axis] for axis in axes]
      return NamedSharding(mesh, P(*(
          None if tp == 1 or size % tp else axis
          for axis, size in zip(mesh_axes, x.shape, strict=False))))

    return type(node)(**{name: jax.tree.map(lambda x, name=name: spec(name, x), getattr(node, name))
                         for name in node.__dataclass_fields__})

  def walk(tree: Any, tp: int) -> Any:
    special = lambda x: isinstance(x, (KVPages, SlotSampling))
    return jax.tree.map(lambda x: of_fields(x, tp) if special(x) else NamedSharding(mesh, P()),
                        tree, is_leaf=special)

  return walk(state.replace(draft=None), mesh.shape["tp"]).replace(
      draft=walk(state.draft, draft_tp))


def with_tpu_layouts(shardings: SpecState, state: SpecState) -> SpecState:
  """The shardings with the layout in which XLA for TPU updates KV pages in place.

  By default XLA picks layouts of its own where K*h is no multiple of 128, and tiles for 8 bits
  that its scatter does not use: the pools were then copied for every layer (compiled for v5e, v5p,
  v6e and 7x, not run).
  """
  row_major = Layout((0, 1, 2))
  eight_bits = Layout((0, 1, 2), tiling=((8, 128), (4, 1)))

  def pin(sharding: Any, x: Any) -> Any:
    if not isinstance(x, KVPages):
      return sharding
    return jax.tree.map(
        lambda s, a: Format(eight_bits if a.dtype.itemsize == 1 else row_major, s), sharding, x)

  return jax.tree.map(pin, shardings, state, is_leaf=lambda x: isinstance(x, KVPages))
