"""Reads and writes the keys that config.json files of several families have.

A key that would change the maths is applied or refused; none is ignored.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jspec.config import MAX_LAYERS, MAX_REAL, MAX_SIZE, ModelConfig, RopeScaling
from jspec.config.checks import check_flag, check_int, check_mapping, check_number

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
                "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_WRITTEN_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # the others' names are ours

# Keys with which a checkpoint computes something we don't, and the values that are harmless.
REFUSED: dict[str, tuple[Any, ...]] = {
  "quantization_config": (None,), "partial_rotary_factor": (None, 1, 1.0),
  "use_bidirectional_attention": (None, False), "num_local_experts": (None, 0),
  "num_experts": (None, 0), "attention_multiplier": (None,), "embedding_multiplier": (None,),
  "residual_multiplier": (None,), "logits_scaling": (None,), "logit_scale": (None,),
  "clip_qkv": (None,), "alibi": (None, False), "parallel_attn": (None, False),
  "no_rope_layers": (None, []), "layer_norm_elementwise_affine": (None, True),
  "_remove_final_layer_norm": (None, False), "do_layer_norm_before": (None, True),
}
# Refused likewise but for families that apply them, which say so.
MOSTLY_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
# null says nothing, but for these: that there is no window, that each head has its own keys.
NULL_SAYS = ("sliding_window", "num_key_value_heads")


def refuse(config: Mapping[str, Any], model_type: str, applied: tuple[str, ...]) -> None:
  """ValueError for what would change the maths; applied: of MOSTLY_REFUSED, what is read."""
  allowed = REFUSED | {key: (None,) for key in MOSTLY_REFUSED if key not in applied}
  for key, harmless in allowed.items():
    if key in config and config[key] not in harmless:
      raise ValueError(f"config.json: {key}={brief(config[key])} is not supported for "
                       f"model_type {model_type!r}; supported: {harmless[-1]!r} or absent")


def brief(value: Any) -> str:
  return reprlib.repr(value)


def _need(config: Mapping[str, Any], key: str) -> Any:
  if config.get(key) is None:
    raise ValueError(f"config.json: {key!r} is missing")
  return config[key]


def size(config: Mapping[str, Any], key: str, default: int | None = None,
         most: int = MAX_SIZE) -> int:
  value = default if config.get(key) is None else config[key]
  return check_int(f"config.json: {key}", _need(config, key) if value is None else value, 1, most)


def real(config: Mapping[str, Any], key: str, default: float | None = None,
         zero: bool = False) -> float:
  value = default if config.get(key) is None else config[key]
  value = _need(config, key) if value is None else value
  return check_number(f"config.json: {key}", value, 0, MAX_REAL, above=not zero)


def maybe_real(config: Mapping[str, Any], key: str) -> float | None:
  return None if config.get(key) is None else real(config, key)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
  return check_flag(f"config.json: {key}", config.get(key, default))


def activation(name: Any) -> str:
  if not isinstance(name, str) or name not in _ACTIVATIONS:
    raise ValueError(f"activation {brief(name)} is not supported; "
                     f"supported: {', '.join(_ACTIVATIONS)}")
  return _ACTIVATIONS[name]


def rotary_config(config: Mapping[str, Any], family: str, rope: tuple[float, RopeScaling | None],
                  activation_key: str = "hidden_act") -> ModelConfig:
  """Llama and what is like it: RMSNorm, rotary positions, a gated MLP; every layer sees all."""
  width, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
  layers = size(config, "num_hidden_layers", most=MAX_LAYERS)
  attention_bias = flag(config, "attention_bias")
  return ModelConfig(
    family=family, vocab_size=size(config, "vocab_size"), width=width, num_layers=layers,
    num_heads=heads, num_kv_heads=size(config, "num_key_value_heads", heads),
    head_dim=size(config, "head_dim", width // heads), mlp_dim=size(config, "intermediate_size"),
    max_positions=size(config, "max_position_embeddings", 2048),
    norm_eps=real(config, "rms_norm_eps", zero=True),
    activation=activation(config.get(activation_key, "silu")),
    qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=flag(config, "mlp_bias"),
    rope_theta=rope[0], rope_scaling=rope[1],
    tie_embeddings=flag(config, "tie_word_embeddings"))


def rope_of(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """(theta, scaling) of all layers, from transformers 4 or 5 keys."""
  theta, (parameters, scaling) = real(config, "rope_theta", 1e4), rope_keys(config)
  parameters = parameters or scaling or {}
  if isinstance(parameters.get("full_attention"), Mapping):
    raise ValueError("config.json: rope_parameters per layer type are supported for gemma3 only")
  return real(parameters, "rope_theta", theta), rope_scaling(parameters)


def rope_keys(config: Mapping[str, Any]) -> list[Mapping[str, Any] | None]:
  """What transformers 5 and what 4 calls it, None for what is not there."""
  return [None if config.get(key) is None else check_mapping(f"config.json: {key}", config[key])
          for key in ("rope_parameters", "rope_scaling")]


def rope_scaling(parameters: Mapping[str, Any]) -> RopeScaling | None:
  kind = parameters.get("rope_type")
  kind = parameters.get("type") if kind is None else kind
  if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise ValueError("config.json: partial_rotary_factor="
                     f"{parameters['partial_rotary_factor']} is not supported; supported: 1.0")
  if kind in ("default", None):
    return None
  if kind == "linear":
    return RopeScaling("linear", real(parameters, "factor"))
  if kind == "llama3":
    return RopeScaling("llama3", real(parameters, "factor"), real(parameters, "low_freq_factor"),
                       real(parameters, "high_freq_factor"),
                       size(parameters, "original_max_position_embeddings"))
  raise ValueError(f"rope type {brief(kind)} is not supported; supported: default, linear, llama3")


def windows(config: Mapping[str, Any], layers: int, window: Any,
            default: Callable[[], Iterable[int]] = tuple) -> tuple[int | None, tuple[int, ...]]:
  """(window, sliding layers), by layer_types where config.json has them.

  Args:
    window: of the sliding layers, as config.json has it; None: there are none.
    default: the sliding layers where there are no layer_types.
  """
  layer_types = config.get("layer_types")
  if window is not None:
    check_int("config.json: sliding_window", window, 1, MAX_SIZE)
  if layer_types is None:
    sliding = tuple(default()) if window is not None else ()
    return (window, sliding) if sliding else (None, ())
  known = ("sliding_attention", "full_attention")
  if not isinstance(layer_types, list) or len(layer_types) != layers or not all(
      kind in known for kind in layer_types):
    raise ValueError(f"config.json: layer_types needs {layers} entries out of full_attention and "
                     f"sliding_attention, got {brief(layer_types)}")
  sliding = tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
  if sliding and window is None:
    raise ValueError("config.json: layer_types has sliding_attention but no window is in use")
  return (window, sliding) if sliding else (None, ())


def rotary_keys(config: ModelConfig) -> dict[str, Any]:
  """rotary_config's inverse: config.json but for the names of the family."""
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
  if config.rope_scaling is not None:
    scaling = config.rope_scaling
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
      rope |= {"low_freq_factor": scaling.low_freq_factor,
               "high_freq_factor": scaling.high_freq_factor,
               "original_max_position_embeddings": scaling.original_max_positions}
  return {
    "dtype": "float32", "vocab_size": config.vocab_size, "hidden_size": config.width,
    "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
    "intermediate_size": config.mlp_dim, "max_position_embeddings": config.max_positions,
    "rms_norm_eps": config.norm_eps, "attention_bias": config.out_bias,
    "tie_word_embeddings": config.tie_embeddings, "rope_parameters": rope,
    "hidden_act": _WRITTEN_ACTIVATIONS.get(config.activation, config.activation),
    "mlp_bias": config.mlp_bias}
