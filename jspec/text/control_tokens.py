"""Conversations whose contents are plain text: control tokens come from the chat template alone.

A content that spells "<|im_end|>" is written by a tokenizer that knows no such token; the
template's own are known to it by names that nobody can guess.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tokenizers

from jspec.text.chat_template import map_strings, unused_characters


class ControlTokens(NamedTuple):
  """A tokenizer's special tokens as texts."""

  spelled: re.Pattern[str]  # any of them, the longest at a place
  begins: re.Pattern[str]  # the places where one begins, others within it included
  prefixes: frozenset[str]  # their beginnings
  longest: int


def control_tokens(backend: tokenizers.Tokenizer) -> ControlTokens | None:
  """None for a tokenizer that has none."""
  added = backend.get_added_tokens_decoder().values()
  texts = sorted((token.content for token in added if token.special and token.content),
                 key=len, reverse=True)
  if not texts:
    return None
  any_of = "|".join(map(re.escape, texts))
  prefixes = {text[:count] for text in texts for count in range(1, len(text))}
  return ControlTokens(re.compile(f"({any_of})"), re.compile(f"(?={any_of})"),
                       frozenset(prefixes), len(texts[0]))


def split_plain(tokens: ControlTokens, render: Callable[[Any], str], given: Any, text: str,
                template: str) -> list[str] | None:
  """A prompt as text, control token, text, ..., where these tokens are the template's own.

  The contents are rendered a second time with the first character of what spells a control token
  replaced by a private one: as long as before, not in the way of templates that trim, slice or
  loop. None where that changes no control token of the prompt.

  Args:
    render: writes what was given, with `template`.
    given: nested lists and dicts of the strings that clients give.
    text: `render(given)`.
  """
  found = tokens.spelled.findall(text)
  if not found:
    return None
  private: dict[str, str] = {}  # by the character that it stands for
  unused = unused_characters(given, template)

  def disguised(content: str) -> str:
    out = list(content)
    for at in _beginnings(tokens, content):
      if content[at] not in private:
        private[content[at]] = next(unused)
      out[at] = private[content[at]]
    return "".join(out)

  changed = map_strings(given, disguised)
  if not private:
    return None
  parts = tokens.spelled.split(render(changed))
  if parts[1::2] == found:
    return None
  for character, stand_in in private.items():
    for form in (stand_in, json.dumps(stand_in)[1:-1]):
      parts[::2] = [part.replace(form, character) for part in parts[::2]]
  return parts


def _beginnings(tokens: ControlTokens, content: str) -> set[int]:
  """Where a control token begins in a content, or may with what follows the content."""
  places = {match.start() for match in tokens.begins.finditer(content)}
  for end in {len(content), len(content.rstrip())}:
    for at in range(max(0, end - tokens.longest + 1), end):
      if content[at:end] in tokens.prefixes:
        places.add(at)
  return places


class PlainTokenizer(NamedTuple):
  """A tokenizer that knows its special tokens by other names only."""

  backend: tokenizers.Tokenizer
  names: Mapping[str, str]  # by the token's text
  ids: Mapping[int, int]  # of the tokens with other names -> the model's

  def encode(self, parts: list[str]) -> list[int]:
    """The ids of `split_plain`'s parts."""
    text = "".join(self.names[part] if i % 2 else part for i, part in enumerate(parts))
    return [self.ids.get(i, i) for i in self.backend.encode(text, add_special_tokens=False).ids]


def plain_tokenizer(backend: tokenizers.Tokenizer) -> PlainTokenizer:
  """A copy with new names for the special tokens, in its model's vocabulary, too."""
  stored = json.loads(backend.to_str())
  secret = secrets.token_hex(16)  # so that no client can write one
  special = [token for token in stored["added_tokens"] if token["special"]]
  names = {token["content"]: f"\U000f0000{secret}{i}\U000f0001" for i, token in enumerate(special)}
  for token in special:
    token["content"] = names[token["content"]]
  stored["post_processor"] = None
  model = stored["model"]
  if isinstance(model["vocab"], dict):
    model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
  else:  # Unigram's pieces with their scores
    model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
  if "merges" in model:
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [(a, b) for a, b in pairs if not {a, b, a + b} & names.keys()]
  if model.get("unk_token") in names:
    model["unk_token"] = names[model["unk_token"]]
  copy = tokenizers.Tokenizer.from_str(json.dumps(stored))
  ids = {new: old for text, name in names.items()
         if (new := copy.token_to_id(name)) is not None
         and (old := backend.token_to_id(text)) is not None}
  return PlainTokenizer(copy, names, ids)
