"""vLLM's engine arguments without a meaning here, for `LLM` and `jspec serve` alike."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_ARGUMENT = re.compile(r"\{(\w+)\}")


class Argument(NamedTuple):
  instead: str  # what to do; with names of LLM's arguments in braces
  neutral: tuple = (None,)  # values that ask for nothing


ARGUMENTS: Mapping[str, Argument] = {  # as keyword arguments of vllm.LLM
  "gpu_memory_utilization": Argument(
      "the KV cache has {num_pages} pages, or room for {max_num_seqs} requests of {max_model_len} "
      "tokens: set those"),
  "kv_cache_memory_bytes": Argument("use {num_pages}"),
  "num_gpu_blocks_override": Argument("use {num_pages}"),
  "block_size": Argument("use {page_size}"),
  "swap_space": Argument("preempted requests are computed anew, nothing is swapped: leave it out",
                         (None, 0)),
  "cpu_offload_gb": Argument("weights stay on the device: leave it out", (None, 0)),
  "enforce_eager": Argument("every step is compiled: leave it out", (None, False)),
  "trust_remote_code": Argument("no code from model repositories is run: leave it out",
                                (None, False)),
  "enable_chunked_prefill": Argument(
      "prompts are always read in chunks, of {max_num_batched_tokens} at most: leave it out",
      (None, True)),
  "pipeline_parallel_size": Argument("use {tensor_parallel_size} and {data_parallel_size}",
                                     (None, 1)),
  "distributed_executor_backend": Argument("one process runs all devices: leave it out"),
  "disable_custom_all_reduce": Argument("XLA's is used: leave it out", (None, False)),
  "quantization": Argument("a GGUF file brings its own; {kv_cache_dtype} is the cache's"),
  "load_format": Argument("the format is read from the files: leave it out", (None, "auto")),
  "tokenizer": Argument("the model's own is used: leave it out"),
  "tokenizer_mode": Argument("the model's own is used: leave it out", (None, "auto")),
  "skip_tokenizer_init": Argument("the model's own is used: leave it out", (None, False)),
  "tokenizer_revision": Argument("the model's own is used: leave it out"),
  "download_dir": Argument("use {cache_dir}"),
  "hf_overrides": Argument("change the model's config.json"),
  "enable_lora": Argument("adapters are not supported: merge them into the weights",
                          (None, False)),
  "runner": Argument("models generate text, nothing else: leave it out",
                     (None, "auto", "generate")),
  "task": Argument("models generate text, nothing else: leave it out", (None, "auto", "generate")),
  "limit_mm_per_prompt": Argument("prompts are text: leave it out"),
  "disable_log_stats": Argument("LLM logs none: leave it out", (None, True, False)),
}


def take(arguments: dict[str, Any]) -> None:
  """Removes vLLM's arguments that ask for nothing; ValueError for one that asks for something."""
  for name in [name for name in arguments if name in ARGUMENTS]:
    value, known = arguments.pop(name), ARGUMENTS[name]
    if not any(value is neutral or (type(value) is type(neutral) and value == neutral)
               for neutral in known.neutral):
      raise ValueError(f"{name}={reprlib.repr(value)} is vLLM's and has no meaning here: "
                       + _ARGUMENT.sub(r"\1", known.instead))


def flag_hints() -> dict[str, str]:
  """The same as flags of a command line: what to do in place of each."""
  flag = lambda name: f"--{name.replace('_', '-')}"
  return {flag(name): _ARGUMENT.sub(lambda match: flag(match[1]), argument.instead)
          for name, argument in ARGUMENTS.items()}
