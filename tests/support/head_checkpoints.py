"""Tiny checkpoints of drafting heads, in every format, beside the tree that they must become.

Written from the formats' descriptions, with names spelt out: nothing of jspec's own tables.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import zipfile
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from jspec.config import ModelConfig
from jspec.heads.config import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig

E, V, VD, M, H, K, HD, L = 16, 40, 12, 24, 4, 2, 8, 8
TARGET = ModelConfig("llama", V, E, L, H, K, HD, M, 64)
IDS = np.array([0, 1, 3, 5, 8, 9, 14, 20, 21, 30, 38, 39])  # the target's token of each draft token
STORAGES = {"float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage",
            "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
            "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage"}


class View(NamedTuple):
  """A tensor of a torch file that need not fill its storage; strides and offset in numbers."""

  storage: np.ndarray  # views of the same one share it
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


@dataclasses.dataclass
class Checkpoint:
  method: str
  config: dict[str, Any] | None  # config.json
  tensors: dict[str, np.ndarray]  # torch's layout: matrices are (out, in)
  head: HeadConfig  # what loading gives, and
  tree: dict[str, Any]  # its tree
  dtype: Any = np.float32
  seed: int = 0

  def new(self, name: str, *shape: int) -> np.ndarray:
    """A random tensor of the file."""
    self.seed += 1
    array = np.random.default_rng(self.seed).normal(size=shape).astype(self.dtype)
    self.tensors[name] = array
    return array

  def linear(self, name: str, out: int, inputs: int, bias: bool = False) -> dict[str, np.ndarray]:
    leaf = {"w": self.new(f"{name}.weight", out, inputs).T}
    return leaf | {"b": self.new(f"{name}.bias", out)} if bias else leaf

  def norm(self, name: str, size: int) -> dict[str, np.ndarray]:
    return {"scale": self.new(f"{name}.weight", size)}


# ------------------------------------------------------------ files


def write(checkpoint: Checkpoint, folder: pathlib.Path, file: str = "model.safetensors"):
  """The checkpoint as a folder; the file's ending decides its format."""
  folder.mkdir(exist_ok=True)
  if checkpoint.config is not None:
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
  if file.endswith(".safetensors"):
    safetensors.numpy.save_file(
      {name: np.ascontiguousarray(a) for name, a in checkpoint.tensors.items()}, folder / file)
  else:
    write_torch(folder / file, checkpoint.tensors)
  return folder


def write_torch(file: pathlib.Path, tensors: dict[str, Any]) -> None:
  """What torch.save writes for an OrderedDict of tensors (arrays or Views), opcode by opcode."""
  storages: list[np.ndarray] = []
  entries = b"".join(text_opcodes(name) + tensor_opcodes(value, storages)
                     for name, value in tensors.items())
  ordered = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
  metadata = pickle.EMPTY_DICT + text_opcodes("_metadata") + ordered + pickle.SETITEM + pickle.BUILD
  write_zip(file, b"\x80\x02" + ordered + pickle.MARK + entries + pickle.SETITEMS + metadata
            + pickle.STOP, storages)


def write_zip(file: pathlib.Path, content: bytes, storages: list[np.ndarray]) -> None:
  name = file.stem
  with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
    archive.writestr(f"{name}/data.pkl", content)
    archive.writestr(f"{name}/byteorder", "little")
    for i, storage in enumerate(storages):
      entry = zipfile.ZipInfo(f"{name}/data/{i}")
      entry.extra = b"FB" + (8 + i).to_bytes(2, "little") + b"Z" * (8 + i)  # torch's padding
      archive.writestr(entry, storage.tobytes())
    archive.writestr(f"{name}/version", "3\n")


