"""The part of device_check.py that generates text with and without speculation."""

from __future__ import annotations

import time

from jspec import LLM, SamplingParams
from jspec.bench.datasets import load_prompts
from jspec.bench.runner import cold
from jspec.checkpoints import hub
from scripts.device.part import Clock, Setup, say


def speculation(setup: Setup, clock: Clock, found: dict, report: dict) -> None:
  """Greedy text of a real model with and without n-gram drafts: speed, and whether it agrees."""
  dtype = "float32" if setup.smoke else "bfloat16"
  try:
    loaded = hub.load_model(setup.model, dtype=dtype, progress=False)
  except (ValueError, OSError) as error:
    found["skipped"] = f"model {setup.model!r} is not to be had: {error}"
    say(found["skipped"])
    return
  max_tokens = 16 if setup.smoke else 128
  params = SamplingParams(temperature=0, max_tokens=max_tokens)
  prompts = [loaded.tokenizer.apply_chat_template(list(p.messages))
             for p in load_prompts([], 1 if setup.smoke else 3)]
  prompts = sorted((p for p in prompts if len(p) + max_tokens <= 1024), key=len)
  prompts = prompts[:2] if setup.smoke else prompts
  for batch in clock.each((1,) if setup.smoke else (1, 8), "batch {}".format):
    outputs = {}
    for method, config in {"none": None, "ngram": {"method": "ngram"}}.items():
      llm = LLM(loaded, dtype=dtype, max_model_len=1024, max_num_seqs=batch,
                speculative_config=config)
      llm.generate(cold(prompts), params)  # compiles
      start = time.perf_counter()
      outputs[method] = llm.generate(cold(prompts), params)
      seconds = time.perf_counter() - start
      steps = sum((o.speculation for o in outputs[method][1:]), outputs[method][0].speculation)
      found[f"batch {batch}, {method}"] = row = {
          "tokens_per_s": sum(len(o.token_ids) for o in outputs[method]) / seconds,
          "tokens_per_step": steps.tokens_per_step, "acceptance_rate": steps.acceptance_rate,
          "cached_tokens": sum(o.num_cached_tokens for o in outputs[method])}
      say(f"batch {batch}, {method}: {row}")
    same = [a.token_ids == b.token_ids for a, b in zip(*outputs.values(), strict=True)]
    found[f"batch {batch}, prompts with the same text"] = f"{sum(same)} of {len(same)}"
    say(f"batch {batch}: the same text for {sum(same)} of {len(same)} prompts")
