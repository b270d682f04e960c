"""Fixtures shared by the test suite."""

from __future__ import annotations

import pytest

from jspec import hub


@pytest.fixture(scope="session")
def smollm2() -> hub.LoadedModel:
  """The embedded default model in float32: fetched and converted on first use, then cached."""
  return hub.load_model("smollm2-135m-instruct")
