"""What speculation to do: vLLM's `speculative_config` keys and the flags that came before them.

A key is applied, refused with the values that are allowed, or (where vLLM itself ignored it)
accepted with a warning. Nothing is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

METHODS = ("none", "ngram", "draft_model")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")

# The n-gram defaults differ from vLLM's 5/5: one-token matches make chat slower than plain
# decoding, five-token matches miss most of what there is to copy.
NGRAM_LOOKUP_MAX, NGRAM_LOOKUP_MIN = 4, 2
NGRAM_DRAFT_TOKENS = 7

_NGRAM_NAMES = ("ngram", "[ngram]")
_OTHER_METHODS = ("suffix", "custom_class", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp",
                  "dflash", "dspark", "extract_hidden_states")  # vLLM's, past and present
_NAME_HINTS = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"),
               ("dspark", "dspark"), ("medusa", "medusa"))  # in a model's name, as vLLM reads it

_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min",
         "prompt_lookup_latest", "draft_sample_method", "rejection_sample_method", "tree_widths",
         "num_speculative_tokens_per_batch_size", "disable_by_batch_size",
         "draft_tensor_parallel_size")

# Older spellings -> today's.
_OLDER = {
  "speculative_model": "model",
  "num_speculative_tokens": "num_speculative_tokens",
  "ngram_prompt_lookup_max": "prompt_lookup_max",
  "ngram_prompt_lookup_min": "prompt_lookup_min",
  "speculative_disable_by_batch_size": "disable_by_batch_size",
  "speculative_model_quantization": "quantization",
  "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
  "speculative_max_model_len": "max_model_len",
  "speculative_disable_mqa_scorer": "disable_mqa_scorer",
  "spec_decoding_acceptance_method": "acceptance_method",
  "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
  "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
  "disable_logprobs_during_spec_decoding": "disable_logprobs",
  "use_v2_block_manager": "use_v2_block_manager",
  "num_lookahead_slots": "num_lookahead_slots",
  "rejection_sample_method": "rejection_sample_method",
  "synthetic_acceptance_rate": "synthetic_acceptance_rate",
  "speculative_token_tree": "speculative_token_tree",
  "spec_method": "method",
  "spec_model": "model",
  "spec_tokens": "num_speculative_tokens",
}

_NO_EFFECT = {
  "disable_mqa_scorer": "drafts are always scored in one forward pass",
  "disable_logprobs": "log-probabilities are returned wherever a request asks for them",
  "use_v2_block_manager": "there is one page allocator",
  "num_lookahead_slots": "pages for draft tokens are reserved by themselves",
}

# Keys of things jspec does not have -> the values that ask for nothing (None always does).
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
  "enforce_eager": (False,),
  "tensor_parallel_size": (),
  "quantization": (),
  "moe_backend": (),
  "attention_backend": (),
  "kv_cache_dtype": ("auto",),
  "max_model_len": (),
  "revision": (),
  "code_revision": (),
  "index_share_for_mtp_iteration": (),
  "disable_padded_drafter_batch": (False,),
  "disable_eagle_block_drop": (False,),
  "disable_lookahead_block_hashes": (False,),
  "draft_lm_head_quantization": (),
  "use_local_argmax_reduction": (False,),
  "use_heterogeneous_vocab": (False,),
  "parallel_drafting": (False,),
  "suffix_decoding_max_tree_depth": (24,),
  "suffix_decoding_max_cached_requests": (10000,),
  "suffix_decoding_max_spec_factor": (1.0,),
  "suffix_decoding_min_token_prob": (0.1,),
  "draft_load_config": (),
  "synthetic_acceptance_rate": (),
  "synthetic_acceptance_rates": (),
  "synthetic_acceptance_length": (),
  "enable_adaptive_verification": (False,),
  "dspark_draft_topk": (),
  "xpress_topc": (),
  "fly_window_size": (),
  "fly_entropy_threshold": (0.3,),
  "fly_entropy_top_k": (3,),
  "target_model_config": (),
  "target_parallel_config": (),
  "draft_model_config": (),
  "draft_parallel_config": (),
  "acceptance_method": ("rejection_sampler",),
  "posterior_threshold": (0.09,),
  "posterior_alpha": (0.3,),
  "speculative_token_tree": (),
}
_INSTEAD = {
  "tensor_parallel_size": "use draft_tensor_parallel_size",
  "speculative_token_tree": "use tree_widths",
  "acceptance_method": "typical acceptance changes the output",
}


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
  """The speculation of an engine. Without arguments: none."""

  method: str = "none"
  model: str | None = None  # of the draft model
  num_speculative_tokens: int = 0  # draft tokens per step; the depth where drafts are trees
  prompt_lookup_max: int = 0  # longest and shortest n-gram looked up
  prompt_lookup_min: int = 0
  prompt_lookup_latest: bool = False  # of several matches the latest, not the earliest
  draft_sample_method: str = "greedy"  # "probabilistic": sample drafts, keep their distribution
  tree_widths: tuple[int, ...] | None = None  # children per node at each depth; None: a chain
  schedule: tuple[tuple[int, int, int], ...] = ()  # (first, last batch size, draft tokens)
  draft_tensor_parallel_size: int = 1  # devices that share the draft model; 1: each has all of it

  def __post_init__(self):
    if self.method not in METHODS:
      raise ValueError(f"speculative method {self.method!r} is not one of {_listed(METHODS)}")
    _check_int("num_speculative_tokens", self.num_speculative_tokens,
               0 if self.method == "none" else 1)
    if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
      raise ValueError(f"draft_sample_method must be one of {_listed(DRAFT_SAMPLE_METHODS)}, "
                       f"got {self.draft_sample_method!r}")
    if not isinstance(self.prompt_lookup_latest, bool):
      raise ValueError(f"prompt_lookup_latest must be true or false, "
                       f"got {self.prompt_lookup_latest!r}")
    if self.method == "ngram":
      self._check_ngram()
    elif self.prompt_lookup_max or self.prompt_lookup_min or self.prompt_lookup_latest:
      raise ValueError(f"prompt_lookup_* belong to method 'ngram', got method {self.method!r}")
    if self.method == "draft_model":
      if not isinstance(self.model, str) or not self.model:
        raise ValueError(f"method 'draft_model' needs a model, got {self.model!r}")
    elif (self.model is not None or self.tree_widths or self.draft_sample_method != "greedy"
          or self.draft_tensor_parallel_size != 1):
      raise ValueError("model, tree_widths, draft_sample_method 'probabilistic' and "
                       "draft_tensor_parallel_size belong to method 'draft_model', "
                       f"got method {self.method!r}")
    _check_int("draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1)
    if self.tree_widths is not None:
      _check_tree(self.tree_widths, self.num_speculative_tokens)
    _check_schedule(self.schedule)

  def _check_ngram(self):
    _check_int("prompt_lookup_min", self.prompt_lookup_min, 1)
    _check_int("prompt_lookup_max", self.prompt_lookup_max, 1)
    if self.prompt_lookup_min > self.prompt_lookup_max:
      raise ValueError(f"prompt_lookup_min={self.prompt_lookup_min} must not exceed "
                       f"prompt_lookup_max={self.prompt_lookup_max}")

  def draft_tokens_at(self, batch_size: int) -> int:
    """Draft tokens per step at a batch size: gaps in the schedule go on with what came before."""
    tokens = self.num_speculative_tokens
    for first, _, scheduled in self.schedule:
      if batch_size < first:
        break
      tokens = scheduled
    return min(tokens, self.num_speculative_tokens)


def parse_speculative(config: Mapping[str, Any] | None = None,
                      older_flags: Mapping[str, Any] | None = None) -> SpeculativeConfig:
  """The speculation that vLLM's keys and older flags ask for; ValueError if jspec can't do it.

  Args:
    config: method, model, num_speculative_tokens, ...; dashes and underscores are alike, None
      is the same as leaving a key out.
    older_flags: speculative_model="[ngram]", ngram_prompt_lookup_max=4, ...
  """
  keys = _merged(config, older_flags)
  for key in [key for key in keys if key in _NO_EFFECT]:
    warnings.warn(f"speculative key {key} has no effect: {_NO_EFFECT[key]}", stacklevel=1)
    del keys[key]
  for key in [key for key in keys if key in _UNSUPPORTED]:
    _refuse_unless_neutral(key, keys.pop(key))
  if not keys:
    return SpeculativeConfig()
  method = _method(keys)
  if method == "none":
    others = sorted(key for key, value in keys.items()
                    if (key, value) != ("num_speculative_tokens", 0) and key != "method")
    if others:
      raise ValueError(f"method 'none' takes no other keys, got {_listed(others)}")
    return SpeculativeConfig()
  tokens = _draft_tokens(method, keys)
  lookup_max, lookup_min = _lookups(method, keys)
  tree = keys.get("tree_widths")
  return SpeculativeConfig(
    method=method, model=None if method == "ngram" else keys.get("model"),
    num_speculative_tokens=tokens, prompt_lookup_max=lookup_max, prompt_lookup_min=lookup_min,
    prompt_lookup_latest=keys.get("prompt_lookup_latest", False),
    draft_sample_method=_draft_sampling(keys), tree_widths=None if tree is None else tuple(tree),
    schedule=_schedule(keys, tokens),
    draft_tensor_parallel_size=keys.get("draft_tensor_parallel_size", 1))


def _merged(config: Mapping[str, Any] | None, older: Mapping[str, Any] | None) -> dict[str, Any]:
  """Both sources under today's names, None left out."""
  if config is not None and not isinstance(config, Mapping):
    raise ValueError("speculative_config must be a dict such as {'method': 'ngram'}, "
                     f"got {config!r:.60}")
  keys: dict[str, Any] = {}
  legacy_lookup = False
  known = (*_KEYS, *_NO_EFFECT, *_UNSUPPORTED)
  for source, names in ((config or {}, {key: key for key in known}), (older or {}, _OLDER)):
    for given, value in source.items():
      name = str(given).replace("-", "_")
      if name not in names:
        what = "key in speculative_config" if names is not _OLDER else "argument"
        choices = _KEYS if names is not _OLDER else tuple(_OLDER)
        raise ValueError(f"unknown {what}: {given!r}; known are {', '.join(choices)}")
      if value is None:
        continue
      key = names[name]
      if key in keys:
        raise ValueError(f"{key} is given twice: {keys[key]!r} and {value!r} (as {given})")
      keys[key] = value
      legacy_lookup |= name.startswith("ngram_prompt_lookup")
  if legacy_lookup and "prompt_lookup_max" in keys:
    keys.setdefault("prompt_lookup_min", 1)  # the older flag's default
  return keys


