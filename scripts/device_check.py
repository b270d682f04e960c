"""What gpu_check.py and tpu_check.py share: arguments, time budget, report, and the order of parts.

The report is rewritten after each part, so that a run cut short still leaves what it had found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform as host
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setup:
  """What a part needs to know."""

  platform: str  # "gpu" | "tpu": whose kernels
  smoke: bool  # tiny shapes, kernels interpreted, on CPU
  quick: bool
  model: str
  layers: int  # of Llama-3.1-8B, whose whole depth takes long to compile

  def attend(self, backend: str) -> Callable:
    from jspec.model import attention
    return attention.choose("cpu" if self.smoke else self.platform, backend, interpret=self.smoke)

  def backends(self) -> tuple[str, ...]:
    """In order of preference. Mosaic GPU's interpreter takes minutes even for tiny shapes."""
    from jspec.model import attention
    names = attention.PREFERENCE[self.platform]
    return tuple(n for n in names if n != "mosaic_gpu") if self.smoke else names


class Clock:
  """The time that is left for a part. Says what it had no time for."""

  def __init__(self, seconds: float):
    self.end, self.dropped = time.monotonic() + seconds, list[str]()

  def each(self, items: Iterable[Any], name: Callable[[Any], str]) -> Iterator[Any]:
    for item in items:
      if time.monotonic() < self.end:
        yield item
      else:
        self.dropped.append(name(item))


def say(text: str) -> None:
  print(text, flush=True)


def main(platform: str, doc: str, argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=doc)
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

  from scripts import device_kernels, device_speed, device_text
  if not args.cpu_smoke and jax.default_backend() != platform:
    say(f"this needs a {platform}; jax has found only {jax.devices()}")
    return 2
  setup = Setup(platform, args.cpu_smoke, args.quick, args.model, 2 if args.cpu_smoke else
                args.layers)
  report: dict[str, Any] = {
      "platform": platform, "device": jax.devices()[0].device_kind, "smoke": args.cpu_smoke,
      "arguments": {k: str(v) for k, v in vars(args).items()},
      "versions": {"python": host.python_version(), "jax": jax.__version__,
                   "jaxlib": jaxlib.__version__,
                   "platform": jax.devices()[0].client.platform_version},
      "failures": [], "dropped": []}
  say(f"{report['device']}, jax {jax.__version__}")
  parts = (  # and the share of the budget that is gone when each must end
      ("kernels", device_kernels.kernels, 0.4),
      ("attention_bandwidth", device_speed.attention_bandwidth, 0.6),
      ("verification_cost", device_speed.verification_cost, 0.8),
      ("speculation", device_text.speculation, 1.0))
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
  if not device_kernels.compared(report["kernels"]):
    report["failures"].append("no kernel was compared with the reference")
  args.output.write_text(json.dumps(report, indent=1) + "\n")
  for item in report["dropped"]:
    say(f"no time for {item}")
  say(f"{len(report['failures'])} failures, {report['seconds']} s, {args.output}")
  return 1 if report["failures"] else 0
