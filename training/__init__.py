"""Training of drafting heads and draft models."""

import sys

if sys.argv[0] == "-m":  # Python looks for the module to run: `python -m training.train`
  from jspec.cli.endings import quit_at_ctrl_c
  quit_at_ctrl_c(True)  # until `ended`, in that module's main, takes over
