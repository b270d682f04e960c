"""Fixtures shared by the test suite."""

from __future__ import annotations

import gc
import os
import pathlib

# Before jax starts: eight devices for what needs several. All else runs on the first.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""),
                                    "--xla_force_host_platform_device_count=8"]).strip()

import jax
import pytest
import tiny
import tiny_cases
import tiny_llm

from jspec import hub

# Several files run the same programs: what one has compiled the others load.
CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="session")
def smollm2() -> hub.LoadedModel:
  """The embedded default model in float32: fetched and converted on first use, then cached."""
  return hub.load_model("smollm2-135m-instruct")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
  """Each compiled program holds memory maps, of which a process may have some 65,000."""
  yield
  jax.clear_caches()
  for module in (tiny, tiny_cases, tiny_llm):  # what they keep would have to be compiled again
    for kept in vars(module).values():
      if hasattr(kept, "cache_clear"):
        kept.cache_clear()
  gc.collect()
