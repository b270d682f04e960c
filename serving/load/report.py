"""Figures of a load test: percentiles, goodput, acceptance, memory; as a table and a plot."""

from __future__ import annotations

import collections
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from jspec.serving.load.client import Record

PERCENTILES = (50, 90, 99)
Samples = Sequence[tuple[float, dict[str, float]]]  # (seconds, counters of the server)
_COLUMNS = ("speculation", "level", "requests", "done", "left", "errors", "lost", "tok/s",
            "goodput", "TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "e2e s p50/p90/p99",
            "accepted", "prefix hits", "memory MiB")
_PANELS = (  # title, key in a run's figures, factor, logarithmic
  ("time to first token, ms", "ttft_s", 1000, True),
  ("time per output token, ms", "tpot_s", 1000, True),
  ("end-to-end latency, s", "e2e_s", 1, True),
  ("output tokens/s", "output_tokens_per_s", 1, False),
  ("goodput, share of requests", "goodput", 1, False),
  ("acceptance rate", "acceptance_rate", 1, False),
)


class Goals(NamedTuple):
  """A request counts for goodput if it takes no longer, in seconds."""

  ttft: float
  tpot: float


def summary(records: Sequence[Record], samples: Samples, goals: Goals) -> dict[str, Any]:
  """Everything about one run. Latencies are those of completed requests, from when they were due.

  Throughput is output tokens of completed requests from the first request to the last answer.
  Time per output token is per token, not per message: (last - first) / (tokens - 1).
  """
  done = [record for record in records if record.completed]
  seconds = max((r.last for r in records), default=0.0) - min((r.due for r in records), default=0.0)
  good = [r for r in done if _ttft(r) <= goals.ttft and (_tpot(r) or 0.0) <= goals.tpot]
  tokens = sum(r.output_tokens for r in done)
  asked = sum(not r.left for r in records)
  first, last = samples[0][1], samples[-1][1]
  gained = {name: last[name] - first[name] for name in last if name in first}
  accepted = gained.get("accepted_tokens", 0.0)
  return {
    "requests": len(records), "completed": len(done), "left": len(records) - asked,
    "errors": dict(collections.Counter(r.error for r in records if r.error)),
    "lost": sum(r.lost for r in records), "seconds": seconds,
    "requests_per_s": _share(len(done), seconds), "output_tokens_per_s": _share(tokens, seconds),
    "prompt_tokens": sum(r.prompt_tokens for r in done), "output_tokens": tokens,
    "goodput": _share(len(good), asked), "good_requests_per_s": _share(len(good), seconds),
    "ttft_s": percentiles([_ttft(r) for r in done]),
    "tpot_s": percentiles([t for r in done if (t := _tpot(r)) is not None]),
    "e2e_s": percentiles([r.last - r.due for r in done]),
    "sent_late_s": max((r.sent - r.due for r in records), default=0.0),
    "acceptance_rate": _share(accepted, gained.get("draft_tokens", 0.0)),
    "mean_acceptance_length": 1 + _share(accepted, gained.get("drafts", 0.0)),
    "prefix_hit_rate": _share(gained.get("prefix_hits", 0.0), gained.get("prefix_queries", 0.0)),
    "preemptions": gained.get("preemptions", 0.0),
    "memory_bytes": [(at, counters["memory_bytes"]) for at, counters in samples
                     if "memory_bytes" in counters],
    "idle_after": not (last.get("running") or last.get("waiting") or last.get("kv_cache_usage")),
  }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
  """With linear interpolation between the two nearest; None without values."""
  if not values:
    return None
  ordered = sorted(values)

  def at(percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

  return {**{f"p{percent}": at(percent) for percent in PERCENTILES},
          "mean": sum(ordered) / len(ordered)}


def _ttft(record: Record) -> float:
  assert record.first is not None
  return record.first - record.due


def _tpot(record: Record) -> float | None:
  """None where there is no second token to wait for."""
  if record.output_tokens < 2:
    return None
  assert record.first is not None
  return (record.last - record.first) / (record.output_tokens - 1)


def _share(part: float, whole: float) -> float:
  return part / whole if whole else 0.0


# -------------------------------------------------------------------- display


def table(runs: Sequence[dict[str, Any]]) -> str:
  """One line per run."""
  rows = [_row(run) for run in runs]
  widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
  return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
                   for row in (_COLUMNS, *rows))


def _row(run: dict[str, Any]) -> tuple[str, ...]:
  memory = [value / 2**20 for _, value in run["memory_bytes"]]
  return (run["speculation"], f"{run['level']:g}{'/s' if run['kind'] == 'rate' else ' clients'}",
          str(run["requests"]), str(run["completed"]), str(run["left"]),
          str(sum(run["errors"].values())), str(run["lost"]),
          f"{run['output_tokens_per_s']:.1f}", f"{run['goodput']:.0%}",
          _three(run["ttft_s"], 1000, 0), _three(run["tpot_s"], 1000, 1),
          _three(run["e2e_s"], 1, 2), f"{run['acceptance_rate']:.0%}",
          f"{run['prefix_hit_rate']:.0%}",
          f"{memory[0]:.0f}..{memory[-1]:.0f}" if memory else "-")


def _three(values: dict[str, float] | None, factor: float, digits: int) -> str:
  if values is None:
    return "-"
  return "/".join(f"{factor * values[f'p{percent}']:.{digits}f}" for percent in PERCENTILES)


def plot(runs: Sequence[dict[str, Any]], title: str, path: pathlib.Path) -> None:
  """Each figure against the request rate or the number of clients; medians of repeats."""
  import matplotlib
  matplotlib.use("Agg")
  from matplotlib import pyplot
  figure, grid = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
  modes = list(dict.fromkeys(run["speculation"] for run in runs))
  for axes, (name, key, factor, logarithmic) in zip(grid.flat, _PANELS, strict=True):
    for i, mode in enumerate(modes):
      own = [run for run in runs if run["speculation"] == mode and run[key] is not None]
      for style, part in (("-", "p50"), ("--", "p99")) if logarithmic else (("-", None),):
        points: dict[float, list[float]] = {}
        for run in own:
          points.setdefault(run["level"], []).append(run[key][part] if part else run[key])
        levels = sorted(points)
        axes.plot(levels, [factor * statistics.median(points[level]) for level in levels],
                  style, marker="o", color=f"C{i}", label=f"{mode} {part}" if part else mode)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("requests/s" if runs[0]["kind"] == "rate" else "clients")
    if logarithmic:
      axes.set_yscale("log")
    else:
      axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({run["level"] for run in runs}))
    axes.legend(fontsize=7, handlelength=4)
  figure.suptitle(title, fontsize=10)
  figure.savefig(path, dpi=120)
  pyplot.close(figure)
