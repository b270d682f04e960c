"""From logits to the target distribution p, per tree node, and draws from it.

Plain decoding and verification use the same functions. Order: allowed_token_ids, bad_words,
min_tokens, logit_bias -> repetition, frequency, presence penalty -> temperature -> min_p ->
top_k -> top_p (vLLM V1's; what is forbidden stays so whatever comes after it). Penalties and
bad_words count the tokens on the node's own path. Randomness is a function of (request key,
absolute position of the token being drawn, role), so a draw does not depend on how many steps led
to it, on the batch, or on what was drafted.
"""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp

from jspec.types import PAD_TOKEN, DraftTree, Rows, SlotSampling

# Bits of SlotSampling.token_flags.
STOPS = 1  # ends the request
NOT_BEFORE_MIN = 2  # forbidden until min_tokens tokens are out
IN_PROMPT = 4

# Roles of random numbers: a draft and its verification must never share one.
TARGET, DRAFT, ACCEPT = 0, 1, 2

BLOCK = 512  # of the two-level inverse CDF
PARTS = 48  # no block crosses from one of them to the next: devices hold whole parts


class NodeContext(flax.struct.PyTreeNode):
  """What the next-token law of each row depends on, beyond the logits."""

  slot: jax.Array  # i32[R]
  path: jax.Array  # i32[R, D], draft tokens from below the root to the node, PAD_TOKEN beyond
  depth: jax.Array  # i32[R]


def node_context(draft: DraftTree, rows: Rows, mask: jax.Array) -> NodeContext:
  """mask: bool[B, N, N] ancestors. D is N - 1: no path is longer."""
  n = draft.token.shape[1]
  depth = mask.sum(-1, dtype=jnp.int32) - 1  # i32[B, N]
  at_depth = jax.nn.one_hot(depth - 1, n - 1, dtype=jnp.int32)  # [B, N, D]; the root nowhere
  path = jnp.einsum("bij,bjd->bid", mask.astype(jnp.int32), at_depth * (draft.token + 1)[..., None])
  return NodeContext(rows.slot, path[rows.slot, rows.node] - 1, depth[rows.slot, rows.node])


def fold_keys(key: jax.Array, position: jax.Array, role: int) -> jax.Array:
  """Keys [B] of requests, positions i32[B] -> keys [B] for the draw at that position."""
  return jax.vmap(lambda k, t: jax.random.fold_in(jax.random.fold_in(k, t), role))(key, position)


def uniforms(key: jax.Array, position: jax.Array, role: int) -> jax.Array:
  """f32[B] in [0, 1)."""
  return jax.vmap(jax.random.uniform)(fold_keys(key, position, role))


def penalised(logits, s: SlotSampling, num_output, context: NodeContext) -> jax.Array:
  """Float32 [R, V] scores after bias, penalties, min_tokens and bad_words."""
  slot, path = context.slot, context.path
  column = lambda x: x[slot][:, None]
  flags = s.token_flags[slot]
  count = _at(s.output_count[slot], path).add(1, mode="drop").reshape(logits.shape)
  seen = (count > 0) | (flags & IN_PROMPT > 0)
  repetition = column(s.repetition_penalty)
  x = logits + s.bias[slot]
  x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
  x = x - column(s.frequency_penalty) * count - column(s.presence_penalty) * (count > 0)
  early = (num_output[slot] + context.depth < s.min_tokens[slot])[:, None]
  x = jnp.where(early & (flags & NOT_BEFORE_MIN > 0), -jnp.inf, x)
  last, completes = _completed_bad_words(s, context)
  forbidden = jnp.where(completes, last, PAD_TOKEN)
  return _at(x, forbidden).set(-jnp.inf, mode="drop").reshape(x.shape)


def _completed_bad_words(s: SlotSampling, context: NodeContext):
  """The tokens [R, W] that would complete a bad word at each row, and whether they would."""
  words = s.bad_words[context.slot]  # [R, W, M]
  length = s.recent.shape[1]
  text = jnp.concatenate([s.recent[context.slot], context.path], 1)
  index = jnp.arange(length) + context.depth[:, None]  # the last M - 1 tokens of the path
  tail = jnp.take_along_axis(text, index, axis=1)[:, None]
  head, last = words[..., :-1], words[..., -1]
  return last, (last != PAD_TOKEN) & ((head == PAD_TOKEN) | (head == tail)).all(-1)


