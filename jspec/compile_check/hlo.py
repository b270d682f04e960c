"""What a compiled program's text (HLO) says about collectives, kernels and copies of the pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
KERNEL_TARGETS = {  # custom call -> what it is
  "tpu_custom_call": "tpu", "mosaic_gpu": "mosaic_gpu", "mosaic_gpu_v2": "mosaic_gpu",
  "__gpu$xla.gpu.triton": "triton", "triton_kernel_call": "triton",
}
MOVES = ("copy", "copy-start", "transpose")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_ON_CHIP = "S(1)"  # the memory space of VMEM, in a layout
_BITS = re.compile(r"[a-z]+(\d+)")


Arrays = tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of each


class Instruction(NamedTuple):
  opcode: str
  arrays: Arrays  # of the result's type
  line: str


def instructions(text: str) -> Iterator[Instruction]:
  """Every instruction of every computation, those inside fusions included."""
  for line in text.splitlines():
    start = _INSTRUCTION.match(line)
    if start is None:
      continue
    end = _end_of_type(line, start.end())
    opcode = _OPCODE.match(line, end)
    if opcode is not None:
      arrays = tuple((dtype, tuple(int(n) for n in dims.split(",") if n))
                     for dtype, dims in _ARRAY.findall(line[start.end():end]))
      yield Instruction(opcode.group(1), arrays, line)


def _end_of_type(line: str, start: int) -> int:
  """Where the result's type ends: a tuple's closing bracket, or else the first blank."""
  if line[start] != "(":
    return line.find(" ", start)
  depth = 0
  for i in range(start, len(line)):
    depth += (line[i] == "(") - (line[i] == ")")
    if depth == 0:
      return i + 1
  return len(line)


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
  bits = _BITS.match(dtype)  # f8e4m3fn, bf16, s32, u8; pred has no number
  return math.prod(shape) * max(1, int(bits.group(1)) // 8 if bits else 1)


def collectives(text: str) -> dict[str, dict[str, int]]:
  """{kind: {"count", "bytes"}}; bytes are of the results, on one device.

  Counted as written: once for what a loop repeats. An asynchronous pair counts once, by its start.
  """
  found: dict[str, dict[str, int]] = {}
  for kind, size, _ in _collectives(text):
    entry = found.setdefault(kind, {"count": 0, "bytes": 0})
    entry["count"] += 1
    entry["bytes"] += size
  return dict(sorted(found.items()))


def largest_collective(text: str) -> dict[str, Any] | None:
  """{"kind", "bytes", "where"} of the one that moves most; where: JAX's name of the operation."""
  largest = max(_collectives(text), key=lambda x: x[1], default=None)
  if largest is None:
    return None
  where = re.search(r'op_name="([^"]*)"', largest[2])
  return {"kind": largest[0], "bytes": largest[1], "where": where.group(1) if where else ""}


def _collectives(text: str) -> Iterator[tuple[str, int, str]]:
  """(kind, bytes, line)."""
  for opcode, arrays, line in instructions(text):
    kind = opcode.removesuffix("-start")
    if kind not in COLLECTIVES or not arrays:
      continue
    if opcode != kind:
      arrays = _results_of_start(line, kind, arrays)
    yield kind, sum(num_bytes(*array) for array in arrays), line


def _results_of_start(line: str, kind: str, arrays: Arrays) -> Arrays:
  """A start's type names the operands before the results: ((operands), results), or flat."""
  type_at = _INSTRUCTION.match(line).end()  # type: ignore[union-attr]
  if line.startswith("((", type_at):
    operands = line[type_at + 1:_end_of_type(line, type_at + 1)]
    return arrays[len(_ARRAY.findall(operands)):]
  if line[type_at] == "(" and kind != "all-reduce":
    return (max(arrays, key=lambda array: num_bytes(*array)),)
  return arrays


def kernels(text: str) -> dict[str, int]:
  """{backend: calls} of the Pallas kernels in the program."""
  found: dict[str, int] = {}
  for opcode, _, line in instructions(text):
    if opcode == "custom-call":
      target = re.search(r'custom_call_target="([^"]*)"', line)
      name = KERNEL_TARGETS.get(target.group(1)) if target else None
      if name:
        found[name] = found.get(name, 0) + 1
    elif opcode == "fusion" and '"kind":"__triton"' in line and "pallas" in line:
      found["triton"] = found.get("triton", 0) + 1
  return dict(sorted(found.items()))


def copies_of(text: str, shape: tuple[int, ...]) -> list[str]:
  """The instructions that move a whole array of as many elements as `shape`, in any order.

  Moves to or from on-chip memory are not among them, see `staged`.
  """
  return [line for line in _moves(text, shape) if _ON_CHIP not in line]


def staged(text: str, shape: tuple[int, ...]) -> list[str]:
  """Those that bring such an array into a TPU's VMEM or back.

  XLA's choice for an array small enough, to be near a scatter: it costs bandwidth, no memory.
  """
  return [line for line in _moves(text, shape) if _ON_CHIP in line]


def _moves(text: str, shape: tuple[int, ...]) -> list[str]:
  size = math.prod(shape)
  return [line.strip() for opcode, arrays, line in instructions(text)
          if opcode in MOVES and any(math.prod(dims) == size for _, dims in arrays)]
