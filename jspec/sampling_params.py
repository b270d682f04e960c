"""What a request asks of sampling. Every field is applied exactly, speculation or not."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.config.checks import FieldError

MAX_LOGPROBS = 20  # per token, beside the token itself
MAX_BAD_WORDS = 16  # of more than one token; single tokens are unlimited
MAX_BAD_WORD_TOKENS = 8
MAX_STOPS = 64  # strings, each looked for at every token
MAX_TOKENS_NAMED = 4096  # in stop_token_ids, and bad words in all
MAX_TOKENS_ALLOWED = 2**20  # more than any vocabulary has
MAX_CHARACTERS = 1024  # of a stop string or a bad word
MAX_CHARACTERS_NAMED = 32768  # of all stop strings, or all bad words, together
MAX_SEED = MAX_NUMBER = 2**63 - 1  # of any integer
LARGEST = 1e18  # of any number: the product of two stays finite in float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Sampling parameters, named and defaulted as in vLLM.

  Args:
    n: outputs per prompt; output i uses seed + i where a seed is given.
    temperature: 0 is greedy (argmax, first index on ties).
    top_k: keep the k most likely tokens (ties with the k-th stay); 0 or -1 keeps all.
    top_p: keep the smallest set of likeliest tokens with at least this mass (ties stay together).
    min_p: drop tokens less likely than min_p times the likeliest.
    seed: same seed, same text: alone, in any batch, with or without deterministic drafts; -1 is
      the same as None.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
      output (Keskar et al. 2019).
    presence_penalty: subtracted from the logits of tokens in the output, once.
    frequency_penalty: likewise, for each occurrence.
    logit_bias: token id -> number added to its logit, before the penalties.
    bad_words: texts that are never generated. With and without a space before.
    allowed_token_ids: no other token is generated, whatever its bias; None allows all.
    min_tokens: no stop token before this many.
    max_tokens: None is as many as fit, 0 reads the prompt and generates nothing.
    stop: strings that end the text (cut off unless include_stop_str_in_output).
    stop_token_ids: tokens that end it, beside the model's own end tokens.
    ignore_eos: go on past the model's end tokens.
    logprobs: log-probabilities of the sampled token and this many likeliest, under the model's
      raw distribution; None returns none.
    prompt_logprobs: the same of the prompt's tokens but the first; 0 gives the token's own alone.
      Such a prompt is computed anew, whatever the prefix cache has of it.
    num_speculative_tokens: draft tokens per step for this request, at most the engine's; 0 turns
      speculation off for it.
    skip_special_tokens: leave special tokens out of the text.
    truncate_prompt_tokens: of a longer prompt keep the last so many tokens; -1 keeps what fits
      max_model_len.

  vLLM's other fields are taken at the values that ask for nothing, and refused at any other. To
  change a field: params.clone(max_tokens=5), or dataclasses.replace.
  """

  n: int = 1
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int | None = None
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: Mapping[int, float] | None = None
  bad_words: Sequence[str] = ()
  allowed_token_ids: Sequence[int] | None = None
  min_tokens: int = 0
  max_tokens: int | None = 16
  stop: str | Sequence[str] = ()
  stop_token_ids: Sequence[int] = ()
  include_stop_str_in_output: bool = False
  ignore_eos: bool = False
  logprobs: int | None = None
  prompt_logprobs: int | None = None
  num_speculative_tokens: int | None = None
  skip_special_tokens: bool = True
  truncate_prompt_tokens: int | None = None
  best_of: dataclasses.InitVar[Any] = None
  use_beam_search: dataclasses.InitVar[Any] = False
  length_penalty: dataclasses.InitVar[Any] = 1.0
  early_stopping: dataclasses.InitVar[Any] = False
  detokenize: dataclasses.InitVar[Any] = True
  spaces_between_special_tokens: dataclasses.InitVar[Any] = True
  flat_logprobs: dataclasses.InitVar[Any] = False
  logits_processors: dataclasses.InitVar[Any] = None
  guided_decoding: dataclasses.InitVar[Any] = None
  structured_outputs: dataclasses.InitVar[Any] = None
  extra_args: dataclasses.InitVar[Any] = None
  output_kind: dataclasses.InitVar[Any] = None
  skip_reading_prefix_cache: dataclasses.InitVar[Any] = None
  thinking_token_budget: dataclasses.InitVar[Any] = None

  def __post_init__(self, *vllm_fields):
    _check_neutral(vllm_fields)
    object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
    for name in ("stop", "bad_words", "stop_token_ids"):
      object.__setattr__(self, name, _listed(name, getattr(self, name)))
    object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
    if self.logit_bias is not None:
      object.__setattr__(self, "logit_bias", _token_bias(self.logit_bias))
    self._check_numbers()
    for name in ("stop", "bad_words"):
      if any(not isinstance(text, str) or not text for text in getattr(self, name)):
        raise FieldError(
            name, f"{name} must hold non-empty strings, got {shown(getattr(self, name))}")
    if self.allowed_token_ids is not None:
      object.__setattr__(self, "allowed_token_ids",
                         _listed("allowed_token_ids", self.allowed_token_ids))
      if not self.allowed_token_ids:
        raise FieldError("allowed_token_ids",
                         "allowed_token_ids must name at least one token (None allows all), got []")
    for name in ("stop_token_ids", "allowed_token_ids"):
      tokens = getattr(self, name) or ()
      if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in tokens):
        raise FieldError(name, f"{name} must be token ids >= 0, got {shown(tokens)}")
    for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_TOKENS_NAMED),
                       ("stop_token_ids", MAX_TOKENS_NAMED),
                       ("allowed_token_ids", MAX_TOKENS_ALLOWED)):
      if len(getattr(self, name) or ()) > most:
        raise FieldError(name, f"{name} may have {most} entries, got {len(getattr(self, name))}")
    for name in ("stop", "bad_words"):
      sizes = [len(text) for text in getattr(self, name)]
      if max(sizes, default=0) > MAX_CHARACTERS or sum(sizes) > MAX_CHARACTERS_NAMED:
        raise FieldError(name, f"{name} may have {MAX_CHARACTERS} characters each, and "
                               f"{MAX_CHARACTERS_NAMED} in all, got {max(sizes)} and {sum(sizes)}")
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
      if not isinstance(getattr(self, name), bool):
        raise FieldError(name, f"{name} must be True or False, got {shown(getattr(self, name))}")

  def clone(self, **changes: Any) -> SamplingParams:
    """The same, but for the fields that are named."""
    return dataclasses.replace(self, **changes)

  def _check_numbers(self):
    ranges = (("n", 1, MAX_NUMBER), ("top_k", 0, MAX_NUMBER), ("min_tokens", 0, MAX_NUMBER),
              ("max_tokens", 0, MAX_NUMBER), ("seed", 0, MAX_SEED), ("logprobs", 0, MAX_LOGPROBS),
              ("prompt_logprobs", 0, MAX_LOGPROBS),
              ("num_speculative_tokens", 0, MAX_NUMBER), ("truncate_prompt_tokens", 1, MAX_NUMBER))
    can_be_none = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "num_speculative_tokens",
                   "truncate_prompt_tokens")
    for name, low, high in ranges:
      value = getattr(self, name)
      if value is None and name in can_be_none:
        continue
      if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"{name} must be an integer, got {shown(value)}")
      if not low <= value <= high and (name, value) != ("truncate_prompt_tokens", -1):
        allowed = f">= {low}" if value < low else f"in {low}..{high}"
        raise FieldError(name, f"{name} must be {allowed}, got {shown(value)}")
    reals = (("temperature", 0, LARGEST), ("min_p", 0, 1), ("presence_penalty", -2, 2),
             ("frequency_penalty", -2, 2), ("repetition_penalty", 1 / LARGEST, LARGEST))
    for name, least, most in reals:
      _check_real(name, getattr(self, name), least, most)
    _check_real("top_p", self.top_p, 0, 1, above=True)
    if self.max_tokens is not None and self.min_tokens > self.max_tokens:
      raise FieldError("min_tokens", f"min_tokens={self.min_tokens} must not exceed "
                                     f"max_tokens={self.max_tokens}")


