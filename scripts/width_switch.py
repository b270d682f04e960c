"""Does a step cost what its width costs? A mixed run against the mix of its widths' times.

  python scripts/width_switch.py
A drafter proposes 0, 3 or 7 tokens: always the same number, or in turn. One process, in turn,
medians. Says how often the step was traced.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from jspec.checkpoints import hub
from jspec.config import EngineConfig, Verification
from jspec.engine.programs import initial_state
from jspec.speculation import step
from jspec.speculation.drafter import Drafter
from jspec.speculation.plan import default_widths
from jspec.types import NO_PARENT, DraftTree, StepInputs

DRAFTS = (0, 3, 7)


def drafter_of(num_tokens: int) -> Drafter:
  """Proposes as many tokens as params say, by turns of the committed length."""

  def propose(params, state, root, slots):
    count = params[slots.length % len(params)]
    chain = jnp.arange(num_tokens + 1) - 1
    parent = jnp.where(chain < count[:, None], chain, NO_PARENT)
    token = jnp.where(chain < 0, root[:, None], 1)
    return DraftTree(token, parent.at[:, 0].set(NO_PARENT), None), state

  return Drafter(lambda num_slots, num_pages: (), propose,
                 lambda params, state, slots, committed: state, num_tokens + 1, num_tokens)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="smollm2-135m-instruct")
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--repeats", type=int, default=7)
  parser.add_argument("--length", type=int, default=128)
  arguments = parser.parse_args()
  target = hub.load_model(arguments.model)
  drafter = drafter_of(max(DRAFTS))
  engine = EngineConfig(max_num_seqs=1, num_pages=16, max_model_len=2048)
  # Under this rule drafts are verified whole, however often they were wrong; none of them passes.
  config = step.StepConfig(target.config, default_widths(1, drafter.num_nodes),
                           verification=Verification("lossy_synthetic", rates=(0.0,) * max(DRAFTS)))
  traces = []
  multi = step.make_multi_step(config, drafter, arguments.steps)

  def traced(*args):
    traces.append(1)
    return multi(*args)

  run = jax.jit(traced, donate_argnums=1)
  state = initial_state(jax.random.key(0), target.config, drafter, engine, jnp.float32)
  state = state.replace(page_table=jnp.arange(state.page_table.shape[1])[None])
  runs = {str(n): (n,) * len(DRAFTS) for n in DRAFTS} | {"mixed": DRAFTS}
  times = {name: [] for name in runs}
  for repeat in range(arguments.repeats + 1):  # the first compiles
    for name, counts in runs.items():
      state = state.replace(active=jnp.ones(1, bool), limit=jnp.full(1, 10**6),
                            max_draft=jnp.full(1, 99), num_output=jnp.ones(1, jnp.int32),
                            length=jnp.full(1, arguments.length))
      inputs = StepInputs(target.params, jnp.array(counts), jnp.int32(99), jnp.float32(1000))
      started = time.perf_counter()
      state, out = run(inputs, state, jnp.int32(arguments.steps))
      jax.block_until_ready(out)
      if repeat:
        times[name].append((time.perf_counter() - started) / int(out.num_steps[0]) * 1e3)
  median = {name: statistics.median(values) for name, values in times.items()}
  mix = statistics.mean(median[str(n)] for n in DRAFTS)
  for name, value in median.items():
    print(f"drafts {name:>5}: {value:.2f} ms per step")
  print(f"mixed / mean of the widths' times: {median['mixed'] / mix:.3f}; traces: {len(traces)}")


if __name__ == "__main__":
  main()
