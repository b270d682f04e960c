"""Plain autoregressive decoding, as a drafter: the tree is its root."""

from __future__ import annotations

from jspec.config.methods import Options
from jspec.speculation.drafter import Drafter, DrafterSetup, root_only


def none() -> Drafter:
  return Drafter(
      init=lambda num_slots, num_pages: (),
      propose=lambda params, state, root, slots: (root_only(root, 1), state),
      observe=lambda params, state, slots, committed: state,
      num_nodes=1, max_depth=0)


def build(options: Options, setup: DrafterSetup):
  del options, setup  # unused
  return none(), ()
