"""A drafting head's name -> its config and parameters, checked against the target."""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jspec.checkpoints.head_files import METHODS, HeadFiles, kind_of_head, read_head_files
from jspec.checkpoints.head_formats import EMBED, LM_HEAD, HeadLayout, head_layout
from jspec.checkpoints.hub import resolve_head
from jspec.checkpoints.model_names import may_be_head
from jspec.checkpoints.tensors import Leaf, check_leaves, progress_bar
from jspec.checkpoints.weights import hf_norm_offset
from jspec.config import DTYPES, ModelConfig
from jspec.heads.config import HeadConfig
from jspec.model.params import Params, Path, Place, on_device

_ROWS_AT_ONCE = 8192
_ROUNDING, _TINY = 2.0**-7, 1e-7  # bfloat16's and float16's steps

_log = logging.getLogger("jspec")


def load_head(name: str | pathlib.Path, target: ModelConfig, *, method: str | None = None,
              dtype: str = "float32", progress: bool | None = None,
              put: Place = on_device, revision: str | None = None,
              target_params: Params | None = None) -> tuple[HeadConfig, Params]:
  """A head that fits the target, and its parameter tree as heads/config.py documents it.

  Args:
    name: a folder, a .safetensors, .bin or .pt file, or a Hugging Face repo id.
    method: one of head_files.METHODS; None: what the checkpoint is.
    dtype: of matrices and embeddings; norms are float32.
    progress: show a progress bar on stderr; None means only on a terminal.
    put: places a parameter on the device or devices that need it.
    revision: of a repo id, a branch, tag or commit.
    target_params: the target's tree, to see whether what looks like a copy of it is one; None: it
      is.
  """
  if dtype not in DTYPES:
    raise ValueError(f"{dtype=} is not one of {', '.join(DTYPES)}")
  files = read_head_files(resolve_head(name, revision))
  layout = open_head(files, target, method)
  check_fit(files.where, layout, target)
  if layout.copies and target_params is not None:
    own = [name for name in layout.copies if not _is_copy(layout, name, target, target_params)]
    if own:
      layout = open_head(files, target, method, own)
      _log.warning("%s: its own %s is used, for it is not the target's", files.where,
                   " and ".join(own))
  if set(layout.copies) - {EMBED}:  # which every EAGLE-1 checkpoint has
    _log.warning("%s: %s skipped: heads of this kind use the target's own, of which it is a copy",
                 files.where, " and ".join(name for name in layout.copies if name != EMBED))
  return layout.config, _read(layout, dtype, progress, put)


def _is_copy(layout: HeadLayout, name: str, target: ModelConfig, params: Params) -> bool:
  """Whether a tensor is the target's but for rounding; in parts, for it may be a gigabyte."""
  array, axis = np.asarray(layout.tensors[name].read()), 0
  if name == EMBED or (name == LM_HEAD and "head" not in params):
    own = params["embed"]
  elif name == LM_HEAD:
    own, axis = params["head"]["w"], 1
  else:
    own = params["final_norm"]["scale"] - hf_norm_offset(target, ("final_norm", "scale"))
  for begin in range(0, len(array), _ROWS_AT_ONCE):
    rows = array[begin:begin + _ROWS_AT_ONCE].astype(np.float32)
    if not _alike(own, rows.T if axis else rows, begin, axis):
      return False
  return True


@functools.partial(jax.jit, static_argnums=3)
def _alike(own: jax.Array, rows: jax.Array, begin: int, axis: int) -> jax.Array:
  """Whether these rows, or columns, are equal in bfloat16's precision."""
  part = jax.lax.dynamic_slice_in_dim(own, begin, rows.shape[axis], axis).astype(jnp.float32)
  return (jnp.abs(part - rows) <= _ROUNDING * jnp.abs(rows) + _TINY).all()


