"""The part of device_check.py that compares every attention kernel with the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import case

from jspec.pallas import reference
from jspec.speculation import tree
from jspec.types import NO_PARENT
from scripts.device.part import Clock, Setup, say

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # absolute; values are of standard deviation 1


def kernel_cases(setup: Setup) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
  """name -> (arguments of attention_cases.case, options of the kernel)."""
  llama = dict(num_heads=32, num_kv=8, head_dim=128, page_size=128, dtype="bfloat16",
               lengths=(0, 1, 128, 300, 1024), parents=tree.from_widths((4, 2, 1)))
  chain = lambda n, **more: ({**llama, "parents": tree.chain(n - 1), **more}, {"is_chain": True})
  wide = (NO_PARENT, 0, 0, *(i // 2 for i in range(3, 65)))
  window = {"window": 100, "soft_cap": 30.0, "first_visible": 3}
  gemma = {**llama, "num_heads": 4, "num_kv": 1, "head_dim": 256}
  cases = {
      "decode": chain(1), "chain of 8": chain(8), "tree": (llama, {}),
      "int8 pages": ({**llama, "kv_dtype": "int8"}, {}),
      "float32": ({**llama, "dtype": "float32"}, {}),
      "prefill of 256": chain(256, lengths=(0, 300), unused=range(200, 256)),
      "tree of 65": ({**llama, "parents": wide, "unused": (40, 63, 64)}, {}),
      "window and soft cap": (gemma, window), "pages of 16": ({**llama, "page_size": 16}, {}),
      "smollm2": ({**llama, "num_heads": 9, "num_kv": 3, "head_dim": 64}, {}),
      "float8_e4m3fn pages": ({**llama, "kv_dtype": "float8_e4m3fn"}, window),
      "float8_e5m2 pages": ({**llama, "kv_dtype": "float8_e5m2"}, {}),
      "one kv head per query head": ({**llama, "num_heads": 8}, {}),
      "head size 80": ({**llama, "head_dim": 80}, {}),
      "window of a chain": (chain(40)[0], {**window, "is_chain": True}),
      "float32 with int8 pages": ({**llama, "dtype": "float32", "kv_dtype": "int8"}, {})}
  if setup.smoke:
    tiny = dict(num_heads=4, num_kv=2, head_dim=64, page_size=32, lengths=(0, 32, 70))
    cases = {name: ({**cases[name][0], **tiny}, cases[name][1])
             for name in ("chain of 8", "int8 pages", "tree", "float32")}
  return dict(list(cases.items())[:len(cases) // 2]) if setup.quick else cases


def kernels(setup: Setup, clock: Clock, found: dict, report: dict) -> None:
  """Each kernel against the reference in float32, with NaN wherever it must not look."""
  for name, (arguments, options) in clock.each(kernel_cases(setup).items(), lambda x: x[0]):
    c = case(**arguments)
    options = {**options, "scale": arguments["head_dim"]**-0.5}
    exact = {key: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
             for key, x in c.arrays.items()}
    with jax.default_matmul_precision("highest"):
      want = np.asarray(jax.jit(lambda a, o=options: reference.paged_attention(**a, **o))(exact))
    found[name] = {}
    for backend in setup.backends():
      attend = setup.attend(backend)
      try:
        got = jax.jit(lambda a, f=attend, o=options: f(**a, **o))(c.arrays)
        error = _error(np.asarray(got.astype(jnp.float32)), want, c.mask.any(-1))
        wrong = not error <= TOLERANCE[arguments.get("dtype", "float32")]
        found[name][backend] = {"largest_error": error}
      except NotImplementedError as refusal:
        wrong = False
        found[name][backend] = {"refused": str(refusal).removeprefix("no paged attention for ")}
      except Exception as error:  # does not compile, or does not run: as bad as a wrong answer
        wrong = True
        found[name][backend] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
      say(f"{name}, {backend}: {found[name][backend]}{'  WRONG' if wrong else ''}")
      if wrong:
        report["failures"].append(f"kernel {backend}, {name}: {found[name][backend]}")


def _error(got: np.ndarray, want: np.ndarray, in_use: np.ndarray) -> float:
  """The largest at nodes in use; infinite if any number anywhere is not finite."""
  if not np.isfinite(got).all():
    return float("inf")
  return float(np.abs(got - want)[in_use].max())


def compared(found: dict[str, dict[str, Any]]) -> bool:
  """Whether any kernel was."""
  return any("largest_error" in result for of_case in found.values()
             for backend, result in of_case.items() if backend != "reference")
