"""Inputs for the paged attention kernels and the answer they must give, in plain float64 numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.pallas import tree_bits
from jspec.speculation import tree
from jspec.types import NO_PARENT

LENGTHS = (0, 3, 4, 8, 13, 37)  # exact multiples of page size 4 among them
NOWHERE = np.iinfo(np.int32).max
QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Case:
  """Everything that holds no KV of a slot is NaN: other pages, slots past its nodes, their scales.

  Nodes not in use hold NaN too; page table entries past a slot's pages lead out of the pool.
  """

  q: np.ndarray  # f32[B, N, H, h]
  k: np.ndarray  # f32[P, S, K*h], as the kernel shall see them (quantised ones: dequantised)
  v: np.ndarray
  table: np.ndarray
  length: np.ndarray
  mask: np.ndarray  # bool[B, N, N]
  arrays: dict[str, Any]  # the kernel's arguments, by name

  def run(self, kernel, **options) -> np.ndarray:
    return np.array(kernel(**self.arrays, **options).astype(jnp.float32))


def case(num_heads: int, num_kv: int, parents: Sequence[int], *, lengths=LENGTHS, page_size=4,
         head_dim=8, dtype="float32", kv_dtype=None, unused: Sequence[int] = (), seed=0) -> Case:
  """unused: nodes (leaves, none with a child in use) left out in slot 1, if there is one."""
  rng = np.random.default_rng(seed)
  b, n = len(lengths), len(parents)
  per_slot = -(-(max(lengths) + n) // page_size) + 1
  num_pages = b * per_slot + 5
  order = rng.permutation(num_pages)[:b * per_slot].reshape(b, per_slot).astype(np.int32)
  parent = np.tile(np.array(parents), (b, 1))
  parent[1:2, list(unused)] = NO_PARENT
  in_use = (parent != NO_PARENT) | (np.arange(n) == 0)
  mask = np.array(tree.ancestors(jnp.array(parent), n)) & in_use[:, :, None]
  q = _rounded(rng.normal(size=(b, n, num_heads, head_dim)), dtype)
  table = np.full_like(order, NOWHERE)
  kv_dtype = kv_dtype or dtype
  owned = np.zeros((num_pages, page_size), bool)
  for slot, length in enumerate(lengths):
    used = -(-(length + n) // page_size)
    table[slot, :used] = order[slot, :used]
    for at in [*range(length), *(length + np.flatnonzero(in_use[slot]))]:
      owned[order[slot, at // page_size], at % page_size] = True
  names = {"q": jnp.asarray(q, dtype), "page_table": jnp.asarray(table),
           "length": jnp.asarray(np.array(lengths, np.int32)),
           "ancestors": tree_bits.pack(jnp.asarray(mask))}
  values = {}
  for name in "kv":
    x = rng.normal(size=(num_pages, page_size, num_kv, head_dim)).astype(np.float32)
    values[name], arrays = _stored(x, kv_dtype, owned, name)
    names |= arrays
  return Case(q, values["k"], values["v"], table, np.array(lengths), mask, names)


def _rounded(x, dtype) -> np.ndarray:
  return np.array(jnp.asarray(x, dtype).astype(jnp.float32))


def _stored(x: np.ndarray, kv_dtype: str, owned: np.ndarray, name: str):
  """What x[P, S, K, h] reads back as, and the arrays that hold it."""
  p, s = owned.shape
  if kv_dtype not in QUANTISED:
    x = np.where(owned[..., None], _rounded(x.reshape(p, s, -1), kv_dtype), np.nan)
    return x, {f"{name}_pages": jnp.asarray(x, kv_dtype)}
  largest = 127.0 if kv_dtype == "int8" else float(jnp.finfo(kv_dtype).max)
  scale = np.abs(x).max(-1, keepdims=True) / largest
  stored = x / scale
  stored = np.where(owned[..., None, None], stored.round() if kv_dtype == "int8" else stored,
                    largest if kv_dtype == "int8" else np.nan)
  stored = jnp.asarray(stored, jnp.float32).astype(kv_dtype)
  scale = np.where(owned[..., None, None], scale, np.nan).astype(np.float32)
  back = np.array(stored.astype(jnp.float32)) * scale
  return back.reshape(p, s, -1), {
      f"{name}_pages": stored.reshape(p, s, -1),
      f"{name}_scale": jnp.asarray(scale[..., 0].transpose(0, 2, 1))}


def dense(c: Case, *, scale, soft_cap=None, window=None, first_visible=0, is_chain=False):
  """One query at a time, over the list of positions that it sees; 0 for nodes not in use."""
  del is_chain  # the mask says as much
  out = np.zeros(c.q.shape)
  head_dim = c.q.shape[3]
  num_kv = c.k.shape[2] // head_dim
  group = c.q.shape[2] // num_kv
  page_size = c.k.shape[1]
  for slot, length in enumerate(c.length):
    pages = c.table[slot][c.table[slot] != NOWHERE]
    flat = lambda x, pages=pages: x[pages].reshape(len(pages) * page_size, num_kv, head_dim)
    k, v = flat(c.k), flat(c.v)
    depth = c.mask[slot].sum(-1) - 1
    for node in np.flatnonzero(depth >= 0):
      kin = np.flatnonzero(c.mask[slot, node])
      seen = [(at, at) for at in range(length)] + [(length + j, length + depth[j]) for j in kin]
      seen = [at for at, position in seen if at >= first_visible
              and (window is None or position > length + depth[node] - window)]
      for head in range(c.q.shape[2] if seen else 0):
        score = k[seen, head // group].astype(np.float64) @ c.q[slot, node, head] * scale
        if soft_cap is not None:
          score = soft_cap * np.tanh(score / soft_cap)
        weight = np.exp(score - score.max())
        out[slot, node, head] = weight / weight.sum() @ v[seen, head // group]
  return out


def assert_right(kernel, c: Case, atol=2e-5, **options) -> None:
  """The kernel agrees with `dense` at every node in use and is finite everywhere."""
  got = c.run(kernel, **options)
  assert np.isfinite(got).all(), "NaN from somewhere the slot does not own"
  in_use = c.mask.any(-1)
  np.testing.assert_allclose(got[in_use], dense(c, **options)[in_use], atol=atol)
