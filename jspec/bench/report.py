"""The benchmark's table, JSON and plot."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

from jspec.bench.metrics import PLAIN, SPECULATIVE

_PACKAGES = ("jspec-jax", "jax", "jaxlib", "numpy", "torch", "transformers")
_COLUMNS = ("task", "requests", "plain tok/s", "spec tok/s", "ratio", "decode ratio", "acceptance",
            "tok/step", "tok/drafting step", "drafting steps", "TTFT ms", "TPOT ms", "identical")


def environment(argv: Sequence[str]) -> dict[str, Any]:
  """What is about to be run, when and on what."""
  return {
    "command": [pathlib.Path(argv[0]).name, *argv[1:]],
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "machine": {"cpu": _cpu_model(), "cores": cores(), "load_average": _load_average(),
                "system": platform.system(), "architecture": platform.machine()},
    "versions": {"python": platform.python_version(), **_versions()},
  }


def cores() -> int:
  """Cores that this process may use."""
  affinity = getattr(os, "sched_getaffinity", None)  # Linux only
  return len(affinity(0)) if affinity else os.cpu_count() or 1


def _load_average() -> list[float] | None:
  given = getattr(os, "getloadavg", None)  # not on Windows
  return list(given()) if given else None


def peak_memory_mib() -> float | None:
  """The process's largest resident set so far: weights, all engines and their compilation.

  None where the system does not tell.
  """
  try:
    import resource  # here: not on Windows
  except ImportError:
    return None
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes


def table(report: dict[str, Any]) -> str:
  """The report for people to read."""
  rows = [_row(task, block) for task, block in report["tasks"].items()]
  rows.append(_row("all", report["all"]))
  if report["without_loops"] is not None:
    rows.append(_row("without loops", report["without_loops"]))
  widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
  lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                     for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
           for row in (_COLUMNS, *rows)]
  return "\n".join([*lines, "", *_remarks(report)])


def _row(name: str, block: dict[str, Any]) -> tuple[str, ...]:
  plain, spec = block["engines"][PLAIN], block["engines"][SPECULATIVE]
  same = spec.get("identical_to_plain")
  return (name, str(block["requests"]), _number(plain["tokens_per_s"], 1),
          _number(spec["tokens_per_s"], 1), _number(spec["ratio"], 2),
          _number(spec["decode_ratio"], 2), f"{spec['acceptance_rate']:.0%}",
          _number(spec["tokens_per_step"], 2), _number(spec["mean_acceptance_length"], 2),
          "-" if spec["drafting_share"] is None else f"{spec['drafting_share']:.0%}",
          _pair(plain["ttft_s"], spec["ttft_s"]), _pair(plain["tpot_s"], spec["tpot_s"]),
          "-" if same is None else f"{same}/{block['requests']}")


def _remarks(report: dict[str, Any]) -> list[str]:
  everything, sound = report["all"], report["without_loops"]
  headline = sound or everything
  spec = headline["engines"][SPECULATIVE]
  limit = report["settings"]["max_tokens"]
  loops = everything["looping_requests"]
  lines = [f"Speculation makes this {_number(spec['ratio'], 2)}x as fast "
           f"({_number(spec['decode_ratio'], 2)}x without prefill)"
           + (f", {loops} of {everything['requests']} requests looped: their batches are left out "
              "of this number" if loops and sound else "")
           + (", looping texts included, since every batch has one" if loops and not sound else "")
           + ".",
           f"End-to-end latency for {limit} tokens, median: "
           + ", ".join(f"{name} {_number(metrics['latency_s'], 2)} s"
                       for name, metrics in headline["engines"].items()) + "."]
  for name, metrics in headline["engines"].items():
    if name not in (PLAIN, SPECULATIVE):
      same = metrics.get("identical_to_plain")
      also = "" if same is None else f", {same} of {headline['requests']} outputs the same"
      lines.append(f"{name}: {_number(metrics['tokens_per_s'], 1)} tokens/s, "
                   f"{_number(metrics['ratio'], 2)}x jspec's plain decoding{also}.")
  cached = ", ".join(f"{name} {everything['engines'][name]['cached_tokens']}"
                     for name in (PLAIN, SPECULATIVE))
  lines.append(f"Cached tokens: {cached}, of {everything['prompt_tokens']} prompt tokens.")
  peak = report["peak_memory_mib"]
  lines.append(("" if peak is None
                else f"Peak memory {peak:.0f} MiB, all engines in one process. ")
               + f"Times are medians of {report['settings']['repeats']}; TTFT and TPOT are plain / "
               "speculative.")
  return lines


def plot(report: dict[str, Any], path: pathlib.Path) -> None:
  """Tokens per second by task and engine; the number above a bar is its ratio to plain."""
  import matplotlib
  matplotlib.use("Agg")
  from matplotlib import pyplot
  blocks = {**report["tasks"], "all": report["all"]}
  if report["without_loops"] is not None:
    blocks["without loops"] = report["without_loops"]
  names = list(report["all"]["engines"])
  figure, axes = pyplot.subplots(figsize=(1.5 + 1.3 * len(blocks), 4), layout="constrained")
  width = 0.8 / len(names)
  for i, name in enumerate(names):
    metrics = [block["engines"][name] for block in blocks.values()]
    bars = axes.bar([x + (i - (len(names) - 1) / 2) * width for x in range(len(blocks))],
                    [m["tokens_per_s"] for m in metrics], width, label=name)
    if name != PLAIN:
      axes.bar_label(bars, [f"{_number(m['ratio'], 2)}x" for m in metrics], fontsize=7)
  axes.set_xticks(range(len(blocks)), [f"{task}\n({block['requests']})"
                                       for task, block in blocks.items()])
  axes.set_ylabel("tokens/s, prefill included")
  settings, machine = report["settings"], report["machine"]
  axes.set_title(f"{settings['model']}, {settings['dtype']}, batch {settings['batch_size']}, "
                 f"{settings['max_tokens']} tokens, {machine['cpu']} ({machine['cores']} cores)",
                 fontsize=9)
  axes.legend()
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def _number(value: float | None, digits: int) -> str:
  return "-" if value is None else f"{value:.{digits}f}"


def _pair(a: float | None, b: float | None) -> str:
  return " / ".join("-" if x is None else f"{1000 * x:.1f}" for x in (a, b))


def _cpu_model() -> str:
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
  except OSError:
    lines = []
  named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  return named[0] if named else platform.processor() or "unknown"


def _versions() -> dict[str, str]:
  found = {}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      pass
  return found
