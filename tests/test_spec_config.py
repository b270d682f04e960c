"""vLLM's speculative keys and older flags: each applied, refused, or warned about."""

from __future__ import annotations

import warnings

import pytest

from jspec import spec_config
from jspec.spec_config import SpeculativeConfig, parse_speculative

NONE = SpeculativeConfig()
NGRAM = SpeculativeConfig("ngram", None, 7, 4, 2)


def draft(**fields):
  return SpeculativeConfig(**{"method": "draft_model", "model": "m", "num_speculative_tokens": 3,
                              **fields})


def ngram(longest, shortest, tokens=7, **fields):
  return SpeculativeConfig("ngram", None, tokens, longest, shortest, **fields)


@pytest.mark.parametrize("config, older, expected", [
  (None, None, NONE),
  ({}, {}, NONE),
  ({"method": None, "model": None}, {"speculative_model": None}, NONE),
  ({"method": "none"}, None, NONE),
  ({"method": "none", "num_speculative_tokens": 0}, None, NONE),
  ({"method": "ngram"}, None, NGRAM),
  ({"model": "ngram"}, None, NGRAM),
  ({"model": "[ngram]"}, None, NGRAM),
  ({"method": "ngram", "model": "[ngram]"}, None, NGRAM),
  ({"method": "ngram_gpu"}, None, NGRAM),
  ({"method": "ngram", "num-speculative-tokens": 5, "prompt-lookup-max": 3}, None, ngram(3, 3, 5)),
  ({"method": "ngram", "prompt_lookup_min": 2}, None, ngram(2, 2)),
  ({"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 1}, None, ngram(5, 1)),
  ({"method": "ngram", "prompt_lookup_latest": True}, None,
   ngram(4, 2, prompt_lookup_latest=True)),
  ({"model": "m", "num_speculative_tokens": 3}, None, draft()),
  ({"model": "m", "method": "draft_model", "num_speculative_tokens": 3,
    "draft_sample_method": "probabilistic"}, None, draft(draft_sample_method="probabilistic")),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "probabilistic"}, None,
   draft(draft_sample_method="probabilistic")),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "strict"}, None, draft()),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "standard",
    "draft_sample_method": "probabilistic"}, None, draft(draft_sample_method="probabilistic")),
  ({"model": "m", "tree_widths": [4, 2, 1]}, None, draft(tree_widths=(4, 2, 1))),
  ({"model": "eagle-eyed", "method": "draft_model", "num_speculative_tokens": 3}, None,
   draft(model="eagle-eyed")),
  ({"model": "eagle3-runs/plain-model", "num_speculative_tokens": 3}, None,
   draft(model="eagle3-runs/plain-model")),
  # values of unsupported keys that ask for nothing
  ({"method": "ngram", "quantization": None, "draft_tensor_parallel_size": 1,
    "parallel_drafting": False, "acceptance_method": "rejection_sampler"}, None, NGRAM),
  # older flags
  (None, {"speculative_model": "[ngram]", "num_speculative_tokens": 5,
          "ngram_prompt_lookup_max": 4}, ngram(4, 1, 5)),
  (None, {"speculative-model": "[ngram]", "ngram-prompt-lookup-max": 4,
          "ngram-prompt-lookup-min": 3}, ngram(4, 3)),
  (None, {"speculative_model": "[ngram]"}, NGRAM),
  (None, {"speculative_model": "m", "num_speculative_tokens": 3}, draft()),
  (None, {"spec_method": "ngram", "spec_tokens": 2}, ngram(4, 2, 2)),
  ({"method": "ngram"}, {"num_speculative_tokens": 2}, ngram(4, 2, 2)),
  ({"method": "ngram"}, {"speculative_disable_by_batch_size": 4},
   ngram(4, 2, schedule=((1, 3, 7), (4, 4, 0)))),
  ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 7], [8, 16, 3]]}, None,
   ngram(4, 2, schedule=((1, 4, 7), (8, 16, 3)))),
])
def test_accepted_configurations(config, older, expected):
  assert parse_speculative(config, older) == expected


