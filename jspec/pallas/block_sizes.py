"""How much each kernel takes at a time, by chip, and where each figure was measured."""

from __future__ import annotations

import dataclasses

import jax

MIB = 1 << 20


def device_kind() -> str:
  """What jax calls the chip that is traced for: the mesh's in scope, else the process's own."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.device_kind if device is not None else jax.devices()[0].device_kind


@dataclasses.dataclass(frozen=True)
class TPU:
  """One TensorCore's share of a chip."""

  step_bytes: int  # keys and values fetched at a time; two such buffers lie in VMEM
  cores: int  # TensorCores behind one jax device: Pallas splits a "parallel" axis between them
  measured: str  # "model": about 1.5 us of the core's HBM bandwidth, which hides a copy's latency


_TPU = {
    "TPU v4": TPU(1 * MIB, 2, "model"),
    "TPU v5 lite": TPU(1 * MIB, 1, "model"),
    "TPU v5": TPU(2 * MIB, 2, "model"),
    "TPU v6 lite": TPU(2 * MIB, 1, "model"),
    "TPU7x": TPU(4 * MIB, 1, "model"),
}
_TPU_SCORES = 128 * 1024  # entries of one product's score matrix: 512 KiB of VMEM in f32
_TPU_QUERIES = 512 * 1024  # bytes of a block's queries; the output and the sums take 10 times that
_TPU_ROWS = 256  # queries of one product: enough to be bound by computing, not by copies


def tpu(kind: str, *, token_bytes: int, page_size: int, max_pages: int, num_nodes: int,
        node_rows: int, row_bytes: int) -> tuple[int, int, int]:
  """Pages per step, nodes per query block, and cores to split the slots between.

  Args:
    token_bytes: a position's keys and values. node_rows: a node's rows in each product.
    row_bytes: one row of the queries of all products.
  """
  chip = _TPU.get(kind, _TPU["TPU v5 lite"])
  nodes = min(num_nodes, max(1, min(_TPU_ROWS, _TPU_QUERIES // row_bytes) // node_rows))
  tokens = min(chip.step_bytes // token_bytes, _TPU_SCORES // (nodes * node_rows), 1024)
  return max(1, min(tokens // page_size, max_pages)), nodes, chip.cores


@dataclasses.dataclass(frozen=True)
class Triton:
  """What paged_attention_triton.py's programs are made of."""

  rows: int  # queries of one kv head in a program
  columns: int  # positions per turn of its loop
  splits: int  # programs that share a slot's columns
  warps: int
  stages: int  # of the loads' pipeline


def triton(num_rows: int, head_dim: int, itemsize: int, kv_bytes: int, num_heads: int,
           max_columns: int) -> Triton:
  """From a model: two programs on each of 132 multiprocessors, none with less than 256 columns.

  The rest is what compiles for sm_90 without spilling registers, and with at most 16 bytes of a
  stack for sm_80 and sm_89. float32 products run outside the tensor cores, over more warps.

  Args:
    num_rows: queries of all nodes that share a kv head. itemsize: of a query's number, kv_bytes:
      of one in the pages. num_heads: slots times kv heads. max_columns: a slot's longest reach.
  """
  most, columns, warps = (16, 32, 8) if itemsize == 4 else (64, 64, 4) if head_dim <= 128 else (
      32, 32, 4)
  rows = max(16, min(most, 1 << (num_rows - 1).bit_length()))
  programs = num_heads * -(-num_rows // rows)
  splits = max(1, min(2 * 132 // programs, max_columns // 256))
  stages = 1 if itemsize == 4 and kv_bytes == 1 else 2  # converting, it would spill
  return Triton(rows, columns, splits, warps, stages)


@dataclasses.dataclass(frozen=True)
class Hopper:
  """How the Mosaic GPU kernel cuts up its work."""

  chunk: int  # columns per step: 64 is the least that the tensor cores take as rows
  stages: int  # chunks in flight
  groups: int  # warpgroups, of 64 queries each, that share a chunk
  splits: int  # thread blocks that share a slot's columns


_HOPPER_SMEM = 220 * 1024  # of 227 KiB; the rest holds barriers and sums across warps
_HOPPER_SMS = 132
_HOPPER_STAGES = 4  # 128 KiB in flight on each SM at head size 128: over 3 us of its HBM bandwidth


def hopper(num_rows: int, head_dim: int, kv_bytes: int, num_heads: int, max_columns: int) -> Hopper:
  """From a model: keys and values in flight hide the HBM's latency, every SM gets a thread block.

  Args:
    num_rows: queries of all nodes that share a kv head. kv_bytes: of one number in the pages.
    num_heads: slots times kv heads. max_columns: a slot's longest reach.
  """
  groups = 2 if num_rows > 64 and head_dim <= 128 else 1
  warpgroups = groups * max(1, head_dim // 128)
  chunk = 128 if head_dim == 64 and groups == 1 else 64
  blocks = num_heads * -(-num_rows // (64 * groups))
  splits = max(1, min(_HOPPER_SMS // blocks, max_columns // (2 * chunk)))
  fixed = groups * 64 * 2 * head_dim  # queries
  fixed += warpgroups * 64 * (2 * chunk + 64 * (4 if splits > 1 else 2))  # weights, results
  fixed += 2 * chunk * 2 * head_dim if kv_bytes == 1 else 0  # a chunk in bfloat16
  stages = (_HOPPER_SMEM - fixed) // (2 * chunk * (head_dim * kv_bytes + 4))
  return Hopper(chunk, min(stages, _HOPPER_STAGES), groups, splits)
