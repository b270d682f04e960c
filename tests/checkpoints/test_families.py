"""A family is one file and one row: a made-up one is added to the registry and its files load."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import safetensors.numpy
from gguf_files import random_model

from jspec.checkpoints.families import FAMILIES
from jspec.checkpoints.gguf import load_gguf, read_gguf
from jspec.checkpoints.hf_config import hf_config_from_model, model_config_from_hf
from jspec.checkpoints.tensors import WeightsError
from jspec.checkpoints.weights import load_params

MODULE = """
import dataclasses

from jspec.checkpoints.families import gguf_keys, hf_keys
from jspec.checkpoints.families.family import LAYER_NAMES, OUTER_NAMES, Family


def _from_hf(config):
  config = {**config, "hidden_size": config["dim"]}
  model = hf_keys.rotary_config(config, "dummy", hf_keys.rope_of(config), "act")
  return dataclasses.replace(model, qk_norm=True)


def _to_hf(config):
  keys = hf_keys.rotary_keys(config)
  return keys | {"dim": keys.pop("hidden_size"), "act": keys.pop("hidden_act")}


def _from_gguf(keys):
  return dataclasses.replace(gguf_keys.rotary_config(keys), qk_norm=True)


FAMILY = Family(
  name="dummy", model_type="dummy_text", architecture="DummyForCausalLM", from_hf=_from_hf,
  defaults={"rms_norm_eps": 1e-4}, wrapper="dummy", to_hf=_to_hf, from_gguf=_from_gguf,
  layer_names={**LAYER_NAMES, "q": "attn.query", "attn_norm": "before"},
  outer_names={**OUTER_NAMES, "embed": "words"}, prefixes=("body.", "whole.body."),
  harmless=("ears.",), norm_offset=0.5, gguf_rotates_pairs=True)
"""
CONFIG = {"model_type": "dummy", "ears": 2, "text_config": {
  "dim": 32, "vocab_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128, "act": "gelu"}}


@pytest.fixture
def dummy(tmp_path, monkeypatch):
  (tmp_path / "dummy_family.py").write_text(MODULE, encoding="utf-8")
  monkeypatch.syspath_prepend(tmp_path)
  module = importlib.import_module("dummy_family")
  monkeypatch.setitem(FAMILIES, "dummy", module.FAMILY)
  return tmp_path


def test_a_family_is_unknown_until_it_has_a_row():
  with pytest.raises(ValueError, match="model_type 'dummy' is not supported; supported: llama"):
    model_config_from_hf(CONFIG)


def test_a_family_needs_one_file_and_one_row_to_load_its_safetensors(dummy):
  config = model_config_from_hf(CONFIG)
  assert (config.family, config.norm_eps, config.activation) == ("dummy", 1e-4, "gelu")
  assert model_config_from_hf(hf_config_from_model(config)) == config
  rng, shapes = np.random.default_rng(0), {"words": (48, 32), "norm": (32,)}
  for i in range(2):
    shapes |= {f"layers.{i}.{name}": shape for name, shape in {
      "before": (32,), "post_attention_layernorm": (32,), "attn.query": (32, 32),
      "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
      "self_attn.q_norm": (8,), "self_attn.k_norm": (8,), "mlp.gate_proj": (48, 32),
      "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}.items()}
  tensors = {f"whole.body.{name}.weight": rng.normal(size=shape).astype(np.float32)
             for name, shape in shapes.items()}
  tensors |= {"whole.body.lm_head.weight": tensors["whole.body.words.weight"] + 1,
              "ears.left": np.zeros(3, np.float32)}
  safetensors.numpy.save_file(tensors, dummy / "model.safetensors")
  params = load_params(dummy, config)
  first = "whole.body.layers.0."
  np.testing.assert_array_equal(params["layers"][0]["q"]["w"],
                                tensors[first + "attn.query.weight"].T)
  np.testing.assert_array_equal(params["layers"][0]["attn_norm"]["scale"],
                                tensors[first + "before.weight"] + np.float32(0.5))
  np.testing.assert_array_equal(params["head"]["w"], tensors["whole.body.lm_head.weight"].T)
  safetensors.numpy.save_file(tensors | {"eyes.left": np.zeros(3, np.float32)},
                              dummy / "model.safetensors")
  with pytest.raises(WeightsError, match="a dummy model with this config has no tensor eyes.left"):
    load_params(dummy, config)


def test_a_family_needs_one_file_and_one_row_to_load_its_gguf(dummy):
  path, config, _, tensors = random_model(dummy / "m.gguf", "dummy", ("output.weight",))
  loaded, params = load_gguf(read_gguf(path))
  assert loaded == config and config.qk_norm and config.family == "dummy"
  pairs = tensors["blk.1.attn_q.weight"].reshape(4, 4, 2, 32)  # of each head, even rows then odd
  halves = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(32, 32)
  np.testing.assert_array_equal(params["layers"][1]["q"]["w"], halves.T)
  np.testing.assert_array_equal(params["layers"][1]["attn_norm"]["scale"],
                                tensors["blk.1.attn_norm.weight"])
