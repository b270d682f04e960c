"""A compile-check result in words, and many as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def one(result: dict[str, Any]) -> str:
  """Everything about one case."""
  versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
  lines = [result["case"], f"  compiled, not run, with {versions}"]
  for depth, figures in result["compiled"].items():
    lines += [f"  {depth} layers: lowered in {figures['lower_seconds']} s, compiled in "
              f"{figures['compile_seconds']} s"] + [f"    {line}" for line in _figures(figures)]
  per_layer, whole = result["per_layer"], result["whole"]
  if per_layer:
    sums = ", ".join(f"{count:g} {kind}" for kind, count in per_layer["collectives"].items())
    lines.append(f"  each layer adds, in each width: {per_layer['kernels']:g} attention kernels, "
                 f"{sums or 'no collectives'}; and {size(per_layer['temp_bytes'])} temp in all")
  if whole:
    lines += [f"  all {whole['layers']} layers, {whole['from']}:",
              f"    memory {size(whole['used_bytes'])} of {size(whole['memory_bytes'])}: "
              f"{'fits' if whole['fits'] else 'DOES NOT FIT'}"]
    if whole["from"] != "compiled":
      lines += [f"    {line}" for line in _figures(whole)]
  return "\n".join(lines + _prediction(result["prediction"]))


def _figures(figures: dict[str, Any]) -> list[str]:
  collectives = ", ".join(f"{x['count']} {kind} ({size(x['bytes'])})"
                          for kind, x in figures["collectives"].items())
  largest = figures.get("largest_collective")
  if largest:
    where = "/".join(largest["where"].split("/")[-3:]) or "?"
    collectives += f"; the largest: {largest['kind']}, {size(largest['bytes'])}, of {where}"
  kernels = ", ".join(f"{count} {name}" for name, count in figures["kernels"].items())
  work = ("the compiler gives no FLOPs or bytes" if figures["flops"] is None else
          f"compiler's count, all widths once: {figures['flops']:.3g} FLOPs, "
          f"{size(figures['bytes_accessed'])}")
  return [
    f"per device: arguments {size(figures['argument_bytes'])}, aliased "
    f"{size(figures['alias_bytes'])} (state {size(figures['state_bytes'])}), "
    f"temp {size(figures['temp_bytes'])}, code {size(figures['code_bytes'])}",
    f"attention kernels: {kernels or 'none (XLA)'}; page-pool copies: {figures['pool_copies']}, "
    f"moves through VMEM: {figures['pool_stagings']}",
    f"collectives: {collectives or 'none'}", work]


def _prediction(prediction: dict[str, Any]) -> list[str]:
  lines = ["  predicted by the roofline, per device (nothing was run):",
           "     T      FLOPs      bytes       v(T)  v(T)/v(1)  if not overlapped  bound by"]
  for row in prediction["verification"]:
    lines.append(
      f"    {row['queries']:2}  {row['flops']:9.3g}  {size(row['bytes']):>9}  "
      f"{row['seconds'] * 1e3:6.2f} ms  {row['ratio']:9.3f}  {row['serial_ratio']:17.3f}  "
      f"{row['bound_by']}")
  lines.append(f"  drafting {prediction['draft_seconds'] * 1e3:.2f} ms, step "
               f"{prediction['step_seconds'] * 1e3:.2f} ms: faster than plain decoding from "
               f"{prediction['break_even_tokens']:.2f} tokens per step")
  return lines


def table(results: Sequence[dict[str, Any]]) -> str:
  """One line per case, in Markdown."""
  head = ("model", "drafter", "chip", "tp", "memory / device", "fits", "layers", "kernel",
          "pool copies", "sums per layer", "v(1) ms", "v(8)/v(1)", "not overlapped", "compile s")
  rows = [head, tuple("---" for _ in head), *(_row(result) for result in results)]
  return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(result: dict[str, Any]) -> tuple[str, ...]:
  model, drafter, chip, tp, *_ = result["case"].split()
  whole = result["whole"]
  figures = whole or next(iter(result["compiled"].values()))
  rows = {row["queries"]: row for row in result["prediction"]["verification"]}
  sums = (result["per_layer"] or {}).get("collectives", {}).get("all-reduce", 0)
  seconds = sum(x["lower_seconds"] + x["compile_seconds"] for x in result["compiled"].values())
  return (
    model, drafter, chip, tp.removeprefix("tp="),
    f"{size(whole['used_bytes'])} of {size(whole['memory_bytes'])}" if whole else "?",
    "?" if whole is None else "yes" if whole["fits"] else "NO",
    "all" if whole and whole["from"] == "compiled" else "+".join(result["compiled"]),
    "/".join(figures["kernels"]) or "XLA", str(figures["pool_copies"]),
    f"{sums:g}" if result["per_layer"] else "?", f"{rows[1]['seconds'] * 1e3:.2f}",
    f"{rows[8]['ratio']:.3f}", f"{rows[8]['serial_ratio']:.3f}", f"{seconds:.0f}")


def size(num_bytes: float) -> str:
  """Decimal units, three digits."""
  for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if abs(num_bytes) >= factor:
      return f"{num_bytes / factor:.3g} {unit}"
  return f"{num_bytes:g} B"
