"""Checks every attention kernel on this machine's NVIDIA GPU and measures what speculation needs.

  python scripts/gpu_check.py --output gpu_check.json

In under six minutes: each kernel against the reference, with NaN wherever it must not look; the
bandwidth of decode attention as a share of a copy's; the cost v(T)/v(1) of verifying T tokens at
Llama-3.1-8B's shapes; the embedded model with and without speculation. Exit status 1 if a kernel
disagrees or anything breaks, 2 without a GPU. Not run on a GPU yet: tested with --cpu-smoke.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the parts and their cases lie there

from scripts import device_check  # noqa: E402

if __name__ == "__main__":
  sys.exit(device_check.main("gpu", __doc__))
