"""GGUF files of small random models."""

from __future__ import annotations

import gguf as gguf_package
import numpy as np

from jspec.checkpoints.gguf import (
  gguf_config,
  gguf_names,
  read_gguf,
)
from jspec.checkpoints.weights import checkpoint_shapes, hf_names

WIDTH, HEADS, KV_HEADS, VOCAB = 32, 4, 2, 48


def write_gguf(path, architecture, tensors, **extra):
  """A tiny GGUF file; a tensor is an array, or (raw bytes, quantisation)."""
  writer = gguf_package.GGUFWriter(path, architecture)
  writer.add_block_count(2)
  writer.add_context_length(128)
  writer.add_embedding_length(WIDTH)
  writer.add_feed_forward_length(48)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_vocab_size(VOCAB)
  for key, value in extra.items():
    writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
  for name, tensor in tensors.items():
    if isinstance(tensor, tuple):
      writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def llama_cpp_permute(array, heads):
  """convert_hf_to_gguf.py's LlamaModel.permute."""
  halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)


def random_model(path, architecture, names_extra=()):
  """A GGUF file with random weights, its config, and the same weights as HF tensors."""
  bare = write_gguf(path, architecture, {name: np.zeros(1, np.float32) for name in names_extra},
                    **({"attention__sliding_window": 16} if architecture == "gemma3" else {}))
  config = gguf_config(read_gguf(bare))
  rng, tensors, hf = np.random.default_rng(0), {}, {}
  for leaf, shape in checkpoint_shapes(config).items():
    array = rng.normal(size=shape).astype(np.float32)
    hf[hf_names(config)[leaf]] = array
    if architecture == "llama" and leaf[0] == "layers" and leaf[2] in ("q", "k"):
      array = llama_cpp_permute(array, HEADS if leaf[2] == "q" else KV_HEADS)
    if architecture == "gemma3" and leaf[-1] == "scale":
      array = array + 1
    tensors[gguf_names(config)[leaf]] = array
  extra = {"attention__sliding_window": 16} if architecture == "gemma3" else {}
  return write_gguf(path, architecture, tensors, **extra), config, hf, tensors
