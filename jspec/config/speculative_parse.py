"""From vLLM's `speculative_config` keys, and the flags that came before them, to SpeculativeConfig.

A key is applied, refused with the values that are allowed, or (where vLLM itself ignored it)
accepted with a warning. Nothing is dropped in silence.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.config import draft_trees
from jspec.config.checks import check_int, check_number
from jspec.config.speculative import (
  HEADS,
  MANY,
  METHODS,
  NEURAL,
  SpeculativeConfig,
  check_widths,
  listed,
)
from jspec.config.speculative_keys import INSTEAD, KEYS, NO_EFFECT, OLDER, UNSUPPORTED
from jspec.config.verification import Verification

# The n-gram defaults differ from vLLM's 5/5: one-token matches make chat slower than plain
# decoding, five-token matches miss most of what there is to copy.
NGRAM_LOOKUP_MAX, NGRAM_LOOKUP_MIN = 4, 2
NGRAM_DRAFT_TOKENS = 7

_NGRAM_NAMES = ("ngram", "[ngram]")
_OTHER_METHODS = ("custom_class", "mtp", "dflash", "dspark")  # vLLM's
_NAME_HINTS = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"),
               ("dspark", "dspark"), ("medusa", "medusa"))  # in a model's name, as vLLM reads it
_PASSED = {  # keys that are fields, too -> the field
  "model": "model",
  "revision": "revision",
  "prompt_lookup_latest": "prompt_lookup_latest",
  "tree_top_k": "tree_top_k",
  "tree_total_tokens": "tree_total_tokens",
  "n_candidates": "n_candidates",
  "adaptive_draft_length": "adaptive_draft_length",
  "hidden_state_layers": "hidden_state_layers",
  "draft_confidence_threshold": "draft_confidence_threshold",
  "num_lookup_tokens": "num_lookup_tokens",
  "draft_tensor_parallel_size": "draft_tensor_parallel_size",
  "suffix_decoding_max_tree_depth": "suffix_max_tree_depth",
  "suffix_decoding_max_cached_requests": "suffix_max_cached_requests",
  "suffix_decoding_max_spec_factor": "suffix_max_spec_factor",
  "suffix_decoding_min_token_prob": "suffix_min_token_prob",
}
_RULES = {  # rejection_sample_method -> (draft_sample_method implied, verification)
  "standard": (None, "lossless"),
  "strict": ("greedy", "lossless"),
  "probabilistic": ("probabilistic", "lossless"),
  "block": (None, "block"),
  "synthetic": (None, "lossy_synthetic"),
  "lossy_synthetic": (None, "lossy_synthetic"),
  "lossy_typical": (None, "lossy_typical"),
}
_ACCEPTANCE_METHODS = {"rejection_sampler": "standard",
                       "typical_acceptance_sampler": "lossy_typical"}


Detect = Callable[[str, str | None], str | None]  # model, revision -> method


def parse_speculative(config: Mapping[str, Any] | None = None,
                      older_flags: Mapping[str, Any] | None = None,
                      detect: Detect | None = None) -> SpeculativeConfig:
  """The speculation that vLLM's keys and older flags ask for; ValueError if jspec can't do it.

  Args:
    config: method, model, num_speculative_tokens, ...; dashes and underscores are alike, None
      is the same as leaving a key out.
    older_flags: speculative_model="[ngram]", ngram_prompt_lookup_max=4, ...
    detect: model and revision -> the method its checkpoint is made for, None for a plain model;
      by default the model's name is all there is to go by.
  """
  keys = _merged(config, older_flags)
  for key in [key for key in keys if key in NO_EFFECT]:
    warnings.warn(f"speculative key {key} has no effect: {NO_EFFECT[key]}", stacklevel=1)
    del keys[key]
  for key in [key for key in keys if key in UNSUPPORTED]:
    _refuse_unless_neutral(key, keys.pop(key))
  if keys.get("acceptance_method") == "rejection_sampler":  # asks for nothing
    del keys["acceptance_method"]
  if not keys:
    return SpeculativeConfig()
  method = _method(keys, detect)
  if method == "none":
    others = sorted(key for key, value in keys.items()
                    if (key, value) != ("num_speculative_tokens", 0) and key != "method")
    if others:
      raise ValueError(f"method 'none' takes no other keys, got {listed(others)}")
    return SpeculativeConfig()
  parts = method.split("+")
  widths, paths = _trees(parts, keys)
  tokens = _draft_tokens(parts, keys, widths)
  lookup_max, lookup_min = _lookups(parts, keys)
  sampling, verification = _verification(keys, tokens)
  fields = {field: keys[key] for key, field in _PASSED.items() if key in keys}
  lookup_tokens = check_int("num_lookup_tokens", fields.get("num_lookup_tokens", 0), 0)
  layers = fields.get("hidden_state_layers", ())
  if isinstance(layers, str) or not isinstance(layers, Sequence):
    raise ValueError(f"hidden_state_layers must be a list of numbers, got {layers!r}")
  fields["hidden_state_layers"] = tuple(layers)
  if set(parts) <= {"ngram"}:
    fields.pop("model", None)
  return SpeculativeConfig(
    method=method, num_speculative_tokens=tokens, prompt_lookup_max=lookup_max,
    prompt_lookup_min=lookup_min, draft_sample_method=sampling, tree_widths=widths,
    tree_paths=paths, schedule=_schedule(keys, max(tokens, lookup_tokens)),
    verification=verification, **fields)


def _merged(config: Mapping[str, Any] | None, older: Mapping[str, Any] | None) -> dict[str, Any]:
  """Both sources under today's names, None left out."""
  if config is not None and not isinstance(config, Mapping):
    raise ValueError("speculative_config must be a dict such as {'method': 'ngram'}, "
                     f"got {config!r:.60}")
  keys: dict[str, Any] = {}
  legacy_lookup = False
  known = (*KEYS, *NO_EFFECT, *UNSUPPORTED)
  for source, names in ((config or {}, {key: key for key in known}), (older or {}, OLDER)):
    for given, value in source.items():
      name = str(given).replace("-", "_")
      if name not in names:
        what = "key in speculative_config" if names is not OLDER else "argument"
        choices = KEYS if names is not OLDER else tuple(OLDER)
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
  allowed = UNSUPPORTED[key]
  if any(type(value) is type(v) and value == v for v in allowed):
    return
  options = " or ".join(["leaving it out", *map(repr, allowed)])
  hint = f" ({INSTEAD[key]})" if key in INSTEAD else ""
  raise ValueError(f"speculative key {key}={value!r} is not supported{hint}: "
                   f"allowed is {options}")


