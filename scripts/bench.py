"""Times plain against speculative decoding: `python scripts/bench.py --help` is `jspec bench`."""

import sys

from jspec.cli import main

if __name__ == "__main__":
  sys.exit(main(["bench", *sys.argv[1:]]))
