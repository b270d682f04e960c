"""The decoder-only transformer: pure functions over a parameter tree.

Prefill, plain decoding and tree verification are the same `forward`, over KV pages. Training has
one over packed sequences (training/layers.py): both run `layer`, which is told how to attend.
Families (Llama, Qwen, Gemma, OPT, ...) differ in ModelConfig and in which parameters exist. The
parameter tree, all matrices (in, out), norms always float32:

  embed [V, E]; positions [max_positions, E] (learned_positions); final_norm; head {w [E, V]}
  layers: list of {attn_norm, q, k, v, o, q_norm?, k_norm?, attn_post_norm?, mlp_norm,
                   gate?, up, down, mlp_post_norm?}; a norm is {scale, bias?}, a matrix {w, b?}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.model import cache
from jspec.model.execution import FAST, Execution
from jspec.pallas import tree_bits
from jspec.pallas.reference import tree_sum
from jspec.types import KVPages, Rows

Params = dict[str, Any]

MIN_ROWS = 4  # XLA:CPU turns a matrix product with fewer rows into other code (see dense)
MAX_ROWS = 32  # and again above this many, in float32


def forward(
    params: Params,
    config: ModelConfig,
    token: jax.Array,  # i32[B, N]
    mask: jax.Array,  # bool[B, N, N], ancestors or self
    rows: Rows,
    pages: KVPages,
    page_table: jax.Array,  # i32[B, max_pages]
    length: jax.Array,  # i32[B]
    *,
    how: Execution = FAST,
    is_chain: bool = False,
    feature_layers: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array, KVPages]:
  """Runs the tree nodes named by `rows` on top of each slot's committed prefix.

  Node i's KV goes to position length + i; its rotary position is length + depth. `is_chain`
  promises that each node's parent is the node before it, for a cheaper mask.

  Returns:
    hidden [R, E]: the final normed hidden state of each row, ready for `logits`.
    features [R, F]: hidden states named as in transformers' `hidden_states`: k is the input of
      layer k, num_layers the final normed output; side by side in the order given.
    pages: with the rows' keys and values written.
  """
  with jax.named_scope("embed"):
    depth = mask.sum(-1, dtype=jnp.int32) - 1
    position = length[rows.slot] + depth[rows.slot, rows.node]
    x = embed(params, config, token[rows.slot, rows.node], position)
  x, taps, pages = blocks(params["layers"], config, x, position, mask, rows, pages, page_table,
                          length, how=how, is_chain=is_chain, taps=feature_layers)
  hidden = norm(x, params["final_norm"], config, how)
  taps = {**taps, config.num_layers: hidden}
  tapped = [taps[i] for i in feature_layers]
  features = jnp.concatenate(tapped, -1) if tapped else jnp.zeros((x.shape[0], 0), x.dtype)
  return hidden, features, pages


def embed(params: Params, config: ModelConfig, token: jax.Array, position: jax.Array) -> jax.Array:
  """[...] -> [..., E]."""
  x = _lookup(params["embed"], token, config.vocab_parts)
  if config.embed_scale != 1.0:
    x = x * jnp.asarray(config.embed_scale, x.dtype)
  if config.learned_positions:
    x = x + params["positions"][jnp.minimum(position, config.max_positions - 1)]
  return x


def _lookup(table: jax.Array, token: jax.Array, parts: int) -> jax.Array:
  """table[V, E] at token i32[...]; each of the parts of V looks for its own and finds 0 else.

  Left to itself, XLA may send the whole table to every device.
  """
  if parts == 1:
    return table[token]
  size = table.shape[0] // parts
  local = token - size * jnp.arange(parts).reshape(-1, *[1] * token.ndim)  # [parts, ...]
  take = jax.vmap(lambda rows, index: rows[jnp.clip(index, 0, size - 1)])
  rows = take(table.reshape(parts, size, -1), local)
  return jnp.where(((local >= 0) & (local < size))[..., None], rows, 0).sum(0, dtype=table.dtype)


def blocks(layers, config: ModelConfig, x, position, mask, rows: Rows, pages: KVPages, page_table,
           length, *, how: Execution = FAST, is_chain=False, taps: tuple[int, ...] = (),
           attn_input: jax.Array | None = None, first_visible: int = 0):
  """The decoder layers alone, for drafters that bring their own input x[R, E].

  Args:
    attn_input: [R, any width], what the first layer's q, k and v are computed from, unnormed; by
      default x through the layer's attn_norm.
    first_visible: positions below it are never attended to.

  Returns x after the layers, {layer: x before it} for the taps, and the pages.
  """
  seen = {}
  computed = rows.of_node < rows.slot.shape[0]
  ancestors = tree_bits.pack(mask & computed[:, :, None])
  where = cache.locate_rows(rows, page_table, length, pages.k[0].shape[1])
  angles = rope_angles(config, position)
  layer_pages: list[list[Any]] = [list(x) or [None] * len(layers) for x in (
      pages.k, pages.v, pages.k_scale, pages.v_scale)]
  for i, params in enumerate(layers):
    if i in taps:
      seen[i] = x
    sliding = i in config.sliding_layers

    def over_pages(q, k, v, i=i, sliding=sliding):
      k_pages, v_pages, k_scale, v_scale = (x[i] for x in layer_pages)
      k_pages, k_scale = cache.write(k_pages, k_scale, *where, k)
      v_pages, v_scale = cache.write(v_pages, v_scale, *where, v)
      for x_pages, new in zip(layer_pages, (k_pages, v_pages, k_scale, v_scale), strict=True):
        x_pages[i] = new
      y = how.attend(
          _unpacked(q, rows, config), k_pages, v_pages, page_table, length, ancestors,
          scale=config.scale, soft_cap=config.attn_soft_cap,
          window=config.window if sliding else None, first_visible=first_visible,
          is_chain=is_chain, k_scale=k_scale, v_scale=v_scale)
      return y.reshape(*y.shape[:2], -1)[rows.slot, rows.node]

    x = layer(params, config, x, angles[sliding], over_pages, how,
              attn_input if i == 0 else None)
  return x, seen, KVPages(*(tuple(a for a in x if a is not None) for x in layer_pages))


def layer(params: Params, config: ModelConfig, x: jax.Array, angles: tuple | None,
          attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], how: Execution,
          attn_input: jax.Array | None = None) -> jax.Array:
  """One decoder layer on x[..., E].

  Args:
    angles: of the positions, as rope_angles has them for this kind of layer.
    attend: (q [..., H*h], k [..., K*h], v [..., K*h]) -> [..., H*h].
    attn_input: [..., any width], what q, k and v are computed from; by default x through the
      layer's attn_norm.
  """
  with jax.named_scope("attention"):
    y = norm(x, params["attn_norm"], config, how) if attn_input is None else attn_input
    q, k, v = (dense(y, params[name], how) for name in "qkv")
    q, k = (rotate_heads(a, params.get(f"{name}_norm"), config, angles, how)
            for a, name in ((q, "q"), (k, "k")))
    y = dense(attend(q, k, v), params["o"], how)
    if config.post_norms:
      y = norm(y, params["attn_post_norm"], config, how)
    x = x + y
  with jax.named_scope("mlp"):
    y = mlp(norm(x, params["mlp_norm"], config, how), params, config, how)
    if config.post_norms:
      y = norm(y, params["mlp_post_norm"], config, how)
    return x + y


def logits(params: Params, config: ModelConfig, hidden: jax.Array,
           how: Execution = FAST) -> jax.Array:
  """hidden [..., E] -> float32 [..., V], the sums as they are, never in the model's dtype."""
  with jax.named_scope("lm_head"):
    if "head" in params:
      out = dense(hidden, params["head"], how, jnp.float32)
    else:
      out = _rows_product(hidden, params["embed"], 1, how.bitwise, jnp.float32)
    if config.final_soft_cap is not None:
      out = config.final_soft_cap * jnp.tanh(out / config.final_soft_cap)
    return out