def _method(keys: Mapping[str, Any], detect: Detect | None) -> str:
  method, model = keys.get("method"), keys.get("model")
  if model is not None and not isinstance(model, str):
    raise ValueError(f"the draft model must be a name or a path, got {model!r}")
  if method is None and model is None:
    raise ValueError(f"speculation with {listed(sorted(keys))} needs a method "
                     f"({listed(METHODS)}) or a draft model")
  if method is None:
    method = _method_of(str(model), keys.get("revision"), detect)
  if isinstance(method, str):  # jspec's n-gram drafter is on the device anyway
    method = "+".join("ngram" if part in ("ngram_gpu", "[ngram]") else part
                      for part in method.split("+"))
  parts = str(method).split("+")
  if not isinstance(method, str) or any(part not in METHODS for part in parts):
    other = method in _OTHER_METHODS or str(method).endswith("_mtp")
    what = "is one that jspec doesn't have" if other else "is unknown"
    raise ValueError(f"speculative method {method!r} {what}: methods are {listed(METHODS)}, or "
                     "two of them joined, as in 'ngram+eagle3'")
  takes_model = method == "none" or set(parts) & set(NEURAL)  # none refuses every key by itself
  if not takes_model and model is not None and not (
      method == "ngram" and model in _NGRAM_NAMES):
    raise ValueError(f"method {method!r} uses no model, got model={model!r}: leave it out")
  return method


def _method_of(model: str, revision: str | None, detect: Detect | None) -> str:
  """The method of a model that is given without one."""
  if model in _NGRAM_NAMES:
    return "ngram"
  if detect is not None:
    return detect(model, revision) or "draft_model"
  base = re.split(r"[/\\]", model.rstrip("/\\"))[-1].lower()
  method = next((hinted for hint, hinted in _NAME_HINTS if hint in base), "draft_model")
  if method not in METHODS:
    raise ValueError(f"the name of {model!r} suggests method {method!r}, which jspec doesn't "
                     f"have: methods are {listed(METHODS)}; name one if this is a guess gone "
                     "wrong")
  return method


def _trees(parts: Sequence[str], keys: Mapping[str, Any]):
  """(tree_widths of a draft model, tree_paths of a head); None where there is no such tree."""
  names = ("tree_widths", "medusa_choices", "speculative_token_tree")
  given = [key for key in names if key in keys]
  if not given:
    return None, None
  if len(given) > 1:
    raise ValueError(f"{listed(given)} all describe the draft tree: give one of them")
  value = keys[given[0]]
  if given[0] != "tree_widths":
    paths = draft_trees.parse(value)
    if not set(parts) & set(HEADS):
      raise ValueError(f"{given[0]} belongs to method {listed(HEADS)}, got {'+'.join(parts)!r}")
    return None, paths
  if isinstance(value, str) or not isinstance(value, Sequence) or not value:
    raise ValueError("tree_widths must be a list with one number of children per depth, such as "
                     f"[4, 2, 1], got {value!r}")
  check_widths(value)
  if not set(parts) & set(HEADS):
    return tuple(value), None
  return None, draft_trees.of_widths(value)


