"""AdamW and its schedule, from a configuration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jspec.training.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """The learning rate of update number 0, 1, ..., num_steps - 1."""
  if num_steps < 1:
    raise ValueError(f"a schedule needs at least one step, got {num_steps}")
  warmup = config.warmup_steps or round(config.warmup_share * num_steps)
  if warmup >= num_steps > 1:
    raise ValueError(f"optimizer.warmup_steps={warmup} must be less than the {num_steps} steps")
  last = max(num_steps - 1 - warmup, 1)  # steps from the peak to the end

  def schedule(count):
    rise = jnp.minimum((count + 1) / (warmup + 1), 1.0)  # update 0 is not wasted
    done = jnp.clip((count - warmup) / last, 0.0, 1.0)
    left = {"cosine": 0.5 * (1 + jnp.cos(jnp.pi * done)), "linear": 1 - done,
            "constant": jnp.ones_like(done)}[config.schedule]
    return config.learning_rate * rise * (config.final_share + (1 - config.final_share) * left)

  return schedule


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
  """Clipping, Adam's moments, weight decay of matrices, the schedule; then the relative rates."""
  parts = []
  if config.clip_norm:
    parts.append(optax.clip_by_global_norm(config.clip_norm))
  if config.clip_value:
    parts.append(optax.clip(config.clip_value))
  parts.append(optax.scale_by_adam(*config.betas, eps=config.eps))
  if config.weight_decay:
    parts.append(optax.add_decayed_weights(config.weight_decay, mask=_is_matrix))
  parts.append(optax.scale_by_learning_rate(make_schedule(config, num_steps)))
  if config.rates:
    parts.append(_relative_rates(dict(config.rates)))
  return optax.chain(*parts)


def _is_matrix(params: Any) -> Any:
  return jax.tree.map(lambda x: x.ndim >= 2, params)


def _relative_rates(rates: dict[str, float]) -> optax.GradientTransformation:
  """Multiplies the updates of some top-level parts of the params."""

  def init(params):
    unknown = [name for name in rates if name not in params]
    if unknown:
      raise ValueError(f"optimizer.rates names {', '.join(unknown)}; "
                       f"the params have {', '.join(params)}")
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params  # unused
    times = lambda rate, part: jax.tree.map(lambda x: rate * x, part)
    return {name: times(rates.get(name, 1.0), part) for name, part in updates.items()}, state

  return optax.GradientTransformation(init, update)