def lm_head(params: Params, token: Any = None) -> jax.Array:
  """[E, V], the head or the tied embedding; of some tokens i32[n] only, [E, n]."""
  if "head" in params:
    return params["head"]["w"] if token is None else params["head"]["w"][:, token]
  return (params["embed"] if token is None else params["embed"][token]).T


def with_vocab_size(params: Params, size: int) -> Params:
  """The tree with so many rows of the vocabulary: the first ones, or zeros after the last."""
  def resized(x, axis):
    x = x[:size] if axis == 0 else x[:, :size]
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, missing)

  head = {"head": {"w": resized(params["head"]["w"], 1)}} if "head" in params else {}
  return {**params, "embed": resized(params["embed"], 0), **head}


def dense(x: jax.Array, p: Params, how: Execution, dtype: Any = None) -> jax.Array:
  """x [..., in] @ w [in, out] (+ b), summed in float32.

  dtype: of the result, x's by default; float32 for logits, in which bfloat16 would make ties.
  """
  y = _rows_product(x, p["w"], 0, how.bitwise, dtype or x.dtype)
  return y + p["b"] if "b" in p else y


def _rows_product(x, w, contract: int, bitwise: bool, dtype: Any):
  """x[..., in] times w, over w's axis `contract`, in dtype.

  XLA:CPU compiles one row to a matrix-vector product that rounds differently (and in bfloat16 is
  many times slower), and above MAX_ROWS float32 rows it blocks the sum differently. So bfloat16
  always has at least MIN_ROWS rows, and `bitwise` keeps all widths within one class: then a row's
  result does not depend on how many rows go with it.
  """
  outer, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
  num_rows = x.shape[0]
  few = bitwise or (w.dtype == jnp.bfloat16 and jax.default_backend() == "cpu")
  if few and num_rows < MIN_ROWS:
    x = jnp.pad(x, ((0, MIN_ROWS - num_rows), (0, 0)))
  # Asked for bfloat16 directly, XLA:CPU converts all of w to float32 first, every call.
  multiply = lambda part: jax.lax.dot_general(
      part, w, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32).astype(dtype)
  if bitwise and num_rows > MAX_ROWS:
    # The barrier keeps XLA from merging the products back into one.
    parts = [x[i:i + MAX_ROWS] for i in range(0, num_rows, MAX_ROWS)]
    parts[-1] = jnp.pad(parts[-1], ((0, max(0, MIN_ROWS - parts[-1].shape[0])), (0, 0)))
    out = []
    for part in parts:
      part, w = jax.lax.optimization_barrier((part, w))
      out.append(multiply(part))
    y = jnp.concatenate(out)
  else:
    y = multiply(x)
  return y[:num_rows].reshape(*outer, -1)


