"""The transformer of jspec/model/transformer.py over whole rows of packed sequences, without pages.

The same parameter tree and the same layers; attention is dense and can be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.model import transformer
from jspec.model.execution import FAST

Params = Any
MASKED = -1e30  # finite, so that a row that sees nothing has no NaN in its gradient


def forward(
    params: Params,
    config: ModelConfig,
    token: jax.Array,  # i32[B, T]
    segment: jax.Array,  # i32[B, T], see training.types.Batch
    position: jax.Array,  # i32[B, T]
    taps: tuple[int, ...] = (),
    checkpoint: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Runs whole rows: a token sees those before it in its own segment.

  Args:
    taps: which hidden states to give as features: k is the input of layer k, num_layers the final
      normed one.
    checkpoint: keep each layer's input alone for the gradient, and compute the layer again.

  Returns hidden [B, T, E], final and normed, ready for `logits`, and features [B, T, F], the taps
  side by side.
  """
  with jax.named_scope("embed"):
    x = transformer.embed(params, config, token, position)
  angles = transformer.rope_angles(config, position)
  seen = {}
  for i, layer in enumerate(params["layers"]):
    if i in taps:
      seen[i] = x
    sliding = i in config.sliding_layers

    def run(layer, x, angles, sliding=sliding):
      attend = lambda q, k, v: attention(q, k, v, segment, position, config, sliding=sliding)
      return transformer.layer(layer, config, x, angles, attend, FAST)

    x = (jax.checkpoint(run) if checkpoint else run)(layer, x, angles[sliding])
  hidden = transformer.norm(x, params["final_norm"], config, FAST)
  seen[config.num_layers] = hidden
  nothing = jnp.zeros((*x.shape[:2], 0), x.dtype)
  return hidden, jnp.concatenate([nothing, *(seen[k] for k in taps)], -1)


def attention(
    q: jax.Array,  # [B, T, H*h]
    k: jax.Array,  # [B, T, K*h]
    v: jax.Array,  # [B, T, K*h]
    segment: jax.Array,  # i32[B, T]
    position: jax.Array,  # i32[B, T], of the keys
    config: ModelConfig,
    *,
    sliding: bool = False,
    later: Sequence[tuple[jax.Array, jax.Array]] = (),
) -> jax.Array:
  """Dense causal attention within segments, [B, T, H*h].

  Args:
    sliding: whether config.window bounds what is seen.
    later: (keys, values), each [B, T, K*h], of entries that follow the row's own: the j-th lies
      j + 1 positions after it. They are seen by that row alone, which queries from the last one's
      position: a draft on top of the row's text.
  """
  b, t = segment.shape
  by_head = lambda x: x.reshape(b, t, -1, config.head_dim)  # [B, T, K, h]
  k, v = by_head(k), by_head(v)
  queries = (q * jnp.asarray(config.scale, q.dtype)).reshape(b, t, k.shape[2], -1, config.head_dim)
  products = lambda spec, keys: jnp.einsum(spec, queries, keys, preferred_element_type=jnp.float32)
  scores = products("btkgh,bskh->bkgts", k)
  own = [products("btkgh,btkh->bkgt", by_head(keys))[..., None] for keys, _ in later]
  scores = jnp.concatenate([scores, *own], -1)  # [B, K, H/K, T, T + len(later)]
  if config.attn_soft_cap is not None:
    scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
  visible = visible_rows(segment, position, config.window if sliding else None, len(later))
  weight = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), -1).astype(v.dtype)
  out = jnp.einsum("bkgts,bskh->btkgh", weight[..., :t], v, preferred_element_type=jnp.float32)
  for j, (_, values) in enumerate(later):
    column = weight[..., t + j].transpose(0, 3, 1, 2)  # [B, T, K, H/K]
    out = out + column[..., None] * by_head(values)[:, :, :, None]
  return out.reshape(q.shape).astype(q.dtype)


def visible_rows(segment: jax.Array, position: jax.Array, window: int | None,
                 num_later: int) -> jax.Array:
  """bool[B, T, T + num_later]: what each row sees of the rows, and of its own later entries."""
  t = segment.shape[1]
  seen = (segment[:, :, None] == segment[:, None]) & jnp.tril(jnp.ones((t, t), bool))
  later = jnp.ones((*segment.shape, num_later), bool)
  if window is not None:
    seen &= position[:, :, None] + num_later - position[:, None] < window
    later &= num_later - 1 - jnp.arange(num_later) < window
  return jnp.concatenate([seen, later], -1)
