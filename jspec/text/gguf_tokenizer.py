"""The tokenizer that a GGUF file describes, rebuilt as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# The split expressions are part of each vocabulary: its merges were learned on such pieces.
_LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                 r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "llama-v3": _LLAMA3_SPLIT,
           "qwen2": _QWEN2_SPLIT, "deepseek-r1-qwen": _QWEN2_SPLIT}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word in the vocabulary skips its merges
_SUPPORTED_PRE = ("gpt-2", "smollm", *_SPLITS)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer in GGUF metadata; ValueError names a kind that is not supported."""
  kind = metadata.get("tokenizer.ggml.model")
  if kind not in ("gpt2", "llama"):
    raise ValueError(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
  for key in ("tokens", "merges" if kind == "gpt2" else "scores"):
    if not metadata.get(f"tokenizer.ggml.{key}"):
      raise ValueError(f"GGUF metadata: tokenizer.ggml.{key} is missing")
  tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
  tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
  for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    added = [AddedToken(token, special=special, normalized=False)
             for token, type_ in zip(tokens, types, strict=False) if type_ == wanted]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
  bos = metadata.get("tokenizer.ggml.bos_token_id")
  adds_bos = metadata.get("tokenizer.ggml.add_bos_token",
                          kind == "llama" or _pre(metadata) in _WHOLE_WORDS)
  if adds_bos and bos is not None:
    tokenizer.post_processor = TemplateProcessing(
      single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B",
      special_tokens=[(tokens[bos], bos)])
  return tokenizer


def _pre(metadata: Mapping[str, Any]) -> str:
  return metadata.get("tokenizer.ggml.pre", "default")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
  pre = _pre(metadata)
  if pre not in _SUPPORTED_PRE:
    raise ValueError(f"GGUF pre-tokenizer {pre!r} is not supported; "
                     f"supported: {', '.join(_SUPPORTED_PRE)}")
  vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
  merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
  tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
  steps: list[Any] = [byte_level]
  if pre == "smollm":  # every digit alone, before the spaces are attached: "\n\n1." keeps "\n\n"
    steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
  elif pre in _SPLITS:
    steps = [pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"), byte_level]
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
  if _SPLITS.get(pre) == _QWEN2_SPLIT:
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
  """SentencePiece BPE: merges are not stored, the order of the pieces implies them."""
  tokens = metadata["tokenizer.ggml.tokens"]
  gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
  # Gemma's scores don't follow its merge order, the order of its tokens does.
  ranks = range(0, -len(tokens), -1) if gemma else metadata["tokenizer.ggml.scores"]
  vocab = {token: i for i, token in enumerate(tokens)}
  # Gemma's runs of spaces are user-defined tokens spelled with real spaces: matched before the
  # normalisation below, longest first, as SentencePiece and llama.cpp do.
  unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
  tokenizer = Tokenizer(models.BPE(vocab, _merges(vocab, ranks), unk_token=unknown, fuse_unk=True,
                                   byte_fallback=True))
  replace = normalizers.Replace(" ", "▁")
  tail: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if metadata.get("tokenizer.ggml.add_space_prefix", not gemma):
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    tail.append(decoders.Strip(" ", 1, 0))
  else:
    tokenizer.normalizer = replace
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
  tokenizer.decoder = decoders.Sequence(tail)
  return tokenizer


def _merges(vocab: Mapping[str, int], ranks: Any) -> list[tuple[str, str]]:
  """Every way to make a piece out of two others, best piece first."""
  merges = []
  for piece, i in vocab.items():
    splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
    splits = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
    splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    merges += [(ranks[i], len(left), len(right), left, right) for left, right in splits]
  merges.sort(key=lambda merge: merge[:3], reverse=True)
  return [(left, right) for *_, left, right in merges]
