"""vLLM's speculative keys and older flags: each applied, refused, or warned about."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest

from jspec.config import Verification, draft_trees, speculative_keys
from jspec.config.methods import OPTIONS
from jspec.config.methods.eagle import EagleOptions
from jspec.config.methods.ngram import NgramOptions
from jspec.config.methods.suffix import SuffixOptions
from jspec.config.speculative import SpeculativeConfig
from jspec.config.speculative_parse import parse_speculative

NONE = SpeculativeConfig()
NGRAM = SpeculativeConfig("ngram", (NgramOptions(4, 2),), 7)
SHARED = {field.name for field in dataclasses.fields(SpeculativeConfig)}


def draft(**fields):
  return head("draft_model", **{"num_speculative_tokens": 3, **fields})


def head(method="eagle3", **fields):
  """fields: of the configuration, or of the options of the method's last part."""
  shared = {name: value for name, value in fields.items() if name in SHARED}
  own = {name: value for name, value in fields.items() if name not in SHARED}
  *lookup, last = method.split("+")
  options = *(OPTIONS[name]() for name in lookup), OPTIONS[last](**{"model": "m", **own})
  return SpeculativeConfig(method, options, **shared)


def ngram(longest, shortest, tokens=7, latest=False, **fields):
  return SpeculativeConfig("ngram", (NgramOptions(longest, shortest, latest),), tokens, **fields)


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
   ngram(4, 2, latest=True)),
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
  # heads
  ({"method": "eagle3", "model": "m"}, None, head()),
  ({"model": "org/EAGLE3-LLaMA", "num_speculative_tokens": 3}, None,
   head(model="org/EAGLE3-LLaMA", num_speculative_tokens=3)),
  ({"method": "eagle", "model": "m", "tree_top_k": 8, "tree_total_tokens": 26}, None,
   head("eagle", tree_top_k=8, tree_total_tokens=26)),
  ({"method": "medusa", "model": "m", "medusa_choices": "mc_sim_7b_63"}, None,
   head("medusa", tree_paths=draft_trees.CHOICES["mc_sim_7b_63"])),
  ({"method": "eagle", "model": "m", "speculative_token_tree": "[(0,), (1,), (0, 0)]"}, None,
   head("eagle", tree_paths=((0,), (1,), (0, 0)))),
  ({"method": "medusa", "model": "m", "tree_widths": [2, 1]}, None,
   head("medusa", tree_paths=((0,), (1,), (0, 0), (1, 0)))),
  ({"method": "mlp_speculator", "model": "m", "n_candidates": 5}, None,
   head("mlp_speculator", n_candidates=5)),
  ({"method": "eagle3", "model": "m", "draft_confidence_threshold": 0.4}, None,
   head(draft_confidence_threshold=0.4)),
  # copies
  ({"method": "suffix"}, None, SpeculativeConfig("suffix", (SuffixOptions(),))),
  ({"method": "suffix", "suffix_decoding_max_tree_depth": 32, "tree_total_tokens": 16,
    "suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.2}, None,
   SpeculativeConfig("suffix", (SuffixOptions(32, 0, 2.0, 0.2, tree_total_tokens=16),))),
  ({"method": "ngram+eagle3", "model": "m", "num_lookup_tokens": 7}, None,
   head("ngram+eagle3", num_lookup_tokens=7)),
  ({"method": "ngram+eagle3", "model": "m", "prompt_lookup_max": 3, "tree_top_k": 4,
    "tree_total_tokens": 9}, None,
   SpeculativeConfig("ngram+eagle3", (NgramOptions(3, 3), EagleOptions(
     "m", tree_top_k=4, tree_total_tokens=9)))),
  ({"method": "suffix+eagle", "model": "m", "tree_top_k": 4, "tree_total_tokens": 9}, None,
   SpeculativeConfig("suffix+eagle", (SuffixOptions(tree_total_tokens=9), EagleOptions(
     "m", tree_top_k=4, tree_total_tokens=9)))),
  ({"method": "suffix+draft_model", "model": "m", "num_speculative_tokens": 3}, None,
   head("suffix+draft_model", num_speculative_tokens=3)),
  # rules of acceptance
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "block",
    "draft_sample_method": "probabilistic"}, None,
   draft(draft_sample_method="probabilistic", verification=Verification("block"))),
  ({"method": "ngram", "rejection_sample_method": "lossy_typical", "posterior_alpha": 0.5}, None,
   ngram(4, 2, verification=Verification("lossy_typical", posterior_alpha=0.5))),
  ({"method": "ngram"}, {"spec_decoding_acceptance_method": "typical_acceptance_sampler",
                         "typical_acceptance_sampler_posterior_threshold": 0.2},
   ngram(4, 2, verification=Verification("lossy_typical", 0.2))),
  ({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.5}, None,
   ngram(4, 2, 3, verification=Verification("lossy_synthetic", rates=(1.0, 0.5, 0.0)))),
  ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6]}, None,
   ngram(4, 2, 2, verification=Verification("lossy_synthetic", rates=(0.8, 0.6)))),
  ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"},
   {"synthetic_acceptance_rate": 0.75},
   ngram(4, 2, 2, verification=Verification("lossy_synthetic", rates=(1.0, 0.5)))),
  # values of unsupported keys that ask for nothing
  ({"method": "ngram", "quantization": None, "draft_tensor_parallel_size": None,
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
  ({"method": "ngram", "num_speculative_tokens": 1025}, None,
   "num_speculative_tokens must be <= 1024, got 1025: each step has a mask of all drafted tokens"),
  ({"method": "draft_model", "model": "m", "tree_widths": [64] * 9}, None,
   "number of nodes of tree_widths must be <= 1024, got 4160"),
  ({"method": "medusa", "model": "m", "tree_widths": [64] * 9}, None, "<= 1024, got 4160"),
  ({"method": "medusa", "model": "m", "medusa_choices": [[i] for i in range(1025)]}, None,
   "number of nodes of the draft tree must be <= 1024, got 1025"),
  ({"method": "suffix", "tree_total_tokens": 10**30}, None, "tree_total_tokens must be <= 1024"),
  ({"method": "ngram+eagle3", "model": "m", "num_lookup_tokens": 2000}, None,
   "num_lookup_tokens must be <= 1024, got 2000"),
  ({"method": "ngramm"}, None, "'ngramm' is unknown: methods are 'none', 'ngram', 'suffix'"),
  ({"method": 3}, None, "3 is unknown"),
  ({"method": ["ngram"]}, None, "is unknown"),
  ({"method": "dflash", "model": "m"}, None, "'dflash' is one that jspec doesn't have"),
  ({"method": "deepseek_mtp"}, None, "doesn't have"),
  ({"model": "org/Qwen3-8B-DFlash-b16"}, None, "suggests method 'dflash'"),
  ({"method": "eagle3+ngram", "model": "m"}, None, "is not one of.*as in 'ngram.eagle3'"),
  ({"method": "ngram+suffix"}, None, "is not one of"),
  ({"method": "ngram+eagle9", "model": "m"}, None, "is unknown"),
  ({"method": "eagle3"}, None, "needs a model, got None"),
  ({"method": "suffix", "model": "m"}, None, "uses no model"),
  ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, None, r"number in \[0, 1\], got 2"),
  ({"method": "ngram", "suffix_decoding_max_tree_depth": 9}, None, "belongs to method 'suffix'"),
  ({"method": "eagle3", "model": "m", "num_lookup_tokens": 7}, None, "belongs to a joined method"),
  ({"method": "eagle3", "model": "m", "tree_top_k": 8}, None, "needs tree_top_k and tree_total"),
  ({"method": "medusa", "model": "m", "tree_top_k": 8, "tree_total_tokens": 9}, None,
   "tree_top_k=8 belongs to method 'eagle', 'eagle3'"),
  ({"method": "medusa", "model": "m", "medusa_choices": [[0], [1, 0]]}, None, "no parent"),
  ({"method": "medusa", "model": "m", "medusa_choices": "mc_sim"}, None, "mc_sim"),
  ({"method": "medusa", "model": "m", "medusa_choices": [[0], [0, 0]],
    "num_speculative_tokens": 3}, None, "2 deep, but num_speculative_tokens=3"),
  ({"method": "medusa", "model": "m", "medusa_choices": [[0]], "tree_widths": [2]}, None,
   "give one of them"),
  ({"method": "ngram", "medusa_choices": [[0]]}, None,
   "medusa_choices=.* belongs to method 'medusa'"),
  ({"method": "eagle", "model": "m", "tree_widths": [2], "draft_confidence_threshold": 0.5}, None,
   "exclude each other"),
  ({"method": "eagle", "model": "m", "draft_confidence_threshold": 1.5}, None, "got 1.5"),
  ({"method": "eagle", "model": "m", "tree_top_k": 8, "tree_total_tokens": 9,
    "draft_sample_method": "probabilistic"}, None, "would not be lossless"),
  ({"method": "ngram", "rejection_sample_method": "block"}, None, "chains of sampled drafts"),
  ({"method": "ngram", "posterior_alpha": 0.5}, None, "belong to rejection_sample_method"),
  ({"method": "ngram", "rejection_sample_method": "lossy_typical", "posterior_alpha": 0}, None,
   r"posterior_alpha must be a number in \(0, 1\], got 0"),
  ({"method": "ngram", "rejection_sample_method": "synthetic"}, None, "got 'neither'|neither"),
  ({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 5}, None, r"in \[1, 4\], got 5"),
  ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5, 0.6]}, None, "never rise"),
  ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5]}, None, "list of num_speculative_tokens=2"),
  ({"method": "ngram", "synthetic_acceptance_length": 2}, None, "belongs to rejection"),
  ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": ["a", "b"]}, None, "must be a number in .* got 'a'"),
  ({"method": "ngram", "acceptance_method": ["typical"]}, None, "acceptance_method=.'typical'. is"),
  ({"method": "suffix", "model": "ngram"}, None, "uses no model"),
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
  ({"model": "m", "num_speculative_tokens": 3, "prompt_lookup_max": 3}, None, "belongs to method"),
  ({"method": "ngram", "tree_widths": [1]}, None, "belongs to method 'draft_model'"),
  ({"method": "ngram", "draft_sample_method": "probabilistic"}, None, "belongs to"),
  ({"model": "m", "num_speculative_tokens": 2, "tree_widths": [2]}, None, "one number per depth"),
  ({"model": "m", "tree_widths": [2, 0]}, None, "tree_widths must be >= 1"),
  ({"model": "m", "tree_widths": 4}, None, "must be a list"),
  ({"model": "m", "num_speculative_tokens": 3, "draft_sample_method": "beam"}, None, "'beam'"),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "fly"}, None,
   "'fly' is not supported: allowed are 'standard'"),
  ({"model": "m", "num_speculative_tokens": 3, "rejection_sample_method": "strict",
    "draft_sample_method": "probabilistic"}, None, "contradict"),
  ({"method": "ngram", "quantization": "fp8"}, None, "quantization='fp8'.*leaving it out"),
  ({"method": "ngram", "draft_tensor_parallel_size": 2}, None, "parallel_size=2 belongs to"),
  ({"method": "ngram", "tensor_parallel_size": 1}, None, "use draft_tensor_parallel_size"),
  ({"method": "ngram", "acceptance_method": "typical"}, None, "'rejection_sampler', 'typical_acc"),
  ({"method": "ngram", "acceptance_method": "typical_acceptance_sampler",
    "rejection_sample_method": "standard"}, None, "both given"),
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