def truncated(scores: jax.Array, s: SlotSampling, slot: jax.Array) -> jax.Array:
  """Scores over the temperature, up to a constant; -inf where min_p, top_k or top_p forbid."""
  temperature = s.temperature[slot][:, None]
  below = scores - scores.max(-1, keepdims=True)  # so that no temperature overflows the maximum
  x = jnp.where(temperature > 0, below / jnp.where(temperature > 0, temperature, 1), scores)
  min_p, top_k, top_p = (v[slot][:, None] for v in (s.min_p, s.top_k, s.top_p))
  x = jnp.where(x < x.max(-1, keepdims=True) + jnp.log(min_p), -jnp.inf, x)

  def lowest_kept(x):
    k = jnp.where(top_k > 0, top_k, x.shape[-1])
    x = jnp.where(x >= _threshold(x, jnp.ones_like(x), k), x, -jnp.inf)
    p = jax.nn.softmax(x)  # rises with x, so the least x that top_p keeps says which it keeps
    kept = (x > -jnp.inf) & ((top_p >= 1) | (p >= _threshold(p, p, top_p)))
    return jnp.where(kept, x, jnp.inf).min(-1, keepdims=True)

  needed = ((top_k > 0) | (top_p < 1)).any()
  everything = lambda x: jnp.full_like(x[:, :1], -jnp.inf)
  return jnp.where(x >= jax.lax.cond(needed, lowest_kept, everything, x), x, -jnp.inf)


def _threshold(x: jax.Array, weight: jax.Array, amount: jax.Array) -> jax.Array:
  """Largest t with weight of {x >= t} at least `amount`, per row: exact, by bisecting the bits.

  So equal values stay or go together, whatever their order; no sort over the vocabulary.
  """
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # int order = float order

  def halve(_, span):
    low, high = span  # enough weight at or above low, not at or above high
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    enough = jnp.where(ordered >= middle, weight, 0).sum(-1, keepdims=True) >= amount
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  low = ordered.min(-1, keepdims=True)
  high = ordered.max(-1, keepdims=True) + 1
  low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
  return jax.lax.bitcast_convert_type(jnp.where(low < 0, low ^ 0x7FFFFFFF, low), jnp.float32)


def needs_scores(s: SlotSampling, active: jax.Array) -> jax.Array:
  """Whether any active slot asks for more than the argmax of its raw logits."""
  changed = ((s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0)
             | (s.min_tokens > 0) | (s.bad_words[..., -1] != PAD_TOKEN).any(-1)
             | s.biased | (s.temperature > 0))
  return (changed & active).any()


def broken(logits: jax.Array) -> jax.Array:
  """bool[R]: rows that tell no law: with a NaN or +inf in them, or nothing above -inf."""
  return ~((logits < jnp.inf).all(-1) & (logits > -jnp.inf).any(-1))


def choose(logits, s: SlotSampling, num_output, active, context: NodeContext, u) -> jax.Array:
  """One draw i32[R] from each row's target distribution; the argmax for greedy rows.

  Args:
    logits: f32[R, V]. u: f32[R], a uniform for each row.
  """
  def general(x):
    x = truncated(penalised(x, s, num_output, context), s, context.slot)
    drawn = inverse_cdf(jnp.exp(x - x.max(-1, keepdims=True)), u)
    return jnp.where(s.temperature[context.slot] > 0, drawn, _argmax(x))

  return jax.lax.cond(needs_scores(s, active), general, _argmax, logits)


def target_scores(logits, s: SlotSampling, num_output, context: NodeContext) -> jax.Array:
  """f32[R, V], log p up to a constant: what `choose` draws from. One token for greedy rows."""
  x = truncated(penalised(logits, s, num_output, context), s, context.slot)
  likeliest = jnp.arange(x.shape[-1]) == _argmax(x)[:, None]
  greedy = s.temperature[context.slot][:, None] == 0
  return jnp.where(greedy & ~likeliest, -jnp.inf, x)


