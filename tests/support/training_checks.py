"""What every way of training a drafter must pass: exact gradients, and text learnt by heart."""

from __future__ import annotations

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.model import transformer
from jspec.training import layers
from jspec.training.types import Batch, Method

quickly = {"xla_backend_optimization_level": 0}


@contextlib.contextmanager
def in_float64():
  """Every float32 that the code asks for is a float64: finite differences see seven digits more."""
  with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):
    yield


def to_float64(tree):
  wide = lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
  return jax.tree.map(wide, tree)


def check_gradient(method: Method, params, target_params, batch: Batch, step: int = 0,
                   seed: int = 0, rtol: float = 1e-5) -> None:
  """The gradient by every array of params, in a random direction, against central differences.

  An array whose derivative is 0 in truth fails, too: there would be nothing to compare.
  """
  rng, h = np.random.default_rng(seed), 1e-5
  with in_float64():
    params, target_params, batch = (to_float64(x) for x in (params, target_params, batch))
    key = jax.random.key(4)
    loss = lambda p: method.loss(p, target_params, batch, jnp.int32(step), key)[0]
    value = jax.jit(loss, compiler_options=quickly)
    gradient = jax.jit(jax.grad(loss), compiler_options=quickly)(params)
    leaves, tree = jax.tree.flatten(params)
    assert value(params).dtype == jnp.float64
    for i, (leaf, slope) in enumerate(zip(leaves, jax.tree.leaves(gradient), strict=True)):
      way = rng.normal(size=leaf.shape)
      at = lambda by, i=i, way=way: value(jax.tree.unflatten(
          tree, [x + by * way if j == i else x for j, x in enumerate(leaves)]))
      want = float(at(h) - at(-h)) / (2 * h)
      where = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(params)[i][0])
      assert abs(want) > 1e-7, f"{where} does not matter"
      np.testing.assert_allclose((slope * way).sum(), want, rtol=rtol, atol=1e-9, err_msg=where)


def own_text(target, target_params, num: int, length: int, prompt: int = 4, seed: int = 0) -> Batch:
  """The target's greedy answers to random prompts: a sequence a row, the answer to be learned."""
  rng = np.random.default_rng(seed)
  token = np.zeros((num, length), np.int32)
  token[:, :prompt] = rng.integers(0, target.vocab_size, (num, prompt))
  segment = np.ones_like(token)
  position = np.broadcast_to(np.arange(length, dtype=np.int32), token.shape)

  @jax.jit
  def best(token):
    hidden, _ = layers.forward(target_params, target, token, segment, position)
    return transformer.logits(target_params, target, hidden).argmax(-1)

  for at in range(prompt, length):
    token[:, at] = best(token)[:, at - 1]
  return Batch(*map(jnp.asarray, (token, segment, position, position >= prompt)))


def with_states(method: Method, target, target_params, batch: Batch) -> Batch:
  """The batch with the target's hidden states and the method's features."""
  hidden, feature = jax.jit(lambda: layers.forward(
      target_params, target, batch.token, batch.segment, batch.position, method.feature_layers))()
  return batch.replace(hidden=hidden, feature=feature)


def accuracies(method: Method, logits, batch: Batch) -> list[float]:
  """By depth, how many of the tokens to be learned are the drafter's best guess."""
  out = []
  token, segment, loss = (np.array(x) for x in (batch.token, batch.segment, batch.loss))
  for d, of_depth in enumerate(logits):
    best = np.array(of_depth).argmax(-1)
    best = best if method.target_id is None else np.array(method.target_id)[best]
    right = [best[row, at - d - 2] == token[row, at] for row, at in np.argwhere(loss)
             if at >= d + 2 and segment[row, at - d - 2] == segment[row, at] > 0]
    out.append(float(np.mean(right)))
  return out


def overfit(method: Method, target, target_params, batch: Batch, steps: int,
            learning_rate: float = 1e-2) -> list[float]:
  """Accuracy by depth on the batch itself, after that many full-batch steps of Adam."""
  batch = with_states(method, target, target_params, batch)
  params = method.init(jax.random.key(0), target_params)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(
      optax.cosine_decay_schedule(learning_rate, steps)))

  def update(step, carry):
    params, state = carry
    loss = lambda p: method.loss(p, target_params, batch, step, jax.random.key(step))[0]
    change, state = optimizer.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, change), state

  train = jax.jit(lambda *carry: jax.lax.fori_loop(0, steps, update, carry))
  params, _ = train(params, optimizer.init(params))
  logits = jax.jit(method.logits, compiler_options=quickly)(params, target_params, batch)
  return accuracies(method, logits, batch)
