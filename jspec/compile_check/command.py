"""jspec compile-check: will this step compile for that chip, fit it, and what should it cost?"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from jspec.compile_check import chips, models
from jspec.compile_check.case import DRAFTERS, TP_SIZES, Case
from jspec.config import DTYPES, KV_DTYPES

ALL_LAYERS = "all"


def add_compile_check_flags(parser: argparse.ArgumentParser) -> None:
  """What to compile and where to put the result."""
  default = {field.name: field.default for field in Case.__dataclass_fields__.values()}
  parser.add_argument("--model", default="llama-3.1-8b",
                      help=f"{', '.join(models.MODELS)} (default: %(default)s)")
  parser.add_argument("--chip", default="v5e", help=f"{', '.join(chips.CHIPS)} "
                      "(default: %(default)s)")
  parser.add_argument("--drafter", default=default["drafter"],
                      help=f"{', '.join(DRAFTERS)} (default: %(default)s)")
  parser.add_argument("--tp", type=int, default=1, help="devices that share the model: "
                      f"{', '.join(map(str, TP_SIZES))} (default: 1)")
  parser.add_argument("--batch", type=int, default=1, help="slots (default: 1)")
  parser.add_argument("--context", type=int, default=default["context"],
                      help="tokens per slot (default: %(default)s)")
  parser.add_argument("--nodes", type=int, help="tokens verified per slot and step, root included "
                      "(default: 8, or 1 without a drafter)")
  parser.add_argument("--dtype", default=default["dtype"], help=f"{', '.join(DTYPES)} "
                      "(default: %(default)s)")
  parser.add_argument("--kv-cache-dtype", default="auto", help=f"{', '.join(KV_DTYPES)} "
                      "(default: %(default)s)")
  parser.add_argument("--page-size", type=int, default=default["page_size"],
                      help="tokens (default: %(default)s)")
  parser.add_argument("--attention-backend", dest="attention", default=default["attention"],
                      help="kernel (the platform's own Pallas kernels, or an error), auto, "
                      "reference, ... (default: %(default)s)")
  parser.add_argument("--layers", default="1,2", help="compile with these many layers; from two "
                      "numbers the whole is extrapolated; 'all' compiles every layer "
                      "(default: %(default)s)")
  parser.add_argument("--all", action="store_true", help="the table: every model on every chip "
                      "and split that is worth one (tens of minutes)")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE",
                      help="add the results to those in this file")
  parser.add_argument("--baseline", action="store_true", help="compare with the repository's "
                      "baseline; differences are printed and exit with code 1")


def run_compile_check(arguments: argparse.Namespace) -> int:
  """Refuses what cannot be done before it compiles anything."""
  layers = depths(arguments.layers)
  cases = all_cases() if arguments.all else [case_of(arguments)]
  if arguments.json is not None and not arguments.json.parent.is_dir():
    raise ValueError(f"can't write {arguments.json}: its folder doesn't exist")
  # Here: bad flags need not wait for JAX, which must not have started when it is kept off chips.
  from jspec.compile_check import check, program, report
  program.prepare()
  print("jspec: compiling for devices that are not here (JAX_PLATFORMS=cpu); nothing is run",
        file=sys.stderr)
  say = lambda text: print(f"jspec: {text}", file=sys.stderr, flush=True)
  results: list[dict[str, Any]] = []
  for case in cases:
    result = check.run(case, layers, say)
    results.append(result)
    if not arguments.all:
      print(report.one(result))
    if arguments.json is not None:  # after each, as a table takes long
      check.write_results(results, arguments.json)
  if arguments.all:
    print(report.table(results))
  return compared(results) if arguments.baseline else 0


def compared(results: list[dict[str, Any]]) -> int:
  """Prints what differs from the baseline; the exit code."""
  from jspec.compile_check import check
  baseline, code = check.read_results(check.BASELINE), 0
  for result in results:
    before = check.baseline_of(result, baseline)
    lines = check.differences(result, before) if before else [
      f"not in the baseline for jax {result['versions']['jax']}"]
    for line in lines:
      print(f"jspec: {result['case']}: {line}", file=sys.stderr)
      code = 1
  return code


def case_of(arguments: argparse.Namespace) -> Case:
  nodes = arguments.nodes
  if nodes is None:
    nodes = 1 if arguments.drafter == "none" else 8
  return Case(
    models.canonical(arguments.model), chips.find(arguments.chip).name,
    arguments.drafter.replace("-", "_"), arguments.tp, arguments.batch, arguments.context, nodes,
    arguments.dtype, arguments.kv_cache_dtype, arguments.page_size, arguments.attention)


def depths(text: str) -> tuple[int, ...] | None:
  """--layers: None for all."""
  if text == ALL_LAYERS:
    return None
  try:
    numbers = tuple(sorted({int(part) for part in text.split(",")}))
  except ValueError:
    numbers = ()
  if not 1 <= len(numbers) <= 2 or numbers[0] < 1:
    raise ValueError(f"--layers must be one or two numbers of layers, such as 1,2, or "
                     f"{ALL_LAYERS!r}, got {text!r}")
  return numbers


def all_cases() -> list[Case]:
  """The table: 8B at every split of the main chips, and one or two of everything else."""
  main, others = ("v5e", "v6e", "v5p", "H200"), ("tpu7x", "H100", "A100")
  cases = [Case("llama-3.1-8b", chip, tp=tp) for chip in main for tp in TP_SIZES]
  cases += [Case("llama-3.1-8b", chip) for chip in others]
  cases += [Case("llama-3.3-70b", chip, tp=8) for chip in main]
  cases += [Case("llama-3.1-8b", chip, "draft_model", tp=tp, nodes=4)
            for chip, tp in (("v5p", 1), ("H200", 4))]
  cases += [Case("llama-3.1-8b", chip, "eagle3", tp=tp, nodes=4)
            for chip, tp in (("v5e", 4), ("v5p", 1), ("H200", 1), ("H200", 4))]
  cases += [Case("llama-3.1-8b", chip, kv_cache_dtype=kv)
            for chip, kv in (("v6e", "fp8"), ("v5p", "int8"), ("H200", "fp8"))]
  cases += [Case("qwen3-8b", chip) for chip in ("v5p", "H200")]
  cases += [Case("smollm2-135m", chip, context=2048) for chip in ("v5e", "H200")]
  return cases
