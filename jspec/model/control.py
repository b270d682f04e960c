"""Conditional execution that leaves large carries in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def run_if(predicate: jax.Array, run: Callable, carry: Any) -> Any:
  """carry = run(carry) where the predicate holds.

  A loop of at most one turn, because XLA:CPU copies what a lax.cond may write (the KV pages),
  and updates a loop's carry in place.
  """
  return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.bool_(False), run(c[1])),
                            (predicate, carry))[1]
