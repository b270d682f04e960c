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
SUPPORT = str(pathlib.Path(__file__).parent / "support")


@pytest.fixture(scope="session")
def smollm2() -> hub.LoadedModel:
  """The embedded default model in float32: fetched and converted on first use, then cached."""
  return hub.load_model("smollm2-135m-instruct")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs(request):
  yield
  forget(request.module)


@pytest.fixture(autouse=True)
def forget_before_it_is_too_late(request):
  """Each compiled program holds memory maps, of which a process may have some 65,000."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.is_file() and maps.read_bytes().count(b"\n") > MAX_MAPS:
    forget(request.module)


def forget(own):
  jax.clear_caches()
  support = [module for module in [*sys.modules.values()]
             if str(getattr(module, "__file__", "")).startswith(SUPPORT)]
  for module in (*support, own):  # what they keep was compiled, too
    for kept in vars(module).values():
      if hasattr(kept, "cache_clear"):
        kept.cache_clear()
  gc.collect()
