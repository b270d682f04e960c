"""From vLLM's `speculative_config` keys, and the flags that came before them, to SpeculativeConfig.

A key is applied, refused with the values that are allowed, or (where vLLM itself ignored it)
accepted with a warning. Nothing is dropped in silence.
"""

from __future__ import annotations

import re
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.config.checks import check_int, check_number, listed
from jspec.config.methods import OPTIONS, Options
from jspec.config.speculative import MANY, SpeculativeConfig, check_method
from jspec.config.speculative_keys import (
  INSTEAD,
  NO_EFFECT,
  OLDER,
  SHARED,
  UNSUPPORTED,
  known_keys,
)
from jspec.config.verification import Verification

_NGRAM_NAMES = ("ngram", "[ngram]")
_OTHER_METHODS = ("custom_class", "mtp", "dflash", "dspark")  # vLLM's
_NAME_HINTS = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"),
               ("dspark", "dspark"), ("medusa", "medusa"))  # in a model's name, as vLLM reads it
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
  check_method(method)
  if method == "ngram":
    keys.pop("model", None)  # "[ngram]"
  rule = _rule(keys)
  options = _options(method, keys)
  tokens = _draft_tokens(method, options[-1], keys)
  lookup_tokens = check_int("num_lookup_tokens", keys.get("num_lookup_tokens", 0), 0)
  return SpeculativeConfig(
    method, options, tokens, lookup_tokens, _schedule(keys, max(tokens, lookup_tokens)),
    keys.get("adaptive_draft_length", True), _verification(keys, rule, tokens))


def _merged(config: Mapping[str, Any] | None, older: Mapping[str, Any] | None) -> dict[str, Any]:
  """Both sources under today's names, None left out."""
  if config is not None and not isinstance(config, Mapping):
    raise ValueError("speculative_config must be a dict such as {'method': 'ngram'}, "
                     f"got {config!r:.60}")
  keys: dict[str, Any] = {}
  legacy_lookup = False
  known = (*known_keys(), *NO_EFFECT, *UNSUPPORTED)
  for source, names in ((config or {}, {key: key for key in known}), (older or {}, OLDER)):
    for given, value in source.items():
      name = str(given).replace("-", "_")
      if name not in names:
        what = "key in speculative_config" if names is not OLDER else "argument"
        choices = known_keys() if names is not OLDER else tuple(OLDER)
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
                     f"({listed(OPTIONS)}) or a draft model")
  if method is None:
    method = _method_of(str(model), keys.get("revision"), detect)
  if isinstance(method, str):  # jspec's n-gram drafter is on the device anyway
    method = "+".join("ngram" if part in ("ngram_gpu", "[ngram]") else part
                      for part in method.split("+"))
  parts = str(method).split("+")
  if not isinstance(method, str) or any(part not in OPTIONS for part in parts):
    other = method in _OTHER_METHODS or str(method).endswith("_mtp")
    what = "is one that jspec doesn't have" if other else "is unknown"
    raise ValueError(f"speculative method {method!r} {what}: methods are {listed(OPTIONS)}, or "
                     "two of them joined, as in 'ngram+eagle3'")
  # none refuses every key by itself
  takes_model = method == "none" or any("model" in OPTIONS[part].keys() for part in parts)
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
  if method not in OPTIONS:
    raise ValueError(f"the name of {model!r} suggests method {method!r}, which jspec doesn't "
                     f"have: methods are {listed(OPTIONS)}; name one if this is a guess gone "
                     "wrong")
  return method


def _options(method: str, keys: Mapping[str, Any]) -> tuple[Options, ...]:
  """Of each part; a key goes to every part that has it, and is refused where none does."""
  kinds = [OPTIONS[part] for part in method.split("+")]
  for key, value in keys.items():
    if key == "num_lookup_tokens" and len(kinds) == 1:
      raise ValueError(f"{key}={reprlib.repr(value)} belongs to a joined method, such as "
                       f"'ngram+eagle3', got method {method!r}")
    if key not in SHARED and all(key not in kind.keys() for kind in kinds):
      owners = listed(name for name, kind in OPTIONS.items() if key in kind.keys())
      raise ValueError(f"{key}={reprlib.repr(value)} belongs to method {owners}, "
                       f"got method {method!r}")
  return tuple(kind.of_keys({key: keys[key] for key in kind.keys() if key in keys})
               for kind in kinds)


def _draft_tokens(method: str, options: Options, keys: Mapping[str, Any]) -> int:
  tokens = keys.get("num_speculative_tokens")
  if tokens is not None:
    return check_int("num_speculative_tokens", tokens, 1)
  if options.default_tokens is None:
    raise ValueError(f"method {method!r} needs num_speculative_tokens (1 or more)")
  return options.default_tokens


def _rule(keys: dict[str, Any]) -> str:
  """One of _RULES; puts the draft_sample_method that it implies among the keys."""
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
  implied = _RULES[rule][0]
  sampling = keys.get("draft_sample_method", implied)
  if implied not in (None, sampling):
    raise ValueError(f"rejection_sample_method={rule!r} and draft_sample_method={sampling!r} "
                     "contradict each other: give the latter alone")
  if implied == "probabilistic":  # greedy drafts are what every method has
    keys["draft_sample_method"] = implied
  return rule


def _verification(keys: Mapping[str, Any], rule: str, tokens: int) -> Verification:
  name = _RULES[rule][1]
  typical = {key: keys[key] for key in ("posterior_threshold", "posterior_alpha") if key in keys}
  if typical and name != "lossy_typical":
    raise ValueError(f"{listed(typical)} belong to rejection_sample_method 'lossy_typical', "
                     f"got {rule!r}")
  return Verification(name, rates=_rates(keys, tokens, name, rule), **typical)


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
