"""Tokenizers out of files: Hugging Face folders and GGUF metadata."""

from __future__ import annotations

import pathlib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from jspec.config.checks import check_int, first_bytes, read_json
from jspec.text.tokenizer import Tokenizer

# Turn endings that GGUF metadata does not always list, stopped at if they are control tokens.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_CONVERTED = ("tokenizer.model", "vocab.json", "merges.txt")  # by transformers, from either first
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(source: str | pathlib.Path) -> Tokenizer:
  """The tokenizer of a Hugging Face folder."""
  path = pathlib.Path(source)
  config = _read_json(path / "tokenizer_config.json")
  backend = _backend(path)
  # null says nothing: what another file says stands.
  special = {**_special_tokens(_read_json(path / "special_tokens_map.json")),
             **_special_tokens(config)}
  said = [(str(path / name), _read_json(path / name))
          for name in ("generation_config.json", "config.json")]
  said += [(where, text) for where, one in said if isinstance(text := one.get("text_config"), dict)]
  eos = next((ids for one in said if (ids := _ids("eos_token_id", *one))), [])
  eos.append(backend.token_to_id(special.get("eos_token", "")))
  bos = [backend.token_to_id(special.get("bos_token", "")),
         *(i for one in said[1:] for i in _ids("bos_token_id", *one))]
  return Tokenizer(backend, _unique(eos), next((i for i in bos if i is not None), None),
                   _folder_template(path, config), special)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer that GGUF metadata describes."""
  from jspec.text.gguf_tokenizer import tokenizer_from_gguf
  try:
    backend = tokenizer_from_gguf(metadata)
  except ValueError:
    raise
  except Exception as error:  # the library has its own, and damaged metadata raises any
    raise ValueError(f"the tokenizer in the GGUF metadata is damaged: {error}") from None
  ids = {name: _gguf_id(metadata, key) for name, key in
         (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"),
          ("pad_token", "padding"))}
  spelled = {name: backend.id_to_token(i) for name, i in ids.items() if i is not None}
  special = {name: token for name, token in spelled.items() if token is not None}
  added = backend.get_added_tokens_decoder()
  eos = [ids["eos_token"], _gguf_id(metadata, "eot")]
  eos += [i for i, token in added.items() if token.special and token.content in _TURN_ENDS]
  template = metadata.get("tokenizer.chat_template")
  if template is not None and not isinstance(template, str):
    raise ValueError("GGUF metadata: tokenizer.chat_template must be text, got "
                     f"{reprlib.repr(template)}")
  return Tokenizer(backend, _unique(eos), ids["bos_token"], template, special)


def _gguf_id(metadata: Mapping[str, Any], key: str) -> int | None:
  name = f"tokenizer.ggml.{key}_token_id"
  return None if metadata.get(name) is None else check_int(f"GGUF metadata: {name}",
                                                           metadata[name], 0, 2**32)


def _ids(key: str, where: str, config: Mapping[str, Any]) -> list[int | None]:
  """The token ids of a key that holds one, a list or nothing."""
  value = config.get(key)
  return [check_int(f"{where}: {key}", i, 0)
          for i in (value if isinstance(value, list) else [value]) if i is not None]


def _unique(ids: Iterable[int | None]) -> tuple[int, ...]:
  return tuple(dict.fromkeys(i for i in ids if i is not None))


def _backend(folder: pathlib.Path) -> tokenizers.Tokenizer:
  file = folder / "tokenizer.json"
  if file.is_file():
    first_bytes(file)
    try:
      backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
      raise ValueError(f"{file} is damaged: {error}") from None
  elif any((folder / name).is_file() for name in _CONVERTED[:2]):
    try:
      import transformers  # slow to import, so only for folders without tokenizer.json
    except ImportError:
      raise ValueError(f"{folder} has no tokenizer.json; install transformers to convert "
                       "its tokenizer") from None
    for vocabulary in (file for name in _CONVERTED if (file := folder / name).is_file()):
      first_bytes(vocabulary)
    try:
      backend = transformers.AutoTokenizer.from_pretrained(folder, use_fast=True).backend_tokenizer
    except Exception as error:  # of all its libraries
      raise ValueError(f"the tokenizer in {folder} can't be converted: {error}") from None
  else:
    raise ValueError(f"{folder}: no tokenizer.json, tokenizer.model or vocab.json")
  backend.no_truncation()
  backend.no_padding()
  return backend


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  return read_json(file) if file.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
  tokens = {name: config.get(name) for name in _SPECIAL_NAMES}
  named = {name: token.get("content") if isinstance(token, dict) else token
           for name, token in tokens.items()}
  return {name: token for name, token in named.items() if isinstance(token, str)}


def _folder_template(folder: pathlib.Path, config: Mapping[str, Any]) -> str | None:
  file = folder / "chat_template.jinja"
  if file.is_file():
    first_bytes(file)
    try:
      return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f"{file} is damaged: {error}") from None
  template = config.get("chat_template")
  if isinstance(template, list):  # several, by name
    template = next((entry.get("template") for entry in template
                     if isinstance(entry, dict) and entry.get("name") == "default"), None)
  if template is not None and not isinstance(template, str):
    raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string, got "
                     f"{template!r:.60}")
  return template
