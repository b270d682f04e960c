"""The transformer of jspec/model/transformer.py over whole rows of packed sequences, without pages.

The same parameter tree and the same layers, but dense attention, which can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.model import transformer

Params = Any
MASKED = -1e30  # finite, so that a row that sees nothing has no NaN in its gradient

# (q [B, T, H, h], k [B, T, K, h], v [B, T, K, h]) -> [B, T, H, h]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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
    x = embed(params, config, token, position)
  angles = transformer.rope_angles(config, position.reshape(-1))
  seen = {}
  for i, layer in enumerate(params["layers"]):
    if i in taps:
      seen[i] = x
    sliding = i in config.sliding_layers

    def run(layer, x, angles, sliding=sliding):
      attend = lambda q, k, v: attention(q, k, v, segment, position, config, sliding=sliding)
      return block(layer, config, x, angles, attend)

    x = (jax.checkpoint(run) if checkpoint else run)(layer, x, angles[sliding])
  hidden = transformer.norm(x, params["final_norm"], config, False)
  seen[config.num_layers] = hidden
  nothing = jnp.zeros((*x.shape[:2], 0), x.dtype)
  return hidden, jnp.concatenate([nothing, *(seen[k] for k in taps)], -1)


def embed(params: Params, config: ModelConfig, token: jax.Array, position: jax.Array) -> jax.Array:
  """[B, T] -> [B, T, E]."""
  x = transformer.embed(params, config, token.reshape(-1), position.reshape(-1))
  return x.reshape(*token.shape, -1)


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
  """[B, T, E] -> f32[B, T, V]."""
  out = transformer.logits(params, config, hidden.reshape(-1, hidden.shape[-1]))
  return out.reshape(*hidden.shape[:-1], -1)


def dense(x: jax.Array, p: Params, dtype: Any = None) -> jax.Array:
  """[..., in] -> [..., out]. dtype: of the result, see transformer.dense."""
  return transformer.dense(x.reshape(-1, x.shape[-1]), p, False, dtype).reshape(*x.shape[:-1], -1)


def block(layer: Params, config: ModelConfig, x: jax.Array, angles, attend: Attend,
          attn_input: jax.Array | None = None) -> jax.Array:
  """One decoder layer on x [B, T, E].

  Args:
    angles: of the rows' positions, as transformer.rope_angles has them for this kind of layer.
    attn_input: [B, T, any width], what q, k and v are computed from; by default x through the
      layer's attn_norm.
  """
  rows = x.shape[:2]
  with jax.named_scope("attention"):
    y = transformer.norm(x, layer["attn_norm"], config, False) if attn_input is None else attn_input
    q, k, v = (dense(y, layer[name]) for name in "qkv")
    q, k = (transformer.rotate_heads(a.reshape(-1, a.shape[-1]), layer.get(f"{name}_norm"), config,
                               angles, False) for a, name in ((q, "q"), (k, "k")))
    y = attend(*(a.reshape(*rows, -1, config.head_dim) for a in (q, k, v)))
    y = dense(y.reshape(*rows, -1), layer["o"])
    if config.post_norms:
      y = transformer.norm(y, layer["attn_post_norm"], config, False)
    x = x + y
  with jax.named_scope("mlp"):
    y = transformer.norm(x, layer["mlp_norm"], config, False)
    y = transformer.mlp(y.reshape(-1, y.shape[-1]), layer, config, False).reshape(x.shape)
    if config.post_norms:
      y = transformer.norm(y, layer["mlp_post_norm"], config, False)
    return x + y


def attention(
    q: jax.Array,  # [B, T, H, h]
    k: jax.Array,  # [B, T, K, h]
    v: jax.Array,  # [B, T, K, h]
    segment: jax.Array,  # i32[B, T]
    position: jax.Array,  # i32[B, T], of the keys
    config: ModelConfig,
    *,
    sliding: bool = False,
    later: Sequence[tuple[jax.Array, jax.Array]] = (),
) -> jax.Array:
  """Dense causal attention within segments, [B, T, H, h].

  Args:
    sliding: whether config.window bounds what is seen.
    later: (keys, values), each [B, T, K, h], of entries that follow the row's own: the j-th lies
      j + 1 positions after it. They are seen by that row alone, which queries from the last one's
      position: a draft on top of the row's text.
  """
  b, t, num_heads, head_dim = q.shape
  num_kv = k.shape[2]
  queries = (q * jnp.asarray(config.scale, q.dtype)).reshape(b, t, num_kv, -1, head_dim)
  products = lambda spec, keys: jnp.einsum(spec, queries, keys, preferred_element_type=jnp.float32)
  scores = products("btkgh,bskh->bkgts", k)
  own = [products("btkgh,btkh->bkgt", keys)[..., None] for keys, _ in later]
  scores = jnp.concatenate([scores, *own], -1)  # [B, K, H/K, T, T + len(later)]
  if config.attn_soft_cap is not None:
    scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
  visible = visible_rows(segment, position, config.window if sliding else None, len(later))
  weight = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), -1).astype(v.dtype)
  out = jnp.einsum("bkgts,bskh->btkgh", weight[..., :t], v, preferred_element_type=jnp.float32)
  for j, (_, values) in enumerate(later):
    column = weight[..., t + j].transpose(0, 3, 1, 2)  # [B, T, K, H/K]
    out = out + column[..., None] * values[:, :, :, None]
  return out.reshape(b, t, num_heads, head_dim).astype(q.dtype)


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
