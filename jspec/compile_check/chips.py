"""The chips that compile-check knows: what their makers publish, and how a compiler is told.

Every figure is of one JAX device. That is a chip, except on tpu7x, whose chips are two devices
that share the chip's published memory, bandwidths and arithmetic evenly. Arithmetic is dense:
NVIDIA's sheets print twice that, for sparse matrices. `link` is one direction, half of the
bidirectional figure on the sheets.

Sources: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; nvidia.com data sheets of the A100, H100 and
H200 (SXM). VMEM: jax's own table of TPUs (jax._src.tpu_info), per TensorCore.
"""

from __future__ import annotations

import dataclasses

GB, GIB, MIB = 10**9, 2**30, 2**20


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of device."""

  name: str
  platform: str  # "tpu" | "gpu"
  memory: int  # bytes
  bandwidth: float  # bytes/s, of its memory
  flops: float  # 1/s, dense bfloat16
  link: float  # bytes/s, to its neighbours, all links, one direction
  source: str  # what the figures are printed in
  vmem: int | None = None  # bytes per TensorCore
  topologies: tuple[tuple[int, str], ...] = ()  # (devices, libtpu's name), ascending; TPU
  compute_capability: tuple[int, int] = (0, 0)  # GPU
  # KV cache dtypes it can do nothing with. None so far: the step compiled with each for each chip,
  # on an A100 because the Triton kernel converts float8_e4m3fn itself.
  lacks: tuple[str, ...] = ()


def _tpu(name: str, memory: int, bandwidth: float, flops: float, link: float, vmem: int,
         topologies: tuple[tuple[int, str], ...]) -> Chip:
  return Chip(name, "tpu", memory, bandwidth, flops, link, f"cloud.google.com/tpu/docs/{name}",
              vmem, topologies)


CHIPS = {chip.name: chip for chip in (
  _tpu("v5e", 16 * GB, 819e9, 197e12, 200e9, 128 * MIB, ((4, "v5e:2x2"), (8, "v5e:2x4"))),
  _tpu("v5p", 95 * GIB, 2765e9, 459e12, 600e9, 64 * MIB, ((4, "v5p:2x2x1"), (8, "v5p:2x2x2"))),
  _tpu("v6e", 32 * GB, 1638e9, 918e12, 400e9, 128 * MIB, ((4, "v6e:2x2"), (8, "v6e:2x4"))),
  _tpu("tpu7x", 96 * GIB, 3690e9, 1153.5e12, 300e9, 64 * MIB, ((8, "tpu7x:2x2x1"),)),
  Chip("A100", "gpu", 80 * GB, 2039e9, 312e12, 300e9, "NVIDIA A100 80GB SXM data sheet",
       compute_capability=(8, 0)),
  Chip("H100", "gpu", 80 * GB, 3350e9, 989.5e12, 450e9, "NVIDIA H100 SXM data sheet",
       compute_capability=(9, 0)),
  Chip("H200", "gpu", 141 * GB, 4800e9, 989.5e12, 450e9, "NVIDIA H200 SXM data sheet",
       compute_capability=(9, 0)),
)}

MAX_DEVICES = 8


def find(name: str) -> Chip:
  """The chip of this name, however it is capitalised."""
  for known, chip in CHIPS.items():
    if known.lower() == name.lower():
      return chip
  raise ValueError(f"chip {name!r} is unknown; known: {', '.join(CHIPS)}")


# What XLA wants to know of a card that is not there (its GpuTargetConfigProto, as text). A run on
# the card itself with XLA_FLAGS=--xla_dump_to=DIR writes the true one as *.gpu_target_config.pbtxt.
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} shared_memory_per_block_optin: {shared_optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock}
  device_memory_size: {memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{device_kind}"
"""
_DEVICE_KINDS = {"A100": "NVIDIA A100-SXM4-80GB", "H100": "NVIDIA H100 80GB HBM3",
                 "H200": "NVIDIA H200"}


def target_config(chip: Chip) -> str:
  """GpuTargetConfigProto text for a GPU of the table."""
  major, minor = chip.compute_capability
  hopper = major == 9
  return _TARGET_CONFIG.format(
    shared_per_core=233472 if hopper else 167936, shared_optin=232448 if hopper else 166912,
    cores=132 if hopper else 108, fpus=128 if hopper else 64,
    bandwidth=int(chip.bandwidth), l2=(50 if hopper else 40) * MIB, clock=1.98 if hopper else 1.41,
    memory=chip.memory, major=major, minor=minor, device_kind=_DEVICE_KINDS[chip.name])
