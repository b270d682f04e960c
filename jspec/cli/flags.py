"""Flags that several commands share, and what a command makes of them."""

from __future__ import annotations

import argparse
from typing import Any

from jspec.checkpoints import model_names
from jspec.cli import terminal
from jspec.cli.endings import importing
from jspec.cli.parser import length
from jspec.config import ATTENTION_BACKENDS, DTYPES, KV_DTYPES, NUMERICS
from jspec.config.checks import parse_json
from jspec.config.speculative_parse import parse_speculative
from jspec.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m-instruct"

_OLDER_FLAGS = ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max",
                "ngram_prompt_lookup_min")
_ENGINE_FLAGS = ("dtype", "max_model_len", "max_num_seqs", "page_size", "kv_cache_dtype",
                 "tensor_parallel_size", "data_parallel_size", "attention_backend", "numerics",
                 "revision", "cache_dir")
_SAMPLING_FLAGS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
                   "stop", "stop_token_ids", "repetition_penalty", "presence_penalty",
                   "frequency_penalty", "bad_words", "logit_bias", "ignore_eos")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
  """Model, speculation and engine; what is left out keeps LLM's default."""
  group = parser.add_argument_group("model and engine")
  group.add_argument("--model", default=DEFAULT_MODEL, help="folder, .gguf file, Hugging Face repo "
                     "id or a name from `jspec models` (default: %(default)s)")
  group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face "
                     "repo id")
  group.add_argument("--dtype", choices=("auto", *DTYPES))
  group.add_argument("--max-model-len", type=length, metavar="N", help="tokens of prompt and "
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
  if arguments.max_tokens is not None and arguments.max_tokens < 1:  # 0 reads, and writes nothing
    raise ValueError(f"--max-tokens must be >= 1, got {arguments.max_tokens}")
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
