"""`jspec models` and `jspec models inspect`."""

from __future__ import annotations

import argparse
import json

from jspec.cli.endings import importing
from jspec.cli.flags import DEFAULT_MODEL


def add_models_flags(parser: argparse.ArgumentParser) -> None:
  parser.set_defaults(run=run_models)
  inspect = parser.add_subparsers(metavar="command").add_parser(
    "inspect", help="what a head or model is, and whether a head fits the target")
  inspect.add_argument("path", help="folder, file, Hugging Face repo id or a name from the list")
  inspect.add_argument("--target", metavar="MODEL", default=DEFAULT_MODEL,
                       help="the target, fetched if need be (default: %(default)s)")
  inspect.set_defaults(run=run_inspect)
  for command in (parser, inspect):  # suppressed: a subcommand's default must not undo a flag
    command.add_argument("--json", action="store_true", help="as JSON",
                         default=False if command is parser else argparse.SUPPRESS)
    command.add_argument("--cache-dir", help="where models are stored",
                         default=None if command is parser else argparse.SUPPRESS)


def run_models(arguments: argparse.Namespace) -> int:
  with importing():
    from jspec.checkpoints import hub  # here: it imports JAX
  rows = hub.list_models(arguments.cache_dir)
  if arguments.json:
    print(json.dumps([row._asdict() for row in rows], indent=2))
    return 0
  name = max(len(row.name) for row in rows)
  for row in rows:
    state = "present" if row.present else "not fetched yet"
    print(f"{row.name:<{name}}  {state:<15}  {row.description}; licence: {row.licence}")
  print("Also: a folder with config.json, a .gguf file, or a Hugging Face repo id (org/name).")
  return 0


def run_inspect(arguments: argparse.Namespace) -> int:
  with importing():
    from jspec.checkpoints import inspection  # here: it imports JAX
  report = inspection.inspect_checkpoint(arguments.path, arguments.target, arguments.cache_dir)
  print(json.dumps(report, indent=2) if arguments.json else "\n".join(inspection.lines(report)))
  return 0
