"""How long a step should take: bytes over bandwidth or arithmetic over peak, whichever is longer.

What is counted, on one device: every weight matrix once, whatever the number of tokens; the KV
pages of the whole context once per slot; the logits, written and read as float32; two operations
per weight and token; attention's products; two float32 sums over the devices per layer and one for
the embedding. What is not: activations, normalisation, sampling, launches, and any inefficiency.
Sums over n devices go round a ring, 2 (n - 1) hops of 1/n of the bytes each, over all of a chip's
links, and each hop takes HOP_SECONDS besides, which is assumed: no sheet prints it.

`overlapped` is the roofline proper, memory and arithmetic at the same time; `serial` adds them,
which bounds what imperfect overlap can cost. Neither was measured on any of the chips.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.compile_check.chips import Chip
from jspec.config import ModelConfig

HOP_SECONDS = 1e-6  # assumed
QUERIES = (1, 2, 4, 8, 16, 32)  # tokens per slot


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one forward pass with logits, on one device."""

  flops: float
  bytes: float
  sums: int  # all-reduces
  bytes_summed: float  # of each


def matrix_weights(config: ModelConfig) -> tuple[int, int]:
  """Weights of all layers' matrices, and of the head, which may be the embedding."""
  c = config
  attention = c.width * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
  mlp = c.width * c.mlp_dim * (3 if c.gated_mlp else 2)
  return c.num_layers * (attention + mlp), c.width * c.vocab_size


def forward_cost(config: ModelConfig, tp: int, batch: int, queries: int, context: int,
                 weight_bytes: int, kv_bytes: int) -> Cost:
  """weight_bytes, kv_bytes: of one number; 1-byte KV has a float32 scale per head and token."""
  c = config
  layers, head = matrix_weights(c)
  rows = batch * queries
  kv_heads = -(-c.num_kv_heads // tp)  # repeated where there are fewer than devices
  per_token = 2 * c.num_layers * kv_heads * (c.head_dim * kv_bytes + (4 if kv_bytes == 1 else 0))
  logits = 2 * 4 * rows * c.vocab_size / tp
  products = 4 * rows * (context + queries) * c.num_layers * c.num_heads * c.head_dim
  return Cost(
    flops=(2 * rows * (layers + head) + products) / tp,
    bytes=(layers + head) * weight_bytes / tp + batch * (context + queries) * per_token + logits,
    sums=2 * c.num_layers + 1 if tp > 1 else 0,
    bytes_summed=4 * rows * c.width)


def seconds(cost: Cost, chip: Chip, tp: int, overlapped: bool = True) -> float:
  memory, arithmetic = cost.bytes / chip.bandwidth, cost.flops / chip.flops
  hops = 2 * (tp - 1)
  sums = cost.sums * hops * (cost.bytes_summed / tp / chip.link + HOP_SECONDS)
  return (max(memory, arithmetic) if overlapped else memory + arithmetic) + sums


def verification(config: ModelConfig, chip: Chip, tp: int, batch: int, context: int,
                 weight_bytes: int, kv_bytes: int) -> list[dict[str, Any]]:
  """v(T), the time to verify T tokens per slot, and v(T) / v(1), for the T of QUERIES."""
  rows: list[dict[str, Any]] = []
  for queries in QUERIES:
    cost = forward_cost(config, tp, batch, queries, context, weight_bytes, kv_bytes)
    rows.append({
      "queries": queries, "flops": cost.flops, "bytes": cost.bytes,
      "seconds": seconds(cost, chip, tp), "serial_seconds": seconds(cost, chip, tp, False),
      "bound_by": "memory" if cost.bytes / chip.bandwidth > cost.flops / chip.flops else
                  "arithmetic"})
  for row in rows:
    row["ratio"] = row["seconds"] / rows[0]["seconds"]
    row["serial_ratio"] = row["serial_seconds"] / rows[0]["serial_seconds"]
  return rows
