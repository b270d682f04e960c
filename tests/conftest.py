"""Fixtures shared by the test suite."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys

# Before jax starts: eight devices for what needs several. All else runs on the first.
# Less optimised machine code compiles two to three times as fast; tests that read a program, or its
# last bits, compile it with tiny_llm.AS_SHIPPED. `make aot` leaves compilers as they are. A flag
# that XLA does not know ends the process: jax 0.12 has no other emitters.
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8",
    *([] if importlib.util.find_spec("libtpu") else [
        "--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"]
          if importlib.metadata.version("jaxlib").startswith("0.10.") else [])])]).strip()

import jax
import pytest

from jspec.checkpoints import hub

# Several files run the same programs: what one has compiled the others load.
CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"
if importlib.util.find_spec("libtpu") is None:
  jax.config.update("jax_compilation_cache_dir", str(CACHE))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
MAX_MAPS = 25_000
TESTS = str(pathlib.Path(__file__).parent)


@pytest.fixture(scope="session")
def smollm2() -> hub.LoadedModel:
  """The embedded default model in float32: fetched and converted on first use, then cached."""
  return hub.load_model("smollm2-135m-instruct")


def group_of(item) -> str:
  """What one process runs, one test after another: a file; in tests/laws all tests of a case."""
  case = getattr(item, "callspec", None) and item.callspec.params.get("name")
  return f"laws of {case}" if item.path.parent.name == "laws" and case else (
      str(item.path.relative_to(TESTS)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """The tests of a group stand together, and --dist loadgroup gives them to one process."""
  groups: dict[str, list] = {}
  for item in items:
    groups.setdefault(group_of(item), []).append(item)
    item.add_marker(pytest.mark.xdist_group(group_of(item)))
  items[:] = [item for group in groups.values() for item in group]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
  """Each compiled program holds memory maps, of which a process may have some 65,000."""
  laws = lambda item: group_of(item).startswith("laws of ")
  if nextitem is None or item.path != nextitem.path and not (laws(item) and laws(nextitem)) or (
      num_maps() > MAX_MAPS):
    forget()


def num_maps() -> int:
  maps = pathlib.Path("/proc/self/maps")
  return maps.read_bytes().count(b"\n") if maps.is_file() else 0


def forget():
  jax.clear_caches()
  for module in [*sys.modules.values()]:
    if str(getattr(module, "__file__", "")).startswith(TESTS):
      for kept in vars(module).values():  # what they keep was compiled, too
        if hasattr(kept, "cache_clear"):
          kept.cache_clear()
  gc.collect()
