"""`jspec`, and `python -m jspec`: the command line."""

import sys

from jspec.cli.endings import importing


def main() -> int:
  with importing():
    from jspec.cli.main import main as run  # here: it takes a moment
  return run()


if __name__ == "__main__":
  sys.exit(main())
