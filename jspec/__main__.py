"""`python -m jspec` is `jspec`."""

import sys

from jspec.cli import main

if __name__ == "__main__":
  sys.exit(main())
