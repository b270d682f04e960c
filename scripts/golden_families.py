"""Tiny random models of every family, run by transformers: what make_goldens.py stores of them."""

from __future__ import annotations

import json

import numpy as np
import torch
import transformers

VOCAB, TOKENS = 64, 28  # longer than any window below

_COMMON = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
           "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
_PLAIN = {"rope_type": "default", "rope_theta": 1000.0}

CASES = {
  "llama_tied": ("llama", {**_COMMON, "head_dim": 8, "rope_parameters": _LLAMA3,
                           "tie_word_embeddings": True}),
  "llama_untied": ("llama", {**_COMMON, "rope_parameters": _LINEAR, "attention_bias": True,
                             "mlp_bias": True, "tie_word_embeddings": False}),
  "mistral": ("mistral", {**_COMMON, "rope_parameters": _PLAIN, "sliding_window": 8,
                          "tie_word_embeddings": False}),
  "qwen2": ("qwen2", {**_COMMON, "rope_parameters": _PLAIN, "tie_word_embeddings": True}),
  "qwen2_window": ("qwen2", {**_COMMON, "rope_parameters": _PLAIN, "use_sliding_window": True,
                             "sliding_window": 5, "max_window_layers": 1,
                             "tie_word_embeddings": False}),
  "qwen3": ("qwen3", {**_COMMON, "head_dim": 16, "rope_parameters": _PLAIN,
                      "tie_word_embeddings": True}),
  "gemma3": ("gemma3_text", {
    **_COMMON, "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": _LINEAR,
                        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
  "opt": ("opt", {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 64,
                  "word_embed_proj_dim": 24, "bos_token_id": 1, "eos_token_id": 2,
                  "pad_token_id": 0}),
}


def family_golden(name: str, seed: int) -> dict[str, np.ndarray]:
  """config.json, float16 weights under their checkpoint names, token ids, float32 logits."""
  kind, options = CASES[name]
  config = transformers.AutoConfig.for_model(kind, **options)
  config._attn_implementation = "eager"  # the only one with soft caps
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for key, parameter in model.named_parameters():
      parameter.copy_(_random(key, parameter, kind, generator))
  ids = torch.randint(3, VOCAB, (1, TOKENS), generator=generator)
  # transformers 5.24 reads Gemma 3's attn_logit_softcapping but hands it to nobody; its attention
  # function does take the cap.
  cap = options.get("attn_logit_softcapping")
  with torch.no_grad():
    logits = model(ids, **({"softcap": cap} if cap else {})).logits[0]
  tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
  arrays = {f"w/{key}": value.numpy().astype(np.float16)
            for key, value in model.state_dict().items() if key not in tied}
  text = json.dumps({**config.to_dict(), "model_type": kind})
  return {"config": np.array(text), "ids": ids[0].numpy().astype(np.int32),
          "logits": logits.numpy(), **arrays}


def _random(key: str, parameter: torch.Tensor, kind: str,
            generator: torch.Generator) -> torch.Tensor:
  """Nothing trivial, and every value exact in float16: norms off 1, biases off 0."""
  noise = torch.randn(parameter.shape, generator=generator)
  if parameter.ndim == 2:
    noise = noise if "embed" in key else 1.5 * noise / parameter.shape[1] ** 0.5
  else:
    is_scale = "norm" in key and key.endswith("weight") and kind != "gemma3_text"
    noise = 0.3 * noise + (1.0 if is_scale else 0.0)
  return noise.half().float()
