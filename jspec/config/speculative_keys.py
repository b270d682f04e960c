"""The keys of speculative_config: vLLM's, the flags that came before them, and jspec's own."""

from __future__ import annotations

from typing import Any

from jspec.config.methods import OPTIONS

# Of all methods; each has some of its own beside them (methods/).
SHARED = ("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size",
          "disable_by_batch_size", "adaptive_draft_length", "num_lookup_tokens",
          "rejection_sample_method", "acceptance_method", "posterior_threshold",
          "posterior_alpha", "synthetic_acceptance_rate", "synthetic_acceptance_rates",
          "synthetic_acceptance_length")

# Older spellings -> today's.
OLDER = {
  "speculative_model": "model",
  "num_speculative_tokens": "num_speculative_tokens",
  "ngram_prompt_lookup_max": "prompt_lookup_max",
  "ngram_prompt_lookup_min": "prompt_lookup_min",
  "speculative_disable_by_batch_size": "disable_by_batch_size",
  "speculative_model_quantization": "quantization",
  "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
  "speculative_max_model_len": "max_model_len",
  "speculative_disable_mqa_scorer": "disable_mqa_scorer",
  "spec_decoding_acceptance_method": "acceptance_method",
  "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
  "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
  "disable_logprobs_during_spec_decoding": "disable_logprobs",
  "use_v2_block_manager": "use_v2_block_manager",
  "num_lookahead_slots": "num_lookahead_slots",
  "rejection_sample_method": "rejection_sample_method",
  "synthetic_acceptance_rate": "synthetic_acceptance_rate",
  "speculative_token_tree": "speculative_token_tree",
  "spec_method": "method",
  "spec_model": "model",
  "spec_tokens": "num_speculative_tokens",
}

NO_EFFECT = {
  "disable_mqa_scorer": "drafts are always scored in one forward pass",
  "disable_logprobs": "log-probabilities are returned wherever a request asks for them",
  "use_v2_block_manager": "there is one page allocator",
  "num_lookahead_slots": "pages for draft tokens are reserved by themselves",
}

# Keys of things jspec does not have -> the values that ask for nothing (None always does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
  "enforce_eager": (False,),
  "tensor_parallel_size": (),
  "quantization": (),
  "moe_backend": (),
  "attention_backend": (),
  "kv_cache_dtype": ("auto",),
  "max_model_len": (),
  "code_revision": (),
  "index_share_for_mtp_iteration": (),
  "disable_padded_drafter_batch": (False,),
  "disable_eagle_block_drop": (False,),
  "disable_lookahead_block_hashes": (False,),
  "draft_lm_head_quantization": (),
  "use_local_argmax_reduction": (False,),
  "use_heterogeneous_vocab": (False,),
  "parallel_drafting": (False,),
  "draft_load_config": (),
  "enable_adaptive_verification": (False,),
  "dspark_draft_topk": (),
  "xpress_topc": (),
  "fly_window_size": (),
  "fly_entropy_threshold": (0.3,),
  "fly_entropy_top_k": (3,),
  "target_model_config": (),
  "target_parallel_config": (),
  "draft_model_config": (),
  "draft_parallel_config": (),
}
INSTEAD = {
  "tensor_parallel_size": "use draft_tensor_parallel_size",
}


def known_keys() -> tuple[str, ...]:
  """Those that do something, for some method."""
  own = (key for options in OPTIONS.values() for key in options.keys())
  return tuple(dict.fromkeys((*SHARED, *own)))
