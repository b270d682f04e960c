"""The command line: jspec generate | chat | serve | bench | compile-check | models."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys
import warnings
from typing import Any

from jspec import flags, model_names, terminal, vllm_arguments
from jspec.checks import parse_json
from jspec.config import ATTENTION_BACKENDS, DTYPES, KV_DTYPES, NUMERICS
from jspec.endings import BAD_INPUT as BAD_INPUT
from jspec.endings import BROKEN_PIPE as BROKEN_PIPE
from jspec.endings import ended, importing
from jspec.flags import whole_number as whole_number  # for serving.command
from jspec.sampling_params import SamplingParams
from jspec.spec_parse import parse_speculative

DEFAULT_MODEL = "smollm2-135m-instruct"

_OLDER_FLAGS = ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max",
                "ngram_prompt_lookup_min")
_ENGINE_FLAGS = ("dtype", "max_model_len", "max_num_seqs", "page_size", "kv_cache_dtype",
                 "tensor_parallel_size", "data_parallel_size", "attention_backend", "numerics",
                 "revision", "cache_dir")
_SAMPLING_FLAGS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
                   "stop", "stop_token_ids", "repetition_penalty", "presence_penalty",
                   "frequency_penalty", "bad_words", "logit_bias", "ignore_eos")


def main(argv: list[str] | None = None) -> int:
  """Runs a command and returns its exit code; bad input is one sentence on stderr and code 2."""
  warnings.formatwarning = lambda message, *_, **__: f"jspec: note: {message}\n"
  return ended("jspec", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
  arguments = build_parser().parse_args(argv)
  for note in arguments.notes:
    print(f"jspec: note: {note}", file=sys.stderr)
  return arguments.run(arguments)


def build_parser() -> argparse.ArgumentParser:
  """All commands and flags."""
  parser = flags.Parser(prog="jspec", description="Speculative decoding in JAX: the text of the "
                        "target model, sooner.")
  parser.set_defaults(notes=())
  parser.add_argument("--version", action="version", version=f"jspec {version()}")
  commands = parser.add_subparsers(dest="command", metavar="command", required=True)

  generate = commands.add_parser("generate", help="continue or answer a prompt")
  generate.add_argument("prompt", nargs="?", help="the prompt; '-' or nothing reads stdin")
  generate.add_argument("--file", type=pathlib.Path, help="read the prompt from a UTF-8 file")
  generate.add_argument("--raw", action="store_true", help="don't apply the chat template")
  generate.set_defaults(run=run_generate)
  chat = commands.add_parser("chat", help="talk with the model")
  chat.set_defaults(run=run_chat)
  for command in (generate, chat):
    command.add_argument("--system", help="system message")
    command.add_argument("--show-drafts", action="store_true",
                         help="accepted draft tokens in green")
    command.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                         help="auto: on a terminal, unless NO_COLOR is set")
    add_engine_flags(command)
    add_sampling_flags(command, max_tokens=256)

  from serving.command import add_serve_flags, run_serve
  serve = commands.add_parser("serve", help="answer over gRPC and OpenAI-compatible HTTP")
  add_engine_flags(serve)
  add_serve_flags(serve)
  serve.set_defaults(run=run_serve)

  from jspec.bench.command import add_bench_flags, run_bench
  bench = commands.add_parser("bench", help="time plain against speculative decoding")
  add_engine_flags(bench)
  add_sampling_flags(bench, max_tokens=128)
  add_bench_flags(bench)
  bench.set_defaults(run=run_bench)

  for command in (generate, chat, serve, bench):  # last: what they have themselves is theirs
    flags.add_vllm_flags(command, vllm_arguments.ARGUMENTS)
  flags.add_vllm_flags(serve, vllm_arguments.SERVE)

  from jspec.compile_check.command import add_compile_check_flags, run_compile_check
  compile_check = commands.add_parser(
    "compile-check", help="compile the step for a TPU or GPU that is not here")
  add_compile_check_flags(compile_check)
  compile_check.set_defaults(run=run_compile_check)

  _add_models(commands)
  return parser


def _add_models(commands: Any) -> None:
  models = commands.add_parser("models", help="list the models known by name")
  models.set_defaults(run=run_models)
  inspect = models.add_subparsers(metavar="command").add_parser(
    "inspect", help="what a head or model is, and whether a head fits the target")
  inspect.add_argument("path", help="folder, file, Hugging Face repo id or a name from the list")
  inspect.add_argument("--target", metavar="MODEL", default=DEFAULT_MODEL,
                       help="the target, fetched if need be (default: %(default)s)")
  inspect.set_defaults(run=run_inspect)
  for command in (models, inspect):  # suppressed: a subcommand's default must not undo a flag
    command.add_argument("--json", action="store_true", help="as JSON",
                         default=False if command is models else argparse.SUPPRESS)
    command.add_argument("--cache-dir", help="where models are stored",
                         default=None if command is models else argparse.SUPPRESS)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
  """Model, speculation and engine; what is left out keeps LLM's default."""
  group = parser.add_argument_group("model and engine")
  group.add_argument("--model", default=DEFAULT_MODEL, help="folder, .gguf file, Hugging Face repo "
                     "id or a name from `jspec models` (default: %(default)s)")
  group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face "
                     "repo id")
  group.add_argument("--dtype", choices=("auto", *DTYPES))
  group.add_argument("--max-model-len", type=flags.length, metavar="N", help="tokens of prompt and "
                     "output together, such as 4096, 4k or 4K; auto: as many as the model was made "
                     "for")
  group.add_argument("--max-num-seqs", type=int, help="requests in one batch")
  group.add_argument("--page-size", type=int, help="tokens per KV page")
  group.add_argument("--kv-cache-dtype", choices=tuple(KV_DTYPES))
  group.add_argument("--tensor-parallel-size", "-tp", type=int, metavar="N",
                     help="devices that share the weights")
  group.add_argument("--data-parallel-size", "-dp", type=int, metavar="N",
                     help="groups of devices that share the requests")
  group.add_argument("--attention-backend", choices=ATTENTION_BACKENDS)
  group.add_argument("--numerics", choices=NUMERICS)
  group.add_argument("--cache-dir", help="where models are stored")
  group = parser.add_argument_group("speculation (default: n-gram prompt lookup)")
  group.add_argument("--speculative-config", "-sc", type=json_object, metavar="JSON",
                     help="vLLM's keys, such as '{\"method\": \"ngram\", "
                     "\"num_speculative_tokens\": 5}', or one by one: --speculative-config.method "
                     "ngram")
  group.add_argument("--no-speculation", action="store_true", help="plain decoding")
  group.add_argument("--speculative-model", metavar="MODEL", help="a draft model or '[ngram]'")
  group.add_argument("--num-speculative-tokens", type=int, metavar="K")
  group.add_argument("--ngram-prompt-lookup-max", type=int, metavar="N")
  group.add_argument("--ngram-prompt-lookup-min", type=int, metavar="N")


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
  """The fields of SamplingParams; greedy unless a temperature is given."""
  group = parser.add_argument_group("sampling")
  group.add_argument("--max-tokens", type=int, default=max_tokens, help="default: %(default)s")
  group.add_argument("--min-tokens", type=int, default=0)
  group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, the default")
  group.add_argument("--top-p", type=float, default=1.0)
  group.add_argument("--top-k", type=int, default=0)
  group.add_argument("--min-p", type=float, default=0.0)
  group.add_argument("--seed", type=int)
  group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                     help="end the text here; may be repeated")
  group.add_argument("--stop-token-id", dest="stop_token_ids", type=int, action="append",
                     default=[], metavar="ID")
  group.add_argument("--repetition-penalty", type=float, default=1.0)
  group.add_argument("--presence-penalty", type=float, default=0.0)
  group.add_argument("--frequency-penalty", type=float, default=0.0)
  group.add_argument("--bad-word", dest="bad_words", action="append", default=[], metavar="TEXT",
                     help="never write this; may be repeated")
  group.add_argument("--logit-bias", type=json_object, metavar="JSON",
                     help="such as '{\"42\": -5.0}'")
  group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def json_object(text: str) -> dict[str, Any]:
  """A flag's value that must be a JSON object."""
  try:
    value = parse_json(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"not valid JSON ({error}): {text!r}") from None
  if not isinstance(value, dict):
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
  return value


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
  return SamplingParams(**{name: getattr(arguments, name) for name in _SAMPLING_FLAGS})


