"""Options of method "ngram"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jspec.config.checks import check_flag, check_int
from jspec.config.methods.options import LookupOptions


@dataclasses.dataclass(frozen=True)
class NgramOptions(LookupOptions):
  """The defaults differ from vLLM's 5 and 5: one-token matches make chat slower than plain
  decoding, five-token matches miss most of what there is to copy."""

  prompt_lookup_max: int = 4  # longest and shortest n-gram looked up
  prompt_lookup_min: int = 2
  prompt_lookup_latest: bool = False  # of several matches the latest, not the earliest

  @classmethod
  def of_keys(cls, keys: Mapping[str, Any]) -> Self:
    """Longest or shortest n-gram: one that is left out mirrors the other, as in vLLM."""
    pair = "prompt_lookup_max", "prompt_lookup_min"
    given = [keys[key] for key in pair if key in keys]
    return cls(**{**dict.fromkeys(pair, given[0]), **keys} if given else keys)

  def __post_init__(self):
    check_int("prompt_lookup_max", self.prompt_lookup_max, 1)
    check_int("prompt_lookup_min", self.prompt_lookup_min, 1)
    if self.prompt_lookup_min > self.prompt_lookup_max:
      raise ValueError(f"prompt_lookup_min={self.prompt_lookup_min} must not exceed "
                       f"prompt_lookup_max={self.prompt_lookup_max}")
    check_flag("prompt_lookup_latest", self.prompt_lookup_latest)

  @property
  def default_tokens(self) -> int:
    return 7

  def check_tokens(self, tokens: int) -> None:
    check_int("num_speculative_tokens", tokens, 1)
