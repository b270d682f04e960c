"""Micro-batches accumulate to the update of one batch that holds all their rows."""

from __future__ import annotations

import functools

import eagle3_batches as eagle3
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_cases import TARGET, target_params
from training_cases import METHODS, ONE_OF_EACH, packed, params_of
from training_checks import quickly

from jspec.training import state
from jspec.training.methods import make_method
from jspec.training.methods.eagle3 import Eagle3Options


def method_and_params(name: str):
  if name != "eagle3":
    return METHODS[name], params_of(name)
  method = make_method("eagle3", Eagle3Options(steps=2, feature_layers=eagle3.TAPS,
                                               train_head=True), TARGET, eagle3.TARGET_ID)
  return method, method.init(jax.random.key(1), target_params())


def micro_batches(name: str):
  """Two batches; of the second hardly anything is to be learnt."""
  make = eagle3.packed_batch if name == "eagle3" else packed
  first, second = make(), make()
  few = second.loss & (jnp.arange(second.token.shape[1]) < 4)
  return first, second.replace(token=(second.token + 3) % TARGET.vocab_size, loss=few)


@functools.cache
def updated(name: str, accumulate: bool):
  """(gradient, metrics) of an update at step 5; SGD at rate 1 shows the gradient."""
  method, params = method_and_params(name)
  batches, optimizer = micro_batches(name), optax.sgd(1.0)
  join = (lambda *xs: jnp.stack(xs)) if accumulate else (lambda *xs: jnp.concatenate(xs)[None])
  batch = jax.tree.map(join, *batches)
  began = state.init_state(0, method, optimizer, target_params(), params=params).replace(
      step=jnp.int32(5))
  update = jax.jit(state.make_update(method, optimizer, TARGET), compiler_options=quickly)
  after, metrics = update(began, target_params(), batch)
  return jax.tree.map(lambda p, q: np.array(p - q), began.params, after.params), {
      k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "eagle3"])
def test_accumulated_micro_batches_have_the_loss_and_the_gradient_of_all_their_rows(name):
  (gradient, metrics), (want, whole) = updated(name, True), updated(name, False)
  # The optimiser's subtraction rounds by parameters of up to 2: 1e-6 of those, not of gradients.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, want)
  assert metrics.keys() == whole.keys() and {"loss", "terms", "accuracy_1"} <= metrics.keys()
  for key, value in whole.items():
    assert metrics[key] == pytest.approx(value, abs=1e-6, rel=2e-6), key


@pytest.mark.parametrize("name", ["medusa_vocab", "eagle3"])
def test_that_is_not_the_mean_of_the_micro_batches_means(name):
  method, params = method_and_params(name)
  losses, terms = [], []
  for batch in micro_batches(name):
    batch = state.with_features(batch, method, target_params(), TARGET)
    loss, metrics = method.loss(params, target_params(), batch, jnp.int32(5), jax.random.key(0))
    losses.append(float(loss))
    terms.append(float(metrics["terms"]))
  whole = updated(name, True)[1]
  assert terms[1] < terms[0] / 2 and whole["terms"] == sum(terms)
  assert abs(whole["loss"] - np.mean(losses)) > 1e-3 * whole["loss"]
