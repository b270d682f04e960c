"""`jspec`, and `python -m jspec`: the command line."""

import sys

from jspec.endings import importing


def main() -> int:
  with importing():
    from jspec import cli  # here: it takes a moment
  return cli.main()


if __name__ == "__main__":
  sys.exit(main())
