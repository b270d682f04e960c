"""Checkpoint tensors -> the parameter tree of model/transformer.py, one tensor at a time.

A file format says what each leaf of `param_shapes` is made of (`TensorSource`); `build_params` does
the rest.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jspec.checkpoints.families import FAMILIES
from jspec.checkpoints.tensors import (
  FLOATS,
  Leaf,
  Part,
  Shard,
  StoredTensor,
  as_it_is,
  check_leaves,
  join_shards,
  progress_bar,
  read_safetensors,
  safetensors_shards,
)
from jspec.config import DTYPES, ModelConfig
from jspec.model.params import Params, Path, Place, insert, on_device, param_shapes

_HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".attn.masked_bias")


class TensorSource(NamedTuple):
  """A model on disk; matrices are (out, in) in every format we read."""

  where: str  # for messages
  tensors: Mapping[str, StoredTensor]  # every one in the checkpoint
  leaves: Mapping[Path, Leaf]
  harmless: Callable[[str], bool]  # may this tensor stay unused?


def model_leaves(config: ModelConfig, names: Mapping[Path, str],
                 join: Callable[[Path], Callable[[np.ndarray], np.ndarray]] = lambda path: as_it_is,
                 ) -> dict[Path, Leaf]:
  """The leaves of a format that has a tensor for each; join(path): how it becomes the leaf."""
  return {path: Leaf((Part(names[path], shape),), join(path))
          for path, shape in checkpoint_shapes(config).items()}


def checkpoint_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  """The shape of every leaf on disk: matrices are (out, in), positions may begin later."""
  shapes, offset = param_shapes(config), FAMILIES[config.family].position_offset
  for path, shape in shapes.items():
    if path[-1] == "w":
      shapes[path] = shape[::-1]
    elif path == ("positions",):
      shapes[path] = (shape[0] + offset, shape[1])
  return shapes


def hf_names(config: ModelConfig, prefix: str | None = None) -> dict[Path, str]:
  """Leaf -> tensor name in a Hugging Face checkpoint of this family."""
  family = FAMILIES[config.family]
  prefix = family.prefixes[0] if prefix is None else prefix
  names: dict[Path, str] = {}
  for path in param_shapes(config):
    ending = "bias" if path[-1] in ("b", "bias") else "weight"
    if path[0] == "layers":
      names[path] = f"{prefix}layers.{path[1]}.{family.layer_names[str(path[2])]}.{ending}"
    elif path[0] == "head":
      names[path] = "lm_head.weight"
    else:
      names[path] = f"{prefix}{family.outer_names[str(path[0])]}.{ending}"
  return names


def hf_norm_offset(config: ModelConfig, path: Path) -> float:
  """What to add to a stored norm weight, for families that keep w of the factor 1 + w."""
  return FAMILIES[config.family].norm_offset if path[-1] == "scale" else 0.0


def load_params(source: str | pathlib.Path | Iterable[str | pathlib.Path], config: ModelConfig,
                dtype: str = "float32", progress: bool | None = None,
                place: Place | None = None) -> Params:
  """The parameter tree from safetensors: a folder, a file, or the list of shards.

  Args:
    progress: show a progress bar on stderr; None means only on a terminal.
    place: where each parameter goes; the default device if None.
  """
  return build_params(safetensors_source(source, config), config, dtype, progress, place)


def build_params(source: TensorSource, config: ModelConfig, dtype: str = "float32",
                 progress: bool | None = None, place: Place | None = None) -> Params:
  """Checks every tensor against the config, then reads them one by one."""
  if dtype not in DTYPES:
    raise ValueError(f"{dtype=} is not one of {', '.join(DTYPES)}")
  check_tensors(source, config)
  params: Params = {"layers": [{} for _ in range(config.num_layers)]}
  for path, leaf in progress_bar(source.leaves.items(), "loading weights", progress):
    array = leaf.read(source.tensors)
    if path == ("positions",):
      array = array[FAMILIES[config.family].position_offset:]
    if path[-1] == "w":
      array = array.T
    is_norm = len(path) > 1 and str(path[-2]).endswith("norm")
    # Always a copy of our own: JAX must not alias a mapped file that may change under it.
    array = np.array(array, dtype=_numpy_dtype("float32" if is_norm else dtype), order="C")
    insert(params, path, (place or on_device)(path, array))
  return params


def _numpy_dtype(dtype: str) -> np.dtype:
  return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
  """Refuses missing, unknown and misshapen tensors by name."""
  check_leaves(source.where, f"a {config.family} model with this config", source.leaves,
               source.tensors, source.harmless)


def safetensors_source(source: str | pathlib.Path | Iterable[str | pathlib.Path],
                       config: ModelConfig) -> TensorSource:
  """A Hugging Face checkpoint as a TensorSource; reads headers only."""
  if isinstance(source, (str, pathlib.Path)):
    where, shards = str(source), safetensors_shards(pathlib.Path(source))
  else:
    shards = [Shard(pathlib.Path(file)) for file in source]
    where = str(shards[0].file.parent) if shards else "no files given"
  tensors = join_shards(shards, lambda file: read_safetensors(file, FLOATS))
  family = FAMILIES[config.family]
  embed = f"{family.outer_names['embed']}.weight"
  prefix = next((p for p in family.prefixes if p + embed in tensors), family.prefixes[0])
  names = hf_names(config, prefix)
  head = prefix.removesuffix("model.") + "lm_head.weight"
  if ("head", "w") in names and "lm_head.weight" not in tensors and head in tensors:
    names["head", "w"] = head

  def join(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    offset = np.float32(hf_norm_offset(config, path))
    return (lambda array: array.astype(np.float32) + offset) if offset else as_it_is

  def harmless(name: str) -> bool:
    tied_head = config.tie_embeddings and name in ("lm_head.weight", head)
    return tied_head or name.startswith(family.harmless) or name.endswith(_HARMLESS_ENDINGS)

  return TensorSource(where, tensors, model_leaves(config, names, join), harmless)
