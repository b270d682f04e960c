"""A tiny random model with a real byte-level tokenizer, for tests of everything above the step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from tiny_tokenizers import EOS as EOS
from tiny_tokenizers import TOKENIZERS, byte_tokenizer

from jspec.checkpoints.hub import LoadedModel
from jspec.config import ModelConfig
from jspec.llm import LLM
from jspec.model.params import init_params
from jspec.sampling_params import SamplingParams

# Compiler options that undo the flags of conftest.py.
AS_SHIPPED = {"xla_backend_optimization_level": 3, **(
    {"xla_cpu_use_fusion_emitters": True} if jax.__version__.startswith("0.10.") else {})}
NAME = "tiny"
SPECULATION = {
  "none": None,
  "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
            "prompt_lookup_min": 1},
  "draft_model": {"model": NAME, "num_speculative_tokens": 3},  # the target is its own draft
}
# A pool far larger than needed: copies of it would show, as would writes to pages nobody owns.
OPTIONS = dict(dtype="float32", max_model_len=96, max_num_seqs=4, page_size=8, num_pages=2048)


def tiny_config(**changes) -> ModelConfig:
  return ModelConfig(**{**dict(
      family="llama", vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
      head_dim=8, mlp_dim=64, max_positions=256), **changes})


@functools.cache
def tiny_model(dtype: str = "float32", key: int = 0) -> LoadedModel:
  config = tiny_config()
  params = init_params(jax.random.key(key), config, jnp.dtype(dtype))
  # Sharper than random logits are, so that sampled text repeats itself and drafts get accepted.
  params["head"]["w"] = params["head"]["w"] * 3
  return LoadedModel(config, params, byte_tokenizer(), NAME)


@functools.cache
def _shared(method: str, options: tuple) -> LLM:
  options = OPTIONS | dict(options)
  return LLM(tiny_model(options["dtype"]), speculative_config=SPECULATION[method], progress=False,
             **options)


def tiny_llm(method: str = "none", **options) -> LLM:
  """One LLM per combination for the whole session: its programs are compiled once."""
  return _shared(method, tuple(sorted(options.items())))


@contextlib.contextmanager
def with_tokenizer(kind: str, method: str) -> Iterator[LLM]:
  """The shared LLM with a tokenizer of another kind: its programs know none."""
  llm = tiny_llm(method)
  own, llm.tokenizer = llm.tokenizer, TOKENIZERS[kind]
  try:
    yield llm
  finally:
    llm.tokenizer = own


def greedy(**fields) -> SamplingParams:
  return SamplingParams(temperature=0.0, **fields)


def is_idle(llm: LLM) -> bool:
  """Whether nothing is queued or running and all pages are free."""
  scheduler = llm.engine.scheduler
  return (not scheduler.waiting and not scheduler.running
          and scheduler.allocator.num_free == scheduler.allocator.num_pages)
