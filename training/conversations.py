"""Conversations and plain text from files, and their tokens with a mask of what is to be learnt."""

from __future__ import annotations

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

from jspec.chat_template import render_chat
from jspec.tokenizer import Tokenizer
from training.shards import Sequences, held_out, in_memory

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
SUFFIXES = (".json", ".jsonl", ".txt")  # what is read of a folder
FORMATS = ('{"conversations": [{"from", "value"}]} (ShareGPT), '
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


def read(paths: Sequence[str | pathlib.Path]) -> list[Conversation]:
  """The conversations of these files, globs and folders; formats are told by their content."""
  found = [c for file in _files(paths) for c in _read_file(file)]
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


def _read_file(file: pathlib.Path) -> list[Conversation]:
  try:
    text = file.read_bytes().decode("utf-8-sig")
  except OSError as error:
    raise ValueError(f"can't read {file}: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise ValueError(f"{file} is not UTF-8 text: invalid byte at offset {error.start}") from None
  if _JSON.match(text):
    rows = _rows(file, text)
    found = [c for place, row in rows if (c := _conversation(place, row, file.stem)) is not None]
  elif text.strip() and file.suffix in (".json", ".jsonl"):
    raise ValueError(f"{file}:1: neither a JSON object nor a list of them")
  else:
    found = [Conversation(file.stem, text=p.strip()) for p in re.split(r"\n\s*\n", text)
             if p.strip()]
  if not found:
    raise ValueError(f"{file} is empty: it holds no conversation and no text")
  return found


def _rows(file: pathlib.Path, text: str) -> Iterator[tuple[str, Any]]:
  """(where it is, row) of JSON lines or of a JSON list."""
  if text.lstrip().startswith("["):
    try:
      rows = json.loads(text)
    except ValueError as error:
      raise ValueError(f"{file} is not valid JSON: {error}") from None
    yield from ((f"{file}, entry {i}", row) for i, row in enumerate(rows))
    return
  for i, line in enumerate(text.split("\n"), start=1):
    if line.strip():
      try:
        yield f"{file}:{i}", json.loads(line)
      except ValueError as error:
        raise ValueError(f"{file}:{i}: not valid JSON: {error}") from None


def _conversation(place: str, row: Any, file_source: str) -> Conversation | None:
  """None for an empty conversation, as ShareGPT has them."""
  if not isinstance(row, Mapping):
    raise ValueError(f"{place}: expected an object, got {row!r:.60}")
  source = str(row.get("source", row.get("category", file_source)))
  if "conversations" in row:
    messages = _messages(place, row["conversations"], "from", "value")
  elif "messages" in row:
    messages = _messages(place, row["messages"], "role", "content")
  elif "turns" in row or "prompt" in row:
    messages = _prompt(place, row["turns"] if "turns" in row else row["prompt"])
    response = row.get("response")
    if not isinstance(response, str | None):
      raise ValueError(f"{place}: 'response' must be a string, got {response!r:.60}")
    if messages and response:
      messages.append({"role": "assistant", "content": response})
  else:
    raise ValueError(f"{place}: keys {sorted(map(str, row))} are none of {FORMATS}")
  return Conversation(source, tuple(messages)) if messages else None


def _prompt(place: str, prompt: Any) -> list[dict[str, str]]:
  if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
    return _messages(place, prompt, "role", "content")
  # Of several things to say the later ones wait for answers that are not there.
  said = prompt[0] if isinstance(prompt, list) and prompt else prompt
  if not isinstance(said, str) or not said.strip():
    raise ValueError(f"{place}: a prompt must be text or a list of turns, got {prompt!r:.60}")
  return [{"role": "user", "content": said}]


def _messages(place: str, turns: Any, role_key: str, text_key: str) -> list[dict[str, str]]:
  if not isinstance(turns, list):
    raise ValueError(f"{place}: a conversation must be a list of turns, got {turns!r:.60}")
  messages = []
  for turn in turns:
    if not isinstance(turn, Mapping) or not isinstance(turn.get(text_key), str):
      raise ValueError(f"{place}: a turn must be an object with {role_key!r} and the string "
                       f"{text_key!r}, got {turn!r:.60}")
    role = turn.get(role_key)
    if role not in ROLES:
      raise ValueError(f"{place}: role {role!r} is not one of {', '.join(ROLES)}")
    messages.append({"role": ROLES[role], "content": turn[text_key]})
  return messages


# --------------------------------------------------------------- encoding


def encode(conversation: Conversation, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
  """(tokens i32[n], bool[n]: the assistant's words and its end of turn; all of plain text)."""
  if conversation.text:
    tokens = np.array(tokenizer.encode(conversation.text), np.int32)
    return tokens, np.ones(len(tokens), bool)
  messages = conversation.messages
  tokens = np.array(tokenizer.apply_chat_template(messages, False), np.int32)
  loss = np.zeros(len(tokens), bool)
  whole = _render(tokenizer, messages, False)
  for i, message in enumerate(messages):
    if message["role"] != "assistant" or not i:  # what answers nothing nobody will ask for
      continue
    before = _render(tokenizer, messages[:i], True)
    after = _render(tokenizer, messages[:i + 1], False)
    if not (after.startswith(before) and whole.startswith(after)):
      raise ValueError(f"the chat template changes earlier text when more follows, at turn {i} of "
                       f"a conversation of {conversation.source!r}: the assistant's tokens can "
                       "only be told where a template appends")
    start, end = (_common(tokens, tokenizer.encode(t, add_special_tokens=False))
                  for t in (before, after))
    # What a template writes behind the end of the turn, the model does not.
    ends = np.flatnonzero(np.isin(tokens[start:end], tokenizer.eos_ids))
    loss[start:start + ends[-1] + 1 if len(ends) else end] = True
  return tokens, loss


def encode_all(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> Sequences:
  """The conversations as sequences to train on, without hidden states."""
  conversations = list(conversations)
  encoded = [encode(c, tokenizer) for c in conversations]
  if not any(loss.any() for _, loss in encoded):
    names = ", ".join(sorted({c.source for c in conversations})) or "an empty list"
    raise ValueError(f"no assistant turns in {names}: generate answers first with "
                     "python -m training.generate")
  return in_memory([tokens for tokens, _ in encoded], [loss for _, loss in encoded],
                   [c.key for c in conversations], [c.source for c in conversations])


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]],
            add_generation_prompt: bool) -> str:
  assert tokenizer.chat_template is not None
  return render_chat(tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens,
                     add_generation_prompt=add_generation_prompt)


def _common(tokens: np.ndarray, prefix: Sequence[int]) -> int:
  """How many tokens agree: all of the prefix, unless one spans its end."""
  count = min(len(tokens), len(prefix))
  differs = np.flatnonzero(tokens[:count] != np.array(prefix[:count], tokens.dtype))
  return int(differs[0]) if len(differs) else count
