"""What a checkpoint is, from its config and headers alone: `jspec models inspect`."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from jspec.checkpoints.head_files import HeadFiles, read_head_files
from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.hub import read_model_config, resolve, resolve_head
from jspec.checkpoints.load_head import check_fit, method_of, open_head
from jspec.checkpoints.model_names import DEFAULT_MODELS
from jspec.config import ModelConfig
from jspec.model.params import param_shapes


def inspect_checkpoint(name: str, target_name: str,
                       cache_dir: str | pathlib.Path | None = None) -> dict[str, Any]:
  """A JSON object about a head, and whether it fits the target, or about a plain model."""
  embedded = name.lower() in DEFAULT_MODELS
  path = resolve(name, cache_dir).path if embedded else resolve_head(name)
  if path.suffix == ".gguf":
    return _gguf(name, path)
  files = read_head_files(path)
  if method_of(files) is None:
    return _model(name, files)
  return _head(name, files, target_name, read_model_config(target_name, cache_dir))


def _head(name: str, files: HeadFiles, target_name: str, target: ModelConfig) -> dict[str, Any]:
  layout = open_head(files, target)
  config = layout.config
  try:
    check_fit(files.where, layout, target)
    misfit = None
  except ValueError as error:
    misfit = str(error).removeprefix(f"{files.where}: ")
  used = {part.name for leaf in layout.leaves.values() for part in leaf.parts}
  stored = [tensor for name, tensor in layout.tensors.items() if name in used]
  return {"name": name, "kind": "head", "method": config.method, "format": layout.format,
          "config": _fields(config),
          "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
          "taps": list(config.taps(target.num_layers)),
          "parameters": sum(math.prod(tensor.shape) for tensor in stored),
          "bytes": sum(math.prod(tensor.shape) * (tensor.stored or tensor.dtype).itemsize
                       for tensor in stored),
          "dtypes": sorted({(tensor.stored or tensor.dtype).name for tensor in stored}),
          "shared_with_target": list(config.shared),
          "target": target_name, "fits": misfit is None, "misfit": misfit}


def _model(name: str, files: HeadFiles) -> dict[str, Any]:
  if not files.config:
    raise ValueError(f"{files.where} is no drafting head that jspec knows, and without a "
                     "config.json no model either")
  config = model_config_from_hf(files.config)
  tensors = files.tensors.values()
  return _model_report(name, "Hugging Face", config,
                       sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors),
                       {tensor.dtype.name for tensor in tensors})


def _gguf(name: str, path: pathlib.Path) -> dict[str, Any]:
  from jspec.checkpoints import gguf  # here: the gguf package is only needed for GGUF files
  file = gguf.read_gguf(path)
  return _model_report(name, "GGUF", gguf.gguf_config(file), path.stat().st_size,
                       {tensor.kind.name for tensor in file.tensors.values()})


def _model_report(name: str, form: str, config: ModelConfig, size: int,
                  dtypes: set[str]) -> dict[str, Any]:
  return {"name": name, "kind": "model", "method": None, "format": form, "config": _fields(config),
          "parameters": sum(map(math.prod, param_shapes(config).values())), "bytes": size,
          "dtypes": sorted(dtypes)}


def _fields(config: Any) -> dict[str, Any]:
  """The fields of a config that are not at their defaults; those of its layers after a dot."""
  fields: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      fields |= {f"{field.name}.{key}": inner for key, inner in _fields(value).items()}
    elif value != field.default:
      fields[field.name] = value
  return fields


def lines(report: dict[str, Any]) -> list[str]:
  """The report for people."""
  what = f"a head for method {report['method']!r}" if report["kind"] == "head" else "a model"
  rows = {**report["config"],
          "parameters": f"{report['parameters']:,} in {', '.join(report['dtypes'])}: "
                        f"{report['bytes'] / 1e6:,.1f} MB"}
  if report["kind"] == "head":
    rows["draft vocabulary"] = report["draft_vocab_size"]
    if report["taps"]:
      rows["hidden states"] = report["taps"]
    rows["shares with target"] = ", ".join(report["shared_with_target"]) or "nothing"
    rows["fits"] = f"{report['target']}: {report['misfit'] or 'yes'}"
  width = max(map(len, rows))
  return [f"{report['name']}: {what}, format {report['format']}",
          *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
