"""One case from beginning to end: compile, extrapolate, predict, compare with the baseline."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.compile_check import chips, models, program, roofline
from jspec.compile_check.case import Case
from jspec.compile_check.chips import Chip
from jspec.config import KV_DTYPES, ModelConfig

DEPTHS = (1, 2)  # layers, from which a whole model is extrapolated
BASELINE = pathlib.Path(__file__).parent / "baseline.json"
LINEAR = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes",
          "state_bytes", "flops", "bytes_accessed", "pool_copies", "pool_stagings")


def run(case: Case, depths: Sequence[int] | None = DEPTHS,
        progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
  """Everything about a case, as JSON.

  Args:
    depths: layers to compile with; one depth is reported as it is, from two the whole model is
      extrapolated in a straight line: layers are unrolled and alike. Exact for arguments, aliases,
      kernels and collectives; temp bytes and moves through VMEM only roughly on a TPU, whose
      compiler uses VMEM as it finds room. None: all layers.
  """
  config, chip = models.find(case.model), chips.find(case.chip)
  devices = program.devices_of(chip, case.tp)
  compiled = {}
  for num_layers in depths or (config.num_layers,):
    progress(f"{case.name}: compiling {num_layers} of {config.num_layers} layers")
    shallow = models.with_depth(config, num_layers)
    compiled[num_layers] = program.compile_step(program.build(case, shallow, devices))
  whole = _whole(compiled, config.num_layers)
  return {
    "case": case.name,
    "versions": versions(chip),
    "compiled": {str(depth): figures for depth, figures in compiled.items()},
    "whole": None if whole is None else {
      "layers": config.num_layers,
      "from": "compiled" if config.num_layers in compiled else
              f"extrapolated from {' and '.join(map(str, compiled))} layers",
      **whole, **memory(whole, chip)},
    "per_layer": _per_layer(compiled, len(program.widths(case))),
    "prediction": prediction(case, config, chip),
  }


def versions(chip: Chip) -> dict[str, str]:
  """Of what compiled."""
  compiler = "libtpu" if chip.platform == "tpu" else "jax-cuda13-pjrt"
  return {"jax": jax.__version__, compiler: importlib.metadata.version(compiler)}


def _whole(compiled: dict[int, dict[str, Any]], num_layers: int) -> dict[str, Any] | None:
  if num_layers in compiled:
    return compiled[num_layers]
  if len(compiled) < 2:
    return None
  low, high = min(compiled), max(compiled)
  line = lambda a, b: a + (b - a) * (num_layers - low) // (high - low)
  a, b = compiled[low], compiled[high]
  out = {name: None if a[name] is None else line(a[name], b[name]) for name in LINEAR}
  nothing = {"count": 0, "bytes": 0}
  out["collectives"] = {
    kind: {key: line(a["collectives"].get(kind, nothing)[key],
                     b["collectives"].get(kind, nothing)[key]) for key in nothing}
    for kind in sorted({*a["collectives"], *b["collectives"]})}
  out["kernels"] = {name: line(a["kernels"].get(name, 0), b["kernels"].get(name, 0))
                    for name in sorted({*a["kernels"], *b["kernels"]})}
  return out


def _per_layer(compiled: dict[int, dict[str, Any]], num_widths: int) -> dict[str, Any] | None:
  """What one more layer adds to the program of each width."""
  if len(compiled) < 2:
    return None
  low, high = min(compiled), max(compiled)
  times = (high - low) * num_widths
  a, b = compiled[low], compiled[high]
  count = lambda figures, kind: figures["collectives"].get(kind, {"count": 0})["count"]
  kinds = sorted({*a["collectives"], *b["collectives"]})
  return {
    "collectives": {kind: (count(b, kind) - count(a, kind)) / times for kind in kinds},
    "kernels": (sum(b["kernels"].values()) - sum(a["kernels"].values())) / times,
    "temp_bytes": (b["temp_bytes"] - a["temp_bytes"]) // (high - low),
  }


def memory(figures: dict[str, Any], chip: Chip) -> dict[str, Any]:
  """What a device holds while the step runs; donated arguments are the outputs."""
  used = (figures["argument_bytes"] + figures["output_bytes"] - figures["alias_bytes"]
          + figures["temp_bytes"] + figures["code_bytes"])
  return {"used_bytes": used, "memory_bytes": chip.memory, "fits": used <= chip.memory}


def prediction(case: Case, config: ModelConfig, chip: Chip) -> dict[str, Any]:
  """The roofline of verifying, what drafting adds, and how many tokens a step must bring."""
  size = jnp.dtype(case.dtype).itemsize
  kv_dtype = KV_DTYPES[case.kv_cache_dtype]
  kv_size = jnp.dtype(kv_dtype).itemsize if kv_dtype else size
  rows = roofline.verification(config, chip, case.tp, case.batch, case.context, size, kv_size)
  at = lambda queries: roofline.seconds(roofline.forward_cost(
    config, case.tp, case.batch, queries, case.context, size, kv_size), chip, case.tp)
  draft = 0.0
  if case.drafter == "draft_model":
    cost = roofline.forward_cost(models.draft_model_of(case.model), 1, case.batch, 1, case.context,
                                 size, kv_size)
    draft = (case.nodes - 1) * roofline.seconds(cost, chip, 1)
  return {"verification": rows, "draft_seconds": draft, "step_seconds": draft + at(case.nodes),
          "break_even_tokens": (draft + at(case.nodes)) / at(1)}


# ------------------------------------------------------------------ baseline

EXACT = ("argument_bytes", "alias_bytes", "state_bytes", "collectives", "kernels", "pool_copies",
         "pool_stagings")
CLOSE = {"temp_bytes": 0.1, "flops": 0.02, "bytes_accessed": 0.05}  # relative


def read_results(path: pathlib.Path) -> list[dict[str, Any]]:
  return json.loads(path.read_text(encoding="utf-8"))["results"]


def write_results(results: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """Adds to the results in the file, in place of earlier ones of the same case and JAX."""
  earlier = read_results(path) if path.exists() else []
  kept = [row for row in earlier if baseline_of(row, results) is None]
  rows = sorted([*kept, *results], key=lambda row: (row["case"], row["versions"]["jax"]))
  path.write_text(json.dumps({"results": rows}, indent=1, sort_keys=True) + "\n",
                  encoding="utf-8")


def baseline_of(result: dict[str, Any],
                baseline: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
  """The same case by the same JAX: its versions and their compilers decide differently."""
  return next((row for row in baseline if row["case"] == result["case"]
               and row["versions"]["jax"] == result["versions"]["jax"]), None)


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
  """In words, what the compiled programs of two results have not in common, time aside."""
  found = []
  for depth in sorted({*now["compiled"]} & {*before["compiled"]}):
    a, b = now["compiled"][depth], before["compiled"][depth]
    for name in EXACT:
      if a[name] != b[name]:
        found.append(f"{depth} layers: {name} is {a[name]}, was {b[name]}")
    for name, tolerance in CLOSE.items():
      if (a[name] is None) != (b[name] is None) or (
          a[name] is not None and abs(a[name] - b[name]) > tolerance * abs(b[name])):
        found.append(f"{depth} layers: {name} is {a[name]}, was {b[name]} "
                     f"(more than {tolerance:.0%} apart)")
  return found