def inverse_cdf(weight: jax.Array, u: jax.Array) -> jax.Array:
  """Index i32[R] drawn in proportion to weight f32[R, V] >= 0 by the uniforms u f32[R].

  Two levels (block sums, then one block): a single pass over the vocabulary and one random number
  per draw. An index of weight 0 is never returned.
  """
  r, v = weight.shape
  parts = math.gcd(v, PARTS)
  part = v // parts
  size = min(BLOCK, part)
  weight = jnp.pad(weight.reshape(r, parts, part), ((0, 0), (0, 0), (0, -part % size)))
  per_part = weight.shape[2] // size
  weight = weight.reshape(r, parts * per_part, size)
  sums = weight.sum(-1)
  upto = jnp.cumsum(sums, -1)  # [R, blocks]
  point = u * upto[:, -1]
  block = _first_beyond(point, upto, sums)
  before = jnp.where(block > 0, jnp.take_along_axis(upto, block[:, None] - 1, 1)[:, 0], 0)
  inside = pick(weight, block[:, None])[:, 0]
  index = _first_beyond(point, before[:, None] + jnp.cumsum(inside, -1), inside)
  return (block // per_part * part + block % per_part * size + index).astype(jnp.int32)


def _first_beyond(point: jax.Array, upto: jax.Array, weight: jax.Array) -> jax.Array:
  """First index i32[R] of weight > 0 whose prefix sum upto[R, n] exceeds point[R].

  The last index of weight > 0 where none does. Prefix sums need not be those of sequential adding:
  XLA's fall, in the last bit, where it joins partial sums, and rise where nothing is added.
  """
  possible = weight > 0
  beyond = possible & (upto > point[:, None])
  last = jnp.where(possible, jnp.arange(weight.shape[1]), 0).max(-1)
  return jnp.where(beyond.any(-1), jnp.argmax(beyond, -1), last)


def _argmax(x: jax.Array) -> jax.Array:
  return jnp.argmax(x, -1).astype(jnp.int32)


def logprobs(logits: jax.Array, token: jax.Array, num_top: int, parts: int):
  """Under the raw logits [R, V]: (log-probability, rank) of token[R] and the top tokens [R, X].

  parts: devices that share the vocabulary.
  """
  normaliser = jax.nn.logsumexp(logits, -1)
  chosen = pick(logits, token[:, None])
  top, top_token = top_k(logits, num_top, parts)
  rank = (logits > chosen).sum(-1, dtype=jnp.int32) + 1
  return chosen[:, 0] - normaliser, rank, top_token, top - normaliser[:, None]


def top_k(x: jax.Array, k: int, parts: int = 1) -> tuple[jax.Array, jax.Array]:
  """lax.top_k over the last axis, of which `parts` devices hold a part each.

  Then first the best of each part, one after another: XLA would bring all of x together for top_k.
  """
  if parts == 1:
    return jax.lax.top_k(x, k)
  lead, size = x.shape[:-1], x.shape[-1] // parts
  offset = size * jnp.arange(parts)

  def next_best(rest, _):
    best = jnp.argmax(rest, -1)
    value = rest.max(-1)
    return jnp.where(jnp.arange(size) == best[..., None], -jnp.inf, rest), (value, best + offset)

  _, found = jax.lax.scan(next_best, x.reshape(*lead, parts, size), length=min(k, size))
  value, index = (jnp.moveaxis(a, 0, -1).reshape(*lead, -1) for a in found)
  value, best = jax.lax.top_k(value, k)
  return value, jnp.take_along_axis(index, best, -1)


def _by_part(x: jax.Array, index: jax.Array):
  """x[B, V, ...] as [B, parts, V / parts, ...]; index i32[B, T] in each part, and whether there.

  Entries of a vocabulary that is split between devices are looked up and changed part by part, each
  device in its own: XLA may send all of x to every device else.
  """
  parts = math.gcd(x.shape[1], PARTS)
  size = x.shape[1] // parts
  local = index[:, None] - size * jnp.arange(parts)[:, None]  # [B, parts, T]
  return x.reshape(x.shape[0], parts, size, *x.shape[2:]), local, (local >= 0) & (local < size)


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[B, V, ...] at index i32[B, T]: [B, T, ...]."""
  x, local, here = _by_part(x, index)
  beyond = (1,) * (x.ndim - 3)
  values = jnp.take_along_axis(x, jnp.clip(local, 0, x.shape[2] - 1).reshape(*local.shape, *beyond),
                               2)
  return jnp.where(here.reshape(*here.shape, *beyond), values, 0).sum(1, dtype=x.dtype)


def _at(x: jax.Array, index: jax.Array):
  """What x.at[row, index i32[B, T]] is for x[B, V], in parts: merge with reshape(B, V)."""
  x, local, here = _by_part(x, index)
  slot, part = (jnp.arange(n).reshape(shape) for n, shape in zip(
      x.shape[:2], ((-1, 1, 1), (1, -1, 1)), strict=True))
  return x.at[slot, part, jnp.where(here, local, x.shape[2])]


def record(s: SlotSampling, emitted: jax.Array, count: jax.Array) -> SlotSampling:
  """Adds emitted i32[B, T] (count[B] of them real) to the token statistics."""
  real = jnp.arange(emitted.shape[1]) < count[:, None]
  token = jnp.where(real, emitted, PAD_TOKEN)
  text = jnp.concatenate([s.recent, emitted], 1)
  index = jnp.arange(s.recent.shape[1]) + count[:, None]
  count = _at(s.output_count, token).add(1, mode="drop").reshape(s.output_count.shape)
  return s.replace(output_count=count,
                   recent=jnp.take_along_axis(text, index, axis=1))
