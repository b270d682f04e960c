"""What to compile, and every reason to refuse it before the compiler is started."""

from __future__ import annotations

import dataclasses
import importlib.util

from jspec.compile_check import chips, models
from jspec.config import DTYPES, KV_DTYPES, ModelConfig
from jspec.config.methods import OPTIONS

DRAFTERS = tuple(name for name in OPTIONS if name != "extract_hidden_states")
TP_SIZES = (1, 2, 4, 8)
WHEELS = {  # platform -> (modules that must be there, what they are)
  "tpu": (("libtpu",), "libtpu"),
  "gpu": (("jax_cuda13_plugin", "jax_plugins.xla_cuda13"), "jax-cuda13-plugin and -pjrt"),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One program: the step of an engine on a number of devices."""

  model: str
  chip: str
  drafter: str = "ngram"
  tp: int = 1
  batch: int = 1  # slots
  context: int = 8192  # tokens per slot that the pages hold
  nodes: int = 8  # of the tree, root included: tokens verified per slot
  dtype: str = "bfloat16"
  kv_cache_dtype: str = "auto"
  page_size: int = 128
  attention: str = "kernel"  # "kernel": the platform's own; or one of config.ATTENTION_BACKENDS

  def __post_init__(self):
    for name in ("batch", "context", "nodes", "page_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
    if self.drafter not in DRAFTERS:
      raise ValueError(f"drafter {self.drafter!r} is unknown; known: {', '.join(DRAFTERS)}")
    if self.dtype not in DTYPES:
      raise ValueError(f"dtype {self.dtype!r} is not one of {DTYPES}")
    if self.tp not in TP_SIZES:
      raise ValueError(f"tp={self.tp} is not one of {TP_SIZES}")
    config, chip = models.find(self.model), chips.find(self.chip)
    if self.drafter == "draft_model":
      models.draft_model_of(self.model)
    if (self.nodes == 1) != (self.drafter == "none"):
      raise ValueError(f"nodes={self.nodes} does not suit drafter {self.drafter!r}: plain decoding "
                       "(drafter 'none') has 1 node, speculation at least 2")
    if self.context > config.max_positions:
      raise ValueError(f"context={self.context} exceeds {self.model}'s {config.max_positions} "
                       "positions")
    _check_split(self.model, config, self.tp)
    if self.kv_cache_dtype not in KV_DTYPES:
      raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of {tuple(KV_DTYPES)}")
    if self.kv_cache_dtype in chip.lacks:
      usable = [name for name in KV_DTYPES if name not in chip.lacks]
      raise ValueError(f"chip {chip.name} lacks kv_cache_dtype {self.kv_cache_dtype!r}; "
                       f"it has {', '.join(usable)}")

  @property
  def name(self) -> str:
    """What tells the case from others in a baseline."""
    kv = "" if self.kv_cache_dtype == "auto" else f" kv={self.kv_cache_dtype}"
    return (f"{self.model} {self.drafter} {self.chip} tp={self.tp} batch={self.batch} "
            f"context={self.context} nodes={self.nodes} {self.dtype}{kv} page={self.page_size}"
            + ("" if self.attention == "kernel" else f" attention={self.attention}"))


def _check_split(name: str, config: ModelConfig, tp: int) -> None:
  """What compile-check tabulates is a model that is really divided: the vocabulary, too."""
  for field in ("num_heads", "mlp_dim", "vocab_size"):
    if getattr(config, field) % tp:
      raise ValueError(f"{name}: {field}={getattr(config, field)} is not divisible by tp={tp}")
  if config.num_kv_heads % tp and tp % config.num_kv_heads:
    raise ValueError(f"{name}: num_kv_heads={config.num_kv_heads} neither divides tp={tp} nor is "
                     "divisible by it")


def missing_compiler(platform: str) -> str | None:
  """Which wheel is missing for compiling for a platform, in words; None: all are there."""
  modules, wheel = WHEELS[platform]
  if any(not _importable(module) for module in modules):
    return (f"compiling for a {platform.upper()} needs {wheel}, which is not installed: "
            "jspec-jax's extra 'aot' brings it (Linux x86-64)")
  return None


def _importable(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # of its parent package
    return False
