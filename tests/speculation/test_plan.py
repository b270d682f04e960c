"""The widths of a step."""

from __future__ import annotations

import pytest

from jspec.speculation.plan import cpu_widths, default_widths


@pytest.mark.parametrize("widths", [default_widths, cpu_widths])
@pytest.mark.parametrize("num_slots", [1, 2, 8, 16])
@pytest.mark.parametrize("num_nodes", range(1, 10))
def test_no_width_is_compiled_twice_and_the_widest_holds_every_tree(widths, num_slots, num_nodes):
  found = widths(num_slots, num_nodes)
  assert len(set(found)) == len(found)
  assert found[-1] == (num_slots * num_nodes, num_nodes)
  assert (num_slots, 1) in found
