"""One of two processes that share a mesh of four devices: prints the tokens of test_sharding.py.

Run by test_two_processes_generate_what_one_does: two_processes.py ADDRESS INDEX.
"""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([  # two devices; compiled as conftest.py has it compiled
    *(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag),
    "--xla_force_host_platform_device_count=2"])

import jax  # noqa: E402


def main() -> None:
  address, index = sys.argv[1:]
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, num_processes=2, process_id=int(index))
  import sharded  # computes on devices: after the processes know each other

  got, _ = sharded.answers("ngram", 4, max_tokens=6)
  print([list(answer.token_ids) for answer in got])


if __name__ == "__main__":
  main()
