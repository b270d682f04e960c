"""Text <-> token ids over the `tokenizers` library, chat prompts, incremental detokenization."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
import tokenizers.decoders

from jspec.config.checks import FieldError
from jspec.text import control_tokens
from jspec.text.chat_template import Message, render_chat

_MAX_HELD = 16  # tokens; no decoder that is not known here splits a character over more
_NO_CHARACTER = "\ufffd"  # what bytes that are no UTF-8 are shown as
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece spells a byte


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A model's tokenizer with everything around it that generation needs."""

  backend: tokenizers.Tokenizer
  eos_ids: tuple[int, ...]
  bos_id: int | None = None
  chat_template: str | None = None
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest token id; the model's embedding may have more rows."""
    return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    if not isinstance(text, str):
      raise FieldError("prompt", f"a prompt must be a string, got {type(text).__name__}")
    try:
      # A batch of one: other threads run meanwhile, as they don't beside backend.encode.
      return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError:  # a lone surrogate: str without a UTF-8 form
      raise FieldError("prompt", "a prompt must be valid Unicode text") from None

  def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The tokens' text; ids without a token have none."""
    ids = [int(i) for i in ids]
    text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
    if self.has_byte_tokens and _NO_CHARACTER in text:
      detokenizer = Detokenizer(self, skip_special_tokens)
      return detokenizer.push(ids) + detokenizer.flush()
    return text

  def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, *,
                          continue_final_message: bool = False, chat_template: str | None = None,
                          chat_template_kwargs: Mapping[str, Any] | None = None,
                          tools: Sequence[Mapping[str, Any]] | None = None,
                          plain_content: bool = False) -> list[int]:
    """The prompt ids of a conversation; ValueError if there is no template for it.

    Args:
      chat_template: in place of the model's own. The others: see render_chat.
      plain_content: what spells a special token in messages, tools and chat_template_kwargs is
        text like any other. Prompts without such are the same either way.
    """
    template = self.chat_template if chat_template is None else chat_template
    if template is None:
      raise ValueError("this model has no chat template; give a plain prompt instead of messages")

    def render(given: Mapping[str, Any]) -> str:
      return render_chat(template, special_tokens=self.special_tokens,
                         add_generation_prompt=add_generation_prompt,
                         continue_final_message=continue_final_message, **given)

    given = {"messages": messages, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
    text = render(given)
    if plain_content and self._control_tokens is not None:
      parts = control_tokens.split_plain(self._control_tokens, render, given, text, template)
      if parts is not None:
        return self._plain.encode(parts)
    return self.encode(text, add_special_tokens=False)

  def warm_up(self) -> None:
    """Makes what the first message that spells a control token would wait for."""
    _ = self._plain

  @functools.cached_property
  def _control_tokens(self) -> control_tokens.ControlTokens | None:
    return control_tokens.control_tokens(self.backend)

  @functools.cached_property
  def _plain(self) -> control_tokens.PlainTokenizer:
    return control_tokens.plain_tokenizer(self.backend)

  def token_text(self, token: int) -> str:
    """One token for people to read: its text, or its name if it is special or half a character."""
    spelled = self.backend.id_to_token(token) or ""
    text = self._text_within(spelled)
    return text if text and _NO_CHARACTER not in text else spelled

  @functools.cached_property
  def longest_token(self) -> int:
    """No token stands for more characters than this."""
    return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

  def token_bytes(self, token: int) -> bytes | None:
    """A token's UTF-8, which may be less than a character; None if it has none.

    Those of a text's tokens join to the text, but for a space that the first one may lose.
    """
    spelled = self.backend.id_to_token(token) or ""
    if self.is_byte_level:
      return _spelled_bytes(spelled)
    if self.has_byte_tokens and _BYTE_TOKEN.fullmatch(spelled):
      return bytes.fromhex(spelled[3:5])
    text = self._text_within(spelled)
    return None if _NO_CHARACTER in text and _NO_CHARACTER not in spelled else text.encode()

  @functools.cached_property
  def is_byte_level(self) -> bool:
    """Whether tokens are spelled in GPT-2's alphabet of 256 bytes."""
    return isinstance(self._decoder, tokenizers.decoders.ByteLevel)

  @functools.cached_property
  def has_byte_tokens(self) -> bool:
    """Whether SentencePiece's <0x41> stands for a byte."""
    return self.join(["<0x41>"]) == "A"

  @functools.cached_property
  def _decoder(self) -> Any:
    return self.backend.decoder

  def join(self, spelled: list[str]) -> str:
    """The text of tokens that are given as the vocabulary spells them."""
    return " ".join(spelled) if self._decoder is None else self._decoder.decode(spelled)

  def _text_within(self, spelled: str) -> str:
    """A token's text where it is not the first, which may lose its space."""
    if not spelled or self.is_byte_level:
      return self.join([spelled])
    return self.join([_NO_CHARACTER, spelled])[len(_NO_CHARACTER):]

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids that decode leaves out."""
    added = self.backend.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes the files that load_tokenizer, and transformers, read it from."""
    folder = pathlib.Path(folder)
    self.backend.save(str(folder / "tokenizer.json"))
    spelled = {} if self.bos_id is None else {"bos_token": self.backend.id_to_token(self.bos_id)}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **spelled,
                              **self.special_tokens}
    if self.chat_template is not None:
      config["chat_template"] = self.chat_template
    for name, content in (("tokenizer_config.json", config),
                          ("generation_config.json", {"eos_token_id": list(self.eos_ids)})):
      (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

  def vocab_hash(self) -> str:
    """Equal for tokenizers with the same token -> id map: what a draft model must share."""
    vocab = self.backend.get_vocab(with_added_tokens=True)
    text = json.dumps(sorted(vocab.items()), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Detokenizer:
  """Text of a growing list of ids, never half a character.

  The deltas join to what `decode(prompt_ids + ids)` has beyond `decode(prompt_ids)`. Bytes are
  decoded one by one, those of byte-level vocabularies and SentencePiece's byte tokens; of these an
  invalid one is one U+FFFD and leaves its neighbours alone, as in SentencePiece itself (the
  `tokenizers` library gives up the whole run). Other decoders treat the first token apart, so a
  token is decoded after those of the last delta: O(1) per token either way.

  Args:
    prompt_ids: what the text continues; their own text is whole.
  """

  def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True,
               prompt_ids: Sequence[int] = ()):
    self._tokenizer = tokenizer
    self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    self._bytes: list[str] = []  # byte tokens that begin a character
    self._pending: list[str] = []  # other tokens without a delta yet
    self._context: list[str] = []  # tokens of the last delta
    if not tokenizer.is_byte_level:
      last = next((token for i in reversed(prompt_ids) if (token := self._spelled(i))), None)
      if last is not None:
        self._context = [_NO_CHARACTER if _BYTE_TOKEN.fullmatch(last) else last]

  def push(self, ids: Iterable[int]) -> str:
    """The text that these ids complete."""
    tokens = [token for i in ids if (token := self._spelled(int(i))) is not None]
    if self._tokenizer.is_byte_level:
      return self._utf8.decode(b"".join(map(_spelled_bytes, tokens)))
    return "".join(map(self._next, tokens))

  def flush(self) -> str:
    """What was held back: the generation is over."""
    return self._utf8.decode(b"", final=True) + self._invalid(len(self._bytes)) + self._delta(0)

  def _next(self, token: str) -> str:
    if not self._tokenizer.has_byte_tokens:
      self._pending.append(token)
      return self._delta(held=_MAX_HELD)
    if _BYTE_TOKEN.fullmatch(token):
      self._bytes.append(token)
      return self._characters()
    text = self._invalid(len(self._bytes))
    self._pending.append(token)
    return text + self._delta(held=0)

  def _characters(self) -> str:
    """What the bytes have come to; the beginning of a character is kept."""
    text = ""
    while self._bytes:
      try:
        raw = bytes.fromhex("".join(token[3:5] for token in self._bytes))
        complete, _ = codecs.utf_8_decode(raw, "strict", False)
      except UnicodeDecodeError:
        text += self._invalid(1)
        continue
      if not complete:
        break
      self._pending, self._bytes = self._bytes, []
      text += self._delta(held=0)
    return text

  def _invalid(self, count: int) -> str:
    """The first of the bytes are part of no character."""
    if count:
      self._bytes, self._context = self._bytes[count:], [_NO_CHARACTER]
    return _NO_CHARACTER * count

  def _delta(self, held: int) -> str:
    """The text of the pending tokens; none if it ends in half a character, up to `held` tokens."""
    if not self._pending:
      return ""
    text = self._tokenizer.join(self._context + self._pending)
    if text.endswith(_NO_CHARACTER) and len(self._pending) < held:
      return ""
    delta = text[len(self._tokenizer.join(self._context)):]
    before = [] if delta else self._context[-_MAX_HELD:]
    self._context, self._pending = before + self._pending, []
    return delta

  def _spelled(self, token: int) -> str | None:
    """None where it has no text: special tokens, ids that only the model's embedding has."""
    return None if token in self._skipped else self._tokenizer.backend.id_to_token(token)


def _spelled_bytes(spelled: str) -> bytes:
  """The bytes of a token of a byte-level vocabulary."""
  try:
    return bytes(map(_BYTE_OF.__getitem__, spelled))
  except KeyError:  # an added token is spelled as is
    return spelled.encode()


def _byte_alphabet() -> dict[str, int]:
  """GPT-2's spelling of the 256 bytes: printable ones as themselves, the rest from U+0100 on."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