def _refuse_unless_neutral(key: str, value: Any) -> None:
  allowed = _UNSUPPORTED[key]
  if any(type(value) is type(v) and value == v for v in allowed):
    return
  options = " or ".join(["leaving it out", *map(repr, allowed)])
  hint = f" ({_INSTEAD[key]})" if key in _INSTEAD else ""
  raise ValueError(f"speculative key {key}={value!r} is not supported{hint}: "
                   f"allowed is {options}")


def _method(keys: Mapping[str, Any]) -> str:
  method, model = keys.get("method"), keys.get("model")
  if model is not None and not isinstance(model, str):
    raise ValueError(f"the draft model must be a name or a path, got {model!r}")
  if method is None and model is None:
    raise ValueError(f"speculation with {_listed(sorted(keys))} needs a method "
                     f"({_listed(METHODS)}) or a draft model")
  if method is None:
    base = re.split(r"[/\\]", str(model).rstrip("/\\"))[-1].lower()
    method = "ngram" if model in _NGRAM_NAMES else next(
      (hinted for hint, hinted in _NAME_HINTS if hint in base), "draft_model")
    if method not in METHODS:
      raise ValueError(f"the name of {model!r} suggests method {method!r}, which jspec doesn't "
                       f"have yet: methods are {_listed(METHODS)}; name one if this is a guess "
                       "gone wrong")
  if method in ("ngram_gpu", "[ngram]"):  # jspec's n-gram drafter is on the device anyway
    method = "ngram"
  if method not in METHODS:
    known = method in _OTHER_METHODS or str(method).endswith("_mtp")
    what = "is one that jspec doesn't have yet" if known else "is unknown"
    raise ValueError(f"speculative method {method!r} {what}: methods are {_listed(METHODS)}")
  if method == "ngram" and model is not None and model not in _NGRAM_NAMES:
    raise ValueError(f"method 'ngram' uses no model, got model={model!r}: leave it out")
  return method


