"""Whatever a configuration holds: something is made of it, or it is refused with a sentence."""

from __future__ import annotations

import json

import gguf_files
import numpy as np
import pytest
from checkpoint_files import GEMMA, LLAMA, OPT
from damaged import FEW, JSON, outcome
from head_checkpoints import TARGET
from hypothesis import given
from hypothesis import strategies as st

from jspec.checkpoints import gguf, hub
from jspec.checkpoints.head_files import HeadFiles, kind_of_head
from jspec.checkpoints.head_formats import head_layout
from jspec.checkpoints.hf_config import model_config_from_hf
from jspec.checkpoints.tensors import StoredTensor
from jspec.config import EngineConfig, ModelConfig, RopeScaling
from jspec.config.checks import check_int, check_number
from jspec.config.speculative import SpeculativeConfig
from jspec.config.speculative_keys import known_keys
from jspec.config.speculative_parse import parse_speculative
from jspec.heads.config import HeadConfig
from jspec.text.tokenizer_files import gguf_tokenizer, load_tokenizer

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
MULTIMODAL = {"model_type": "gemma3", "text_config": {
    **GEMMA, "model_type": "gemma3_text", "tie_word_embeddings": None}}


@FEW
@given(st.sampled_from([LLAMA, GEMMA, OPT, {**LLAMA, "model_type": "qwen3", "layer_types":
                        ["sliding_attention"] * 3, "use_sliding_window": True},
                        {**LLAMA, "rope_parameters": LLAMA3}]), st.data())
def test_any_config_json_is_a_model_or_a_sentence(config, data):
  keys = [*config, "head_dim", "rope_scaling", "rope_theta", "rms_norm_eps", "hidden_act",
          "sliding_window", "max_window_layers", "sliding_window_pattern", "text_config",
          "attn_logit_softcapping", "tie_word_embeddings", "attention_bias"]
  changes = data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=3))
  found = outcome(model_config_from_hf, {**config, **changes})
  assert found is None or isinstance(found, ModelConfig)


@pytest.mark.parametrize("change, message", [
  ({"num_attention_heads": "4"}, "config.json: num_attention_heads must be .*, got '4'"),
  ({"num_attention_heads": 0}, "config.json: num_attention_heads must be in 1.*, got 0"),
  ({"num_hidden_layers": 1.5}, "config.json: num_hidden_layers must be an integer .*, got 1.5"),
  ({"num_hidden_layers": 10**9}, "num_hidden_layers must be in 1..10000, got 1000000000"),
  ({"rope_scaling": [1]}, r"config.json: rope_scaling must be an object, got \[1\]"),
  ({"rope_theta": 0}, r"config.json: rope_theta must be a number in \(0, 1e\+30\], got 0"),
  ({"attention_bias": "false"}, "config.json: attention_bias must be true or false, got 'false'"),
  ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps must be a number in .*, got nan"),
  ({"hidden_act": ["silu"]}, r"activation \['silu'\] is not supported"),
  ({"layer_types": [[], 1, "full_attention"]}, "config.json: layer_types needs 3 entries"),
])
def test_a_damaged_config_json_says_what_it_has_and_what_is_allowed(change, message):
  with pytest.raises(ValueError, match=message):
    model_config_from_hf({**LLAMA, **change})


def test_null_in_config_json_says_nothing_but_for_the_window():
  nulls = {"rms_norm_eps": None, "hidden_act": None, "attention_bias": None, "head_dim": None,
           "rope_scaling": None, "tie_word_embeddings": None}
  assert model_config_from_hf({**LLAMA, **nulls}) == model_config_from_hf(LLAMA)
  mistral = {**LLAMA, "model_type": "mistral"}
  assert model_config_from_hf(mistral).window == 4096
  assert model_config_from_hf({**mistral, "sliding_window": None}).window is None