@pytest.mark.parametrize("key", sorted(speculative_keys.UNSUPPORTED))
def test_every_unsupported_key_is_refused_by_name(key):
  with pytest.raises(ValueError, match=f"{key}='something'"):
    parse_speculative({"method": "ngram", key: "something"})
  for neutral in (None, *speculative_keys.UNSUPPORTED[key]):
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


def test_a_batch_size_limit_cuts_neither_a_heads_own_number_nor_a_lookups():
  parse = lambda **keys: parse_speculative(
    {"model": "m", "disable_by_batch_size": 4, **keys}).draft_tokens_at
  assert parse(method="eagle3")(3) > 1000 and parse(method="eagle3")(4) == 0
  joined = parse(method="ngram+eagle3", num_speculative_tokens=3, num_lookup_tokens=8)
  assert [joined(size) for size in (1, 3, 4)] == [8, 8, 0]


def test_schedule_carries_the_previous_count_over_gaps_and_the_tail():
  config = ngram(4, 2, schedule=((1, 4, 7), (8, 16, 3), (17, 20, 9)))
  sizes = (1, 4, 5, 7, 8, 16, 17, 20, 100)
  assert [config.draft_tokens_at(size) for size in sizes] == [7, 7, 7, 7, 3, 3, 7, 7, 7]
  assert NGRAM.draft_tokens_at(5) == 7
  off = parse_speculative({"method": "ngram"}, {"speculative_disable_by_batch_size": 4})
  assert [off.draft_tokens_at(size) for size in (1, 3, 4, 50)] == [7, 7, 0, 0]


