"""Sequences to train on: files of self-generated text, with the target's hidden states or without.

A folder holds part-00000.safetensors, part-00001.safetensors, ...; each has, for its N sequences
end to end (n tokens in all):

  token i32[n]; loss bool[n], the tokens to learn to predict, or prompt_len i32[N] if those are all
  behind the prompt; length i32[N]; index i32[N], the row of the list of prompts;
  feature? bf16[n, layers * E], hidden states side by side; 0 for the last token of a sequence,
    which no pass of the target has seen
and as metadata the fields of Origin, and a JSON list per sequence: sources, keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jspec.config import ModelConfig

SAMPLED_ROWS = 64  # of the embedding, for the fingerprint
# Of ModelConfig: how a model lies on its devices, not what it is.
PLACEMENT_FIELDS = ("num_kv_heads", "vocab_parts")


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One sequence as it is written."""

  index: int
  key: str  # equal for equal prompts
  source: str
  token: np.ndarray  # i32[n]
  loss: np.ndarray  # bool[n]
  feature: np.ndarray | None = None  # bf16[n - 1, layers * E]


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a folder of shards was made with."""

  target: str = "unknown"
  fingerprint: str = ""
  layers: tuple[int, ...] = ()  # whose hidden states are kept; named as in model.forward
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of sampling

  def __post_init__(self):
    if len(set(self.layers)) != len(self.layers):
      raise ValueError(f"hidden state layers {list(self.layers)} must differ from each other")

  def metadata(self) -> dict[str, str]:
    return {"target": self.target, "fingerprint": self.fingerprint,
            "hidden_state_layers": json.dumps(self.layers),
            "settings": json.dumps(self.settings, sort_keys=True)}


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
  """Sequences by number: tokens in memory, hidden states read from their files when asked for."""

  token: np.ndarray  # i32[n], end to end
  loss: np.ndarray  # bool[n]
  start: np.ndarray  # i64[N + 1], where each begins
  index: np.ndarray  # i32[N], rows of the list of prompts
  key: tuple[str, ...]  # equal for equal prompts
  source: tuple[str, ...]
  origin: Origin = Origin()
  files: tuple[Any, ...] = ()  # safetensors' lazy [tokens, layers * E]; none: no hidden states
  place: np.ndarray | None = None  # i64[N, 2], file and first row of each one's hidden states

  def __len__(self) -> int:
    return len(self.index)

  @property
  def length(self) -> np.ndarray:  # i64[N]
    return np.diff(self.start)

  @property
  def width(self) -> int:
    """E, of one layer's hidden state; 0 where there are none."""
    return self.files[0].get_shape()[1] // len(self.origin.layers) if self.files else 0

  def span(self, i: int) -> slice:
    """Where sequence i lies in token and loss."""
    return slice(int(self.start[i]), int(self.start[i + 1]))

  def feature(self, i: int, count: int) -> np.ndarray:
    """bf16[count, layers * E], the hidden states of the first tokens of sequence i."""
    if self.place is None:
      raise ValueError("these sequences have no hidden states: jspec train-data "
                       "--features keeps them")
    file, row = map(int, self.place[i])
    return self.files[file][row:row + count]

  def select(self, rows: Sequence[int] | np.ndarray) -> Sequences:
    """Some of them, in this order."""
    rows = np.asarray(rows, np.int64)
    take = lambda array: (np.concatenate([array[self.span(i)] for i in rows]) if len(rows)
                          else array[:0])
    return dataclasses.replace(
        self, token=take(self.token), loss=take(self.loss), start=_starts(self.length[rows]),
        index=self.index[rows], key=tuple(self.key[i] for i in rows),
        source=tuple(self.source[i] for i in rows),
        place=None if self.place is None else self.place[rows])

  def all_learnt(self) -> Sequences:
    """Prompts are to be learnt as well: a head's features there come at no cost."""
    return dataclasses.replace(self, loss=np.ones_like(self.loss))

  def split(self, validation: float, seed: int) -> tuple[Sequences, Sequences]:
    """(training, validation) by prompt, as conversations.split does it."""
    held = np.array([held_out(key, validation, seed) for key in self.key], bool)
    return self.select(np.flatnonzero(~held)), self.select(np.flatnonzero(held))


def held_out(key: str, validation: float, seed: int) -> bool:
  """Whether a prompt is one to validate with, by its key alone: adding data moves none."""
  if not 0 <= validation < 1:
    raise ValueError(f"validation={validation} must be a share in [0, 1)")
  digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
  return int.from_bytes(digest[:8], "big") < validation * 2**64


