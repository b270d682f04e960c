"""What SamplingParams accepts, what it refuses, and how it says so."""

from __future__ import annotations

import math
import pickle

import pytest

from jspec import FieldError
from jspec.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams

WHOLE = {"n": 1, "top_k": 0, "min_tokens": 0, "max_tokens": 0, "seed": 0, "logprobs": 0,
         "prompt_logprobs": 0, "num_speculative_tokens": 0}  # field: smallest value
HIGHEST = {"seed": MAX_SEED, "logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS}
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty")
BAD = [  # field, value, the allowed range as the message has it
  *((name, low - 2 if name in ("top_k", "seed") else low - 1, str(low))  # -1 is none of them
    for name, low in WHOLE.items()),
  *((name, high + 1, str(high)) for name, high in HIGHEST.items()),
  *((name, value, "integer") for name in WHOLE for value in (1.5, "3", True)),
  *((name, value, "finite number") for name in REAL for value in ("1", True, math.nan, math.inf)),
  ("n", None, "integer"), ("temperature", None, "finite number"),
  ("temperature", -0.1, ">= 0"), ("temperature", 1e39, "<= 1e+18"),
  ("top_p", 0, "> 0 and <= 1"), ("top_p", 1.01, "> 0 and <= 1"),
  ("min_p", -0.01, ">= 0 and <= 1"), ("min_p", 1.5, ">= 0 and <= 1"),
  ("repetition_penalty", 0, ">= 1e-18"), ("repetition_penalty", -1.0, ">= 1e-18"),
  *((f"{name}_penalty", value, ">= -2 and <= 2") for name in ("presence", "frequency")
    for value in (-2.1, 2.1)),
  ("stop", ["a", ""], "non-empty strings"), ("stop", [1], "non-empty strings"), ("stop", 1, "list"),
  ("stop", ["a"] * 65, "64 entries, got 65"), ("bad_words", ["a"] * 4097, "4096 entries"),
  ("stop_token_ids", [7] * 4097, "4096 entries"),
  ("bad_words", [""], "non-empty strings"), ("bad_words", 5, "list"),
  ("stop_token_ids", [-1], ">= 0"), ("stop_token_ids", ["a"], "token ids"),
  ("stop_token_ids", [True], "token ids"), ("stop_token_ids", 7, "list"),
  ("allowed_token_ids", [], "at least one token"), ("allowed_token_ids", [-1], ">= 0"),
  ("allowed_token_ids", 7, "list"), ("allowed_token_ids", ["7"], "token ids"),
  ("logit_bias", [1, 2], "map token ids to numbers"),
  ("logit_bias", {"a": 1}, "map token ids to numbers"),
  ("logit_bias", {1.7: 1}, "map token ids to numbers"),
  ("logit_bias", {1: "x"}, "map token ids to numbers"),
  ("logit_bias", {1: math.nan}, "1e+18"), ("logit_bias", {1: 1e39}, "1e+18"),
  ("include_stop_str_in_output", 1, "True or False"), ("ignore_eos", None, "True or False"),
  ("skip_special_tokens", "yes", "True or False"),
]


@pytest.mark.parametrize("field, value, allowed", BAD, ids=lambda x: repr(x)[:30])
def test_a_bad_value_is_refused_by_field_value_and_range(field, value, allowed):
  with pytest.raises(FieldError) as error:
    SamplingParams(**{field: value})
  message = str(error.value)
  shown = value if isinstance(value, (int, float)) else next(iter(value or [value]), value)
  assert field in message and allowed in message and str(shown) in message
  assert error.value.field == field


def test_a_refusal_keeps_its_field_and_its_sentence_on_the_way_to_another_process():
  error = pickle.loads(pickle.dumps(FieldError("seed", "seed must be an integer")))
  assert isinstance(error, ValueError)
  assert (error.field, str(error)) == ("seed", "seed must be an integer")


def test_min_tokens_above_max_tokens_is_refused():
  with pytest.raises(ValueError, match="min_tokens=9 must not exceed max_tokens=8"):
    SamplingParams(min_tokens=9, max_tokens=8)
  SamplingParams(min_tokens=9, max_tokens=None)


GOOD = [
  dict(temperature=0), dict(temperature=1e-30), dict(top_p=1), dict(top_p=1e-9), dict(min_p=1),
  dict(seed=0), dict(seed=MAX_SEED), dict(logprobs=0), dict(logprobs=MAX_LOGPROBS),
  dict(presence_penalty=-2, frequency_penalty=2), dict(max_tokens=None), dict(top_k=10**9),
  dict(repetition_penalty=0.5), dict(num_speculative_tokens=0), dict(min_tokens=4, max_tokens=4),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_the_ends_of_each_range_are_accepted(fields):
  params = SamplingParams(**fields)
  assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize("given, field, normal", [
  (-1, "top_k", 0), ("x", "stop", ("x",)), (["x", "y"], "stop", ("x", "y")), (None, "stop", ()),
  ("", "stop", ()), ("x", "bad_words", ("x",)), (None, "bad_words", ()),
  ([3, 4], "stop_token_ids", (3, 4)), (None, "stop_token_ids", ()), ({}, "logit_bias", {}),
  ({"5": 1, 6: -100}, "logit_bias", {5: 1.0, 6: -100.0})])
def test_values_are_normalised(given, field, normal):
  assert getattr(SamplingParams(**{field: given}), field) == normal


def test_params_are_frozen_and_copy_their_lists():
  stop = ["a"]
  params = SamplingParams(stop=stop)
  stop.append("b")
  assert params.stop == ("a",)
  with pytest.raises(AttributeError):
    params.n = 2
