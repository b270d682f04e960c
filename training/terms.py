"""The terms of a loss: which tokens count, from which row each is predicted, and their means."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.model import transformer
from jspec.training.types import Batch, Mean, Measured, Params


def shifted(x: jax.Array, by: int) -> jax.Array:
  """x[:, t + by] at t, 0 at the end."""
  if by == 0:
    return x
  return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *((0, 0),) * (x.ndim - 2)))


def counted(batch: Batch, ahead: int) -> jax.Array:
  """bool[B, T]: rows whose token `ahead` places on is theirs to predict, and to be learned."""
  same = shifted(batch.segment, ahead) == batch.segment
  return shifted(batch.loss, ahead) & same & (batch.segment > 0)


def mean(x: jax.Array, counts: jax.Array) -> Mean:
  """Of x where it counts."""
  return Mean(jnp.where(counts, x, 0).sum(), number(counts))


def cross_entropy(logits: jax.Array, token: jax.Array) -> jax.Array:
  """[..., V], i32[...] -> [...]."""
  log_q = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(log_q, token[..., None], -1)[..., 0]


def soft_cross_entropy(teacher: jax.Array, logits: jax.Array) -> jax.Array:
  """-sum p log q over the last axis, p and q by the teacher's logits and the student's."""
  return -(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits)).sum(-1)


def divergence(first: jax.Array, second: jax.Array) -> jax.Array:
  """KL(p || q) of the laws with these logits, over the last axis."""
  log_p, log_q = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
  return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def draft_token(token: jax.Array, target_id: np.ndarray | None,
                vocab_size: int) -> tuple[jax.Array, jax.Array]:
  """Its place in the draft vocabulary (0 if it has none), and whether it has one."""
  if target_id is None:
    return token, jnp.ones_like(token, bool)
  place = np.full(vocab_size, -1, np.int32)
  place[target_id] = np.arange(len(target_id))
  at = jnp.asarray(place)[token]
  return jnp.maximum(at, 0), at >= 0


def draft_metrics(logits: jax.Array, batch: Batch, depth: int, target_id: np.ndarray | None,
                  loss: Measured | None = None) -> dict[str, Measured]:
  """accuracy_1 and so on: a token outside the draft vocabulary is a miss."""
  best = logits.argmax(-1)
  best = best if target_id is None else jnp.asarray(target_id)[best]
  ahead = depth + 2
  right = best == shifted(batch.token, ahead)
  found: dict[str, Measured] = {
      f"accuracy_{depth + 1}": mean(right.astype(jnp.float32), counted(batch, ahead))}
  return found if loss is None else found | {f"loss_{depth + 1}": loss}


def number(counts: jax.Array) -> jax.Array:
  return counts.sum(dtype=jnp.float32)


def lm_head(target_params: Params, target_id: np.ndarray | None = None) -> jax.Array:
  """f32[E, Vd], a copy of the target's, for a head to start from."""
  return jnp.array(transformer.lm_head(target_params, target_id), jnp.float32)


def hidden_of(batch: Batch) -> jax.Array:
  if batch.hidden is None:
    raise ValueError("the batch has no hidden states: run the target over it first")
  return batch.hidden


def to_float32(tree: Any) -> Any:
  """A copy, for training to own."""
  return jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)


def with_target_ids(params: Params, target_id: np.ndarray | None) -> Params:
  """The exported tree of a head: with its draft vocabulary, if it has one."""
  return params if target_id is None else params | {
      "target_id": jnp.asarray(target_id, jnp.int32)}


def check_positive(where: str, options: Any, *names: str) -> None:
  for name in names:
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"{where}: {name} must be an integer >= 1, got {value!r}")


def check_range(where: str, options: Any, low: float, high: float, *names: str) -> None:
  """That each lies in low..high, ends included."""
  for name in names:
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
      raise ValueError(f"{where}: {name} must be a number in {low}..{high}, got {value!r}")


def check_draft_vocabulary(where: str, target_id: np.ndarray | None, vocab_size: int) -> None:
  if target_id is not None and (len(target_id) == 0 or list(target_id) != sorted(
      set(np.asarray(target_id).tolist())) or target_id[0] < 0 or target_id[-1] >= vocab_size):
    raise ValueError(f"{where}: the draft vocabulary must be ascending tokens of "
                     f"0..{vocab_size - 1}, got {len(target_id)} that begin with "
                     f"{np.asarray(target_id)[:8].tolist()}")