def detect_method(name: str | pathlib.Path, revision: str | None = None) -> str | None:
  """The method that a checkpoint is a head for, None for a plain model."""
  if pathlib.Path(name).suffix == ".gguf" or not may_be_head(name):
    return None
  return method_of(read_head_files(resolve_head(name, revision)))


def method_of(files: HeadFiles) -> str | None:
  """As detect_method; heads that jspec doesn't run are refused by name."""
  kind = kind_of_head(files)
  if kind is not None and kind not in METHODS:
    raise ValueError(f"{files.where} holds a {kind} head, which jspec doesn't run: methods are "
                     f"{', '.join(METHODS)}")
  return kind


def open_head(files: HeadFiles, target: ModelConfig, method: str | None = None,
              own: Collection[str] = ()) -> HeadLayout:
  """What a head is, every tensor checked against its config; reads no weights."""
  found = method_of(files) or method
  if found is None:
    raise ValueError(f"{files.where} is not a drafting head that jspec knows: methods are "
                     f"{', '.join(METHODS)}")
  if method not in (None, found):
    raise ValueError(f"{files.where} holds a head for method {found!r}, not {method!r}")
  layout = head_layout(files, found, target, own)
  check_tensors(files.where, layout)
  return layout


def check_tensors(where: str, layout: HeadLayout) -> None:
  """Refuses missing, misshapen and unknown tensors by name."""
  check_leaves(where, f"a head of format {layout.format} with this config", layout.leaves,
               layout.tensors, layout.harmless)


def check_fit(where: str, layout: HeadLayout, target: ModelConfig) -> None:
  """Refuses a head that was made for another target."""
  config = layout.config
  if config.target_width != target.width:
    path, needed = config.reads_features(target.width)
    part = layout.leaves[path].parts[0]
    raise ValueError(f"{where}: tensor {part.name} has shape {part.shape}, for targets of width "
                     f"{config.target_width}: this target has {target.width} and needs {needed}")
  if config.vocab_size != target.vocab_size:
    raise ValueError(f"{where}: this head is for a vocabulary of {config.vocab_size} tokens, the "
                     f"target has {target.vocab_size}")
  taps = config.taps(target.num_layers)
  if not all(0 <= tap <= target.num_layers for tap in taps):
    raise ValueError(f"{where}: this head reads hidden states {list(taps)} of the target, which "
                     f"has 0 to {target.num_layers}")
  if config.shared and config.width != target.width:
    raise ValueError(f"{where}: this head is {config.width} wide and has no {config.shared[0]} of "
                     f"its own: it can't share the target's, which is {target.width} wide")


def _read(layout: HeadLayout, dtype: str, progress: bool | None, put: Place) -> Params:
  params: Params = {}
  placed: dict[tuple[Any, ...], jax.Array] = {}  # leaves of one tensor are one array
  leaves: Mapping[Path, Leaf] = layout.leaves
  for path, leaf in progress_bar(leaves.items(), "loading head", progress):
    transposed, is_norm = path[-1] == "w", path[-1] in ("scale", "bias")
    if (leaf, transposed) not in placed:
      array = leaf.read(layout.tensors)
      kind = ml_dtypes.bfloat16 if dtype == "bfloat16" and not is_norm else np.float32
      array = np.array(array.T if transposed else array, dtype=kind, order="C")
      placed[leaf, transposed] = put(path, array)
    _insert(params, path, placed[leaf, transposed])
  if layout.target_id is not None:
    path = ("target_id",)
    _insert(params, path, put(path, layout.target_id.astype(np.int32)))
  return params


def _insert(params: Any, path: Path, leaf: jax.Array) -> None:
  """Sets params[path], growing dicts and lists on the way; list indices come in order."""
  for key, following in zip(path, path[1:], strict=False):
    new: Any = [] if isinstance(following, int) else {}
    if isinstance(key, int):
      if key == len(params):
        params.append(new)
    else:
      params.setdefault(key, new)
    params = params[key]
  params[path[-1]] = leaf
