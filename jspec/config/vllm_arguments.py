"""vLLM's arguments that jspec has not: what asks for nothing, what is passed over, what is refused.

One table for the keyword arguments of `LLM` and for the flags of the command line, without jax.
"""

from __future__ import annotations

import json
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_NAME = re.compile(r"\{(\w+)\}")


class Argument(NamedTuple):
  because: str  # why it is passed over, or what to do instead; {names} are arguments of jspec's
  neutral: tuple = (None,)  # values that ask for nothing
  harmless: bool = False  # the others change neither texts nor what is served: a note is enough
  values: str = "1"  # of the flag: none, "1", or "+" for one or more


def _arguments(names: str, because: str, neutral: tuple = (None,), *,
               harmless: bool = False) -> dict[str, Argument]:
  """names: with "?" behind those whose flags take no value, "+" behind those that take several."""
  found = {}
  for name in names.split():
    switch = name.endswith("?")
    found[name.rstrip("?+")] = Argument(
        because, (None, False) if switch and neutral == (None,) else neutral, harmless,
        "" if switch else "+" if name.endswith("+") else "1")
  return found


def _harmless(names: str, because: str) -> dict[str, Argument]:
  return _arguments(names, because, harmless=True)


_COMPILED = "every step is compiled, by XLA"
_DENSE = "the models here have no experts"
_TEXT = "prompts are text"
_SEVERAL_HOSTS = "one process runs all devices: use {tensor_parallel_size} and {data_parallel_size}"
_LORA = "adapters are not supported: merge them into the weights"
_OWN_TOKENIZER = "the model's own is used: leave it out"
_OWN_CONFIG = "change the model's config.json"
_GRAMMARS = "structured outputs are not supported: leave it out"
_REASONING = "reasoning is part of the text: leave it out"
_TOOLS = "tool calls are not supported: leave it out"
_NEVER_LOGGED = "prompts and texts are never logged"

