"""Trained heads and draft models -> folders in the public checkpoint formats.

Whatever is written has been read: jspec's own readers must find the same config and tensors in it,
so that nothing a style cannot say is dropped in silence. `load_head` and `load_model` lead back.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from jspec.checkpoints.head_files import SCALE_ENDING, HeadFiles, join_scales
from jspec.checkpoints.head_formats import head_layout
from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.load_head import check_fit, check_tensors
from jspec.checkpoints.tensors import StoredTensor
from jspec.checkpoints.weights import TensorSource, hf_norm_offset, model_leaves
from jspec.checkpoints.weights import check_tensors as check_model_tensors
from jspec.config import ModelConfig
from jspec.heads.config import EagleConfig, HeadConfig, MedusaConfig
from jspec.model import transformer
from jspec.model.params import Path
from jspec.training.export.formats import STYLES, Format, format_of, method_of, sayable

DTYPES = ("bfloat16", "float32", "int8")  # of matrices; norms are float32 in every file
INT8_STYLE = "compact"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                    "chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt",
                    "added_tokens.json", "tokenizer.model")
_MIN_SCALE = 2.0**-100  # far above where float32 loses digits, far below any weight that counts

Tensors = dict[str, np.ndarray]


def export(folder: str | pathlib.Path, config: HeadConfig | ModelConfig, params: Any,
           target: ModelConfig, target_name: str, style: str | None = None,
           dtype: str = "bfloat16", *, tokenizer: str | pathlib.Path | None = None,
           overwrite: bool = False) -> pathlib.Path:
  """Writes a head or a draft model as a folder that appears whole or not at all.

  Args:
    config, params: as heads/config.py documents them; of a draft model, model/transformer.py's.
    target: whose head or draft it is. target_name: by which public loaders know it.
    style: one of STYLES[its method]; None: the first of them.
    dtype: of matrices and embeddings; "int8", a scale per row, is for style "compact" alone.
    tokenizer: the target's folder, whose tokenizer a draft model gets.
    overwrite: whether a checkpoint that is there already may be replaced.
  """
  folder = pathlib.Path(folder)
  style = _checked_style(method_of(config), style, dtype, tokenizer)
  check_place(folder, overwrite)
  config = sayable(config)
  leaves = dict(_flat(params))
  target_id = _target_id(config, leaves)
  form = format_of(config, target, target_name, style, "float32" if dtype == "int8" else dtype,
                   target_id, ("fc", "b") in leaves)
  tensors = _tensors(leaves, form, config, dtype) | form.tables
  text = json.dumps(form.config, indent=2) + "\n"
  _check(f"export to {folder}", config, json.loads(text), tensors, form, target, style)
  extra = _tokenizer_files(tokenizer)
  _write(folder, {"config.json": text}, form.file, tensors, extra)
  return folder


def without_copies(config: HeadConfig, params: Any, target: ModelConfig,
                   target_params: Any) -> tuple[HeadConfig, Any]:
  """The same head, sharing with the target what equals the target's own, so that it isn't stored.

  That the lm_head of a draft vocabulary is the target's rows, the style "compact" alone can say.
  """
  if target.final_soft_cap is not None or target.learned_positions or target.embed_scale != 1.0:
    return config, params
  head = transformer.lm_head(target_params)
  if isinstance(config, MedusaConfig) and not config.shares_head and not config.draft_vocab_size:
    if all(_same(one["head"]["w"], head) for one in params["heads"]):
      return (dataclasses.replace(config, shares_head=True),
              {"heads": [{"blocks": one["blocks"]} for one in params["heads"]]})
  if not isinstance(config, EagleConfig):
    return config, params
  if config.has_embed and _same(params["embed"], target_params["embed"]):
    config = dataclasses.replace(config, has_embed=False)
    params = {name: leaf for name, leaf in params.items() if name != "embed"}
  if config.draft_vocab_size:
    head = head[:, np.asarray(params["target_id"])]
  if config.has_head and _same(params["head"]["w"], head):
    config = dataclasses.replace(config, has_head=False)
    params = {name: leaf for name, leaf in params.items() if name != "head"}
  return config, params


def _same(one: Any, other: Any) -> bool:
  return one.shape == other.shape and np.array_equal(np.asarray(one), np.asarray(other))


def quantise_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """f32[out, ...] -> i8[out, ...] and f32[out]; their product is off by half a scale at most.

  A scale has 17 significant bits, so that its product with an int8 is exact in float32 and what
  was loaded quantises to the same numbers again.
  """
  largest = np.abs(rows).max(axis=tuple(range(1, rows.ndim))).astype(np.float64)
  mantissa, exponent = np.frexp(largest / 127)
  scale = np.maximum(np.ldexp(np.ceil(mantissa * 2**17), exponent - 17), _MIN_SCALE)
  numbers = np.rint(rows / scale.reshape(-1, *(1,) * (rows.ndim - 1)))
  return numbers.astype(np.int8), scale.astype(np.float32)


# ------------------------------------------------------------ what goes into the file


def _checked_style(method: str, style: str | None, dtype: str,
                   tokenizer: str | pathlib.Path | None) -> str:
  style = STYLES[method][0] if style is None else style
  if style not in STYLES[method]:
    raise ValueError(f"{style=} is no export style of method {method!r}: its styles are "
                     f"{', '.join(STYLES[method])}")
  if dtype not in DTYPES:
    raise ValueError(f"{dtype=} is not one of {', '.join(DTYPES)}")
  if dtype == "int8" and style != INT8_STYLE:
    raise ValueError(f"dtype='int8' needs style {INT8_STYLE!r}, got {style!r}: public loaders "
                     "don't read it")
  if tokenizer is not None and method != "draft_model":
    raise ValueError(f"a tokenizer goes with a draft model, not with a head for method {method!r}")
  return style


def _flat(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
  if isinstance(tree, Mapping):
    for key, value in tree.items():
      yield from _flat(value, (*path, key))
  elif isinstance(tree, (list, tuple)):
    for i, value in enumerate(tree):
      yield from _flat(value, (*path, i))
  else:
    yield path, tree


def _target_id(config: HeadConfig | ModelConfig, leaves: dict[Path, Any]) -> np.ndarray | None:
  """Taken from the leaves; there if the config has a draft vocabulary, and only then."""
  target_id = leaves.pop(("target_id",), None)
  size = 0 if isinstance(config, ModelConfig) else config.draft_vocab_size
  if target_id is None and not size:
    return None
  shape = None if target_id is None else target_id.shape
  if shape != (size,):
    raise ValueError(f"draft_vocab_size={size} of the config does not fit target_id of shape "
                     f"{shape} in the parameters")
  return np.asarray(target_id)


def _tensors(leaves: Mapping[Path, Any], form: Format, config: HeadConfig | ModelConfig,
             dtype: str) -> Tensors:
  """By name, as stored: matrices (out, in)."""
  tensors: Tensors = {}
  for path, leaf in leaves.items():
    where = ".".join(map(str, path))
    name = form.names.get(path)
    if name is None:
      raise ValueError(f"the parameters have {where}, which the config has not")
    array = np.asarray(leaf).astype(np.float32)
    if not np.isfinite(array).all():
      raise ValueError(f"the parameters are damaged: {where} has numbers that are not finite")
    if isinstance(config, ModelConfig):
      array = array - np.float32(hf_norm_offset(config, path))
    stored = _stored(name, array.T if path[-1] == "w" else array, path, dtype)
    for key, value in stored.items():
      if key in tensors and not np.array_equal(tensors[key], value):
        raise ValueError(f"{where} is tied to another leaf by the config, but differs from it")
    tensors |= stored
  return tensors


def _stored(name: str, array: np.ndarray, path: Path, dtype: str) -> Tensors:
  if path[-1] in ("scale", "bias") or dtype == "float32":
    return {name: np.ascontiguousarray(array)}
  if dtype == "bfloat16":
    return {name: np.ascontiguousarray(array).astype(ml_dtypes.bfloat16)}
  if array.ndim < 2:
    return {name: array}
  numbers, scale = quantise_rows(array)
  return {name: np.ascontiguousarray(numbers), name + SCALE_ENDING: scale}


# ------------------------------------------------------------ whether it can be read


def _check(where: str, config: HeadConfig | ModelConfig, given: dict[str, Any], tensors: Tensors,
           form: Format, target: ModelConfig, style: str) -> None:
  """Reads the checkpoint before it is written; ValueError says what would be lost."""
  stored = {name: _held(array) for name, array in tensors.items()}
  if isinstance(config, ModelConfig):
    _check_same(style, config, model_config_from_hf(given))
    if config.vocab_size != target.vocab_size:
      raise ValueError(f"{where}: this draft model is for a vocabulary of {config.vocab_size} "
                       f"tokens, the target has {target.vocab_size}")
    check_model_tensors(TensorSource(where, stored, model_leaves(config, form.names),
                                     lambda name: False), config)
    return
  layout = head_layout(HeadFiles(where, given, join_scales(where, stored)), config.method, target)
  _check_same(style, config, layout.config)
  check_tensors(where, layout)
  check_fit(where, layout, target)


def _held(array: np.ndarray) -> StoredTensor:
  return StoredTensor(array.dtype, array.shape, lambda: array)


def _check_same(style: str, config: HeadConfig | ModelConfig,
                read: HeadConfig | ModelConfig) -> None:
  wrong = list(differences(config, read))
  if wrong:
    raise ValueError(f"style {style!r} cannot say {', '.join(wrong)}")


def differences(config: Any, read: Any, prefix: str = "") -> Iterator[str]:
  """Where two configurations part, for messages."""
  for field in dataclasses.fields(config):
    name, value, other = prefix + field.name, getattr(config, field.name), getattr(read, field.name)
    if isinstance(value, ModelConfig):
      yield from differences(value, other, f"{name}.")
    elif value != other:
      yield f"{name}={value!r} (it would be read as {other!r})"


# ------------------------------------------------------------ files


def check_place(folder: pathlib.Path, overwrite: bool) -> None:
  """Refuses a folder that `export` would not write."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"{folder} is a file: exports are folders")
  if not folder.exists() or not any(folder.iterdir()):
    return
  if not overwrite:
    raise ValueError(f"{folder} is not empty: choose another folder or allow to overwrite it")
  if not (folder / "config.json").is_file():
    raise ValueError(f"{folder} is no checkpoint, it has no config.json: it is not overwritten")


def _tokenizer_files(tokenizer: str | pathlib.Path | None) -> list[pathlib.Path]:
  if tokenizer is None:
    return []
  files = [file for name in _TOKENIZER_FILES if (file := pathlib.Path(tokenizer) / name).is_file()]
  if not any(file.name.startswith(("tokenizer.", "vocab.")) for file in files):
    raise ValueError(f"{tokenizer} has no tokenizer: none of tokenizer.json, tokenizer.model and "
                     "vocab.json is there")
  return files


def _write(folder: pathlib.Path, texts: Mapping[str, str], file: str, tensors: Tensors,
           copied: list[pathlib.Path]) -> None:
  """All files in a folder beside it, which then takes its name."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
    built, old = pathlib.Path(temporary, "new"), pathlib.Path(temporary, "old")
    built.mkdir()
    for name, text in texts.items():
      (built / name).write_text(text, encoding="utf-8")
    for source in copied:
      shutil.copyfile(source, built / source.name)
    # transformers refuses a file that doesn't say which framework's layout it has.
    safetensors.numpy.save_file(tensors, built / file, metadata={"format": "pt"})
    if folder.exists():
      folder.rename(old)
    try:
      built.rename(folder)
    except OSError:
      if old.exists():
        old.rename(folder)
      raise
