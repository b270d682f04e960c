"""The command line: jspec generate | chat | serve | bench | compile-check | models | train ..."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.cli import parser as flag_parser
from jspec.cli.endings import ended, importing
from jspec.config import vllm_arguments


class Command(NamedTuple):
  """Its module has add_NAME_flags(parser) and run_NAME(arguments) -> exit code."""

  module: str  # imported when somebody asks for the command
  help: str
  vllm: tuple[Mapping[str, vllm_arguments.Argument], ...] = ()  # whose flags are told of, see there
  extra: str = ""  # of jspec-jax, which brings what the module imports


COMMANDS = {
  "generate": Command("jspec.cli.generate", "continue or answer a prompt",
                      (vllm_arguments.ARGUMENTS,)),
  "chat": Command("jspec.cli.generate", "talk with the model", (vllm_arguments.ARGUMENTS,)),
  "serve": Command("jspec.serving.command", "answer over gRPC and OpenAI-compatible HTTP",
                   (vllm_arguments.ARGUMENTS, vllm_arguments.SERVE)),
  "bench": Command("jspec.bench.command", "time plain against speculative decoding",
                   (vllm_arguments.ARGUMENTS,)),
  "compile-check": Command("jspec.compile_check.command",
                           "compile the step for a TPU or GPU that is not here"),
  "models": Command("jspec.cli.models", "list the models known by name"),
  "train-data": Command("jspec.training.generate", "have the target answer prompts to train on"),
  "train": Command("jspec.training.train", "train a drafting head or a draft model", extra="train"),
}


def main(argv: list[str] | None = None) -> int:
  """Runs a command and returns its exit code; bad input is one sentence on stderr and code 2."""
  warnings.formatwarning = lambda message, *_, **__: f"jspec: note: {message}\n"
  return ended("jspec", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
  asked = next((word for word in argv if not word.startswith("-")), None)
  arguments = build_parser([asked] if asked in COMMANDS else []).parse_args(argv)
  for note in arguments.notes:
    print(f"jspec: note: {note}", file=sys.stderr)
  return arguments.run(arguments)


def build_parser(commands: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
  """Knows all commands, and the flags of these."""
  parser = flag_parser.Parser(prog="jspec", description="Speculative decoding in JAX: the text of "
                              "the target model, sooner.")
  parser.set_defaults(notes=())
  parser.add_argument("--version", action="version", version=f"jspec {version()}")
  subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
  for name, command in COMMANDS.items():
    own = subparsers.add_parser(name, help=command.help)
    if name in commands:
      _add_flags(own, name, command)
  return parser


def _add_flags(parser: argparse.ArgumentParser, name: str, command: Command) -> None:
  function = name.replace("-", "_")
  try:
    with importing():
      module = importlib.import_module(command.module)
  except ModuleNotFoundError as error:
    if not command.extra:
      raise
    raise ValueError(f"jspec {name} needs {error.name}, which jspec-jax's extra "
                     f"{command.extra!r} brings") from error
  parser.set_defaults(run=getattr(module, f"run_{function}"))
  getattr(module, f"add_{function}_flags")(parser)
  for arguments in command.vllm:  # last: what the command has itself is its own
    flag_parser.add_vllm_flags(parser, arguments)


def version() -> str:
  try:
    return importlib.metadata.version("jspec-jax")
  except importlib.metadata.PackageNotFoundError:
    return "(not installed)"
