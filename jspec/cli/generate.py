"""`jspec generate` and `jspec chat`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from jspec.cli import terminal
from jspec.cli.flags import (
  add_engine_flags,
  add_sampling_flags,
  engine_arguments,
  load_aloud,
  sampling_params,
  speculation,
)


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("prompt", nargs="?", help="the prompt; '-' or nothing reads stdin")
  parser.add_argument("--file", type=pathlib.Path, help="read the prompt from a UTF-8 file")
  parser.add_argument("--raw", action="store_true", help="don't apply the chat template")
  add_chat_flags(parser)


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--system", help="system message")
  parser.add_argument("--show-drafts", action="store_true", help="accepted draft tokens in green")
  parser.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                      help="auto: on a terminal, unless NO_COLOR is set")
  add_engine_flags(parser)
  add_sampling_flags(parser, max_tokens=256)


def run_generate(arguments: argparse.Namespace) -> int:
  params = sampling_params(arguments)
  config, older = speculation(arguments)
  engine = {"max_num_seqs": 1, **engine_arguments(arguments)}
  colored = _colored(arguments)
  if arguments.raw and arguments.system:
    raise ValueError("--system needs the chat template, which --raw turns off")
  text = read_prompt(arguments.prompt, arguments.file)
  llm = load_aloud(arguments.model, speculative_config=config, **older, **engine)
  prompt = llm.tokenizer.encode(text)
  if arguments.system and llm.tokenizer.chat_template is None:
    raise ValueError(f"--system: model {arguments.model!r} has no chat template")
  if not arguments.raw and llm.tokenizer.chat_template is not None:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    prompt = llm.encode_chat([*system, {"role": "user", "content": text}])
  llm.stream([prompt], params).close()  # refuses a bad request before anything is compiled
  terminal.warm_up(llm, prompt, set(), params.seed)
  output = terminal.write_stream(llm.stream([prompt], params), llm.tokenizer, sys.stdout, colored)
  print(flush=True)
  for line in terminal.summary(output, llm.speculative.method != "none"):
    print(f"[{line}]", file=sys.stderr)
  return 0


def run_chat(arguments: argparse.Namespace) -> int:
  params = sampling_params(arguments)
  config, older = speculation(arguments)
  engine = {"max_num_seqs": 1, **engine_arguments(arguments)}
  colored = _colored(arguments)
  llm = load_aloud(arguments.model, speculative_config=config, **older, **engine)
  if llm.tokenizer.chat_template is None:
    raise ValueError(f"model {arguments.model!r} has no chat template: use `jspec generate`")
  terminal.chat(llm, params, arguments.system, sys.stdout, colored)
  return 0


def read_prompt(prompt: str | None, file: pathlib.Path | None) -> str:
  """The prompt from the command line, a file or stdin, without its last line break."""
  if file is not None:
    if prompt is not None:
      raise ValueError("give a prompt or --file, not both")
    try:
      text, source = file.read_bytes(), str(file)
    except OSError as error:
      raise ValueError(f"can't read {file}: {error.strerror}") from None
  elif prompt is None or prompt == "-":
    if sys.stdin.isatty():
      print("jspec: reading the prompt from the keyboard; Ctrl-D ends it", file=sys.stderr)
    text, source = sys.stdin.buffer.read(), "stdin"
  else:
    text, source = prompt.encode("utf-8", "surrogateescape"), "the prompt"
  try:
    decoded = text.decode("utf-8").removesuffix("\n").removesuffix("\r")
  except UnicodeDecodeError as error:
    raise ValueError(f"{source} is not UTF-8 text: invalid byte at offset {error.start}") from None
  if not decoded.strip():
    raise ValueError(f"{source} is empty")
  return decoded


def _colored(arguments: argparse.Namespace) -> bool:
  """Whether to colour drafts; says so if that was asked for and isn't possible."""
  if not arguments.show_drafts or arguments.color == "always":
    return arguments.show_drafts
  if arguments.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
    return True
  print("jspec: note: --show-drafts shows nothing without colour (--color always)",
        file=sys.stderr)
  return False
