"""config.json (Hugging Face) or GGUF metadata -> ModelConfig. A key that would change the maths
is applied or refused; none is ignored."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.config import MAX_LAYERS, MAX_REAL, MAX_SIZE, ModelConfig, RopeScaling
from jspec.config.checks import check_flag, check_int, check_mapping, check_number

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
                "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

# What transformers assumes when config.json leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
  "llama": {"rms_norm_eps": 1e-6},
  "mistral": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8},
  "qwen2": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28},
  "qwen3": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28,
            "head_dim": 128},
  "gemma3_text": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
                  "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh",
                  "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
  "opt": {"tie_word_embeddings": True, "activation_function": "relu"},
}
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "opt")
SUPPORTED_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

# Keys with which a checkpoint computes something we don't, and the values that are harmless.
_REFUSED: dict[str, tuple[Any, ...]] = {
  "quantization_config": (None,), "partial_rotary_factor": (None, 1, 1.0),
  "use_bidirectional_attention": (None, False), "num_local_experts": (None, 0),
  "num_experts": (None, 0), "attention_multiplier": (None,), "embedding_multiplier": (None,),
  "residual_multiplier": (None,), "logits_scaling": (None,), "logit_scale": (None,),
  "clip_qkv": (None,), "alibi": (None, False), "parallel_attn": (None, False),
  "no_rope_layers": (None, []), "layer_norm_elementwise_affine": (None, True),
  "_remove_final_layer_norm": (None, False), "do_layer_norm_before": (None, True),
}
# null says nothing, but for these: that there is no window, that each head has its own keys.
_NULL_SAYS = ("sliding_window", "num_key_value_heads")
_GEMMA_ONLY = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
  """The ModelConfig of a Hugging Face config.json; ValueError names what is not supported."""
  model_type = config.get("model_type")
  if model_type not in SUPPORTED_MODEL_TYPES:
    raise ValueError(f"model_type {_brief(model_type)} is not supported; "
                     f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
  if model_type == "gemma3":
    _refuse(config, "gemma3")
    text = check_mapping("config.json: text_config", config.get("text_config") or {})
    tied = config.get("tie_word_embeddings")
    config = text if text.get("tie_word_embeddings") is not None else {
        **text, "tie_word_embeddings": tied}
    model_type = "gemma3_text"
  said = {key: value for key, value in config.items()
          if value is not None or key in _NULL_SAYS}
  config = {**_DEFAULTS[model_type], **said}
  _refuse(config, model_type)
  return _opt_config(config) if model_type == "opt" else _rotary_config(config, model_type)


def _refuse(config: Mapping[str, Any], model_type: str) -> None:
  allowed = dict(_REFUSED)
  if model_type not in ("gemma3_text", "gemma3"):
    allowed.update({key: (None,) for key in _GEMMA_ONLY})
  for key, harmless in allowed.items():
    if key in config and config[key] not in harmless:
      raise ValueError(f"config.json: {key}={_brief(config[key])} is not supported for "
                       f"model_type {model_type!r}; supported: {harmless[-1]!r} or absent")


def _brief(value: Any) -> str:
  return reprlib.repr(value)


def _need(config: Mapping[str, Any], key: str) -> Any:
  if config.get(key) is None:
    raise ValueError(f"config.json: {key!r} is missing")
  return config[key]


def _size(config: Mapping[str, Any], key: str, default: int | None = None,
          most: int = MAX_SIZE) -> int:
  value = default if config.get(key) is None else config[key]
  return check_int(f"config.json: {key}", _need(config, key) if value is None else value, 1, most)


def _real(config: Mapping[str, Any], key: str, default: float | None = None,
          zero: bool = False) -> float:
  value = default if config.get(key) is None else config[key]
  value = _need(config, key) if value is None else value
  return check_number(f"config.json: {key}", value, 0, MAX_REAL, above=not zero)


def _maybe_real(config: Mapping[str, Any], key: str) -> float | None:
  return None if config.get(key) is None else _real(config, key)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
  return check_flag(f"config.json: {key}", config.get(key, default))


def _activation(name: Any) -> str:
  if not isinstance(name, str) or name not in _ACTIVATIONS:
    raise ValueError(f"activation {_brief(name)} is not supported; "
                     f"supported: {', '.join(_ACTIVATIONS)}")
  return _ACTIVATIONS[name]


def _rotary_config(config: Mapping[str, Any], model_type: str) -> ModelConfig:
  """Llama, Mistral, Qwen and Gemma: RMSNorm, rotary positions, a gated MLP."""
  gemma = model_type == "gemma3_text"
  width, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
  layers = _size(config, "num_hidden_layers", most=MAX_LAYERS)
  head_dim = _size(config, "head_dim", width // heads)
  theta, scaling, local_theta = _rope(config, gemma)
  window, sliding = _sliding(config, model_type, layers)
  attention_bias = _flag(config, "attention_bias")
  attn_scale = _real(config, "query_pre_attn_scalar") ** -0.5 if gemma else None
  return ModelConfig(
    family="gemma3" if gemma else model_type, vocab_size=_size(config, "vocab_size"), width=width,
    num_layers=layers, num_heads=heads,
    num_kv_heads=_size(config, "num_key_value_heads", heads),
    head_dim=head_dim, mlp_dim=_size(config, "intermediate_size"),
    max_positions=_size(config, "max_position_embeddings", 2048),
    norm_eps=_real(config, "rms_norm_eps", zero=True),
    activation=_activation(config.get("hidden_activation" if gemma else "hidden_act", "silu")),
    qkv_bias=attention_bias or model_type == "qwen2", out_bias=attention_bias,
    mlp_bias=_flag(config, "mlp_bias"), qk_norm=model_type in ("qwen3", "gemma3_text"),
    post_norms=gemma, embed_scale=math.sqrt(width) if gemma else 1.0, rope_theta=theta,
    rope_scaling=scaling, rope_theta_local=local_theta, attn_scale=attn_scale,
    attn_soft_cap=_maybe_real(config, "attn_logit_softcapping"),
    final_soft_cap=_maybe_real(config, "final_logit_softcapping"), window=window,
    sliding_layers=sliding,
    tie_embeddings=_flag(config, "tie_word_embeddings"))


def _opt_config(config: Mapping[str, Any]) -> ModelConfig:
  width, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
  projection = config.get("word_embed_proj_dim", width)
  if projection != width:  # opt-350m, which also norms after the residual
    raise ValueError(f"OPT with word_embed_proj_dim={projection} != hidden_size={width} "
                     "(as opt-350m) is not supported")
  bias = _flag(config, "enable_bias", True)
  return ModelConfig(
    family="opt", vocab_size=_size(config, "vocab_size"), width=width,
    num_layers=_size(config, "num_hidden_layers", most=MAX_LAYERS), num_heads=heads,
    num_kv_heads=heads, head_dim=width // heads, mlp_dim=_size(config, "ffn_dim"),
    max_positions=_size(config, "max_position_embeddings"), norm="layer", norm_eps=1e-5,
    activation=_activation(config["activation_function"]), gated_mlp=False, qkv_bias=bias,
    out_bias=bias, mlp_bias=bias, learned_positions=True,
    tie_embeddings=_flag(config, "tie_word_embeddings"))


def _rope(config: Mapping[str, Any], gemma: bool) -> tuple[float, RopeScaling | None, float | None]:
  """(theta, scaling, theta of the sliding layers), from transformers 4 or 5 keys."""
  parameters, scaling = (
      None if config.get(key) is None else check_mapping(f"config.json: {key}", config[key])
      for key in ("rope_parameters", "rope_scaling"))
  theta = _real(config, "rope_theta", 1e6 if gemma else 1e4)
  if not gemma:
    parameters = parameters or scaling or {}
    if isinstance(parameters.get("full_attention"), Mapping):
      raise ValueError("config.json: rope_parameters per layer type are supported for gemma3 only")
    return _real(parameters, "rope_theta", theta), _rope_scaling(parameters), None
  if parameters is None:
    parameters = {"full_attention": scaling or {}}
  elif "full_attention" not in parameters and "sliding_attention" not in parameters:
    parameters = {"full_attention": parameters}
  full, local = (check_mapping(f"config.json: rope_parameters.{key}", parameters.get(key) or {})
                 for key in ("full_attention", "sliding_attention"))
  if _rope_scaling(local) is not None:
    raise ValueError("config.json: rope scaling on sliding layers is not supported")
  local_theta = _real(local, "rope_theta", _real(config, "rope_local_base_freq", 1e4))
  return _real(full, "rope_theta", theta), _rope_scaling(full), local_theta


def _rope_scaling(parameters: Mapping[str, Any]) -> RopeScaling | None:
  kind = parameters.get("rope_type")
  kind = parameters.get("type") if kind is None else kind
  if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise ValueError("config.json: partial_rotary_factor="
                     f"{parameters['partial_rotary_factor']} is not supported; supported: 1.0")
  if kind in ("default", None):
    return None
  if kind == "linear":
    return RopeScaling("linear", _real(parameters, "factor"))
  if kind == "llama3":
    return RopeScaling("llama3", _real(parameters, "factor"), _real(parameters, "low_freq_factor"),
                       _real(parameters, "high_freq_factor"),
                       _size(parameters, "original_max_position_embeddings"))
  raise ValueError(f"rope type {_brief(kind)} is not supported; supported: default, linear, llama3")


def _sliding(config: Mapping[str, Any], model_type: str,
             layers: int) -> tuple[int | None, tuple[int, ...]]:
  """(window, sliding layers) as transformers derives them for each family."""
  window, layer_types = config.get("sliding_window"), config.get("layer_types")
  if model_type == "llama" or window is None:
    window = None
  if model_type in ("qwen2", "qwen3") and not _flag(config, "use_sliding_window"):
    window = None
  if window is not None:
    check_int("config.json: sliding_window", window, 1, MAX_SIZE)
  sliding: Sequence[int]
  if layer_types is not None:
    known = ("sliding_attention", "full_attention")
    if not isinstance(layer_types, list) or len(layer_types) != layers or not all(
        kind in known for kind in layer_types):
      raise ValueError(f"config.json: layer_types needs {layers} entries out of full_attention and "
                       f"sliding_attention, got {_brief(layer_types)}")
    sliding = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention"]
    if sliding and window is None:
      raise ValueError("config.json: layer_types has sliding_attention but no window is in use")
  elif window is None:
    sliding = ()
  elif model_type == "mistral":
    sliding = range(layers)
  elif model_type == "gemma3_text":
    pattern = _size(config, "sliding_window_pattern", _size(config, "_sliding_window_pattern", 6))
    sliding = [i for i in range(layers) if (i + 1) % pattern]
  else:
    first = check_int("config.json: max_window_layers", config["max_window_layers"], 0, MAX_SIZE)
    sliding = range(min(first, layers), layers)
  return (window, tuple(sliding)) if sliding else (None, ())


def model_config_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str] = (),
                           rope_factors: np.ndarray | None = None) -> ModelConfig:
  """The ModelConfig of a GGUF file.

  Args:
    metadata: the file's key-value pairs.
    tensor_names: names of its tensors; without `output.weight` the embeddings are tied.
    rope_factors: its `rope_freqs.weight`, where Llama 3 files keep their frequency scaling.
  """
  architecture = metadata.get("general.architecture")
  if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
    raise ValueError(f"GGUF architecture {architecture!r} is not supported; "
                     f"supported: {', '.join(SUPPORTED_GGUF_ARCHITECTURES)}")

  def get(key: str, default: Any = None) -> Any:
    value = metadata.get(f"{architecture}.{key}", default)
    if value is None:
      raise ValueError(f"GGUF metadata: {architecture}.{key} is missing")
    return value

  def size(key: str, default: int | None = None, low: int = 1, most: int = MAX_SIZE) -> int:
    return check_int(f"GGUF metadata: {architecture}.{key}", get(key, default), low, most)

  def real(key: str, default: float | None = None) -> float:
    return check_number(f"GGUF metadata: {architecture}.{key}", get(key, default), 0, MAX_REAL)

  gemma = architecture == "gemma3"
  width, heads = size("embedding_length"), size("attention.head_count")
  layers = size("block_count", most=MAX_LAYERS)
  head_dim = size("attention.key_length", width // heads)
  _refuse_gguf(metadata, architecture, head_dim)
  theta = real("rope.freq_base", 1e4)
  window = size("attention.sliding_window", 0, low=0)
  sliding = tuple(i for i in range(layers) if not gemma or (i + 1) % 6) if window else ()
  # llama.cpp: only the 27B Gemma 3 (62 layers) scales queries by width / heads
  attn_scale = (width / heads if layers == 62 else head_dim) ** -0.5 if gemma else None
  return ModelConfig(
    family=architecture, width=width, num_layers=layers, num_heads=heads, head_dim=head_dim,
    vocab_size=size("vocab_size", _gguf_tokens(metadata)),
    num_kv_heads=size("attention.head_count_kv", heads), mlp_dim=size("feed_forward_length"),
    max_positions=size("context_length"),
    norm_eps=_decimal(real("attention.layer_norm_rms_epsilon")),
    activation="gelu_tanh" if gemma else "silu",
    qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensor_names,
    out_bias="blk.0.attn_output.bias" in tensor_names,
    mlp_bias="blk.0.ffn_down.bias" in tensor_names,
    qk_norm=architecture in ("qwen3", "gemma3"), post_norms=gemma,
    embed_scale=math.sqrt(width) if gemma else 1.0, rope_theta=theta,
    rope_scaling=_gguf_rope_scaling(metadata, architecture, rope_factors, theta, head_dim),
    rope_theta_local=real("rope.freq_base_swa", 1e4) if gemma else None,
    attn_scale=attn_scale, window=window or None, sliding_layers=sliding,
    tie_embeddings="output.weight" not in tensor_names)


def _gguf_tokens(metadata: Mapping[str, Any]) -> int | None:
  tokens = metadata.get("tokenizer.ggml.tokens")
  return len(tokens) or None if isinstance(tokens, list) else None


def _refuse_gguf(metadata: Mapping[str, Any], architecture: str, head_dim: int) -> None:
  harmless = {"attention.value_length": head_dim, "rope.dimension_count": head_dim,
              "expert_count": 0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
              "attention.scale": 0.0, "logit_scale": 0.0, "attention.causal": True}
  for key, value in harmless.items():
    given = metadata.get(f"{architecture}.{key}", value)
    if given != value:
      raise ValueError(f"GGUF metadata: {architecture}.{key}={given} is not supported; "
                       f"supported: {value}")


def _decimal(value: float) -> float:
  """9.999999747e-06, the float32 of 1e-5, back to 1e-5, so that both sources give one config."""
  return float(f"{value:.6g}")


def _gguf_rope_scaling(metadata: Mapping[str, Any], architecture: str,
                       factors: np.ndarray | None, theta: float,
                       head_dim: int) -> RopeScaling | None:
  kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
  if kind == "linear":
    factor = metadata.get(f"{architecture}.rope.scaling.factor")
    return RopeScaling("linear", check_number(
        f"GGUF metadata: {architecture}.rope.scaling.factor", factor, 0, MAX_REAL, above=True))
  if kind != "none":
    raise ValueError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear")
  if factors is None:
    return None
  # The file has only the divisors; every Llama 3.1 to 3.3 release uses 1, 4 and 8192.
  if factors.shape != (head_dim // 2,):
    raise ValueError(f"GGUF tensor rope_freqs.weight has shape {factors.shape}, a head of "
                     f"{head_dim} needs ({head_dim // 2},)")
  scaling = RopeScaling("llama3", float(np.max(factors)))
  if not np.allclose(factors, llama3_divisors(scaling, theta, head_dim), rtol=1e-4):
    raise ValueError("GGUF tensor rope_freqs.weight is not a Llama 3 frequency scaling")
  return scaling


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
  """What llama3 scaling divides each rotary frequency by, f64[head_dim / 2]."""
  wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  smooth = np.clip((scaling.original_max_positions / wavelength - low) / (high - low), 0, 1)
  return 1 / ((1 - smooth) / scaling.factor + smooth)


def hf_config_from_model(config: ModelConfig) -> dict[str, Any]:
  """config.json for a model read from GGUF; model_config_from_hf is its inverse."""
  gemma = config.family == "gemma3"
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
  if config.rope_scaling is not None:
    scaling = config.rope_scaling
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
      rope |= {"low_freq_factor": scaling.low_freq_factor,
               "high_freq_factor": scaling.high_freq_factor,
               "original_max_position_embeddings": scaling.original_max_positions}
  out: dict[str, Any] = {
    "model_type": "gemma3_text" if gemma else config.family, "architectures":
    [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}[config.family]
     + "ForCausalLM"], "dtype": "float32", "vocab_size": config.vocab_size,
    "hidden_size": config.width, "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim, "intermediate_size": config.mlp_dim,
    "max_position_embeddings": config.max_positions, "rms_norm_eps": config.norm_eps,
    "attention_bias": config.out_bias, "tie_word_embeddings": config.tie_embeddings,
    "rope_parameters": rope}
  if not gemma:
    return out | {"hidden_act": config.activation, "mlp_bias": config.mlp_bias}
  sliding = {"rope_type": "default", "rope_theta": config.rope_theta_local}
  return out | {
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": config.window,
    "query_pre_attn_scalar": round(config.scale ** -2),
    "layer_types": [("full", "sliding")[i in config.sliding_layers] + "_attention"
                    for i in range(config.num_layers)],
    "rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}