def _draft_tokens(method: str, keys: Mapping[str, Any]) -> int:
  tokens, tree = keys.get("num_speculative_tokens"), keys.get("tree_widths")
  if tree is not None and (isinstance(tree, str) or not isinstance(tree, Sequence) or not tree):
    raise ValueError("tree_widths must be a list with one number of children per depth, such as "
                     f"[4, 2, 1], got {tree!r}")
  if tokens is None:
    if tree is not None:
      return len(tree)
    if method != "ngram":
      raise ValueError(f"method {method!r} needs num_speculative_tokens (1 or more)")
    return NGRAM_DRAFT_TOKENS
  return _check_int("num_speculative_tokens", tokens, 1)


def _lookups(method: str, keys: Mapping[str, Any]) -> tuple[int, int]:
  """Longest and shortest n-gram: one that is left out mirrors the other, as in vLLM."""
  longest, shortest = keys.get("prompt_lookup_max"), keys.get("prompt_lookup_min")
  if longest is None and shortest is None:
    return (NGRAM_LOOKUP_MAX, NGRAM_LOOKUP_MIN) if method == "ngram" else (0, 0)
  longest = shortest if longest is None else longest
  shortest = longest if shortest is None else shortest
  return _check_int("prompt_lookup_max", longest, 1), _check_int("prompt_lookup_min", shortest, 1)


