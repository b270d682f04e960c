"""What hypothesis puts into files and configurations, and the promise that is checked."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

FEW = settings(max_examples=150, deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.sampled_from([2**31, 10**30, -10**30]) |
    st.floats() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3) |
    st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)


def outcome(function, *arguments):
  """The result, or None where it was refused as promised."""
  try:
    return function(*arguments)
  except ValueError as error:
    assert str(error) and "\n" not in str(error).strip()
    return None