def norm(x: jax.Array, p: Params, config: ModelConfig, how: Execution) -> jax.Array:
  """RMSNorm (Zhang and Sennrich 2019) or LayerNorm, in float32 over the last axis."""
  y = x.astype(jnp.float32)
  total = tree_sum if how.bitwise else lambda a: a.sum(-1, keepdims=True)
  if config.norm == "layer":
    y = y - total(y) / y.shape[-1]
  y = y * jax.lax.rsqrt(total(y * y) / y.shape[-1] + config.norm_eps) * p["scale"]
  return (y + p["bias"] if "bias" in p else y).astype(x.dtype)


def mlp(x: jax.Array, layer: Params, config: ModelConfig, how: Execution) -> jax.Array:
  act = {"silu": jax.nn.silu, "gelu": lambda a: jax.nn.gelu(a, approximate=False),
         "gelu_tanh": lambda a: jax.nn.gelu(a, approximate=True),
         "relu": jax.nn.relu}[config.activation]
  up = dense(x, layer["up"], how)
  y = act(dense(x, layer["gate"], how)) * up if config.gated_mlp else act(up)
  return dense(y, layer["down"], how)


def rope_angles(config: ModelConfig, position: jax.Array) -> dict[bool, tuple | None]:
  """(cos, sin) float32 [..., 1, h/2] for full (False) and sliding-window (True) layers."""
  if config.learned_positions:
    return {False: None, True: None}
  angle = position[..., None, None].astype(jnp.float32) * rope_frequencies(config, False)
  full = jnp.cos(angle), jnp.sin(angle)
  if config.rope_theta_local is None:
    return {False: full, True: full}
  angle = position[..., None, None].astype(jnp.float32) * rope_frequencies(config, True)
  return {False: full, True: (jnp.cos(angle), jnp.sin(angle))}


def rope_frequencies(config: ModelConfig, sliding: bool) -> np.ndarray:
  """float32 [h/2], radians per position (Su et al. 2021), with Llama 3's scaling by wavelength."""
  theta_local = config.rope_theta_local if sliding else None
  theta = theta_local or config.rope_theta
  frequency = 1.0 / theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
  scaling = None if theta_local else config.rope_scaling
  if scaling is not None and scaling.kind == "linear":
    frequency = frequency / scaling.factor
  elif scaling is not None:
    wavelength = 2 * math.pi / frequency
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    scaled = np.where(wavelength > low, frequency / scaling.factor, between)
    frequency = np.where(wavelength < high, frequency, scaled)
  return frequency.astype(np.float32)


def rotate_heads(x, p, config: ModelConfig, angles, how: Execution):
  """q or k [..., heads*h]: per-head norm, then rotation of the two halves."""
  y = x.reshape(*x.shape[:-1], -1, config.head_dim)
  if p is not None:
    y = norm(y, p, config, how)
  if angles is not None:
    cos, sin = angles
    half = config.head_dim // 2
    a, b = y[..., :half].astype(jnp.float32), y[..., half:].astype(jnp.float32)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
  return y.reshape(x.shape)


def _unpacked(q: jax.Array, rows: Rows, config: ModelConfig) -> jax.Array:
  """Query rows [R, H*h] -> [B, N, H, h], 0 for nodes that have no row."""
  q = jnp.take(q, rows.of_node.reshape(-1), axis=0, mode="fill", fill_value=0)
  return q.reshape(*rows.of_node.shape, config.num_heads, config.head_dim)