@pytest.mark.parametrize("method", [*OPTIONS, "ngram+medusa"])
def test_a_key_of_another_method_is_refused_even_at_its_default(method):
  """Its default asks for nothing, but whoever writes it expects something of it."""
  parts = method.split("+")
  base = {"model": "m"} if "model" in OPTIONS[parts[-1]].keys() else {}
  if method == "extract_hidden_states":
    base["hidden_state_layers"] = [1]
  elif method != "none":
    base["num_speculative_tokens"] = 2
  own = {key for part in parts for key in OPTIONS[part].keys()}
  others = {key: options for options in OPTIONS.values() for key in options.keys()
            if key not in own and key != "model"}
  assert method == "none" or len(others) > 5
  for key, options in others.items():
    default = {field.name: field.default for field in dataclasses.fields(options)}.get(key, [2])
    asked = {"method": method, **base, key: default if default is not None else [2]}
    owners = ", ".join(repr(name) for name in OPTIONS if key in OPTIONS[name].keys())
    words = f"no other keys, got '{key}'" if method == "none" else (
      f"{key}=.* belongs to method {owners}, got method {re.escape(repr(method))}$")
    with pytest.raises(ValueError, match=words):
      parse_speculative(asked)
    assert parse_speculative({**asked, key: None}) == parse_speculative({"method": method, **base})


@pytest.mark.parametrize("method", [name for name in OPTIONS if name != "none"])
def test_num_lookup_tokens_is_refused_for_a_method_alone_even_at_its_default(method):
  with pytest.raises(ValueError, match="num_lookup_tokens=0 belongs to a joined method"):
    parse_speculative({"method": method, "num_lookup_tokens": 0, **(
      {"model": "m"} if "model" in OPTIONS[method].keys() else {})})


def test_options_are_those_of_the_methods_parts():
  for options in ((), (NgramOptions(), NgramOptions()), (SuffixOptions(),)):
    with pytest.raises(ValueError, match="method 'ngram' has options of NgramOptions, got"):
      SpeculativeConfig("ngram", options, 7)


def test_configurations_are_hashable():
  assert hash(draft(tree_widths=(4, 2, 1)))