def tensor_opcodes(value: np.ndarray | View, storages: list[np.ndarray]) -> bytes:
  if not isinstance(value, View):
    value = np.array(value, order="C")
    strides = tuple(stride // value.itemsize for stride in value.strides)
    value = View(value, 0, value.shape, strides)
  known = [i for i, storage in enumerate(storages) if storage is value.storage]
  if not known:
    storages.append(value.storage)
  key = known[0] if known else len(storages) - 1
  kind = f"ctorch\n{STORAGES[value.storage.dtype.name]}\n".encode()
  storage = (pickle.MARK + text_opcodes("storage") + kind + text_opcodes(str(key))
             + text_opcodes("cpu") + _int(value.storage.size) + pickle.TUPLE + pickle.BINPERSID)
  hooks = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
  return (b"ctorch._utils\n_rebuild_tensor_v2\n" + pickle.MARK + storage + _int(value.offset)
          + _ints(value.shape) + _ints(value.strides) + pickle.NEWFALSE + hooks + pickle.TUPLE
          + pickle.REDUCE)


def text_opcodes(text: str) -> bytes:
  return pickle.BINUNICODE + len(text.encode()).to_bytes(4, "little") + text.encode()


def _int(number: Any) -> bytes:
  if not isinstance(number, int):  # damage
    return pickle.dumps(number, 2)[2:-1]
  return pickle.BININT + number.to_bytes(4, "little", signed=True)


def _ints(numbers: tuple[int, ...]) -> bytes:
  return pickle.MARK + b"".join(map(_int, numbers)) + pickle.TUPLE


# ------------------------------------------------------------ formats


def medusa(dtype=np.float32, layers: int = 1, heads: int = 3, own_head: bool = True,
           prefix: str = "") -> Checkpoint:
  """FasterDecoding's; with a prefix inside a model, as Medusa-2 and ModelOpt keep them."""
  config = {"medusa_num_heads": 2, "medusa_num_layers": layers,  # which is not how many there are
            "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
  config |= {} if own_head else {"version": "2"}
  c = Checkpoint("medusa", config, {}, MedusaConfig(E, V, heads, layers, shares_head=not own_head),
                 {"heads": []}, dtype)
  for i in range(heads):
    head: dict[str, Any] = {"blocks": [c.linear(f"{prefix}{i}.{j}.linear", E, E, True)
                                       for j in range(layers)]}
    if own_head:
      head["head"] = c.linear(f"{prefix}{i}.{layers}", V, E)
    c.tree["heads"].append(head)
  if prefix:
    c.new("model.embed_tokens.weight", V, E)
    c.new("lm_head.weight", V, E)
  return c


def vllm_medusa(dtype=np.float32, bias: bool | None = None, truncated: str = "",
                one_head: str | None = None, scale: float = 1.0, layers: int = 2) -> Checkpoint:
  """vLLM's. truncated: "cut" or "whole" lm_heads; one_head: the name of the shared one, "" none."""
  heads, size = 2, VD if truncated else V
  config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": E,
            "vocab_size": V, "medusa_num_heads": heads, "num_hidden_layers": layers,
            "max_paths": 64, "topk": 10, "truncated_vocab_size": size}
  config |= {} if bias is None else {"medusa_fc_bias": bias}
  config |= {} if one_head is None else {"original_lm_head": True}
  config |= {} if scale == 1.0 else {"logit_scale": scale}
  c = Checkpoint("medusa", config, {}, MedusaConfig(
    E, V, heads, layers, bool(bias), one_head == "", VD if truncated else 0, scale),
    {"heads": []}, dtype)
  order = IDS[::-1].copy()  # token_map need not ascend
  for i in range(heads):
    head: dict[str, Any] = {"blocks": [c.linear(f"blocks.{i}.layers.{j}", E, E, bool(bias))
                                       for j in range(layers)]}
    if one_head is None or (one_head and i == 0):
      name = one_head or f"lm_heads.{i}.weight"
      rows = c.new(name, V if truncated == "whole" else size, E)
      head["head"] = {"w": (rows[order] if truncated == "whole" else rows).T}
    elif one_head:
      head["head"] = c.tree["heads"][0]["head"]
    c.tree["heads"].append(head)
  if truncated:
    c.tensors["token_map"] = order
    c.tree["target_id"] = order
  return c


def mlp_speculator(dtype=np.float32, tied: bool = False, copies: bool = False, prefix: str = "",
                   inner: int = 24, width_key: str = "emb_dim") -> Checkpoint:
  """IBM's. copies: tied stages all lie in the file, as some were saved."""
  n, size = 3, inner or E
  config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"],
            "vocab_size": V, width_key: E, "inner_dim": inner, "n_predict": n, "n_candidates": 4,
            "top_k_tokens_per_head": [4, 3, 2], "tie_weights": tied, "scale_input": tied}
  c = Checkpoint("mlp_speculator", config, {}, MlpSpeculatorConfig(
    E, V, n, size, tied, tied, (4, 3, 2), 4), {"stages": []}, dtype)
  for i in range(n):
    if tied and i:
      first = c.tree["stages"][0]
      stage = {name: first[name] for name in ("emb", "ln", "head")}
      stage["proj"] = c.tree["stages"][1]["proj"] if i > 1 else c.linear(
        f"{prefix}proj.1", size, size)
    else:
      stage = {"emb": c.new(f"{prefix}emb.{i}.weight", V, size),
               "proj": c.linear(f"{prefix}proj.{i}", size, size if i else E),
               "ln": {"scale": c.new(f"{prefix}ln.{i}.weight", size),
                      "bias": c.new(f"{prefix}ln.{i}.bias", size)},
               "head": c.linear(f"{prefix}head.{i}", V, size)}
    c.tree["stages"].append(stage)
  if copies:
    for name in list(c.tensors):
      for i in range(1, n):
        twin = name.replace(".0.", f".{i}.") if "proj" not in name else name.replace(".1.", ".2.")
        if not name.endswith("proj.0.weight"):
          c.tensors[twin] = c.tensors[name].copy()
  return c