ARGUMENTS: Mapping[str, Argument] = {  # keyword arguments of vllm.LLM, and flags of `vllm serve`
  # Memory.
  **_harmless("gpu_memory_utilization", "the KV cache has {num_pages} pages, or room for "
              "{max_num_seqs} requests of {max_model_len} tokens"),
  **_harmless("swap_space preemption_mode", "preempted requests are computed again, nothing is "
              "swapped"),
  **_arguments("kv_cache_memory_bytes num_gpu_blocks_override", "use {num_pages}"),
  **_arguments("block_size", "use {page_size}"),
  **_arguments("cpu_offload_gb offload_group_size", "weights stay on the device: leave it out",
               (None, 0)),
  **_harmless("cpu_offload_params+ offload_params+ calculate_kv_scales? kv_cache_metrics? "
              "prefix_caching_hash_algo disable_hybrid_kv_cache_manager? watermark "
              "scheduler_reserve_full_isl?", "the KV cache does without"),
  **_arguments("kv_cache_dtype_skip_layers+", "{kv_cache_dtype} is that of all layers: leave it "
               "out"),
  **_arguments("kv_transfer_config kv_events_config ec_transfer_config",
               "pages stay with the engine: leave it out"),
  # Compilation and devices.
  **_harmless("enforce_eager? max_seq_len_to_capture cudagraph_capture_sizes+ compilation_config "
              "max_cudagraph_capture_size optimization_level performance_mode "
              "enable_flashinfer_autotune? disable_cascade_attn? kernel_config cudagraph_metrics? "
              "use_v2_block_manager? disable_custom_all_reduce? num_lookahead_slots "
              "disable_async_output_proc? async_scheduling? max_parallel_loading_workers",
              _COMPILED),
  **_arguments("attention_config override_attention_dtype", "use {attention_backend}"),
  **_arguments("device", "jax takes the fastest that it finds; JAX_PLATFORMS=cpu chooses",
               (None, "auto")),
  **_harmless("distributed_executor_backend worker_use_ray? ray_workers_use_nsight? numa_bind? "
              "distributed_timeout_seconds disable_nccl_for_dp_synchronization? enable_dbo? "
              "data_parallel_backend", "one process runs all devices"),
  **_arguments("pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
               "nnodes", _SEVERAL_HOSTS, (None, 1)),
  **_arguments("node_rank data_parallel_rank data_parallel_start_rank", _SEVERAL_HOSTS, (None, 0)),
  **_arguments("master_addr master_port data_parallel_address data_parallel_rpc_port "
               "data_parallel_size_local data_parallel_hybrid_lb? data_parallel_external_lb? "
               "device_ids+", _SEVERAL_HOSTS),
  **_harmless("enable_expert_parallel? enable_eplb? eplb_config moe_backend all2all_backend "
              "expert_placement_strategy", _DENSE),
  **_arguments("worker_cls worker_extension_cls scheduler_cls", "the engine's own is used: "
               "leave it out", (None, "auto")),
  **_arguments("additional_config override_neuron_config", "leave it out", (None, {})),
  # Scheduling.
  **_arguments("enable_chunked_prefill?", "prompts are always read in chunks, of "
               "{max_num_batched_tokens} at most", (None, True), harmless=True),
  **_harmless("max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
              "scheduler_delay_factor prefill_schedule_interval multi_step_stream_outputs? "
              "stream_interval disable_chunked_mm_input?", "the scheduler has {max_num_seqs} and "
              "{max_num_batched_tokens} instead"),
  **_arguments("max_num_scheduled_tokens", "use {max_num_batched_tokens}"),
  **_arguments("num_scheduler_steps", "the engine chooses", (None, 1), harmless=True),
  # The model's files.
  **_harmless("trust_remote_code? code_revision", "no code from model repositories is run"),
  **_arguments("quantization quantization_config", "a GGUF file brings its own; {kv_cache_dtype} "
               "is the cache's"),
  **_arguments("load_format", "the format is read from the files: leave it out",
               (None, "auto", "safetensors", "gguf", "hf")),
  **_arguments("config_format", "the format is read from the files: leave it out",
               (None, "auto", "hf")),
  **_harmless("model_impl model_loader_extra_config ignore_patterns+ use_tqdm_on_load? "
              "pt_load_map_location safetensors_load_strategy safetensors_prefetch_num_threads",
              "files are read in jspec's own way"),
  **_arguments("tokenizer tokenizer_revision hf_config_path", _OWN_TOKENIZER),
  **_arguments("tokenizer_mode", _OWN_TOKENIZER, (None, "auto", "hf")),
  **_arguments("skip_tokenizer_init?", _OWN_TOKENIZER),
  **_harmless("tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config "
              "renderer_num_workers", "there is one tokenizer"),
  **_arguments("download_dir", "use {cache_dir}, or HF_HOME for what comes from Hugging Face"),
  **_arguments("hf_token", "set HF_TOKEN, or log in with `hf auth login`"),
  **_arguments("hf_overrides rope_scaling model_class_overrides", _OWN_CONFIG, (None, {})),
  **_arguments("rope_theta disable_sliding_window?", _OWN_CONFIG),
  # What models do.
  **_arguments("runner task", "models generate text, nothing else: leave it out",
               (None, "auto", "generate")),
  **_arguments("convert", "models generate text, nothing else: leave it out",
               (None, "auto", "none")),
  **_arguments("pooler_config override_pooler_config", "models generate text, nothing else: leave "
               "it out"),
  **_harmless("limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb media_io_kwargs "
              "mm_encoder_tp_mode disable_mm_preprocessor_cache? skip_mm_profiling? "
              "interleave_mm_strings? language_model_only? allowed_local_media_path "
              "allowed_media_domains+ video_pruning_rate", _TEXT),
  **_arguments("enable_prompt_embeds? enable_mm_embeds?", "prompts are texts or token ids: leave "
               "it out"),
  **_arguments("enable_lora? enable_prompt_adapter?", _LORA),
  **_arguments("max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size "
               "fully_sharded_loras? enable_lora_bias? lora_target_modules+ default_mm_loras "
               "qlora_adapter_name_or_path", _LORA),
  **_arguments("guided_decoding_backend", _GRAMMARS, (None, "auto")),
  **_arguments("structured_outputs_config guided_decoding_disable_fallback? "
               "guided_decoding_disable_any_whitespace?", _GRAMMARS),
  **_arguments("reasoning_parser reasoning_parser_plugin enable_reasoning?", _REASONING,
               (None, "", False)),
  **_arguments("max_logprobs", "requests may ask for 20 at most: leave it out", (None, 20)),
  **_arguments("logprobs_mode", "log-probabilities are those of the model, before any sampling "
               "parameter: leave it out", (None, "raw_logprobs")),
  **_arguments("logits_processors+ logits_processor_pattern", "logits processors are not "
               "supported: leave it out"),
  **_arguments("generation_config", "pass get_default_sampling_params() to generate",
               (None, "vllm")),
  **_arguments("override_generation_config", "set the parameters in requests", (None, {})),
  **_arguments("enable_sleep_mode?", "the engine never sleeps: leave it out"),
  **_arguments("io_processor_plugin", "there are no plugins: leave it out"),
  # What is told.
  **_harmless("served_model_name+", "outputs don't name the model"),
  **_harmless("disable_log_stats? aggregate_engine_logging? show_hidden_metrics_for_version "
              "enable_mfu_metrics? enable_logging_iteration_details? enable_mm_processor_stats?",
              "get_metrics() and the server's /metrics have the statistics"),
  **_arguments("otlp_traces_endpoint collect_detailed_traces+ profiler_config "
               "enable_layerwise_nvtx_tracing?", "there are no traces: leave it out"),
}

