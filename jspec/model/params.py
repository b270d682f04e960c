"""The target's parameter tree, {"embed", "layers": [...], "final_norm", ...}, in one description.

`AXES` says what each axis of a leaf counts, `leaves` which leaves a model has. Shapes, random
values, how leaves are split over devices (model/sharding.py) and their names on disk
(checkpoints/) follow from these two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig

Path = tuple[str | int, ...]  # ("layers", 3, "q", "w")
Params = dict[str, Any]
Place = Callable[[Path, Any], jax.Array]  # puts a parameter on the device or devices that need it
# A checkpoint's config -> the model as the devices hold it, and how to put its parameters there.
Placer = Callable[[ModelConfig], tuple[ModelConfig, Place]]


_LINEARS = {"q": ("width", "heads"), "k": ("width", "kv_heads"), "v": ("width", "kv_heads"),
            "o": ("heads", "width"), "up": ("width", "mlp"), "down": ("mlp", "width"),
            "gate": ("width", "mlp"), "head": ("width", "vocab")}  # (in, out)
_NORMS = {"attn_norm": "width", "mlp_norm": "width", "q_norm": "head_dim", "k_norm": "head_dim",
          "attn_post_norm": "width", "mlp_post_norm": "width", "final_norm": "width"}
# The end of a leaf's path -> what each of its axes counts, which sharding.MESH_AXES splits.
AXES: dict[tuple[str, ...], tuple[str, ...]] = {
  ("embed",): ("vocab", "width"), ("positions",): ("positions", "width"),
  **{(name, "w"): axes for name, axes in _LINEARS.items()},
  **{(name, "b"): axes[1:] for name, axes in _LINEARS.items()},
  **{(name, part): (axis,) for name, axis in _NORMS.items() for part in ("scale", "bias")},
}
_SMALL_FAN_IN = 16  # of what is added or, near 1, multiplied: random values of about a quarter


class Leaf(NamedTuple):
  shape: tuple[int, ...]
  axes: tuple[str, ...]  # what each axis counts
  fan_in: int  # random values are divided by its square root


def axes_of(path: Sequence[Any]) -> tuple[str, ...] | None:
  """What a leaf's axes count, by the end of its path; None for leaves that targets have not."""
  return next((AXES[end] for n in (2, 1) if (end := tuple(path[-n:])) in AXES), None)


def leaves(config: ModelConfig) -> dict[Path, Leaf]:
  """Every leaf of the parameter tree, in the order of init_params' keys."""
  c = config
  sizes = {"vocab": c.vocab_size, "positions": c.max_positions, "width": c.width, "mlp": c.mlp_dim,
           "heads": c.num_heads * c.head_dim, "kv_heads": c.num_kv_heads * c.head_dim,
           "head_dim": c.head_dim}
  layer = _layer_ends(c)
  paths: list[Path] = [("embed",)]
  paths += [("layers", i, *end) for i in range(c.num_layers) for end in layer]
  paths += _norm_ends(c, "final_norm")
  paths += [("positions",)] if c.learned_positions else []
  paths += [] if c.tie_embeddings else [("head", "w")]
  found = {}
  for path in paths:
    axes = axes_of(path)
    assert axes is not None, path
    shape = tuple(sizes[axis] for axis in axes)
    found[path] = Leaf(shape, axes, shape[0] if path[-1] in ("w", "embed") else _SMALL_FAN_IN)
  return found


def param_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  """Every leaf of the parameter tree and its shape."""
  return {path: leaf.shape for path, leaf in leaves(config).items()}


def _layer_ends(config: ModelConfig) -> list[tuple[str, ...]]:
  """What the paths of a layer's leaves end in."""
  c, ends = config, _norm_ends(config, "attn_norm", "mlp_norm")
  linears = {"q": c.qkv_bias, "k": c.qkv_bias, "v": c.qkv_bias, "o": c.out_bias,
             "up": c.mlp_bias, "down": c.mlp_bias} | ({"gate": c.mlp_bias} if c.gated_mlp else {})
  for name, has_bias in linears.items():
    ends += [(name, "w"), (name, "b")] if has_bias else [(name, "w")]
  ends += [("q_norm", "scale"), ("k_norm", "scale")] if c.qk_norm else []
  return ends + (_norm_ends(c, "attn_post_norm", "mlp_post_norm") if c.post_norms else [])


def _norm_ends(config: ModelConfig, *names: str) -> list[tuple[str, ...]]:
  parts = ("scale", "bias") if config.norm == "layer" else ("scale",)
  return [(name, part) for name in names for part in parts]


def on_device(path: Path, array: Any) -> jax.Array:
  """A parameter on the default device."""
  del path  # unused: all go to the same place
  return jnp.array(array, copy=False)


def init_params(key: jax.Array, config: ModelConfig, dtype=jnp.float32) -> Params:
  """Random parameters, for tests and for shapes: normal, scaled by 1/sqrt(fan in)."""
  params: Params = {"layers": [{} for _ in range(config.num_layers)]}
  for count, (path, leaf) in enumerate(leaves(config).items()):
    is_norm = path[-1] in ("scale", "bias")
    value = jax.random.normal(jax.random.fold_in(key, count), leaf.shape) / math.sqrt(leaf.fan_in)
    value = value.astype(jnp.float32 if is_norm else dtype)
    if path == ("embed",):  # a row is looked up, not summed over
      value = value * math.sqrt(config.vocab_size / config.width)
    insert(params, path, 1 + value if path[-1] == "scale" else value)
  return params


def insert(params: Params, path: Path, leaf: jax.Array) -> None:
  """params[path] = leaf, in a tree that has its list of layers."""
  node: Any = params
  for key in path[:-1]:
    node = node[key] if isinstance(key, int) else node.setdefault(key, {})
  node[path[-1]] = leaf
