"""config.json and GGUF metadata -> ModelConfig: what is applied, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jspec.checkpoints.families.gguf_keys import llama3_divisors
from jspec.checkpoints.hf_config import (
  hf_config_from_model,
  model_config_from_gguf,
  model_config_from_hf,
)
from jspec.config import RopeScaling
from jspec.model.transformer import rope_frequencies

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 12,
         "intermediate_size": 48, "sliding_window": 16}
OPT = {"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
       "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128}
GGUF = {"general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 128,
        "llama.embedding_length": 32, "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.vocab_size": 64}


def of(base=LLAMA, **changes):
  return model_config_from_hf({**base, **changes})


def test_head_dim_defaults_to_width_over_heads():
  assert of().head_dim == 8
  assert of(head_dim=None).head_dim == 8
  assert of(head_dim=16).head_dim == 16


def test_rope_theta_is_read_from_either_place():
  assert of(rope_theta=5e5).rope_theta == 5e5
  assert of(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5
  assert of().rope_theta == 1e4


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_and_linear_scaling(key):
  llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
  assert of(**{key: llama3}).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
  assert of(**{key: {"type": "linear", "factor": 2.0}}).rope_scaling == RopeScaling("linear", 2.0)
  with pytest.raises(ValueError, match="'factor' is missing"):
    of(**{key: {"rope_type": "linear"}})


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_other_rope_types_are_refused(kind):
  with pytest.raises(ValueError, match=f"'{kind}' is not supported; supported: default, linear"):
    of(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_mistral_slides_on_every_layer_and_by_default():
  mistral = {**LLAMA, "model_type": "mistral"}
  assert of(mistral, sliding_window=16).sliding_layers == (0, 1, 2)
  assert of(mistral).window == 4096
  assert of(mistral, sliding_window=None).window is None


def test_qwen_slides_only_if_told_and_from_max_window_layers_on():
  qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
  assert of(qwen).window is None and of(qwen).qkv_bias and not of(qwen).out_bias
  assert of(qwen, use_sliding_window=True).sliding_layers == (1, 2)
  types = ["full_attention", "sliding_attention", "full_attention"]
  assert of(qwen, use_sliding_window=True, layer_types=types).sliding_layers == (1,)
  with pytest.raises(ValueError, match="layer_types"):
    of(qwen, use_sliding_window=True, layer_types=["chunked_attention"] * 3)
  with pytest.raises(ValueError, match="no window"):
    of(qwen, layer_types=types)


def test_gemma_defaults_and_pattern():
  config = of(GEMMA)
  assert config.sliding_layers == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)
  assert (config.rope_theta, config.rope_theta_local) == (1e6, 1e4)
  assert config.embed_scale == math.sqrt(32) and config.attn_scale == 256 ** -0.5
  assert config.tie_embeddings and config.post_norms and config.qk_norm
  assert of(GEMMA, sliding_window_pattern=3).sliding_layers == (0, 1, 3, 4, 6, 7, 9, 10)
  assert of(GEMMA, final_logit_softcapping=30.0).final_soft_cap == 30.0
  both = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
          "sliding_attention": {"rope_theta": 3e4}}
  config = of(GEMMA, rope_parameters=both)
  assert (config.rope_theta, config.rope_theta_local) == (2e6, 3e4)
  assert config.rope_scaling == RopeScaling("linear", 8.0)


def test_gemma_with_images_uses_its_text_config():
  assert model_config_from_hf({"model_type": "gemma3", "text_config": GEMMA}) == of(GEMMA)


def test_opt_350m_is_refused():
  assert of(OPT).learned_positions and of(OPT).norm == "layer" and of(OPT).activation == "relu"
  with pytest.raises(ValueError, match="word_embed_proj_dim=16"):
    of(OPT, word_embed_proj_dim=16)
  with pytest.raises(ValueError, match="do_layer_norm_before"):
    of(OPT, do_layer_norm_before=False)


@pytest.mark.parametrize("key, value", [
  ("quantization_config", {"quant_method": "gptq"}), ("partial_rotary_factor", 0.5),
  ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0),
  ("query_pre_attn_scalar", 64), ("use_bidirectional_attention", True), ("num_experts", 8)])
def test_keys_that_change_the_maths_are_refused(key, value):
  with pytest.raises(ValueError, match=key):
    of(**{key: value})


def test_biases_and_activation_are_applied():
  config = of(attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh")
  assert config.qkv_bias and config.out_bias and config.mlp_bias
  assert config.activation == "gelu_tanh"
  with pytest.raises(ValueError, match="'quick_gelu' is not supported"):
    of(hidden_act="quick_gelu")


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "relu"])
def test_an_activation_is_written_by_a_name_that_is_read(name):
  config = of(hidden_act=name)
  assert model_config_from_hf(hf_config_from_model(config)) == config


def test_unknown_family_lists_the_known_ones():
  with pytest.raises(ValueError, match="'mamba' is not supported; supported: llama, mistral"):
    model_config_from_hf({"model_type": "mamba"})
  with pytest.raises(ValueError, match="'mamba' is not supported; supported: llama, qwen2"):
    model_config_from_gguf({"general.architecture": "mamba"})
  with pytest.raises(ValueError, match="'hidden_size' is missing"):
    model_config_from_hf({"model_type": "llama"})


def test_gguf_metadata_gives_the_same_config_as_config_json():
  config = model_config_from_gguf(GGUF, ["output.weight"])
  assert config == of(num_hidden_layers=2)
  assert model_config_from_gguf(GGUF).tie_embeddings
  assert model_config_from_hf(hf_config_from_model(config)) == config


def test_gguf_llama3_scaling_is_recovered_from_its_divisors():
  scaling = RopeScaling("llama3", 32.0)
  metadata = {**GGUF, "llama.rope.freq_base": 5e5, "llama.attention.key_length": 64}
  config = model_config_from_gguf(metadata, (), llama3_divisors(scaling, 5e5, 64))
  assert config.rope_scaling == scaling
  plain = model_config_from_gguf(metadata)
  np.testing.assert_allclose(rope_frequencies(plain, False) / rope_frequencies(config, False),
                             llama3_divisors(scaling, 5e5, 64), rtol=1e-5)
  with pytest.raises(ValueError, match="rope_freqs"):
    model_config_from_gguf(metadata, (), np.linspace(1, 4, 32))


@pytest.mark.parametrize("key, value", [
  ("rope.scaling.type", "yarn"), ("expert_count", 8), ("rope.dimension_count", 4)])
def test_gguf_keys_that_change_the_maths_are_refused(key, value):
  with pytest.raises(ValueError, match=str(value)):
    model_config_from_gguf({**GGUF, f"llama.{key}": value})