def llama_config(layers: int = 1, **changes: Any) -> dict[str, Any]:
  return {"model_type": "llama", "hidden_size": E, "intermediate_size": M,
          "num_attention_heads": H, "num_key_value_heads": K, "head_dim": HD,
          "num_hidden_layers": layers, "rms_norm_eps": 1e-5, "vocab_size": V,
          "hidden_act": "silu", "max_position_embeddings": 64, **changes}


def _layer(layers: int = 1, theta: float = 10000.0, qkv_bias: bool = False) -> ModelConfig:
  return ModelConfig("llama", V, E, layers, H, K, HD, M, 64, rope_theta=theta, qkv_bias=qkv_bias)


def _decoder(c: Checkpoint, name: str, inputs: int = E, bias: bool = False) -> dict[str, Any]:
  """A Llama layer without the norm before its attention."""
  return {"q": c.linear(f"{name}.self_attn.q_proj", H * HD, inputs, bias),
          "k": c.linear(f"{name}.self_attn.k_proj", K * HD, inputs, bias),
          "v": c.linear(f"{name}.self_attn.v_proj", K * HD, inputs, bias),
          "o": c.linear(f"{name}.self_attn.o_proj", E, H * HD),
          "gate": c.linear(f"{name}.mlp.gate_proj", M, E),
          "up": c.linear(f"{name}.mlp.up_proj", M, E),
          "down": c.linear(f"{name}.mlp.down_proj", E, M),
          "mlp_norm": c.norm(f"{name}.post_attention_layernorm", E)}


def eagle(dtype=np.float32, bias: bool | None = None, qkv_bias: bool = False, prefix: str = "",
          layers: int = 1) -> Checkpoint:
  """yuhuili's EAGLE-1 and -2. bias: as in the config, None: not named there, and true."""
  config = llama_config(layers, architectures=["LlamaForCausalLM"], rope_theta=5e5)
  config |= {} if bias is None else {"bias": bias}
  config |= {"qkv_bias": True} if qkv_bias else {}
  c = Checkpoint("eagle", config, {}, EagleConfig(
    1, _layer(layers, 5e5, qkv_bias), E, num_taps=1), {}, dtype)
  c.new(f"{prefix}embed_tokens.weight", V, E)  # a copy of the target's
  c.tree["fc"] = c.linear(f"{prefix}fc", E, 2 * E, bias is not False)
  c.tree["layers"] = [_decoder(c, f"{prefix}layers.{i}", bias=qkv_bias) for i in range(layers)]
  for i in range(1, layers):
    c.tree["layers"][i]["attn_norm"] = c.norm(f"{prefix}layers.{i}.input_layernorm", E)
  return c