def _draft_tokens(parts: Sequence[str], keys: Mapping[str, Any], widths) -> int:
  tokens = keys.get("num_speculative_tokens")
  if tokens is not None:
    return check_int("num_speculative_tokens", tokens, 1)
  if widths is not None:
    return len(widths)
  if "draft_model" in parts:
    raise ValueError(f"method {'+'.join(parts)!r} needs num_speculative_tokens (1 or more)")
  return NGRAM_DRAFT_TOKENS if list(parts) == ["ngram"] else 0


def _lookups(parts: Sequence[str], keys: Mapping[str, Any]) -> tuple[int, int]:
  """Longest and shortest n-gram: one that is left out mirrors the other, as in vLLM."""
  longest, shortest = keys.get("prompt_lookup_max"), keys.get("prompt_lookup_min")
  if longest is None and shortest is None:
    return (NGRAM_LOOKUP_MAX, NGRAM_LOOKUP_MIN) if "ngram" in parts else (0, 0)
  longest = shortest if longest is None else longest
  shortest = longest if shortest is None else shortest
  return check_int("prompt_lookup_max", longest, 1), check_int("prompt_lookup_min", shortest, 1)


def _verification(keys: Mapping[str, Any], tokens: int) -> tuple[str, Verification]:
  """(draft_sample_method, how drafts are verified)."""
  rule = keys.get("rejection_sample_method", "standard")
  if not isinstance(rule, str) or rule not in _RULES:
    raise ValueError(f"rejection_sample_method={rule!r} is not supported: "
                     f"allowed are {listed(_RULES)}")
  acceptance = keys.get("acceptance_method")
  if acceptance is not None:
    if not isinstance(acceptance, str) or acceptance not in _ACCEPTANCE_METHODS:
      raise ValueError(f"acceptance_method={acceptance!r} is not supported: "
                       f"allowed are {listed(_ACCEPTANCE_METHODS)}")
    if "rejection_sample_method" in keys:
      raise ValueError("acceptance_method and rejection_sample_method are both given: use the "
                       "latter")
    rule = _ACCEPTANCE_METHODS[acceptance]
  implied, name = _RULES[rule]
  sampling = keys.get("draft_sample_method", implied or "greedy")
  if implied not in (None, sampling):
    raise ValueError(f"rejection_sample_method={rule!r} and draft_sample_method={sampling!r} "
                     "contradict each other: give the latter alone")
  typical = {key: keys[key] for key in ("posterior_threshold", "posterior_alpha") if key in keys}
  if typical and name != "lossy_typical":
    raise ValueError(f"{listed(typical)} belong to rejection_sample_method 'lossy_typical', "
                     f"got {rule!r}")
  return sampling, Verification(name, rates=_rates(keys, tokens, name, rule), **typical)


def _rates(keys: Mapping[str, Any], tokens: int, name: str, rule: str) -> tuple[float, ...]:
  """Chances that the first 1, 2, ... draft tokens pass; a mean length has the least variance."""
  given = [key for key in ("synthetic_acceptance_rates", "synthetic_acceptance_length",
                           "synthetic_acceptance_rate") if key in keys]
  if name != "lossy_synthetic":
    if given:
      raise ValueError(f"{given[0]} belongs to rejection_sample_method 'synthetic', got {rule!r}")
    return ()
  if len(given) != 1:
    raise ValueError("rejection_sample_method 'synthetic' needs synthetic_acceptance_rates or "
                     f"synthetic_acceptance_length, got {listed(given) or 'neither'}")
  value = keys[given[0]]
  if not tokens:
    raise ValueError("rejection_sample_method 'synthetic' needs num_speculative_tokens")
  if given[0] == "synthetic_acceptance_rates":
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != tokens:
      raise ValueError(f"synthetic_acceptance_rates must be a list of num_speculative_tokens="
                       f"{tokens} numbers, got {value!r}")
    for rate in value:
      check_number("each of synthetic_acceptance_rates", rate, 0, 1)
    return tuple(value)
  low, high = (1, tokens + 1) if given[0] == "synthetic_acceptance_length" else (0, 1)
  check_number(given[0], value, low, high)
  mean = value - 1 if low else value * tokens
  return tuple(min(1.0, max(0.0, mean - i)) for i in range(tokens))


def _schedule(keys: Mapping[str, Any], tokens: int) -> tuple[tuple[int, int, int], ...]:
  ranges = keys.get("num_speculative_tokens_per_batch_size")
  limit = keys.get("disable_by_batch_size")
  if ranges is not None and limit is not None:
    raise ValueError("num_speculative_tokens_per_batch_size and disable_by_batch_size are both "
                     "given: use the former")
  if limit is not None:
    check_int("disable_by_batch_size", limit, 2)
    return ((1, limit - 1, tokens or MANY), (limit, limit, 0))  # the last range goes on
  if ranges is None:
    return ()
  try:
    return tuple((first, last, count) for first, last, count in ranges)
  except (TypeError, ValueError):
    raise ValueError("num_speculative_tokens_per_batch_size must be a list of [first batch size, "
                     f"last batch size, draft tokens], got {ranges!r}") from None
