"""Logits of bfloat16 models are the float32 sums: rounded ones tie, and argmax takes the first."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_cases

from jspec.heads import medusa as medusa_head
from jspec.heads.config import MedusaConfig
from jspec.model import sharding, transformer
from jspec.model.execution import Execution

R, E, V = 5, 64, 1000
CONFIG = dataclasses.replace(tiny_cases.TARGET, vocab_size=V, width=E)


def case(tied: bool):
  """Parameters and hidden states in bfloat16, and their logits in float64."""
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
  params, hidden = {"embed": draw(0, V, E)}, draw(1, R, E)
  if not tied:
    params["head"] = {"w": draw(2, E, V)}
  w = params["embed"].T if tied else params["head"]["w"]
  return params, hidden, np.asarray(hidden, np.float64) @ np.asarray(w, np.float64)


def assert_unrounded(got, exact):
  """As near as float32 sums are; numbers of 8 bits would be up to 2**-9 of themselves off."""
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_heads_sums_are_kept_as_they_are(tied, bitwise):
  params, hidden, exact = case(tied)
  assert_unrounded(transformer.logits(params, CONFIG, hidden, Execution(bitwise=bitwise)), exact)
  assert_unrounded(transformer.logits(params, CONFIG, hidden[None])[0], exact)


@pytest.mark.parametrize("tied", [False, True])
def test_the_sums_of_a_split_vocabulary_too(tied):
  params, hidden, exact = case(tied)
  held = sharding.split_config(CONFIG, 2)
  place = sharding.placer(sharding.make_mesh(jax.devices()[:2]), CONFIG, 2)
  split = sharding.place_params(params, place)
  assert held.vocab_parts == 2
  assert_unrounded(jax.jit(lambda p, x: transformer.logits(p, held, x))(split, hidden), exact)


def test_a_medusa_heads_own_matrix_too():
  params, hidden, exact = case(False)
  config = MedusaConfig(E, V, 1, has_bias=False)
  nothing = {"w": jnp.zeros((E, E), jnp.bfloat16)}  # of which silu makes 0
  heads = {"head": {"heads": [{"blocks": [nothing], "head": params["head"]}]}}
  assert_unrounded(medusa_head.head_logits(heads, config, CONFIG, hidden, 0), exact)


def arrays_of(jaxpr):
  for equation in jaxpr.eqns:
    yield from (out.aval for out in equation.outvars)
    for value in equation.params.values():
      for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "jaxpr")):
        if hasattr(inner, "jaxpr"):
          yield from arrays_of(inner.jaxpr)


# Those that draft from the whole vocabulary, a number that occurs as no other size there.
WITH_LOGITS = ("draft_model", "draft_model_tree_sampled", "medusa", "mlp_speculator",
               "mlp_speculator_tree_sampled", "eagle", "eagle_dynamic")


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_no_drafter_has_logits_in_bfloat16(name):
  """In nothing that it computes from bfloat16 parameters has the vocabulary 8 bits a number."""
  drafter, params = tiny.CASES[name](tiny.TARGET)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params)
  table, num_pages = tiny.page_table(2, drafter.lookahead, tiny.MAX_LEN)
  width = len(drafter.feature_layers) * tiny.TARGET.width
  slots = tiny.slots_of(table, [9, 5], feature=np.zeros((2, width)))
  state = jax.tree.map(lambda x: x.astype(jnp.uint16) if x.dtype == jnp.float32 else x,
                       drafter.init(2, num_pages))  # pages of the bits, see cache.stored_dtype
  traced = jax.make_jaxpr(functools.partial(drafter.propose, half))(
      state, jnp.zeros(2, jnp.int32), slots)
  arrays = list(arrays_of(traced.jaxpr))
  halves = {x.shape[-1:] for x in arrays if x.dtype == jnp.bfloat16}
  assert halves and (tiny.VOCAB,) not in halves
  assert (tiny.VOCAB,) in {x.shape[-1:] for x in arrays if x.dtype == jnp.float32}
