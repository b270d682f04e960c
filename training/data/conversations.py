"""Conversations and plain text from files, and their tokens with a mask of what is to be learnt."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.config.checks import parse_json
from jspec.text.chat_template import render_chat
from jspec.text.tokenizer import Tokenizer
from jspec.training.data.shards import Sequences, held_out, in_memory

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
SUFFIXES = (".json", ".jsonl", ".txt")  # what is read of a folder
FORMATS = ('{"conversations": [{"from", "value"} or {"role", "content"}]} (ShareGPT, SpecForge), '
           '{"messages": [{"role", "content"}]}, {"prompt", "response"?}, {"turns"} (Spec-Bench)')
_JSON = re.compile(r"\s*(\{|\[\s*[{\]])")  # how JSON lines and a JSON list of objects begin


@dataclasses.dataclass(frozen=True)
class Conversation:
  """What was said, or a document without speakers."""

  source: str
  messages: tuple[Mapping[str, str], ...] = ()  # {"role", "content"}, roles as in chat templates
  text: str = ""  # a plain document: no messages then

  @functools.cached_property
  def key(self) -> str:
    """Equal for equal prompts, whatever was said before and after: the first thing a user says."""
    said = [m["content"] for m in self.messages if m["role"] == "user"]
    prompt = said[0] if said else self.text or json.dumps([dict(m) for m in self.messages])
    return hashlib.sha256(" ".join(prompt.split()).encode("utf-8", "replace")).hexdigest()[:16]

  @property
  def prompt(self) -> tuple[Mapping[str, str], ...]:
    """The messages up to what the user says last; () if there is no user."""
    last = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=-1)
    return self.messages[:last + 1]


# ---------------------------------------------------------------- reading


def read(paths: Sequence[str | pathlib.Path],
         faults: list[str] | None = None) -> list[Conversation]:
  """The conversations of these files, globs and folders; formats are told by their content.

  faults: takes what is wrong with rows that are left out for it; None: the first one is raised.
  """
  found = [c for file in _files(paths) for c in _read_file(file, faults)]
  if not found:
    raise ValueError("no data: the list of files is empty")
  return found


def split(conversations: Sequence[Conversation], validation: float,
          seed: int) -> tuple[list[Conversation], list[Conversation]]:
  """(training, validation) by prompt; a prompt's side depends on itself and the seed alone."""
  sides: tuple[list[Conversation], list[Conversation]] = ([], [])
  for conversation in conversations:
    sides[held_out(conversation.key, validation, seed)].append(conversation)
  return sides


