"""Drafting heads that come with jspec, and the speculation that serves each embedded model best."""

from __future__ import annotations

import pathlib
from typing import Any

HEADS = {  # name -> the embedded model it was trained for; the folder's README.md is its card
  "smollm2-135m-instruct-eagle3": "smollm2-135m-instruct",
}
NGRAM: dict[str, Any] = {"method": "ngram"}
BEST: dict[str, dict[str, Any]] = {  # by model, as measured (see the head's card)
  "smollm2-135m-instruct": {
    "method": "ngram+eagle3", "model": "smollm2-135m-instruct-eagle3",
    "num_speculative_tokens": 2, "num_lookup_tokens": 7},
}


def default_speculation(model: str | pathlib.Path) -> dict[str, Any]:
  """speculative_config for a model where nobody has named one: its own head's, or n-gram lookup."""
  return dict(BEST.get(str(model), NGRAM))


def head_folder(name: str | pathlib.Path) -> pathlib.Path | None:
  """Where the head of that name lies; None if none comes with jspec under it."""
  return pathlib.Path(__file__).parent / "heads" / str(name) if str(name) in HEADS else None
