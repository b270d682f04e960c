"""What drafting costs: a head's passes per drafted token, as a share of a plain step of the target.

  python scripts/draft_cost.py --draft-vocab 8192 --tokens 3
The head has random parameters: its cost does not depend on them. One process, in turn, medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

from jspec.checkpoints import hub
from jspec.config import EngineConfig
from jspec.drafters.eagle import eagle
from jspec.drafters.none import none
from jspec.engine.programs import initial_state
from jspec.heads.config import EagleConfig
from jspec.heads.init import init_head
from jspec.speculation import step, tree
from jspec.types import Committed, Slots, StepInputs


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="smollm2-135m-instruct")
  parser.add_argument("--draft-vocab", type=int, default=8192)
  parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 5, 7])
  parser.add_argument("--length", type=int, default=128, help="tokens in the cache")
  parser.add_argument("--steps", type=int, default=30, help="steps per timing")
  parser.add_argument("--repeats", type=int, default=9)
  arguments = parser.parse_args()
  target = hub.load_model(arguments.model)
  plain = plain_steps(target, arguments)
  drafts = {k: draft_steps(target, arguments, k) for k in arguments.tokens}
  times = {name: [] for name in ("plain", *drafts)}
  for repeat in range(arguments.repeats + 1):  # the first compiles
    for name, run in (("plain", plain), *drafts.items()):
      started = time.perf_counter()
      jax.block_until_ready(run())
      if repeat:
        times[name].append((time.perf_counter() - started) / arguments.steps * 1e3)
  base = statistics.median(times["plain"])
  print(f"plain step of {target.name}: {base:.2f} ms")
  print("tokens  draft ms/step  per drafted token / plain step")
  for k in drafts:
    cost = statistics.median(times[k])
    print(f"{k:6d}  {cost:13.2f}  {cost / k / base:.4f}")


def plain_steps(target, arguments):
  """Plain decoding steps of one slot with `length` tokens in its cache."""
  drafter, config = none(), target.config
  engine = EngineConfig(max_num_seqs=1, num_pages=16, max_model_len=2048)
  run = jax.jit(step.make_multi_step(step.StepConfig(config, ((1, 1),)), drafter, arguments.steps),
                donate_argnums=1)
  inputs = StepInputs(target.params, (), jnp.int32(0), jnp.float32(9))
  state = initial_state(jax.random.key(0), config, drafter, engine, jnp.float32)
  started = state.replace(
      page_table=jnp.arange(state.page_table.shape[1])[None], active=jnp.ones(1, bool),
      limit=jnp.full(1, 10**6), length=jnp.full(1, arguments.length))
  held = [started]

  def steps():
    state, out = run(inputs, held[0], jnp.int32(arguments.steps))
    held[0] = state.replace(length=jnp.full(1, arguments.length), active=jnp.ones(1, bool))
    return out

  return steps


def draft_steps(target, arguments, num_tokens):
  """As many times propose, and observe with every drafted token accepted."""
  config = target.config
  layer = dataclasses.replace(config, num_layers=1, tie_embeddings=False)
  head = EagleConfig(3, layer, config.width, arguments.draft_vocab, has_head=True)
  shape = tree.shape_of([(0,) * i for i in range(1, num_tokens + 1)])
  drafter = eagle(head, shape, config, 128, jnp.float32)
  params = {"head": init_head(jax.random.key(0), head),
            "target": {name: x for name, x in target.params.items() if name != "layers"}}
  width = len(drafter.feature_layers) * config.width

  @jax.jit
  def run(params, state):
    def once(i, state):
      slots = Slots(jnp.zeros(1, jnp.int32), jnp.arange(16)[None],
                    jnp.full(1, arguments.length), jnp.zeros(1), jax.random.split(
                        jax.random.key(0), 1), jnp.ones((1, width)) + i)
      draft, state = drafter.propose(params, state, jnp.full(1, i), slots)
      committed = Committed(draft.token, draft.token, jnp.ones((1, num_tokens + 1, width)),
                            jnp.full(1, num_tokens + 1))
      return drafter.observe(params, state, slots, committed)

    return jax.lax.fori_loop(0, arguments.steps, once, state)

  state = drafter.init(1, 16)
  return lambda: run(params, state)


if __name__ == "__main__":
  main()
