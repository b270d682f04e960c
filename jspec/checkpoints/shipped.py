"""Drafting heads that come with jspec; each one's folder has its card, README.md."""

from __future__ import annotations

import pathlib

FOLDER = pathlib.Path(__file__).parent / "shipped_heads"
HEADS = {  # name -> the embedded model it was trained for
  "smollm2-135m-instruct-eagle3": "smollm2-135m-instruct",
}


def head_folder(name: str | pathlib.Path) -> pathlib.Path | None:
  """Where the head of that name lies; None if none comes with jspec under it."""
  return FOLDER / str(name) if str(name) in HEADS else None