def in_memory(tokens: Sequence[np.ndarray], losses: Sequence[np.ndarray], keys: Sequence[str],
              sources: Sequence[str]) -> Sequences:
  """Sequences that come from no file."""
  return Sequences(np.concatenate(tokens), np.concatenate(losses), _starts(list(map(len, tokens))),
                   np.arange(len(tokens), dtype=np.int32), tuple(keys), tuple(sources))


# ------------------------------------------------------------------ files


def shard_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
  return sorted(pathlib.Path(folder).glob("part-*.safetensors"))


def write_shard(folder: str | pathlib.Path, part: int, rows: Sequence[Row],
                origin: Origin) -> pathlib.Path:
  """Writes one file, which appears whole or not at all."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tensors = {"token": np.concatenate([r.token for r in rows]).astype(np.int32),
             "loss": np.concatenate([r.loss for r in rows]).astype(bool),
             "length": np.array([len(r.token) for r in rows], np.int32),
             "index": np.array([r.index for r in rows], np.int32)}
  if origin.layers:
    tensors["feature"] = np.concatenate([_whole(r, len(origin.layers)) for r in rows])
  metadata = origin.metadata() | {"sources": json.dumps([r.source for r in rows]),
                                  "keys": json.dumps([r.key for r in rows])}
  file = folder / f"part-{part:05d}.safetensors"
  unfinished = file.with_suffix(".tmp")
  safetensors.numpy.save_file(tensors, unfinished, metadata)
  with open(unfinished, "rb") as stream:
    os.fsync(stream.fileno())
  os.replace(unfinished, file)
  return file


def _whole(row: Row, num_layers: int) -> np.ndarray:
  """bf16[n, layers * E]: the hidden states of all tokens, 0 for the last."""
  given = row.feature
  if given is None or given.shape[0] != len(row.token) - 1 or given.shape[1] % num_layers:
    raise ValueError(f"hidden states of {len(row.token)} tokens and {num_layers} layers must be "
                     f"[{len(row.token) - 1}, {num_layers} * E], got "
                     f"{None if given is None else given.shape}")
  return np.concatenate([given, np.zeros_like(given[:1])]).astype(ml_dtypes.bfloat16)


def read_shards(folder: str | pathlib.Path, target_fingerprint: str | None = None) -> Sequences:
  """All sequences of a folder, by index; data larger than memory stays on disk.

  target_fingerprint: of the target they are for; ValueError if another one wrote them.
  """
  files = shard_files(folder)
  if not files:
    raise ValueError(f"{folder} holds no part-*.safetensors: jspec train-data "
                     "writes them")
  shards = [_read(file) for file in files]
  origin = shards[0].origin
  for file, shard in zip(files, shards, strict=True):
    if shard.origin != origin:
      raise ValueError(f"{file} was made with {shard.origin}, but {files[0].name} with {origin}")
  if target_fingerprint is not None and origin.fingerprint != target_fingerprint:
    raise ValueError(f"{folder} was generated by target {origin.target!r} with fingerprint "
                     f"{origin.fingerprint or 'unknown'}, but this target has fingerprint "
                     f"{target_fingerprint}: hidden states and text of one do not train a head "
                     "of the other")
  return _joined(folder, shards)


def join(parts: Sequence[Sequences]) -> Sequences:
  """The sequences of several folders, one after the other; all of one target and its layers."""
  first, *others = parts
  for other in others:
    if (other.origin.fingerprint, other.origin.layers) != (
        first.origin.fingerprint, first.origin.layers):
      raise ValueError(f"shards of {other.origin} do not go with those of {first.origin}")
  if not others:
    return first
  opened = [part.files for part in parts]
  if any(opened) != all(opened):
    raise ValueError("some folders of shards have hidden states, some have none")
  before = np.cumsum([0, *map(len, opened)])
  return dataclasses.replace(
      first, token=np.concatenate([p.token for p in parts]),
      loss=np.concatenate([p.loss for p in parts]),
      start=_starts(np.concatenate([p.length for p in parts])),
      index=np.arange(sum(map(len, parts)), dtype=np.int32),
      key=tuple(key for p in parts for key in p.key),
      source=tuple(source for p in parts for source in p.source),
      files=tuple(file for files in opened for file in files),
      place=None if not all(opened) else np.concatenate(
          [p.place + [by, 0] for p, by in zip(parts, before, strict=False) if p.place is not None]))


def _joined(folder: str | pathlib.Path, shards: Sequence[Sequences]) -> Sequences:
  index = np.concatenate([s.index for s in shards])
  unique, count = np.unique(index, return_counts=True)
  if count.max() > 1:
    raise ValueError(f"{folder} holds prompt {unique[count.argmax()]} more than once")
  opened = [s.files for s in shards]
  if any(opened) != all(opened):
    raise ValueError(f"{folder}: some shards have hidden states, some have none")
  place = np.concatenate([np.stack([np.full(len(s), i), s.start[:-1]], axis=1)
                          for i, s in enumerate(shards)]) if all(opened) else None
  join = lambda name: np.concatenate([getattr(s, name) for s in shards])
  flat = lambda name: tuple(value for s in shards for value in getattr(s, name))
  whole = Sequences(join("token"), join("loss"), _starts(join("length")), index, flat("key"),
                    flat("source"), shards[0].origin, flat("files"), place)
  # Answers are written as they are finished, which depends on the speed of others.
  return whole.select(np.argsort(index))


def _read(file: pathlib.Path) -> Sequences:
  try:
    content = safetensors.safe_open(file, "numpy")
    metadata, names = content.metadata() or {}, set(content.keys())
    length, index, token = (content.get_tensor(n) for n in ("length", "index", "token"))
    if "loss" in names:
      loss = content.get_tensor("loss")
    else:
      within = np.arange(len(token)) - np.repeat(_starts(length)[:-1], length)
      loss = within >= np.repeat(content.get_tensor("prompt_len"), length)
    layers = tuple(json.loads(metadata.get("hidden_state_layers", "[]")))
    sources, keys = (json.loads(metadata.get(n, "null")) for n in ("sources", "keys"))
    settings = json.loads(metadata.get("settings", "{}"))
  except (safetensors.SafetensorError, ValueError) as error:
    raise ValueError(f"{file} is damaged or not a shard: {error}") from None
  start = _starts(length)
  if start[-1] != len(token) or len(loss) != len(token) or len(index) != len(length):
    raise ValueError(f"{file} is damaged: {len(length)} lengths sum to {start[-1]}, but there are "
                     f"{len(token)} tokens, {len(loss)} loss flags, {len(index)} indices")
  if "feature" in names and not layers:
    raise ValueError(f"{file} has hidden states, but its metadata does not say of which layers")
  opened = (content.get_slice("feature"),) if "feature" in names else ()
  if opened and (opened[0].get_shape()[0] != len(token) or opened[0].get_shape()[1] % len(layers)):
    raise ValueError(f"{file} is damaged: hidden states {opened[0].get_shape()} for {len(token)} "
                     f"tokens and {len(layers)} layers")
  prompts = [token[a:b][:int(loss[a:b].argmax())] for a, b in zip(start, start[1:], strict=False)]
  return Sequences(
      token, loss, start, index, tuple(keys or map(_token_key, prompts)),
      tuple(sources or [file.stem] * len(length)),
      Origin(metadata.get("target", "unknown"), metadata.get("fingerprint", ""), layers, settings),
      opened)


def _token_key(prompt: np.ndarray) -> str:
  return hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest()[:16]


def _starts(length: Sequence[int] | np.ndarray) -> np.ndarray:
  return np.concatenate([[0], np.cumsum(length, dtype=np.int64)])


# ------------------------------------------------------- target and vocabulary


def fingerprint(config: ModelConfig, params: Any) -> str:
  """Equal for the same target, in float32 or bfloat16, on one device or on several."""
  digest = hashlib.sha256()
  fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in PLACEMENT_FIELDS}
  digest.update(json.dumps(fields, sort_keys=True).encode())
  rows = np.linspace(0, config.vocab_size - 1, min(SAMPLED_ROWS, config.vocab_size)).astype(int)
  # A fine-tuned target may well have the embedding of the one it began as.
  for sample in (params["embed"][rows], *(layer[name]["w"][:2] for layer in params["layers"]
                                          for name in ("q", "v", "o", "up", "down"))):
    digest.update(np.asarray(sample).astype(ml_dtypes.bfloat16).tobytes())
  return digest.hexdigest()[:16]


def draft_vocabulary(sequences: Sequences, size: int, vocab_size: int) -> np.ndarray:
  """i32[size], ascending: the tokens most often to be predicted, the lowest ids among equals."""
  if not 1 <= size <= vocab_size:
    raise ValueError(f"draft vocabulary of {size} tokens: must lie in 1..{vocab_size}")
  count = np.bincount(sequences.token[sequences.loss], minlength=vocab_size)
  if len(count) > vocab_size:
    raise ValueError(f"the sequences have token {len(count) - 1}, the vocabulary only {vocab_size}")
  return np.sort(np.argsort(-count, kind="stable")[:size]).astype(np.int32)