@FEW
@given(st.data())
def test_any_speculative_config_is_one_or_a_sentence(data):
  base = data.draw(st.sampled_from([
      {"method": "ngram"}, {"method": "suffix"}, {"model": "m", "num_speculative_tokens": 3},
      {"method": "ngram+eagle3", "model": "m"}, {"method": "medusa", "model": "m"},
      {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"},
      {"method": "eagle", "model": "m", "tree_top_k": 2, "tree_total_tokens": 6}]))
  changes = data.draw(st.dictionaries(
      st.sampled_from(sorted(known_keys())), JSON, min_size=1, max_size=3))
  found = outcome(parse_speculative, {**base, **changes})
  assert found is None or isinstance(found, SpeculativeConfig)


def test_numbers_given_as_text_are_refused_by_name():
  config = {"method": "ngram+eagle3", "model": "m", "num_lookup_tokens": "3"}
  with pytest.raises(ValueError, match="num_lookup_tokens must be an integer >= 0, got '3'"):
    parse_speculative(config)


def test_the_checks_say_what_is_allowed():
  assert check_int("n", 3, 1) == 3 and check_number("x", 1, 0, 2) == 1.0
  for value in (True, 1.0, "1", None, [1]):
    with pytest.raises(ValueError, match="n must be an integer in 1..9, got "):
      check_int("n", value, 1, 9)
  for value in (0, -0.5, 2.5, float("nan"), float("inf"), True, "1", 10**400):
    with pytest.raises(ValueError, match=r"x must be a number in \(0, 2\], got "):
      check_number("x", value, 0, 2, above=True)


@pytest.mark.parametrize("base, changes, field, value", [
  # As transformers' configurations have it: null is as many key heads as heads.
  ({**LLAMA, "model_type": "mistral"}, {"num_key_value_heads": None}, "num_kv_heads", 4),
  (LLAMA, {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}, "rope_scaling",
   RopeScaling("linear", 2.0)),
  (LLAMA, {"rope_theta": 5e5, "rope_parameters": {"rope_theta": None}}, "rope_theta", 5e5),
  (MULTIMODAL, {"tie_word_embeddings": False}, "tie_embeddings", False),
  (MULTIMODAL, {"tie_word_embeddings": None}, "tie_embeddings", True),
])
def test_null_hides_nothing_that_is_said_elsewhere(base, changes, field, value):
  assert getattr(model_config_from_hf({**base, **changes}), field) == value


@pytest.mark.parametrize("depth", [100, 700, *range(900, 1000, 12), 10_000])
def test_nested_json_is_damage_at_any_depth(depth, tmp_path):
  nested = "[" * depth + "]" * depth
  for key in ("rope_scaling", "quantization_config", "model_type", "hidden_act", "layer_types"):
    text = json.dumps({**LLAMA, key: "HERE"}).replace('"HERE"', nested)
    (tmp_path / "config.json").write_text(text)
    assert outcome(lambda: model_config_from_hf(hub.read_config(tmp_path))) is None


@FEW
@given(st.data())
def test_any_engine_config_is_one_or_a_sentence(data):
  keys = ["max_model_len", "max_num_seqs", "page_size", "num_pages", "tensor_parallel_size", "seed",
          "data_parallel_size", "max_num_batched_tokens", "enable_prefix_caching", "dtype",
          "kv_cache_dtype", "attention_backend", "numerics"]
  changes = data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=3))
  found = outcome(lambda: EngineConfig(**changes))
  assert found is None or isinstance(found, EngineConfig)


@pytest.mark.parametrize("change, message", [
  ({"num_pages": "3"}, "num_pages must be an integer in 0.*, got '3'"),
  ({"seed": 2**63}, "seed must be in .*, got 9223372036854775808"),
  ({"kv_cache_dtype": ["int8"]}, r"kv_cache_dtype \['int8'\] is not one of"),
  ({"prefill_chunks": (16, "32")}, "each of prefill_chunks must be an integer .*, got '32'")])
def test_an_engines_numbers_are_checked_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    EngineConfig(**change)


# ------------------------------------------------------------------ tokenizers and defaults


@FEW
@given(st.data())
def test_any_tokenizer_files_make_a_tokenizer_or_a_sentence(tmp_path_factory, data):
  from tiny_llm import byte_tokenizer
  folder = tmp_path_factory.mktemp("tokenizer")
  byte_tokenizer().save(folder)
  keys = {"tokenizer_config.json": ("eos_token", "bos_token", "chat_template", "unk_token"),
          "special_tokens_map.json": ("eos_token",), "generation_config.json": (
              "eos_token_id", "temperature", "top_k"),
          "config.json": ("eos_token_id", "bos_token_id", "text_config")}
  file = data.draw(st.sampled_from(sorted(keys)))
  (folder / file).write_text(json.dumps(data.draw(JSON | st.dictionaries(
      st.sampled_from(keys[file]), JSON | st.lists(st.integers(0, 5), max_size=2)))))
  outcome(load_tokenizer, folder)
  outcome(hub.generation_defaults, folder)


