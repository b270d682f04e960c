"""Checks the attention kernel on this machine's TPU and measures what speculation needs.

  python scripts/tpu_check.py --output tpu_check.json

The same as gpu_check.py, with the TPU kernel. It has never been run on a TPU: only its --cpu-smoke,
with the kernel interpreted, is tested.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the parts and their cases lie there

from scripts import device_check  # noqa: E402

if __name__ == "__main__":
  sys.exit(device_check.main("tpu", __doc__))
