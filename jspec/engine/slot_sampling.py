"""SamplingParams of one request -> its row of SlotSampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.config.checks import FieldError
from jspec.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from jspec.speculation.sampling import IN_PROMPT, NOT_BEFORE_MIN, STOPS
from jspec.text.tokenizer import Tokenizer
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


class RowInputs(NamedTuple):
  """What a request asks of sampling, as token ids that the model has: checked, and small."""

  params: SamplingParams
  ends: np.ndarray  # i32[], tokens that end the request
  not_before_min: np.ndarray  # i32[], tokens forbidden until min_tokens are out
  biased: np.ndarray  # i32[], tokens with a bias
  bias: np.ndarray  # f32[], theirs; -inf for bad words of one token
  allowed: np.ndarray | None  # i32[], tokens beside which none may be drawn; None: all may
  bad_words: np.ndarray  # i32[MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS], of more tokens than one


def row_inputs(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> RowInputs:
  """ValueError for what names a token that the model has not, or exceeds what a slot can hold."""
  for name, tokens in (("logit_bias", params.logit_bias or ()),
                       ("stop_token_ids", params.stop_token_ids),
                       ("allowed_token_ids", params.allowed_token_ids or ())):
    bad = [t for t in tokens if not 0 <= t < vocab_size]
    if bad:
      raise FieldError(
          name, f"{name} names token {bad[0]}, but the vocabulary has {vocab_size} tokens")
  bias = dict(params.logit_bias or {})
  # A spelling with a token that the model has no row for is never generated anyway.
  words = [word for word in bad_word_ids(params.bad_words, tokenizer)
           if all(token < vocab_size for token in word)]
  bias.update((word[0], -math.inf) for word in words if len(word) == 1)
  stops, own = list(params.stop_token_ids), list(tokenizer.eos_ids)
  _check_choice(params, words, stops + own, vocab_size)
  ids = lambda tokens: np.array(sorted(set(tokens)), np.int32)
  return RowInputs(
      params, ids(stops + ([] if params.ignore_eos else own)), ids(stops + own),
      np.array([*bias], np.int32), np.array([*bias.values()], np.float32),
      None if params.allowed_token_ids is None else ids(params.allowed_token_ids),
      _word_table([word for word in words if len(word) > 1]))


def sampling_row(inputs: RowInputs, prompt_ids: Sequence[int], vocab_size: int,
                 output_ids: Sequence[int] = ()) -> SlotSampling:
  """The request's row: numpy, without the leading slot axis.

  output_ids: what was generated before a preemption.
  """
  params = inputs.params
  real, whole = np.float32, np.int32
  flags = np.zeros(vocab_size, np.uint8)
  flags[inputs.ends] |= STOPS
  flags[inputs.not_before_min] |= NOT_BEFORE_MIN
  flags[list(prompt_ids)] |= IN_PROMPT
  bias = np.zeros(vocab_size, np.float32)
  bias[inputs.biased] = inputs.bias
  if inputs.allowed is not None:
    bias[np.isin(np.arange(vocab_size), inputs.allowed, invert=True)] = -np.inf
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
      bad_words=inputs.bad_words, recent=recent)
  return SlotSampling(**fields)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
  """Token sequences that spell the words, at a text's start and after a space, as in vLLM."""
  out: list[list[int]] = []
  for word in words:
    text = word.lstrip() or word
    plain = tokenizer.encode(text, add_special_tokens=False)
    if not plain:
      raise FieldError(
          "bad_words", f"bad_words holds {word[:40]!r}, of which the tokenizer leaves nothing")
    spaced = tokenizer.encode(" " + text, add_special_tokens=False)
    out.append(plain)
    if spaced[:1] != plain[:1] and len(spaced) == len(plain):
      out.append(spaced)
  return out


def _check_choice(params: SamplingParams, words: list[list[int]], ends: list[int],
                  vocab_size: int) -> None:
  """ValueError where the request could come to a place at which it forbids every token.

  That is at the start, or after the head of a bad word of more tokens, whoever wrote that head.
  """
  early = ends if params.min_tokens else []
  allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
  size = vocab_size if allowed is None else len(allowed)
  if size > len({*early, *(word[-1] for word in words)}):
    return
  left = (allowed or set(range(vocab_size))).difference(early)
  for text in ([], *(word[:-1] for word in words)):
    completed = {word[-1] for word in words if text[len(text) - len(word) + 1:] == word[:-1]
                 and len(word) <= len(text) + 1}
    if left <= completed:
      raise FieldError("allowed_token_ids", f"allowed_token_ids, bad_words and min_tokens="
                       f"{params.min_tokens} together could leave no token to go on with")


def _word_table(words: list[list[int]]) -> np.ndarray:
  """ValueError where the words exceed what a slot can hold."""
  longest = max((len(word) for word in words), default=0)
  if longest > MAX_BAD_WORD_TOKENS:
    raise FieldError("bad_words", f"a bad word is {longest} tokens long; at most "
                                  f"{MAX_BAD_WORD_TOKENS} are supported")
  if len(words) > MAX_BAD_WORDS:
    raise FieldError("bad_words", f"bad_words make {len(words)} token sequences of more than one "
                                  f"token; at most {MAX_BAD_WORDS} are supported")
  table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), PAD_TOKEN, np.int32)
  for i, word in enumerate(words):
    table[i, MAX_BAD_WORD_TOKENS - len(word):] = word
  return table