def test_null_as_an_end_token_leaves_what_another_file_says(tmp_path):
  from tiny_llm import byte_tokenizer
  byte_tokenizer().save(tmp_path)
  write = lambda name, content: (tmp_path / name).write_text(json.dumps(content))
  write("generation_config.json", {"eos_token_id": None})
  write("config.json", {"eos_token_id": [5, 7], "bos_token_id": 1})
  write("special_tokens_map.json", {"eos_token": "<|user|>"})
  write("tokenizer_config.json", {"eos_token": None})
  found = load_tokenizer(tmp_path)
  assert found.eos_ids == (5, 7, 1) and found.bos_id == 1
  write("config.json", {"eos_token_id": None, "text_config": {"eos_token_id": 9}})
  assert load_tokenizer(tmp_path).eos_ids == (9, 1)


def test_ids_that_are_none_are_refused_with_the_file(tmp_path):
  from tiny_llm import byte_tokenizer
  byte_tokenizer().save(tmp_path)
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, "2"]}')
  with pytest.raises(ValueError, match="generation_config.json: eos_token_id must be .*, got '2'"):
    load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_converted_says_so(tmp_path):
  pytest.importorskip("transformers")
  (tmp_path / "vocab.json").write_text("version https://git-lfs.github.com/spec/v1\n")
  with pytest.raises(ValueError, match="vocab.json is a git-lfs pointer"):
    load_tokenizer(tmp_path)
  (tmp_path / "vocab.json").write_text("{")
  (tmp_path / "config.json").write_text('{"model_type": "opt"}')
  with pytest.raises(ValueError, match="the tokenizer in .* can't be converted"):
    load_tokenizer(tmp_path)


def test_a_template_that_is_none_is_refused(tmp_path):
  from tiny_llm import byte_tokenizer
  byte_tokenizer().save(tmp_path)
  (tmp_path / "chat_template.jinja").write_text("<!DOCTYPE html><p>Sign in</p>")
  with pytest.raises(ValueError, match="chat_template.jinja is an HTML page"):
    load_tokenizer(tmp_path)
  with pytest.raises(ValueError, match=r"tokenizer.chat_template must be text, got \[1\]"):
    gguf_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
                    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "gpt-2",
                    "tokenizer.chat_template": [1]})


def test_gguf_files_bring_sampling_defaults_too(tmp_path, monkeypatch):
  """Under llama.cpp's names, in float32: 0.6 is stored as 0.60000002384..."""
  path = gguf_files.random_model(tmp_path / "m.gguf", "llama", ("output.weight",))[0]
  file = gguf.read_gguf(path)
  said = {"temp": float(np.float32(0.6)), "top_k": 20, "penalty_repeat": float(np.float32(1.05))}
  metadata = {**file.metadata, **{f"general.sampling.{key}": x for key, x in said.items()}}
  monkeypatch.setattr(gguf, "read_gguf", lambda path: file._replace(metadata=metadata))
  monkeypatch.setattr(hub, "gguf_tokenizer", lambda metadata: None)
  assert hub.load_model(path).generation_defaults == {
      "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
  metadata["general.sampling.temp"] = "hot"
  with pytest.raises(ValueError, match="general.sampling is damaged: temperature must be"):
    hub.load_model(path)


# ------------------------------------------------------------------ heads


@FEW
@given(st.data())
def test_any_head_config_is_a_head_or_a_sentence(data):
  base = {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
          "intermediate_size": 48, "num_heads": 2, "n_predict": 2, "emb_dim": 32}
  keys = [*base, "architectures", "model_type", "eagle_config", "draft_vocab_size", "logit_scale",
          "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "top_k_tokens_per_head",
          "truncated_vocab_size", "inner_dim", "n_candidates", "speculators_model_type"]
  changes = data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=3))
  tensor = StoredTensor(np.dtype(np.float32), (32, 32), lambda: np.zeros((32, 32), np.float32))
  names = {"medusa": "blocks.0.layers.0.weight", "mlp_speculator": "emb.0.weight",
           "eagle": "fc.weight", "eagle3": "midlayer.hidden_norm.weight"}
  for method, name in names.items():
    files = HeadFiles("head", {**base, **changes}, {name: tensor})
    outcome(kind_of_head, files)
    found = outcome(head_layout, files, method, TARGET)
    assert found is None or isinstance(found.config, HeadConfig)
