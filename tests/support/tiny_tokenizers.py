"""Tiny tokenizers of each kind with the same ids for the same letters, for models of 64 tokens."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jspec.text.tokenizer import Tokenizer

SPECIAL = ("<|end|>", "<|user|>", "<|bot|>")
EOS = 0
CHAT_TEMPLATE = ("{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}"
                 "{{ m.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|bot|>{% endif %}")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = (("t", "h"), ("h", "e"), ("a", "n"), ("i", "n"), ("e", "r"), ("o", "n"), ("_", "a"),
          ("_", "t"), ("th", "e"), ("_", "the"), ("an", "d"))
_CHARACTERS = "é日🎉"


def byte_tokenizer(extra: str = "0123456789#") -> Tokenizer:
  """Byte-level, 64 tokens; 'é' takes two of them, '日' three, '🎉' four."""
  pairs = _spaced("Ġ")
  spelled = [*_LETTERS, "Ġ", "Ċ", ".", ",", *"Ã©æĹ¥ðŁİī", *map("".join, pairs), *extra]
  backend = tokenizers.Tokenizer(models.BPE(_numbered(spelled), pairs))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  return _with_specials(backend)


def sentencepiece_tokenizer() -> Tokenizer:
  """Llama's kind: byte tokens for what has no piece, a space before the text that decoding drops.

  In text that goes on it is kept. 64 tokens.
  """
  pairs = [*_spaced("▁"), ("▁", "▁")]
  model = models.BPE(_numbered(_pieces(pairs)), pairs, byte_fallback=True)
  backend = _with_spaces(model, normalizers.Prepend("▁"))
  return _with_specials(backend)


def unigram_tokenizer() -> Tokenizer:
  """Gemma's kind: byte tokens, no space of its own; the likeliest pieces. 64 tokens."""
  pieces = [*SPECIAL, *_pieces([*_spaced("▁"), ("▁", "▁")])]
  scores = [(piece, 0.0 if i < len(SPECIAL) else -8.0 - i / 10) for i, piece in enumerate(pieces)]
  return _with_specials(_with_spaces(models.Unigram(scores, unk_id=2, byte_fallback=True)))


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
  """The ids of a text that goes on, so without a space that the tokenizer begins texts with."""
  newline = tokenizer.encode("\n")
  return tokenizer.encode("\n" + text)[len(newline):]


def _spaced(space: str) -> list[tuple[str, str]]:
  return [(a.replace("_", space), b) for a, b in _PAIRS]


def _numbered(spelled: list[str]) -> dict[str, int]:
  return {token: i for i, token in enumerate([*SPECIAL, *spelled])}


def _pieces(pairs: list[tuple[str, str]]) -> list[str]:
  raw = ("\n" + _CHARACTERS).encode()
  return [*_LETTERS, "▁", ".", ",", *(f"<0x{byte:02X}>" for byte in raw), *map("".join, pairs),
          *"0123456789"]


def _with_spaces(model, *first) -> tokenizers.Tokenizer:
  backend = tokenizers.Tokenizer(model)
  backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
  strip = [decoders.Strip(" ", 1, 0)] if first else []
  backend.decoder = decoders.Sequence(
      [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
  return backend


def _with_specials(backend: tokenizers.Tokenizer) -> Tokenizer:
  backend.add_special_tokens(list(SPECIAL))
  return Tokenizer(backend, (EOS,), None, CHAT_TEMPLATE)


TOKENIZERS = {"byte-level": byte_tokenizer(), "sentencepiece": sentencepiece_tokenizer(),
              "unigram": unigram_tokenizer()}
