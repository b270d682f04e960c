"""Tokens per second and memory of training and of self-generation, by length and batch size.

  python scripts/training_cost.py --method eagle3 --lengths 256 512 1024 --rows 1 2 4

Random text and hidden states: the arithmetic is the same. Medians; the first update compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec import LLM, SamplingParams
from jspec.bench.report import peak_memory_mib
from jspec.checkpoints import hub
from jspec.training import config as configuration
from jspec.training import state
from jspec.training.methods import METHODS, make_method
from jspec.training.types import Batch


def random_batch(rows: int, length: int, method, target, stored: bool) -> Batch:
  rng = np.random.default_rng(0)
  shape = (1, rows, length)
  states = lambda layers: jnp.asarray(
      rng.normal(size=(*shape, layers * target.width)), jnp.bfloat16) if stored else None
  return Batch(jnp.asarray(rng.integers(0, target.vocab_size, shape), jnp.int32),
               jnp.ones(shape, jnp.int32), jnp.broadcast_to(jnp.arange(length), shape),
               jnp.ones(shape, bool), states(1),
               states(len(method.feature_layers)) if method.feature_layers else None)


def training(args, loaded):
  tree = json.loads(args.options)
  options = configuration.from_dict(dict(
      target=args.target, method=args.method, output="-", steps=1, options=tree,
      data={"conversations": ["-"]})).method_options(METHODS[args.method].options)
  ids = np.arange(args.draft_vocab_size, dtype=np.int32) if args.draft_vocab_size else None
  method, optimizer = make_method(args.method, options, loaded.config, ids), optax.adam(1e-4)
  update = jax.jit(state.make_update(method, optimizer, loaded.config), donate_argnums=0)
  for length in args.lengths:
    for rows in args.rows:
      now = state.init_state(0, method, optimizer, loaded.params)
      batch = random_batch(rows, length, method, loaded.config, not args.on_the_fly)
      spent = []
      for _ in range(args.repeats + 1):
        began = time.perf_counter()
        now, metrics = update(now, loaded.params, batch)
        jax.block_until_ready(metrics)
        spent.append(time.perf_counter() - began)
      seconds = statistics.median(spent[1:])
      print(f"train {args.method}: {rows} x {length}: {rows * length / seconds:.0f} tokens/s, "
            f"{seconds:.2f} s per update, {peak_memory_mib() or 0:.0f} MiB at most so far",
            flush=True)


def generation(args, loaded):
  layers = [2, loaded.config.num_layers // 2, loaded.config.num_layers - 3,
            loaded.config.num_layers]
  prompt = list(range(20, 60))
  for size in args.batch_sizes:
    llm = LLM(loaded, max_num_seqs=size, max_model_len=256, speculative_config={
        "method": "extract_hidden_states", "hidden_state_layers": layers})
    for limit in (2, args.max_tokens):  # the first compiles
      began = time.perf_counter()
      outputs = llm.generate([prompt] * size, SamplingParams(
          temperature=0.0, max_tokens=limit, ignore_eos=True))
    seconds = time.perf_counter() - began
    print(f"generate with hidden states, {size} requests: "
          f"{sum(len(out.token_ids) for out in outputs) / seconds:.0f} tokens/s, prefill of "
          f"{len(prompt)} included, {peak_memory_mib() or 0:.0f} MiB at most so far", flush=True)


def main():
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--target", default="smollm2-135m-instruct")
  add("--method", choices=METHODS, default="eagle3")
  add("--options", default="{}", help='the method\'s, as JSON, such as {"steps": 1}')
  add("--draft-vocab-size", type=int, default=8192, help="0: the target's own")
  add("--lengths", type=int, nargs="*", default=[256, 512, 1024])
  add("--rows", type=int, nargs="+", default=[1, 2, 4])
  add("--on-the-fly", action="store_true", help="run the target, too")
  add("--batch-sizes", type=int, nargs="*", default=[1, 8, 32])
  add("--max-tokens", type=int, default=64)
  add("--repeats", type=int, default=3)
  args = parser.parse_args()
  loaded = hub.load_model(args.target)
  training(args, loaded)
  generation(args, loaded)


if __name__ == "__main__":
  main()
