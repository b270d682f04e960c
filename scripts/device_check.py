"""Checks every attention kernel on this machine's GPU or TPU and measures what speculation needs.

  python scripts/device_check.py --platform gpu --output report.json

In under six minutes: each kernel against the reference, with NaN wherever it must not look; the
bandwidth of decode attention as a share of a copy's; the cost v(T)/v(1) of verifying T tokens at
Llama-3.1-8B's shapes; the embedded model with and without speculation. Exit status 1 if a kernel
disagrees or anything breaks, 2 without the device. The report is rewritten after each part, so that
a run cut short still leaves what it had found. Not run on a TPU yet: tested with --cpu-smoke.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform as host
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]  # the parts, and the kernels' cases

from scripts.device.part import Clock, Setup, say  # noqa: E402


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--platform", choices=("gpu", "tpu"), required=True)
  parser.add_argument("--output", type=pathlib.Path, required=True, help="the JSON file to write")
  parser.add_argument("--quick", action="store_true", help="fewer cases of everything")
  parser.add_argument("--budget-seconds", type=float, default=330,
                      help="parts that do not fit are dropped, and the JSON says so")
  parser.add_argument("--model", default="smollm2-135m-instruct", help="for the speculation part")
  parser.add_argument("--layers", type=int, default=5,
                      help="of Llama-3.1-8B's 32, at least 2; the others' time is extrapolated")
  parser.add_argument("--cpu-smoke", action="store_true",
                      help="test this script itself: tiny shapes, interpreted kernels, on CPU")
  args = parser.parse_args(argv)
  start = time.monotonic()
  if args.cpu_smoke:
    os.environ["JAX_PLATFORMS"] = "cpu"
  import jax
  import jaxlib

  from scripts.device import kernels, speed, text
  if not args.cpu_smoke and jax.default_backend() != args.platform:
    say(f"this needs a {args.platform}; jax has found only {jax.devices()}")
    return 2
  setup = Setup(args.platform, args.cpu_smoke, args.quick, args.model, 2 if args.cpu_smoke else
                args.layers)
  report: dict[str, Any] = {
      "platform": args.platform, "device": jax.devices()[0].device_kind, "smoke": args.cpu_smoke,
      "arguments": {k: str(v) for k, v in vars(args).items()},
      "versions": {"python": host.python_version(), "jax": jax.__version__,
                   "jaxlib": jaxlib.__version__,
                   "platform": jax.devices()[0].client.platform_version},
      "failures": [], "dropped": []}
  say(f"{report['device']}, jax {jax.__version__}")
  parts = (  # and the share of the budget that is gone when each must end
      ("kernels", kernels.kernels, 0.4),
      ("attention_bandwidth", speed.attention_bandwidth, 0.6),
      ("verification_cost", speed.verification_cost, 0.8),
      ("speculation", text.speculation, 1.0))
  for name, part, share in parts:
    say(f"-- {name}, {time.monotonic() - start:.0f} s")
    clock = Clock(share * args.budget_seconds - (time.monotonic() - start))
    found: dict[str, Any] = {}
    report[name] = found
    try:
      part(setup, clock, found, report)
    except Exception as error:  # the other parts are still worth having
      report["failures"].append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
      say(report["failures"][-1])
    report["dropped"] += [f"{name}: {item}" for item in clock.dropped]
    report["seconds"] = round(time.monotonic() - start, 1)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
  if not kernels.compared(report["kernels"]):
    report["failures"].append("no kernel was compared with the reference")
  args.output.write_text(json.dumps(report, indent=1) + "\n")
  for item in report["dropped"]:
    say(f"no time for {item}")
  say(f"{len(report['failures'])} failures, {report['seconds']} s, {args.output}")
  return 1 if report["failures"] else 0


if __name__ == "__main__":
  sys.exit(main())
