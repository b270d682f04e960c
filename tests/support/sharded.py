"""What a tiny model answers, over several devices."""

from __future__ import annotations

import dataclasses
import functools

import jax
import tiny_llm

from jspec.checkpoints.hub import LoadedModel
from jspec.llm import LLM
from jspec.model.params import init_params
from jspec.sampling_params import SamplingParams

CONFIG = tiny_llm.tiny_config(num_heads=8, num_kv_heads=2, vocab_size=64, mlp_dim=64, num_layers=1)
PROMPTS = [[1, 2, 3, 4, 5, 6, 1, 2, 3], [7, 8, 9, 10, 7, 8], [20, 21], [5] * 10]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_p=0.8, max_tokens=20, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_k=5, min_p=0.01, logit_bias={7: 2.0}, max_tokens=20,
                   ignore_eos=True)]
SPECULATION = {  # of three nodes each: three widths to compile
  "ngram": {**tiny_llm.SPECULATION["ngram"], "num_speculative_tokens": 2},
  "draft": {"model": tiny_llm.NAME, "num_speculative_tokens": 2},
  "tree": {"model": tiny_llm.NAME, "tree_widths": [2], "draft_sample_method": "probabilistic"},
}


@functools.cache
def model() -> LoadedModel:
  params = init_params(jax.random.key(0), CONFIG)
  params["head"]["w"] = params["head"]["w"] * 3  # repeats itself: drafts get accepted
  return LoadedModel(CONFIG, params, tiny_llm.byte_tokenizer(), tiny_llm.NAME)


def answers(method: str, tp: int, draft_tp: int = 1, max_tokens: int = 20, **options):
  spec = dict(SPECULATION[method])
  if method != "ngram":
    spec["draft_tensor_parallel_size"] = draft_tp
  llm = LLM(model(), speculative_config=spec, tensor_parallel_size=tp, progress=False,
            **{**tiny_llm.OPTIONS, "num_pages": 128, **options})
  params = [dataclasses.replace(p, max_tokens=max_tokens) for p in SAMPLING]
  return [out.outputs[0] for out in llm.generate(PROMPTS, params)], llm