def shown(value: Any) -> str:
  """What a message quotes: short, whatever it is."""
  if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to spell very long ones
    return f"a number of {value.bit_length()} bits"
  return reprlib.repr(value)


def _check_neutral(values: tuple) -> None:
  """values: of vLLM's fields that ask for what is not done, in the order of the class."""
  for name, value in zip(_NEUTRAL, values, strict=True):
    if value is not None and value != _NEUTRAL[name]:
      raise FieldError(name, f"{name} is not supported: leave it out, got {shown(value)}")


def _check_real(name: str, value, low, high, above: bool = False):
  if (isinstance(value, bool) or not isinstance(value, (int, float))
      or not abs(value) < math.inf):  # of integers, too, which math.isfinite may overflow at
    raise FieldError(name, f"{name} must be a finite number, got {shown(value)}")
  if value < low or (above and value == low) or value > high:
    raise FieldError(name, f"{name} must be {'>' if above else '>='} {low:g} and <= {high:g}, "
                           f"got {shown(value)}")


def _listed(name: str, value) -> tuple:
  """None, one string or a sequence -> tuple."""
  if value is None or isinstance(value, str):
    return () if not value else (value,)
  try:
    return tuple(value)
  except TypeError:
    raise FieldError(name, f"{name} must be a list, got {shown(value)}") from None


def _token_bias(bias: Mapping) -> dict[int, float]:
  if not isinstance(bias, Mapping):
    raise FieldError("logit_bias",
                     f"logit_bias must map token ids to numbers, got {shown(bias)}")
  out = {}
  for token, value in bias.items():
    try:
      out[int(str(token))] = float(value)  # JSON has no integer keys
    except (TypeError, ValueError, OverflowError):
      raise FieldError("logit_bias", f"logit_bias must map token ids to numbers, "
                                     f"got {shown(token)}: {shown(value)}") from None
    if not abs(float(value)) <= LARGEST:
      raise FieldError("logit_bias", f"logit_bias must be within -{LARGEST} and {LARGEST}, "
                                     f"got {shown(token)}: {shown(value)}")
  return out


_NEUTRAL = {name: vars(SamplingParams)[name]  # in the order of the class
            for name, kind in SamplingParams.__annotations__.items() if "InitVar" in str(kind)}