@pytest.mark.parametrize("config, older, words", [
  ({"metod": "ngram"}, None, "metod.*num_speculative_tokens"),
  (None, {"speculative_modell": "x"}, "speculative_modell.*speculative_model"),
  ("ngram", None, "must be a dict"),
  ({"num_speculative_tokens": 3}, None, "needs a method"),
  ({"method": "ngramm"}, None, "'ngramm' is unknown: methods are 'none', 'ngram', 'draft_model'"),
  ({"method": 3}, None, "3 is unknown"),
  ({"method": ["ngram"]}, None, "is unknown"),
  ({"method": "eagle3", "model": "m"}, None, "'eagle3' is one that jspec doesn't have yet"),
  ({"method": "deepseek_mtp"}, None, "doesn't have yet"),
  ({"model": "org/EAGLE3-LLaMA", "num_speculative_tokens": 3}, None, "suggests method 'eagle3'"),
  ({"model": 5}, None, "name or a path, got 5"),
  ({"method": "ngram", "model": "m"}, None, "uses no model"),
  ({"method": "draft_model", "num_speculative_tokens": 3}, None, "needs a model"),
  ({"model": "m"}, None, "needs num_speculative_tokens"),
  ({"method": "none", "num_speculative_tokens": 3}, None, "takes no other keys"),
  ({"method": "none", "num_speculative_tokens": 0, "model": "m"}, None, "takes no other keys"),
  ({"method": "ngram", "num_speculative_tokens": 0}, None, ">= 1, got 0"),
  ({"method": "ngram", "num_speculative_tokens": "5"}, None, "integer >= 1, got '5'"),
  ({"method": "ngram", "num_speculative_tokens": True}, None, "integer"),
  ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, None, "must not exceed"),
  ({"method": "ngram", "prompt_lookup_max": 0}, None, "prompt_lookup_max must be >= 1, got 0"),
  ({"method": "ngram", "prompt_lookup_latest": "yes"}, None, "true or false"),
  ({"model": "m", "num_speculative_tokens": 3, "prompt_lookup_max": 3}, None, "belong to method"),
  ({"method": "ngram", "tree_widths": [1]}, None, "belong to method 'draft_model'"),
  ({"method": "ngram", "draft_sample_method": "probabilistic"}, None, "belong to"),
  ({"model": "m", "num_speculative_tokens": 2, "tree_widths": [2]}, None, "one number per depth"),
  ({"model": "m", "tree_widths": [2, 0]}, None, "tree_widths must be >= 1"),
  ({"model": "m", "tree_widths": 4}, None, "must be a list"),
  ({"model": "m", "num_speculative_tokens": 3, "draft_sample_method": "beam"}, None, "'beam'"),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "fly"}, None,
   "'fly' is not supported: allowed are 'standard'"),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "strict",
    "draft_sample_method": "probabilistic"}, None, "contradict"),
  ({"method": "ngram", "quantization": "fp8"}, None, "quantization='fp8'.*leaving it out"),
  ({"method": "ngram", "draft_tensor_parallel_size": 2}, None, "parallel_size belong to"),
  ({"method": "ngram", "tensor_parallel_size": 1}, None, "use draft_tensor_parallel_size"),
  ({"method": "ngram", "acceptance_method": "typical_acceptance_sampler"}, None, "typical"),
  ({"method": "ngram"}, {"spec_decoding_acceptance_method": "typical_acceptance_sampler"},
   "'rejection_sampler'"),
  ({"method": "ngram"}, {"speculative_max_model_len": 100}, "max_model_len=100"),
  ({"method": "ngram", "max-model-len": 9, "max_model_len": 9}, None, "given twice"),
  ({"method": "ngram", "num_speculative_tokens": 3}, {"num_speculative_tokens": 3}, "given twice"),
  ({"method": "ngram"}, {"speculative_disable_by_batch_size": 1}, ">= 2, got 1"),
  ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[2, 4, 7]]}, None, "start at"),
  ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 7], [4, 8, 1]]}, None,
   "don't overlap"),
  ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4]]}, None, "must be a list"),
  ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, -1]]}, None, ">= 0"),
  ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 1]],
    "disable_by_batch_size": 3}, None, "both"),
])
def test_refused_configurations(config, older, words):
  with pytest.raises(ValueError, match=words):
    parse_speculative(config, older)


@pytest.mark.parametrize("key", sorted(spec_config._UNSUPPORTED))
def test_every_unsupported_key_is_refused_by_name(key):
  with pytest.raises(ValueError, match=f"{key}='something'"):
    parse_speculative({"method": "ngram", key: "something"})
  for neutral in (None, *spec_config._UNSUPPORTED[key]):
    assert parse_speculative({"method": "ngram", key: neutral}) == NGRAM


@pytest.mark.parametrize("flag, value", [
  ("speculative_disable_mqa_scorer", True), ("disable_logprobs_during_spec_decoding", True),
  ("use_v2_block_manager", True), ("num_lookahead_slots", 3)])
def test_flags_without_effect_are_accepted_with_a_note(flag, value):
  with pytest.warns(UserWarning, match="has no effect"):
    assert parse_speculative({"method": "ngram"}, {flag: value}) == NGRAM


def test_supported_keys_do_not_warn():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    parse_speculative({"method": "ngram", "quantization": None})


def test_schedule_carries_the_previous_count_over_gaps_and_the_tail():
  config = ngram(4, 2, schedule=((1, 4, 7), (8, 16, 3), (17, 20, 9)))
  sizes = (1, 4, 5, 7, 8, 16, 17, 20, 100)
  assert [config.draft_tokens_at(size) for size in sizes] == [7, 7, 7, 7, 3, 3, 7, 7, 7]
  assert NGRAM.draft_tokens_at(5) == 7
  off = parse_speculative({"method": "ngram"}, {"speculative_disable_by_batch_size": 4})
  assert [off.draft_tokens_at(size) for size in (1, 3, 4, 50)] == [7, 7, 0, 0]


def test_configurations_are_hashable():
  assert hash(draft(tree_widths=(4, 2, 1)))
