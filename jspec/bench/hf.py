"""transformers as a yardstick: plain greedy decoding and its prompt lookup, the same weights."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from jspec.bench.report import cores
from jspec.bench.runner import Engine, Sample
from jspec.sampling_params import SamplingParams


def check_hf(params: SamplingParams, batch_size: int) -> None:
  """ValueError unless transformers is there and can do what is asked."""
  missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
  if missing:
    raise ValueError(f"--compare hf needs torch and transformers; missing: {', '.join(missing)}")
  if batch_size != 1:
    raise ValueError(f"--compare hf needs --batch-size 1, got {batch_size}: transformers' prompt "
                     "lookup takes one prompt at a time")
  plain = SamplingParams(temperature=0.0, max_tokens=params.max_tokens,
                         ignore_eos=params.ignore_eos, seed=params.seed)
  if params != plain:
    raise ValueError("--compare hf is greedy: the only sampling flags it takes are --max-tokens, "
                     "--ignore-eos and --seed")


def hf_engines(name: str, dtype: str, cache_dir: str | None, end_ids: tuple[int, ...],
               ignore_eos: bool, lookup_tokens: int, revision: str | None = None) -> list[Engine]:
  """Two engines over one torch model on the CPU, with as many threads as there are cores."""
  import torch
  import transformers

  from jspec.checkpoints import hub  # here: it imports JAX
  torch.set_num_threads(cores())
  transformers.utils.logging.disable_progress_bar()
  files = hub.resolve(name, cache_dir, revision=revision)
  folder, options = (files.path, {}) if files.kind == "hf" else (
    files.path.parent, {"gguf_file": files.path.name})
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype), local_files_only=True, **options).eval()
  model.generation_config = transformers.GenerationConfig(
    do_sample=False, eos_token_id=None if ignore_eos else list(end_ids),
    pad_token_id=end_ids[0] if end_ids else 0)
  return [Engine("hf plain", _generator(model)),
          Engine(f"hf lookup {lookup_tokens}",
                 _generator(model, prompt_lookup_num_tokens=lookup_tokens))]


def _generator(model: Any, **options: Any):
  import torch

  def generate(prompts: list[list[int]], max_tokens: int) -> list[Sample]:
    first: list[float] = []
    start = time.perf_counter()

    def watch(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
      """A stopping criterion that only looks at the clock: it is called after every step."""
      if not first:
        first.append(time.perf_counter() - start)
      return torch.zeros(ids.shape[0], dtype=torch.bool)

    prompt = torch.tensor(prompts)
    with torch.inference_mode():
      out = model.generate(prompt, attention_mask=torch.ones_like(prompt),
                           max_new_tokens=max_tokens, stopping_criteria=[watch], **options)
    new = tuple(out[0, prompt.shape[1]:].tolist())
    return [Sample(new, first[0], time.perf_counter() - start)]

  return generate