def eagle3(dtype=np.float32, name: str = "midlayer", prefix: str = "", layers: int = 1,
           config: dict[str, Any] | None = None, head: dict[str, Any] | None = None,
           vocabulary: str = "cut", embed: bool = False, target_width: int = E,
           taps: int = 3, theta: float = 10000.0) -> Checkpoint:
  """EAGLE-3 as SafeAILab and SpecForge (midlayer) or ModelOpt and speculators (layers.0) name it.

  Args:
    config: config.json, by default a flat one; head: what it must set in EagleConfig.
    vocabulary: "cut", "whole" with an lm_head, "offsets" also with zero offsets, or "shared".
  """
  cut = vocabulary == "cut"
  flat = llama_config(layers, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
  flat |= {"draft_vocab_size": VD} if cut else {"draft_vocab_size": V}
  switches = head or {}
  c = Checkpoint("eagle3", flat if config is None else config, {}, EagleConfig(
    3, _layer(layers, theta), target_width, VD if cut else 0, num_taps=taps, has_embed=embed,
    has_head=vocabulary != "shared", **switches), {}, dtype)
  first = f"{prefix}{name}"
  c.tree["fc"] = c.linear(f"{prefix}fc", E, taps * target_width)
  c.tree["layers"] = [_decoder(c, first, 2 * E) | {
    "embed_norm": c.norm(f"{first}.input_layernorm", E),
    "feature_norm": c.norm(f"{first}.hidden_norm", E)}]
  for i in range(1, layers):
    c.tree["layers"].append(_decoder(c, f"{prefix}layers.{i}") | {
      "attn_norm": c.norm(f"{prefix}layers.{i}.input_layernorm", E)})
  c.tree["final_norm"] = c.norm(f"{prefix}norm", E)
  if vocabulary != "shared":
    c.tree["head"] = c.linear("lm_head", VD if cut else V, E)
  if cut:
    c.tensors |= {"d2t": IDS - np.arange(VD), "t2d": np.isin(np.arange(V), IDS)}
    c.tree["target_id"] = IDS
  if vocabulary == "offsets":
    c.tensors |= {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
  if embed:
    c.tree["embed"] = c.new(f"{prefix}embed_tokens.weight", V, E)
  if switches.get("norm_before_fc"):
    c.tree["fc_norm"] = c.norm("input_norm", taps * target_width)
  if switches.get("fc_norm"):
    c.tree["fc_norm"] = [c.norm(f"fc_norm.{i}", target_width) for i in range(taps)]
  return c


def speculators(dtype=np.float32, layers: int = 1, taps: tuple[int, ...] = (),
                target_width: int | None = None, embed: bool = False,
                **switches: bool) -> Checkpoint:
  """EAGLE-3 with the nested config.json of the speculators library."""
  config = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0", "draft_vocab_size": VD, "target_hidden_size": target_width,
    "tie_word_embeddings": False, "transformer_layer_config": llama_config(layers, rope_theta=5e5),
    "speculators_config": {
      "algorithm": "eagle3", "default_proposal_method": "greedy",
      "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
      "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
                   "architectures": ["LlamaForCausalLM"]}}}
  config |= {"eagle_aux_hidden_state_layer_ids": list(taps)} if taps else {}
  return eagle3(dtype, "layers.0", layers=layers, config=config | switches, embed=embed,
                head=switches | {"feature_layers": taps}, target_width=target_width or E,
                taps=len(taps) or 3, theta=5e5)


def with_config(checkpoint: Checkpoint, head: dict[str, Any] | None = None,
                **config: Any) -> Checkpoint:
  """The same with other keys in config.json, and what they must change in the head."""
  return dataclasses.replace(checkpoint, config={**checkpoint.config, **config},
                             head=dataclasses.replace(checkpoint.head, **(head or {})))
