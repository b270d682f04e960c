"""`jspec serve`: flags, checked before a model is loaded, and the run.

Without heavy imports: `jspec --help` must work where the extra `serve` is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jspec.cli import flags
from jspec.cli.parser import whole_number

LOG_LEVELS = ("debug", "info", "warning", "error")
KEY_VARIABLE = "JSPEC_API_KEY"
_NEEDED = {  # package -> module
  "prometheus_client": "prometheus_client", "grpcio": "grpc",
  "grpcio-health-checking": "grpc_health", "grpcio-reflection": "grpc_reflection",
  "fastapi": "fastapi", "uvicorn": "uvicorn",
}
_SHORTCUTS = {  # flag's destination -> key of --speculative-config
  "spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens",
  "speculative_disable_by_batch_size": "disable_by_batch_size",
}
_ENGINE = ("num_pages", "enable_prefix_caching", "max_num_batched_tokens", "dynamic_speculation",
           "seed")
MAX_STEPS = 16  # jspec.engine.loop's, which brings jax along; a test compares them
_RANGES: dict[str, tuple[float, float]] = {  # destination -> what is allowed
  "port": (0, 2**16 - 1), "grpc_port": (0, 2**16 - 1), "num_scheduler_steps": (1, MAX_STEPS),
  "max_queue": (1, math.inf), "max_body_bytes": (1, 2**31 - 1),  # gRPC's sizes are 32 bits
  "max_num_batched_tokens": (1, math.inf), "num_pages": (1, math.inf), "spec_tokens": (1, math.inf),
  "speculative_disable_by_batch_size": (2, math.inf), "drain_timeout": (0, 1e6),
  "max_queue_per_client": (1, math.inf), "max_tokens_per_client": (1, math.inf),
  "max_connections": (1, 2**31 - 1), "header_timeout": (0.1, 1e6),
  "keep_alive_timeout": (0.1, 1e6), "write_timeout": (0.1, 1e6),
}


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
  """The engine's flags and a server's own, in the spelling of vLLM."""
  flags.add_engine_flags(parser)
  parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
  _add_doors(parser.add_argument_group("addresses and access"))
  _add_connections(parser.add_argument_group("connections"))
  _add_requests(parser.add_argument_group("requests and answers"))
  group = parser.add_argument_group("scheduling")
  group.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that may "
                     "wait for a slot; more are refused (default: %(default)s)")
  group.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs",
                     help="first come, first served, or by the priority that clients give "
                     "(default: %(default)s)")
  group.add_argument("--max-queue-per-client", type=int, metavar="N", help="outputs that the "
                     "requests of one API key, or of one address where there are no keys, may have "
                     "waiting and running; more are refused (default: half of what the server "
                     "holds where there are several keys, else no bound)")
  group.add_argument("--max-tokens-per-client", type=int, metavar="N", help="likewise the tokens "
                     "of their prompts and of the longest answers to them (default: no bound)")
  group.add_argument("--max-num-batched-tokens", type=whole_number, metavar="N", help="of "
                     "prompts, between two steps of the requests that are being answered")
  group.add_argument("--num-pages", type=whole_number, metavar="N", help="of the KV "
                     "cache (default: enough for --max-num-seqs requests of --max-model-len "
                     "tokens)")
  group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
                     help="keep pages for requests that begin alike (default: yes)")
  group.add_argument("--num-scheduler-steps", type=int, default=1, metavar="N", help="steps "
                     "between two looks at who came and who went (default: %(default)s)")
  group.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
                     help="for running requests to end after SIGTERM (default: %(default)g)")
  group.add_argument("--seed", type=int, help="of the requests that have none of their own")
  group.add_argument("--access-log", action=argparse.BooleanOptionalAction, default=True,
                     help="a line for each request but probes': client, path, status, time, id; "
                     "never keys or texts (default: yes)")
  group.add_argument("--log-level", choices=LOG_LEVELS, default="info")
  group = parser.add_argument_group("more about speculation")
  group.add_argument("--dynamic-speculation", action=argparse.BooleanOptionalAction,
                     help="step times are measured and decide how much is drafted (default: no)")
  group.add_argument("--speculative-disable-by-batch-size", type=int, metavar="N",
                     help="no drafts while this many requests run")
  group.add_argument("--spec-method", metavar="METHOD", help="method of --speculative-config")
  group.add_argument("--spec-model", metavar="MODEL", help="model of --speculative-config")
  group.add_argument("--spec-tokens", type=int, metavar="K",
                     help="num_speculative_tokens of --speculative-config")


def _add_doors(group: Any) -> None:
  group.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, too "
                     "(default: %(default)s)")
  group.add_argument("--port", type=int, default=8000,
                     help="of HTTP; 0 picks a free one (default: %(default)s)")
  group.add_argument("--grpc-port", type=int, default=50051,
                     help="0 picks a free one (default: %(default)s)")
  group.add_argument("--no-http", action="store_true", help="gRPC only")
  group.add_argument("--no-grpc", action="store_true", help="HTTP only")
  group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what clients call "
                     "the model; answers have the first name (default: as in --model)")
  group.add_argument("--api-key", action="extend", nargs="+", default=[], metavar="KEY",
                     help="clients must send one of these; may be repeated. Everybody on this "
                     f"machine can see it in the list of processes: {KEY_VARIABLE} (separated by "
                     "commas) or --api-key-file can't be seen")
  group.add_argument("--api-key-file", type=pathlib.Path, metavar="FILE", help="one key per line")
  group.add_argument("--ssl-certfile", type=pathlib.Path, metavar="FILE", help="PEM, with the "
                     "chain; turns TLS on")
  group.add_argument("--ssl-keyfile", type=pathlib.Path, metavar="FILE", help="PEM, unencrypted")
  group.add_argument("--ssl-ca-certs", type=pathlib.Path, metavar="FILE", help="gRPC clients must "
                     "show a certificate signed by one of these (HTTP clients need not: add "
                     "--no-http or an API key)")
  group.add_argument("--max-body-bytes", type=whole_number, default=4 * 2**20, metavar="N",
                     help="of a request, HTTP or gRPC (default: %(default)s)")


  group.add_argument("--allowed-origins", type=_names, default=(), metavar="JSON", help="sites "
                     "whose pages may use the server from a browser, such as "
                     "'[\"https://chat.example.org\"]'; '[\"*\"]': all (default: none)")
  group.add_argument("--allowed-methods", type=_names, default=("*",), metavar="JSON",
                     help="of such requests (default: all)")
  group.add_argument("--allowed-headers", type=_names, default=("*",), metavar="JSON",
                     help="of such requests (default: all)")
  group.add_argument("--allow-credentials", action="store_true", help="browsers may send cookies "
                     "along")


def _add_connections(group: Any) -> None:
  group.add_argument("--max-connections", type=int, default=2048, metavar="N", help="of each port; "
                     "beyond them HTTP ends those that wait for a request, the oldest first, or "
                     "answers 503 (default: %(default)s, or what the limit of open files allows)")
  group.add_argument("--header-timeout", type=float, default=20.0, metavar="SECONDS",
                     help="for a request's headers to arrive (default: %(default)g)")
  group.add_argument("--keep-alive-timeout", type=float, default=75.0, metavar="SECONDS",
                     help="between two requests of an HTTP connection (default: %(default)g)")
  group.add_argument("--write-timeout", type=float, default=60.0, metavar="SECONDS", help="for a "
                     "client to read some of what it was sent (default: %(default)g)")


def _add_requests(group: Any) -> None:
  group.add_argument("--generation-config", choices=("auto", "none", "vllm"), default="auto",
                     help="sampling parameters that a request leaves out are those of the model's "
                     "generation_config.json (auto, the default), or neutral (none; vllm is the "
                     "same)")
  group.add_argument("--chat-template", type=pathlib.Path, metavar="FILE",
                     help="in Jinja, in place of the model's own")
  group.add_argument("--plain-message-content", action=argparse.BooleanOptionalAction, default=True,
                     help="what looks like a control token in a message is text like any other "
                     "(default: yes)")
  group.add_argument("--enable-prompt-tokens-details", action="store_true", help="say how many "
                     "tokens of a prompt were in the prefix cache, which tells clients about each "
                     "other's prompts")
  group.add_argument("--strict", action="store_true", help="refuse fields of requests that nobody "
                     "knows, instead of passing over them")


def run_serve(arguments: argparse.Namespace) -> int:
  """Checks everything that can be checked without the model, then serves until a signal."""
  _check(arguments)
  keys = api_keys(arguments.api_key, arguments.api_key_file, os.environ)
  template = (None if arguments.chat_template is None
              else _read(arguments.chat_template, "--chat-template"))
  load = loader(arguments)
  _check_installed()
  # Here: what they import may be missing.
  from jspec.serving import server, service
  from jspec.serving.http import connections as http_connections
  from jspec.serving.http import front as http_front
  from jspec.serving.http import server as http_server
  from jspec.serving.rpc import options as grpc_options
  own = {"host": arguments.host, "tokens": keys, "ssl_certfile": arguments.ssl_certfile,
         "ssl_keyfile": arguments.ssl_keyfile}
  cors = http_front.Cors(arguments.allowed_origins, arguments.allow_credentials,
                         arguments.allowed_methods, arguments.allowed_headers)
  names = arguments.served_model_name or [model_name(_model(arguments))]
  settings = server.Settings(
      model_name=names[0], aliases=tuple(names[1:]),
      http=None if arguments.no_http else http_server.Options(
          port=arguments.port, max_body_bytes=arguments.max_body_bytes, cors=cors,
          limits=http_connections.Limits(
              arguments.max_connections, arguments.header_timeout, arguments.keep_alive_timeout,
              arguments.write_timeout), **own),
      grpc=None if arguments.no_grpc else grpc_options.Options(
          port=arguments.grpc_port, max_message_bytes=arguments.max_body_bytes,
          ssl_ca_certs=arguments.ssl_ca_certs, max_connections=arguments.max_connections, **own),
      max_queue=arguments.max_queue, steps_per_turn=arguments.num_scheduler_steps,
      drain_timeout=arguments.drain_timeout, policy=service.Policy(
          strict=arguments.strict, chat_template=template,
          plain_message_content=arguments.plain_message_content,
          show_cached_tokens=arguments.enable_prompt_tokens_details,
          client_priority=arguments.scheduling_policy == "priority",
          max_outputs_per_client=_share(arguments, keys),
          max_tokens_per_client=arguments.max_tokens_per_client,
          access_log=arguments.access_log),
      generation_config=arguments.generation_config == "auto")
  level = logging.getLevelName(arguments.log_level.upper())
  logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr,
                      level=max(level, logging.WARNING))
  logging.getLogger("jspec.serving").setLevel(level)
  return server.run(load, settings)


def loader(arguments: argparse.Namespace) -> Callable[[], Any]:
  """Makes the LLM that the flags describe; whatever the flags alone can get wrong is raised now."""
  config, older = speculation(arguments)
  engine = flags.engine_arguments(arguments)
  given = {name: value for name in _ENGINE if (value := vars(arguments)[name]) is not None}
  model = _model(arguments)
  flags.model_names.model_named(model, arguments.revision)
  return lambda: flags.load_llm(model, speculative_config=config, **older, **engine, **given)


def speculation(arguments: argparse.Namespace) -> tuple[dict[str, Any] | None, dict[str, Any]]:
  """flags.speculation with this command's shortcuts among the keys of --speculative-config."""
  shortcuts = {key: value for name, key in _SHORTCUTS.items()
               if (value := vars(arguments)[name]) is not None}
  if arguments.no_speculation and (shortcuts or arguments.dynamic_speculation):
    raise ValueError("--no-speculation contradicts the other speculation flags")
  config = arguments.speculative_config
  for name, key in _SHORTCUTS.items():
    if key in shortcuts and key in {str(k).replace("-", "_") for k in config or ()}:
      raise ValueError(f"--{name.replace('_', '-')} and the key {key} of --speculative-config are "
                       "the same: give one of them")
  if shortcuts:
    config = {**(config or {}), **shortcuts}
  return flags.speculation(argparse.Namespace(**{**vars(arguments), "speculative_config": config}))