def _draft_sampling(keys: Mapping[str, Any]) -> str:
  """draft_sample_method; rejection_sample_method 'strict' and 'probabilistic' are older names."""
  rejection = keys.get("rejection_sample_method", "standard")
  implied = {"standard": None, "strict": "greedy", "probabilistic": "probabilistic"}
  if not isinstance(rejection, str) or rejection not in implied:
    raise ValueError(f"rejection_sample_method={rejection!r} is not supported: "
                     f"allowed are {_listed(implied)}")
  given = keys.get("draft_sample_method", implied[rejection] or "greedy")
  if implied[rejection] not in (None, given):
    raise ValueError(f"rejection_sample_method={rejection!r} and draft_sample_method={given!r} "
                     "contradict each other: give the latter alone")
  return given


def _schedule(keys: Mapping[str, Any], tokens: int) -> tuple[tuple[int, int, int], ...]:
  ranges = keys.get("num_speculative_tokens_per_batch_size")
  limit = keys.get("disable_by_batch_size")
  if ranges is not None and limit is not None:
    raise ValueError("num_speculative_tokens_per_batch_size and disable_by_batch_size are both "
                     "given: use the former")
  if limit is not None:
    _check_int("disable_by_batch_size", limit, 2)
    return ((1, limit - 1, tokens), (limit, limit, 0))  # the last range goes on
  if ranges is None:
    return ()
  try:
    return tuple((first, last, count) for first, last, count in ranges)
  except (TypeError, ValueError):
    raise ValueError("num_speculative_tokens_per_batch_size must be a list of [first batch size, "
                     f"last batch size, draft tokens], got {ranges!r}") from None


def _check_tree(widths: Sequence[int], num_speculative_tokens: int) -> None:
  for width in widths:
    _check_int("each of tree_widths", width, 1)
  if len(widths) != num_speculative_tokens:
    raise ValueError(f"tree_widths must have one number per depth: got {len(widths)} for "
                     f"{num_speculative_tokens=}")


def _check_schedule(schedule: Sequence[tuple[int, int, int]]) -> None:
  name, before = "num_speculative_tokens_per_batch_size", 0
  for entry in schedule:
    first, last, tokens = entry
    for value, low in ((first, 1), (last, 1), (tokens, 0)):
      _check_int(f"each number of {name}", value, low)
    if first <= before or last < first:
      raise ValueError(f"{name} must have rising ranges that don't overlap, got {list(schedule)}")
    if not before and first != 1:
      raise ValueError(f"{name} must start at batch size 1, got {list(schedule)}")
    before = last


def _check_int(name: str, value: Any, low: int) -> int:
  if isinstance(value, bool) or not isinstance(value, int):
    raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
  if value < low:
    raise ValueError(f"{name} must be >= {low}, got {value}")
  return value


def _listed(names) -> str:
  return ", ".join(repr(name) for name in names)
