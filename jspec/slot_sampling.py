"""SamplingParams of one request -> its row of SlotSampling."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.sampling import IN_PROMPT, NOT_BEFORE_MIN, STOPS
from jspec.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from jspec.tokenizer import Tokenizer
from jspec.types import PAD_TOKEN, SlotSampling


def empty_sampling(num_slots: int, vocab_size: int, num_words: int, word_len: int) -> SlotSampling:
  """Greedy slots without any option."""
  b = num_slots
  real = lambda value: jnp.full(b, value, jnp.float32)
  whole = lambda *shape: jnp.zeros((b, *shape), jnp.int32)
  return SlotSampling(
      temperature=real(0), top_k=whole(), top_p=real(1), min_p=real(0),
      repetition_penalty=real(1), presence_penalty=real(0), frequency_penalty=real(0),
      min_tokens=whole(), logprobs=jnp.zeros(b, bool), biased=jnp.zeros(b, bool),
      bias=jnp.zeros((b, vocab_size)), token_flags=jnp.zeros((b, vocab_size), jnp.uint8),
      output_count=whole(vocab_size), bad_words=whole(num_words, word_len) + PAD_TOKEN,
      recent=whole(word_len - 1) + PAD_TOKEN)


def sampling_row(params: SamplingParams, prompt_ids, tokenizer: Tokenizer, vocab_size: int,
                 output_ids=()) -> SlotSampling:
  """The request's row: numpy, without the leading slot axis.

  output_ids: what was generated before a preemption.
  """
  real, whole = np.float32, np.int32
  flags = np.zeros(vocab_size, np.uint8)
  ends = list(params.stop_token_ids) + ([] if params.ignore_eos else list(tokenizer.eos_ids))
  flags[ends] |= STOPS
  flags[list(params.stop_token_ids) + list(tokenizer.eos_ids)] |= NOT_BEFORE_MIN
  flags[list(prompt_ids)] |= IN_PROMPT
  bias = np.zeros(vocab_size, np.float32)
  for token, value in (params.logit_bias or {}).items():
    bias[token] = value
  words = bad_word_ids(params.bad_words, tokenizer)
  for word in words:
    if len(word) == 1:
      bias[word[0]] = -np.inf
  recent = np.full(MAX_BAD_WORD_TOKENS - 1, PAD_TOKEN, np.int32)
  tail = [*prompt_ids[-len(recent):], *output_ids][-len(recent):]
  recent[len(recent) - len(tail):] = tail
  output = np.asarray(output_ids, whole)
  fields: dict[str, Any] = dict(
      temperature=real(params.temperature), top_k=whole(min(params.top_k, vocab_size)),
      top_p=real(params.top_p), min_p=real(params.min_p),
      repetition_penalty=real(params.repetition_penalty),
      presence_penalty=real(params.presence_penalty),
      frequency_penalty=real(params.frequency_penalty), min_tokens=whole(params.min_tokens),
      logprobs=np.bool_(params.logprobs is not None), biased=np.bool_(bias.any()), bias=bias,
      token_flags=flags, output_count=np.bincount(output, minlength=vocab_size).astype(whole),
      bad_words=_word_table([w for w in words if len(w) > 1]), recent=recent)
  return SlotSampling(**fields)


def bad_word_ids(words, tokenizer: Tokenizer) -> list[list[int]]:
  """Token sequences that spell the words, at a text's start and after a space, as in vLLM."""
  out: list[list[int]] = []
  for word in words:
    text = word.lstrip() or word
    plain = tokenizer.encode(text, add_special_tokens=False)
    spaced = tokenizer.encode(" " + text, add_special_tokens=False)
    out.append(plain)
    if spaced[:1] != plain[:1] and len(spaced) == len(plain):
      out.append(spaced)
  return out


def check_bad_words(words, tokenizer: Tokenizer) -> None:
  """ValueError where the words exceed what a slot can hold."""
  sequences = [w for w in bad_word_ids(words, tokenizer) if len(w) > 1]
  longest = max((len(w) for w in sequences), default=0)
  if longest > MAX_BAD_WORD_TOKENS:
    raise ValueError(f"a bad word is {longest} tokens long; at most {MAX_BAD_WORD_TOKENS} are "
                     "supported")
  if len(sequences) > MAX_BAD_WORDS:
    raise ValueError(f"bad_words make {len(sequences)} token sequences of more than one token; "
                     f"at most {MAX_BAD_WORDS} are supported")


def _word_table(words: list[list[int]]) -> np.ndarray:
  table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), PAD_TOKEN, np.int32)
  for i, word in enumerate(words):
    table[i, MAX_BAD_WORD_TOKENS - len(word):] = word
  return table