SERVE: Mapping[str, Argument] = {  # flags of `vllm serve` alone
  **_arguments("lora_modules+ prompt_adapters+", _LORA),
  **_arguments("enable_auto_tool_choice? exclude_tools_when_tool_choice_none?", _TOOLS),
  **_arguments("tool_call_parser tool_parser_plugin tool_server", _TOOLS, (None, "")),
  **_arguments("chat_template_content_format", "contents reach templates as texts: leave it out",
               (None, "auto", "string")),
  **_arguments("trust_request_chat_template?", "templates are the server's: use {chat_template}"),
  **_arguments("default_chat_template_kwargs", "requests bring their chat_template_kwargs",
               (None, {})),
  **_arguments("response_role", "answers are the assistant's: leave it out", (None, "assistant")),
  **_arguments("return_tokens_as_token_ids?", "requests ask for it"),
  **_arguments("enable_force_include_usage?", "requests ask for it, by stream_options"),
  **_harmless("disable_log_requests? max_log_len enable_log_deltas?", _NEVER_LOGGED),
  **_arguments("enable_log_requests? enable_log_outputs?", f"{_NEVER_LOGGED}: leave it out"),
  **_harmless("uvicorn_log_level disable_uvicorn_access_log? disable_access_log_for_endpoints "
              "log_error_stack?", "the one log has {log_level} and {access_log}"),
  **_arguments("log_config_file", "use {log_level}"),
  **_harmless("enable_server_load_tracking?", "/metrics has the load"),
  **_harmless("disable_fastapi_docs? enable_offline_docs?", "the server has no pages of "
              "documentation"),
  **_harmless("disable_frontend_multiprocessing? h11_max_header_count", "one process answers "
              "HTTP and gRPC"),
  **_arguments("api_server_count", "one process answers HTTP and gRPC: leave it out", (None, 1)),
  **_arguments("h11_max_incomplete_event_size", "use {max_body_bytes}"),
  **_arguments("enable_tokenizer_info_endpoint? tokens_only? headless?", "the server has no such "
               "mode: leave it out"),
  **_arguments("uds", "use {host} and {port}"),
  **_arguments("ssl_cert_reqs", "{ssl_ca_certs} makes the gRPC port ask for certificates",
               (None, 0)),
  **_arguments("enable_ssl_refresh? ssl_ciphers", "restart the server for new certificates; TLS's "
               "ciphers are the library's"),
  **_arguments("root_path", "let the proxy take the prefix off the path", (None, "")),
  **_arguments("middleware+", "put a proxy in front of the server"),
  **_arguments("config", "give the flags themselves"),
}

SHORT = {  # the short forms of such flags
  "-pp": "--pipeline-parallel-size", "-q": "--quantization", "-cc": "--compilation-config",
  "-O": "--optimization-level", "-ep": "--enable-expert-parallel", "-n": "--nnodes",
  "-r": "--node-rank", "-dpn": "--data-parallel-rank", "-dpr": "--data-parallel-start-rank",
  "-dpl": "--data-parallel-size-local", "-dpa": "--data-parallel-address",
  "-dpp": "--data-parallel-rpc-port", "-dpb": "--data-parallel-backend",
  "-pcp": "--prefill-context-parallel-size", "-dcp": "--decode-context-parallel-size",
  "-ac": "--attention-config", "-asc": "--api-server-count",
}


def take(arguments: dict[str, Any]) -> None:
  """Removes vLLM's keyword arguments of LLM that change nothing, with one warning about them.

  ValueError for those that ask for something which is not done.
  """
  given = [(name, arguments.pop(name)) for name in list(arguments) if name in ARGUMENTS]
  refused: list[tuple[str, str]] = []
  passed: list[tuple[str, str]] = []
  for name, value in given:
    argument = ARGUMENTS[name]
    if not _is_neutral(value, argument):
      why = _NAME.sub(r"\1", argument.because)
      (passed if argument.harmless else refused).append((f"{name}={reprlib.repr(value)}", why))
  if refused:
    raise ValueError(refusal(refused))
  if passed:
    warnings.warn(note(passed), stacklevel=3)


def judge_flags(given: Iterable[tuple[str, str, Any]]) -> tuple[str | None, str | None]:
  """(error, note) about flags as (flag, name in ARGUMENTS or SERVE, value): None for nothing.

  Values are texts, lists of texts, True and False for switches.
  """
  refused: list[tuple[str, str]] = []
  passed: list[tuple[str, str]] = []
  for flag, name, value in given:
    argument = SERVE.get(name) or ARGUMENTS[name]
    if not _is_neutral(_read(value), argument):
      why = _NAME.sub(lambda match: flag_of(match[1]), argument.because)
      (passed if argument.harmless else refused).append((flag, why))
  return refusal(refused) if refused else None, note(passed) if passed else None


def refusal(refused: list[tuple[str, str]]) -> str:
  return "; ".join(f"{what} is vLLM's and has no meaning here: {why}" for what, why in refused)


def note(passed: list[tuple[str, str]]) -> str:
  whys = dict.fromkeys(why for _, why in passed)
  return "without effect here: " + ", ".join(
      f"{', '.join(what for what, because in passed if because == why)} ({why})" for why in whys)


def flag_of(name: str) -> str:
  return f"--{name.replace('_', '-')}"


def _is_neutral(value: Any, argument: Argument) -> bool:
  return any(value is neutral or isinstance(value, bool) == isinstance(neutral, bool)
             and value == neutral for neutral in argument.neutral)


def _read(value: Any) -> Any:
  """A flag's text as the value that it spells."""
  if not isinstance(value, str):
    return value
  if value == "None":
    return None
  try:
    return json.loads(value)
  except ValueError:
    return value