def api_keys(given: list[str], file: pathlib.Path | None,
             environment: Mapping[str, str]) -> tuple[str, ...]:
  """The keys of all three sources; none at all lets everybody in."""
  sources = [("--api-key", given)]
  if KEY_VARIABLE in environment:
    sources.append((KEY_VARIABLE, environment[KEY_VARIABLE].split(",")))
  if file is not None:
    lines = [line.strip() for line in _read(file, "--api-key-file").splitlines()]
    if not any(lines):
      raise ValueError(f"--api-key-file {file} holds no key")
    sources.append((f"--api-key-file {file}", [line for line in lines if line]))
  for source, keys in sources:
    # The keys themselves stay out of messages, which end up in logs.
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
      raise ValueError(f"{source} holds a key that is empty or has characters other than visible "
                       "ASCII ones")
  return tuple(dict.fromkeys(key for _, keys in sources for key in keys))


def _share(arguments: argparse.Namespace, keys: tuple[str, ...]) -> int | None:
  """Outputs that one client may have; None: all there are."""
  if arguments.max_queue_per_client is not None or len(keys) < 2:
    return arguments.max_queue_per_client
  return max(1, (arguments.max_queue + (arguments.max_num_seqs or 0)) // 2)


def model_name(model: str) -> str:
  """As clients see it: a path on this machine is none of their business."""
  path = pathlib.Path(model)
  return path.resolve().name if path.exists() else model


def _model(arguments: argparse.Namespace) -> str:
  if arguments.model_tag is None:
    return arguments.model
  if arguments.model not in (flags.DEFAULT_MODEL, arguments.model_tag):
    raise ValueError(f"the model is given twice: {arguments.model_tag!r} and "
                     f"--model {arguments.model!r}")
  return arguments.model_tag


def _check(arguments: argparse.Namespace) -> None:
  if arguments.no_http and arguments.no_grpc:
    raise ValueError("--no-http and --no-grpc leave nothing to serve")
  for name, (low, high) in _RANGES.items():
    value = vars(arguments)[name]
    if value is not None and not low <= value <= high:
      allowed = f">= {low}" if high == math.inf else f"in {low}..{high:.0f}"
      raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")
  if arguments.port == arguments.grpc_port != 0 and not (arguments.no_http or arguments.no_grpc):
    raise ValueError(f"--port and --grpc-port are both {arguments.port}: they must differ")
  if arguments.ssl_ca_certs is not None and arguments.no_grpc:
    raise ValueError("--ssl-ca-certs is about gRPC clients, and --no-grpc lets none in")
  if not all(name.strip() for name in arguments.served_model_name or ()):
    raise ValueError("--served-model-name must not be empty")


def _read(path: pathlib.Path, flag: str) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except OSError as error:
    raise ValueError(f"{flag}: can't read {path}: {error.strerror}") from None
  except UnicodeDecodeError:
    raise ValueError(f"{flag}: {path} is not a text file") from None


def _names(text: str) -> tuple[str, ...]:
  """A JSON list of strings, as vLLM has it, or one string as it is."""
  if not text.lstrip().startswith("["):
    return (text,)
  try:
    names = json.loads(text)
  except ValueError:
    names = None
  if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
    raise argparse.ArgumentTypeError(f"must be a JSON list of strings, got {text!r:.60}")
  return tuple(names)


def _check_installed() -> None:
  missing = [package for package, module in _NEEDED.items()
             if importlib.util.find_spec(module) is None]
  if missing:
    raise ValueError(f"jspec serve needs {', '.join(missing)}, which jspec-jax's extra 'serve' "
                     "brings")
