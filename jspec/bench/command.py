"""`jspec bench`: flags -> engines and prompts -> runs -> report."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

from jspec.bench import report
from jspec.bench.datasets import Prompt, load_prompts
from jspec.bench.hf import check_hf, hf_engines
from jspec.bench.metrics import PLAIN, SPECULATIVE, summarise
from jspec.bench.runner import Engine, llm_engine, make_groups, run_interleaved
from jspec.cli import flags
from jspec.cli.terminal import note
from jspec.sampling_params import SamplingParams


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
  """Prompts, runs and output, beside the flags of model, speculation and sampling."""
  flags.add_engine_flags(parser)
  flags.add_sampling_flags(parser, max_tokens=128)
  group = parser.add_argument_group("benchmark")
  group.add_argument("--dataset", type=pathlib.Path, action="append", default=[], metavar="FILE",
                     help="Spec-Bench question.jsonl, ShareGPT JSON, EditEval, or JSONL with "
                     "prompt or messages; may be repeated (default: built-in prompts)")
  group.add_argument("--task", dest="tasks", action="append", metavar="NAME",
                     help="only this task; may be repeated")
  group.add_argument("--limit-per-task", type=int, metavar="N",
                     help="this many prompts of each task, drawn with --seed")
  group.add_argument("--raw", action="store_true", help="don't apply the chat template")
  group.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
  group.add_argument("--batch-size", type=int, default=1, help="default: %(default)s")
  group.add_argument("--warm-prompts", action="store_true", help="let prompts be found in the "
                     "prefix cache, each of which was read before (default: all are new)")
  group.add_argument("--compare", choices=("hf",), help="also time transformers, in turn")
  group.add_argument("--hf-lookup-tokens", type=int, default=10, metavar="K",
                     help="draft tokens of its prompt lookup (default: %(default)s)")
  group.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all numbers")
  group.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="write a PNG")


def run_bench(arguments: argparse.Namespace) -> int:
  params = flags.sampling_params(arguments)
  _check(arguments, params)
  config, older = flags.speculation(arguments)
  engine = {"max_num_seqs": arguments.batch_size, **flags.engine_arguments(arguments)}
  prompts = load_prompts(arguments.dataset, arguments.limit_per_task, arguments.seed or 0,
                         arguments.tasks)
  plain = flags.load_aloud(arguments.model, **engine)
  revision = engine.pop("revision", None)  # the model is loaded now
  speculative = flags.load_llm(plain.loaded, speculative_config=config, **older, **engine)
  tasks, ids, skipped = _encode(plain, prompts, arguments.raw, arguments.max_tokens)
  if not ids:
    raise ValueError(f"no prompt leaves room for {arguments.max_tokens} tokens: raise "
                     "--max-model-len or lower --max-tokens")
  engines = [llm_engine(name, llm, params, arguments.warm_prompts)
             for name, llm in ((PLAIN, plain), (SPECULATIVE, speculative))]
  ends = plain.tokenizer.eos_ids
  if arguments.compare == "hf":
    engines += hf_engines(arguments.model, plain.engine.config.dtype, arguments.cache_dir, ends,
                          params.ignore_eos, arguments.hf_lookup_tokens, revision)
  environment = report.environment(sys.argv)
  results = _measure(engines, tasks, ids, arguments)
  numbers = {
    **environment,
    "settings": _settings(arguments, plain, speculative),
    "skipped_too_long": skipped,
    "peak_memory_mib": report.peak_memory_mib(),
    **summarise(results, arguments.max_tokens, params.temperature == 0, ends),
  }
  if skipped:
    print(f"jspec: note: {skipped} prompts were left out, too long for --max-model-len",
          file=sys.stderr)
  print(report.table(numbers))
  if arguments.json is not None:
    arguments.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
  if arguments.plot is not None:
    report.plot(numbers, arguments.plot)
  return 0


def _check(arguments: argparse.Namespace, params: SamplingParams) -> None:
  """Refuses before anything is loaded what would fail after minutes of work."""
  for name in ("repeats", "batch_size", "limit_per_task", "hf_lookup_tokens"):
    value = getattr(arguments, name)
    if value is not None and value < 1:
      raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {value}")
  if arguments.no_speculation:
    raise ValueError("bench compares speculation with plain decoding: drop --no-speculation")
  if arguments.max_num_seqs is not None and arguments.max_num_seqs < arguments.batch_size:
    raise ValueError(f"--max-num-seqs {arguments.max_num_seqs} must not be less than "
                     f"--batch-size {arguments.batch_size}")
  for path in (arguments.json, arguments.plot):
    if path is not None and not path.absolute().parent.is_dir():
      raise ValueError(f"can't write {path}: its folder doesn't exist")
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
      raise ValueError(f"can't write {path}: it is a folder or lies in a read-only one")
  if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
    raise ValueError("--plot needs matplotlib, which jspec-jax's extra 'bench' brings")
  if arguments.compare == "hf":
    check_hf(params, arguments.batch_size)


def _encode(llm: Any, prompts: list[Prompt], raw: bool, max_tokens: int
            ) -> tuple[list[str], list[list[int]], int]:
  """Tasks and ids of the prompts that leave room for max_tokens, and how many don't."""
  tasks, encoded = [], []
  for prompt in prompts:
    if raw or llm.tokenizer.chat_template is None:
      ids = llm.tokenizer.encode("\n\n".join(m["content"] for m in prompt.messages))
    else:
      ids = llm.encode_chat(prompt.messages)
    if ids and len(ids) + max_tokens <= llm.engine.config.max_model_len:
      tasks.append(prompt.task)
      encoded.append(ids)
  return tasks, encoded, len(prompts) - len(encoded)


def _measure(engines: list[Engine], tasks: list[str], ids: list[list[int]],
             arguments: argparse.Namespace):
  groups = make_groups(tasks, ids, arguments.batch_size)
  shown = sys.stderr.isatty()

  def progress(done: int, total: int) -> None:
    if shown:
      print(f"\r{done}/{total} batches timed", end="\n" if done == total else "",
            file=sys.stderr, flush=True)

  note("[compiling]")
  return run_interleaved(engines, groups, arguments.max_tokens, arguments.repeats, progress)


def _settings(arguments: argparse.Namespace, plain: Any, speculative: Any) -> dict[str, Any]:
  config, spec = plain.engine.config, speculative.speculative
  own = {name: value for options in spec.options
         for name, value in dataclasses.asdict(options).items()}
  return {
    "model": plain.loaded.name, "dtype": config.dtype, "numerics": config.numerics,
    "page_size": config.page_size, "max_model_len": config.max_model_len,
    "max_num_seqs": config.max_num_seqs, "batch_size": arguments.batch_size,
    "max_tokens": arguments.max_tokens, "repeats": arguments.repeats,
    "temperature": arguments.temperature, "seed": arguments.seed,
    "datasets": [path.name for path in arguments.dataset] or ["built-in"],
    "limit_per_task": arguments.limit_per_task, "raw": arguments.raw,
    "warm_prompts": arguments.warm_prompts,
    "speculation": {"method": spec.method, "model": spec.model,
                    "num_speculative_tokens": spec.num_speculative_tokens,
                    "schedule": spec.schedule, **own},
  }
