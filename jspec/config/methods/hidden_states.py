"""Options of method "extract_hidden_states"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jspec.config.methods.options import Options


@dataclasses.dataclass(frozen=True)
class HiddenStatesOptions(Options):
  hidden_state_layers: tuple[int, ...] = ()  # to keep, named as in transformers' hidden_states

  @classmethod
  def of_keys(cls, keys: Mapping[str, Any]) -> Self:
    layers = keys.get("hidden_state_layers", ())
    if isinstance(layers, str) or not isinstance(layers, Sequence):
      raise ValueError(f"hidden_state_layers must be a list of numbers, got {layers!r}")
    return cls(tuple(layers))

  def __post_init__(self):
    layers = self.hidden_state_layers
    if not layers or any(type(i) is not int or i < 0 for i in layers):
      raise ValueError("method 'extract_hidden_states' needs hidden_state_layers, a list of "
                       f"numbers >= 0, got {list(layers)}")

  def check_tokens(self, tokens: int) -> None:
    if tokens:
      raise ValueError("method 'extract_hidden_states' drafts nothing, got num_speculative_tokens="
                       f"{tokens}")
