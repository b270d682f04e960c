"""Rows of a forward pass: which nodes of which slots are computed, and what each of them sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.types import Rows


def chain_mask(num_slots: int, num_nodes: int) -> jax.Array:
  """bool[B, N, N]: `ancestors` of a chain."""
  return jnp.broadcast_to(jnp.tril(jnp.ones((num_nodes, num_nodes), bool)),
                          (num_slots, num_nodes, num_nodes))


def pack(keep: jax.Array, num_rows: int) -> Rows:
  """Lays out the kept nodes (bool[B, N], at most num_rows of them) slot by slot."""
  b, n = keep.shape
  flat = keep.reshape(-1)
  row = jnp.where(flat, jnp.cumsum(flat) - 1, num_rows)
  source = jnp.zeros(num_rows, jnp.int32).at[row].set(jnp.arange(b * n), mode="drop")
  valid = jnp.arange(num_rows) < flat.sum()
  return Rows(source // n, source % n, valid, row.reshape(b, n).astype(jnp.int32))


def rows_of_all(keep: jax.Array) -> Rows:
  """Every node bool[B, N] a row, R = B * N, those not kept invalid."""
  b, n = keep.shape
  row = jnp.arange(b * n).reshape(b, n)
  return Rows(row.reshape(-1) // n, row.reshape(-1) % n, keep.reshape(-1),
              jnp.where(keep, row, b * n))


def one_row(num_slots: int) -> tuple[Rows, jax.Array]:
  """Rows and mask of a pass over one token of each slot."""
  return rows_of_all(jnp.ones((num_slots, 1), bool)), chain_mask(num_slots, 1)


def rows_at(num_slots: int, nodes: np.ndarray, num_nodes: int) -> Rows:
  """The same nodes of every slot, slot by slot."""
  row = np.arange(num_slots * len(nodes)).reshape(num_slots, -1)
  of_node = np.full((num_slots, num_nodes), row.size)
  of_node[:, nodes] = row
  return Rows(jnp.repeat(jnp.arange(num_slots), len(nodes)), jnp.tile(jnp.array(nodes), num_slots),
              jnp.ones(row.size, bool), jnp.array(of_node, jnp.int32))
