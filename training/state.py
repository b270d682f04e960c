"""The state of a training run, and the one jitted function that advances it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec.config import ModelConfig
from jspec.model.sharding import param_shardings
from jspec.training import layers
from jspec.training.types import Batch, Method, Metrics, Params, value


class TrainState(flax.struct.PyTreeNode):
  """All that an update reads and writes. Donated to it."""

  step: jax.Array  # i32[], updates made
  params: Params  # float32, whatever the dtype of the arithmetic
  optimizer: optax.OptState
  average: Params | None  # exponential moving average of params
  key: jax.Array  # key[], folded by step and never advanced

  @property
  def best(self) -> Params:
    """The parameters to evaluate and export."""
    return self.params if self.average is None else self.average


def init_state(seed: int, method: Method, optimizer: optax.GradientTransformation,
               target_params: Params, ema_decay: float = 0.0,
               params: Params | None = None) -> TrainState:
  """params: to start from; None: method.init's."""
  key = jax.random.key(seed)
  if params is None:
    params = method.init(jax.random.fold_in(key, 0), target_params)
  # Copies: a donated state must not share arrays with the target, or within itself.
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
  average = jax.tree.map(jnp.array, params) if ema_decay else None
  return TrainState(jnp.int32(0), params, optimizer.init(params), average,
                    jax.random.fold_in(key, 1))


def make_update(method: Method, optimizer: optax.GradientTransformation, target: ModelConfig, *,
                dtype=jnp.float32, ema_decay: float = 0.0
                ) -> Callable[[TrainState, Params, Batch], tuple[TrainState, Metrics]]:
  """update(state, target_params, batch) -> (state, metrics): pure, to be jitted.

  batch has a leading axis [A, B, T]: A micro-batches, of which the loss, its gradient and the
  metrics are those of all their rows together, each term one sum over one count. Hidden states
  that it lacks are computed from the target on the way.

  Args:
    dtype: of the arithmetic; parameters, gradients and the optimiser stay float32.
    ema_decay: of the average of the parameters, 0 keeps none.
  """

  def terms(params, target_params, batch, step, key):
    batch = with_features(batch, method, target_params, target)
    batch = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, batch)
    cast = jax.tree.map(lambda x: x.astype(dtype), params)
    return method.terms(cast, target_params, batch, step, key)

  def loss_fn(params, counts, *args):
    """counts: of each term in all micro-batches; None: this is the only one."""
    parts, metrics = terms(params, *args)
    counts = [part.count for part in parts] if counts is None else counts
    loss = sum(part.over(count) for part, count in zip(parts, counts, strict=True))
    return loss, {"loss": parts} | metrics

  def update(state: TrainState, target_params: Params, batch: Batch):
    key = jax.random.fold_in(state.key, state.step)
    count = batch.token.shape[0]

    def given(index, batch):
      return target_params, batch, state.step, jax.random.fold_in(key, index)

    def counts_of(micro):  # of the masks alone: the arithmetic is not compiled
      return [part.count for part in terms(state.params, *given(*micro))[0]]

    def gradients(counts, micro):
      return jax.grad(loss_fn, has_aux=True)(state.params, counts, *given(*micro))

    micros = jnp.arange(count), batch
    if count == 1:  # without a loop XLA has more to fuse
      grads, measured = gradients(None, jax.tree.map(lambda x: x[0], micros))
    else:
      counts = [x.sum() for x in jax.lax.map(counts_of, micros)]
      zeros = jax.tree.map(jnp.zeros_like, state.params)

      def add(total, micro):
        grads, measured = gradients(counts, micro)
        return jax.tree.map(jnp.add, total, grads), measured

      grads, measured = jax.lax.scan(add, zeros, micros)
      measured = jax.tree.map(lambda x: x.sum(0), measured)
    metrics = {name: value(x) for name, x in measured.items()}
    updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
      # With few steps behind it the average would still be the initial values.
      decay = jnp.minimum(ema_decay, (1 + state.step) / (10 + state.step))
      average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)
    metrics |= {"grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
    return state.replace(step=state.step + 1, params=params, optimizer=opt_state,
                         average=average), metrics

  return update


def with_features(batch: Batch, method: Method, target_params: Params,
                  target: ModelConfig) -> Batch:
  """The batch with the target's hidden states, computed where it lacks what the method needs."""
  if batch.hidden is not None and (batch.feature is not None or not method.feature_layers):
    return batch
  hidden, feature = layers.forward(target_params, target, batch.token, batch.segment,
                                        batch.position, method.feature_layers)
  return batch.replace(hidden=jax.lax.stop_gradient(hidden),
                       feature=jax.lax.stop_gradient(feature))


# ---------------------------------------------------------------- on a mesh


def make_mesh(data_parallel: int, tensor_parallel: int) -> Mesh:
  """Rows of the batch are split over "dp", matrices over "tp"."""
  needed, devices = data_parallel * tensor_parallel, jax.devices()
  if needed > len(devices):
    raise ValueError(f"{data_parallel=} times {tensor_parallel=} needs {needed} devices, there are "
                     f"{len(devices)}")
  return Mesh(np.array(devices[:needed]).reshape(data_parallel, tensor_parallel), ("dp", "tp"))


def shardings(mesh: Mesh, tree: Any) -> Any:
  """Of parameters or a whole TrainState (of arrays or their shapes), by the table of inference.

  The optimiser's moments have their parameters' names, so they lie where these do.
  """
  return param_shardings(mesh, tree, mesh.shape["tp"])


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Of arrays [A, B, ...]."""
  return NamedSharding(mesh, P(None, "dp"))