def speculation(arguments: argparse.Namespace) -> tuple[dict[str, Any] | None, dict[str, Any]]:
  """speculative_config and older flags for LLM, checked; n-gram where nothing names a method."""
  older = {name: getattr(arguments, name) for name in _OLDER_FLAGS
           if getattr(arguments, name) is not None}
  config = arguments.speculative_config
  if arguments.no_speculation:
    if older or config is not None:
      raise ValueError("--no-speculation contradicts the other speculation flags")
    return None, {}
  named = any((config or {}).get(key) is not None for key in ("method", "model"))
  if not named and "speculative_model" not in older:
    config = {**(config or {}), "method": "ngram"}
  by_model = not (config or {}).get("method") and (
      (config or {}).get("model") or older.get("speculative_model")) not in (None, "[ngram]")
  if not by_model:  # else the engine looks into the model to find the method
    parse_speculative(config, older)
  return config, older


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
  """Keyword arguments for LLM, all but the model and its speculation."""
  given = {name: getattr(arguments, name) for name in _ENGINE_FLAGS}
  for name in ("max_model_len", "max_num_seqs", "page_size", "tensor_parallel_size",
               "data_parallel_size"):
    if given[name] not in (None, "auto") and given[name] < 1:
      raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {given[name]}")
  return {name: value for name, value in given.items() if value is not None}


def load_llm(model: Any, **keywords: Any):
  """An engine. Imported here: bad flags, unknown names and --help need not wait for JAX."""
  if isinstance(model, str):
    model_names.model_named(model, keywords.get("revision"))
  with importing():
    from jspec.llm import LLM
  return LLM(model, **keywords)


def load_aloud(model: str, **keywords: Any):
  """load_llm, for somebody who waits."""
  model_names.model_named(model, keywords.get("revision"))
  terminal.note(f"[loading {model}]")
  return load_llm(model, **keywords)


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


def run_models(arguments: argparse.Namespace) -> int:
  with importing():
    from jspec import hub  # here: it imports JAX
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
    from jspec import inspection  # here: it imports JAX
  report = inspection.inspect_checkpoint(arguments.path, arguments.target, arguments.cache_dir)
  print(json.dumps(report, indent=2) if arguments.json else "\n".join(inspection.lines(report)))
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


def version() -> str:
  try:
    return importlib.metadata.version("jspec")
  except importlib.metadata.PackageNotFoundError:
    return "(not installed)"


def _colored(arguments: argparse.Namespace) -> bool:
  """Whether to colour drafts; says so if that was asked for and isn't possible."""
  if not arguments.show_drafts or arguments.color == "always":
    return arguments.show_drafts
  if arguments.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
    return True
  print("jspec: note: --show-drafts shows nothing without colour (--color always)",
        file=sys.stderr)
  return False
