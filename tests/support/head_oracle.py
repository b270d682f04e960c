"""What the oracles of heads without pages share: slots, a compiled propose, draws by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jspec.types import Slots

B, E = 6, tiny.TARGET.width
TEMPERATURE = np.array([0.0, 0.3, 0.7, 1.0, 1.5, 0.0], np.float32)


def slots_for(seed: int = 1, temperature=TEMPERATURE, scale: float = 1.0) -> Slots:
  feature = (scale * np.random.default_rng(seed).normal(size=(B, E))).astype(np.float32)
  return tiny.slots_of(jnp.zeros((B, 1), jnp.int32), np.full(B, 3), feature=feature).replace(
      temperature=jnp.array(temperature))


def run(drafter, params, slots):
  root = jnp.arange(B, dtype=jnp.int32)
  propose = jax.jit(drafter.propose, compiler_options={"xla_backend_optimization_level": 0})
  return jax.tree.map(np.array, propose(params, drafter.init(B, 1), root, slots)[0])


def oracle_draws(logits, temperature, uniforms):
  """Draft ids without replacement, one per uniform, each with the law it was drawn from."""
  left, out = set(range(len(logits))), []
  for u in uniforms:
    q = np.zeros(len(logits))
    if temperature == 0:
      q[max(left, key=lambda i: logits[i])] = 1
    else:
      for i in left:
        q[i] = np.exp((logits[i] - max(logits[j] for j in left)) / temperature)
      q /= q.sum()
    upto = 0.0
    for chosen in sorted(left):  # noqa: B007
      upto += q[chosen]
      if upto > u:
        break
    left.remove(chosen)
    out.append((chosen, q))
  return out