def _files(paths: Sequence[str | pathlib.Path]) -> Iterator[pathlib.Path]:
  for path in map(str, paths):
    here = pathlib.Path(path)
    if here.is_file():
      yield here
      continue
    if here.is_dir():
      files = sorted(p for p in here.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    else:
      files = [p for p in map(pathlib.Path, sorted(glob.glob(path, recursive=True)))
               if p.is_file()]
    if not files:
      reason = (f"holds no {', '.join(SUFFIXES)} file" if here.is_dir() else
                "matches no file" if glob.has_magic(path) else "does not exist")
      raise ValueError(f"{path} {reason}")
    yield from files


def _read_file(file: pathlib.Path, faults: list[str] | None) -> list[Conversation]:
  try:
    text = file.read_bytes().decode("utf-8-sig")
  except OSError as error:
    raise ValueError(f"can't read {file}: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise ValueError(f"{file} is not UTF-8 text: invalid byte at offset {error.start}") from None
  before = len(faults or ())
  if _JSON.match(text):
    found = []
    for place, row in _rows(file, text):
      with kept(faults):
        found += _conversation(place, row() if callable(row) else row, file.stem)
  elif text.strip() and file.suffix in (".json", ".jsonl"):
    raise ValueError(f"{file}:1: neither a JSON object nor a list of them")
  else:
    found = [Conversation(file.stem, text=p.strip()) for p in re.split(r"\n\s*\n", text)
             if p.strip()]
  if faults and len(faults) > before and not found:
    raise ValueError(f"{file} holds {len(faults) - before} faulty rows and no other; the first: "
                     f"{faults[before]}")
  if not found:
    raise ValueError(f"{file} is empty: it holds no conversation and no text")
  return found


@contextlib.contextmanager
def kept(faults: list[str] | None) -> Iterator[None]:
  """A ValueError within goes to `faults`, if there are any to keep."""
  try:
    yield
  except ValueError as error:
    if faults is None:
      raise
    faults.append(str(error))


def told(faults: Sequence[str]) -> str:
  """A sentence about what was left out."""
  rows = "1 faulty row" if len(faults) == 1 else f"{len(faults)} faulty rows"
  return f"left out {rows}; the first: {faults[0]}"


def _rows(file: pathlib.Path, text: str) -> Iterator[tuple[str, Any]]:
  """(where it is, row) of a JSON list, (where it is, what reads the row) of JSON lines."""
  if text.lstrip().startswith("["):
    try:
      rows = parse_json(text)
    except ValueError as error:
      raise ValueError(f"{file} is not valid JSON: {error}") from None
    yield from ((f"{file}, entry {i}", row) for i, row in enumerate(rows))
    return
  for i, line in enumerate(text.split("\n"), start=1):
    if line.strip():
      yield f"{file}:{i}", functools.partial(_json_line, f"{file}:{i}", line)


def _json_line(place: str, line: str) -> Any:
  try:
    return parse_json(line)
  except ValueError as error:
    raise ValueError(f"{place}: not valid JSON: {error}") from None


def _conversation(place: str, row: Any, file_source: str) -> list[Conversation]:
  """One; none for an empty conversation, as ShareGPT has them."""
  if not isinstance(row, Mapping):
    raise ValueError(f"{place}: expected an object, got {row!r:.60}")
  source = str(row.get("source", row.get("category", file_source)))
  if "conversations" in row:
    messages = _messages(place, row["conversations"])
  elif "messages" in row:
    messages = _messages(place, row["messages"])
  elif "turns" in row or "prompt" in row:
    messages = _prompt(place, row["turns"] if "turns" in row else row["prompt"])
    response = row.get("response")
    if not isinstance(response, str | None):
      raise ValueError(f"{place}: 'response' must be a string, got {response!r:.60}")
    if messages and response:
      messages.append({"role": "assistant", "content": response})
  else:
    raise ValueError(f"{place}: keys {sorted(map(str, row))} are none of {FORMATS}")
  return [Conversation(source, tuple(messages))] if messages else []


def _prompt(place: str, prompt: Any) -> list[dict[str, str]]:
  if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
    return _messages(place, prompt)
  # Of several things to say the later ones wait for answers that are not there.
  said = prompt[0] if isinstance(prompt, list) and prompt else prompt
  if not isinstance(said, str) or not said.strip():
    raise ValueError(f"{place}: a prompt must be text or a list of turns, got {prompt!r:.60}")
  return [{"role": "user", "content": said}]


def _messages(place: str, turns: Any) -> list[dict[str, str]]:
  if not isinstance(turns, list):
    raise ValueError(f"{place}: a conversation must be a list of turns, got {turns!r:.60}")
  messages = []
  for turn in turns:
    role, text = (_either(turn, *keys) for keys in (("role", "from"), ("content", "value")))
    if not isinstance(text, str):
      raise ValueError(f"{place}: a turn must be an object with 'role' and the string 'content', "
                       f"or 'from' and 'value', got {turn!r:.60}")
    if not isinstance(role, str) or role not in ROLES:
      raise ValueError(f"{place}: role {role!r} is not one of {', '.join(ROLES)}")
    messages.append({"role": ROLES[role], "content": text})
  return messages


def _either(turn: Any, key: str, other: str) -> Any:
  return turn.get(key, turn.get(other)) if isinstance(turn, Mapping) else None


# --------------------------------------------------------------- encoding


def encode(conversation: Conversation,
           tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
  """The conversation's sequences: one, where its chat template only ever appends.

  Templates that change earlier turns when more follows (Qwen3's drops earlier thinking) make
  several: each answer is learnt after the very text that the target had before it.

  Returns:
    Of each sequence (tokens i32[n], bool[n]: the assistant's words and its end of turn; all of a
    plain text).

  Raises:
    ValueError: where an answer does not continue the template's own generation prompt.
  """
  if conversation.text:
    tokens = np.array(tokenizer.encode(conversation.text), np.int32)
    return [(tokens, np.ones(len(tokens), bool))]
  return [_learnt(tokenizer, text, turns) for text, turns in _sequences(conversation, tokenizer)]


def _sequences(conversation: Conversation, tokenizer: Tokenizer
               ) -> list[tuple[str, list[tuple[str, str]]]]:
  """(text, its answers: the text before and with each), a new one where a template changes it."""
  messages = conversation.messages
  out: list[tuple[str, list[tuple[str, str]]]] = []
  text, turns = "", list[tuple[str, str]]()
  for i, message in enumerate(messages):
    if message["role"] != "assistant" or not i:  # what answers nothing nobody will ask for
      continue
    before = _render(tokenizer, messages[:i], True)
    after = _render(tokenizer, messages[:i + 1], False)
    if not after.startswith(before):
      raise ValueError(f"turn {i} of a conversation of {conversation.source!r} does not continue "
                       "the chat template's generation prompt: the assistant's tokens cannot be "
                       "told")
    if turns and not before.startswith(text):
      out.append((text, turns))
      turns = []
    text, turns = after, [*turns, (before, after)]
  whole = _render(tokenizer, messages, False)
  return [*out, (whole if whole.startswith(text) else text, turns)]


def _learnt(tokenizer: Tokenizer, text: str,
            turns: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
  tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
  loss = np.zeros(len(tokens), bool)
  for pair in turns:
    start, end = (_common(tokens, tokenizer.encode(t, add_special_tokens=False)) for t in pair)
    # What a template writes behind the end of the turn, the model does not.
    ends = np.flatnonzero(np.isin(tokens[start:end], tokenizer.eos_ids))
    loss[start:start + ends[-1] + 1 if len(ends) else end] = True
  return tokens, loss


def encode_all(conversations: Iterable[Conversation], tokenizer: Tokenizer,
               faults: list[str] | None = None) -> Sequences:
  """The conversations as sequences to train on, without hidden states. faults: see read."""
  conversations = list(conversations)
  encoded: list[tuple[Conversation, np.ndarray, np.ndarray]] = []
  for conversation in conversations:
    with kept(faults):
      encoded += [(conversation, *pair) for pair in encode(conversation, tokenizer)]
  if not any(loss.any() for _, _, loss in encoded):
    names = ", ".join(sorted({c.source for c in conversations})) or "an empty list"
    wrong = f" ({told(faults)})" if faults else ""
    raise ValueError(f"no assistant turns in {names}{wrong}: generate answers first with "
                     "jspec train-data")
  return in_memory([tokens for _, tokens, _ in encoded], [loss for _, _, loss in encoded],
                   [c.key for c, _, _ in encoded], [c.source for c, _, _ in encoded])


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]],
            add_generation_prompt: bool) -> str:
  if tokenizer.chat_template is None:
    raise ValueError("this model has no chat template: only plain texts can be learnt")
  return render_chat(tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens,
                     add_generation_prompt=add_generation_prompt)


def _common(tokens: np.ndarray, prefix: Sequence[int]) -> int:
  """How many tokens agree: all of the prefix, unless one spans its end."""
  count = min(len(tokens), len(prefix))
  differs = np.flatnonzero(tokens[:count] != np.array(prefix[:count], tokens.dtype))
  return int(differs[0]) if len(differs) else count
