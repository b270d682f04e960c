"""Where a training run's metrics go: the terminal, a JSONL file, TensorBoard, a picture."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

from jspec.training.log.tensorboard import EventFile

FILE = "metrics.jsonl"
OWN = ("step", "kind", "time")  # keys of a row that are no metrics

# panel -> curve -> (steps, values)
Curves = dict[str, dict[str, tuple[list[int], list[float]]]]


class Log:
  """One run's metrics, written as they come: a killed run has lost none."""

  def __init__(self, folder: str | os.PathLike, stdout: bool = True, jsonl: bool = True,
               tensorboard: bool = False, resumed: int | None = None, num_steps: int = 0):
    """Opens the log of a run.

    Args:
      resumed: the step from which the run goes on; rows of later steps are dropped, as they will
        come again. None: a new run, without rows.
      num_steps: of the whole run, for the terminal; 0: not said.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self._stdout, self._num_steps = stdout, num_steps
    if jsonl:
      _drop_rows_after(-1 if resumed is None else resumed, folder / FILE)
    self._jsonl = (folder / FILE).open("a") if jsonl else None
    self._events = EventFile(folder, resumed) if tensorboard else None

  def write(self, step: int, metrics: Mapping[str, Any], kind: str = "train") -> None:
    """Scalars by name, as of `step` updates; kind: "train", "eval", ..."""
    values = {name: _scalar(name, value) for name, value in metrics.items()}
    if self._stdout:
      print(line(step, values, kind, self._num_steps), flush=True)
    if self._jsonl is not None:
      finite = {k: v if math.isfinite(v) else None for k, v in values.items()}  # JSON has no NaN
      row = {"step": step, "kind": kind, "time": round(time.time(), 3), **finite}
      self._jsonl.write(json.dumps(row) + "\n")
      self._jsonl.flush()
    if self._events is not None:
      self._events.write(step, {f"{kind}/{k}": v for k, v in values.items()})

  def close(self) -> None:
    for file in (self._jsonl, self._events):
      if file is not None:
        file.close()

  def __enter__(self) -> Log:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def line(step: int, values: Mapping[str, float], kind: str, num_steps: int = 0) -> str:
  """One line for the terminal; those of the same metrics stand under each other."""
  width = len(str(num_steps or 10**6))
  of = f"/{num_steps}" if num_steps else ""
  return f"{step:>{width}}{of} {kind:<5}  " + "  ".join(
      f"{name} {short(value):<8}" for name, value in values.items()).rstrip()


def short(value: float) -> str:
  """At most four digits; a whole number below ten million in full."""
  if not math.isfinite(value):
    return str(value)
  if value == int(value) and abs(value) < 1e7:
    return str(int(value))
  return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def read(jsonl: str | os.PathLike) -> list[dict[str, Any]]:
  """The rows, as they were written; without a last one that was cut short."""
  rows = []
  for number, text in enumerate(lines := pathlib.Path(jsonl).read_text().splitlines(), 1):
    try:
      rows.append(json.loads(text))
    except json.JSONDecodeError as error:
      if number < len(lines):
        raise ValueError(f"{jsonl}:{number} is no JSON: {text:.60}") from error
  return rows


def curves(rows: list[dict[str, Any]]) -> Curves:
  """What to draw: a panel per metric, one for all of name_1, name_2, ..."""
  panels: Curves = {}
  for row in rows:
    for name, value in row.items():
      if name not in OWN and value is not None:
        panel = panels.setdefault(re.sub(r"_\d+$", "", name), {})
        steps, values = panel.setdefault(f"{row['kind']} {name}", ([], []))
        steps.append(row["step"])
        values.append(value)
  return panels


def plot(jsonl: str | os.PathLike, png: str | os.PathLike) -> None:
  """Draws the curves of a run; needs matplotlib."""
  try:
    import matplotlib
  except ImportError as error:
    raise ValueError("a picture of the curves needs matplotlib, "
                     "which jspec-jax's extra 'bench' brings") from error
  matplotlib.use("Agg")
  from matplotlib import pyplot

  panels = curves(read(jsonl))
  if not panels:
    raise ValueError(f"{jsonl} has no metrics to draw")
  columns = min(3, len(panels))
  figure, grid = pyplot.subplots(-(-len(panels) // columns), columns, squeeze=False,
                                 figsize=(5 * columns, 3.2 * -(-len(panels) // columns)),
                                 layout="constrained")
  for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
    for label, (steps, values) in lines.items():
      marker = "" if label.startswith("train ") and len(steps) > 1 else "."
      axes.plot(steps, values, label=label, linewidth=1, marker=marker)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.legend(fontsize=7)
  for axes in list(grid.flat)[len(panels):]:
    axes.set_visible(False)
  figure.savefig(png, dpi=120)
  pyplot.close(figure)


def _scalar(name: str, value: Any) -> float:
  if name in OWN:
    raise ValueError(f"a metric cannot be named {name}: a row has {', '.join(OWN)} of its own")
  try:
    return float(value)
  except TypeError as error:
    raise ValueError(f"metric {name} must be a scalar, got {value!r:.60}") from error


def _drop_rows_after(step: int, path: pathlib.Path) -> None:
  if path.is_file():
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in read(path) if row["step"] <= step))
    part.replace(path)
