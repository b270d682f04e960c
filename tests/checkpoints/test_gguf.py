"""GGUF files -> the same tree as safetensors; every quantisation; damage named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import random_model, write_gguf

from jspec.checkpoints.gguf import (
  SUPPORTED_QUANTISATIONS,
  load_gguf,
  pairs_to_halves,
  read_gguf,
  read_tensor,
)
from jspec.checkpoints.hf_config import hf_config_from_model, model_config_from_hf
from jspec.checkpoints.tensors import WeightsError
from jspec.checkpoints.weights import load_params


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("head", [(), ("output.weight",)])
def test_gguf_and_safetensors_give_one_tree(architecture, head, tmp_path):
  path, config, hf, _ = random_model(tmp_path / "m.gguf", architecture, head)
  loaded_config, params = load_gguf(read_gguf(path))
  assert loaded_config == config and config.tie_embeddings == (not head)
  assert model_config_from_hf(hf_config_from_model(config)) == config
  safetensors.numpy.save_file(hf, tmp_path / "model.safetensors")
  expected = load_params(tmp_path / "model.safetensors", config)
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_rotary_permutation_by_hand():
  """One head of 6 rows, stored as pairs (0,3) (1,4) (2,5)."""
  stored = np.array([0, 3, 1, 4, 2, 5])
  assert pairs_to_halves(stored, 1).tolist() == [0, 1, 2, 3, 4, 5]
  both = np.concatenate([stored, stored + 6])
  assert pairs_to_halves(both, 2).tolist() == list(range(12))


def _f16(raw, at):
  return float(np.frombuffer(raw[at:at + 2].tobytes(), "<f2")[0])


def _nibbles(raw):
  return [int(b) & 15 for b in raw] + [int(b) >> 4 for b in raw]


def _k_scales(raw):
  """ggml's get_scale_min_k4: eight 6-bit scales and mins in 12 bytes."""
  raw = [int(b) for b in raw]
  low = [(raw[j] & 63, raw[j + 4] & 63) for j in range(4)]
  high = [((raw[j + 4] & 15) | (raw[j - 4] >> 6) << 4, (raw[j + 4] >> 4) | (raw[j] >> 6) << 4)
          for j in range(4, 8)]
  return low + high


def _q45_k(raw, five):
  out, scales, qs = [], _k_scales(raw[4:16]), raw[48:] if five else raw[16:]
  for group in range(8):
    part = qs[32 * (group // 2):][:32]
    values = [int(b) >> 4 if group % 2 else int(b) & 15 for b in part]
    if five:
      values = [v + 16 * (int(h) >> group & 1) for v, h in zip(values, raw[16:48], strict=True)]
    scale, low = scales[group]
    out += [_f16(raw, 0) * scale * v - _f16(raw, 2) * low for v in values]
  return out


def _q6_k(raw):
  low, high, scales = raw[:128], raw[128:192], raw[192:208].view(np.int8)
  out = np.zeros(256)
  for i in range(256):
    half, rest = divmod(i, 128)
    quarter, column = divmod(rest, 32)
    nibble = int(low[64 * half + 32 * (quarter % 2) + column]) >> (4 * (quarter // 2)) & 15
    top = int(high[32 * half + column]) >> (2 * quarter) & 3
    out[i] = _f16(raw, 208) * int(scales[i // 16]) * ((nibble | top << 4) - 32)
  return out


def _q5_0(raw):
  bits = int.from_bytes(raw[2:6].tobytes(), "little")
  return [_f16(raw, 0) * ((n | (bits >> i & 1) << 4) - 16) for i, n in enumerate(_nibbles(raw[6:]))]


# One block -> floats, written from ggml's C structs, element by element.
BLOCKS = {
  "F32": lambda raw: raw.view("<f4"), "F16": lambda raw: raw.view("<f2"),
  "BF16": lambda raw: (raw.view("<u2").astype("<u4") << 16).view("<f4"),
  "Q8_0": lambda raw: _f16(raw, 0) * raw[2:].view(np.int8),
  "Q4_0": lambda raw: [_f16(raw, 0) * (n - 8) for n in _nibbles(raw[2:])],
  "Q4_1": lambda raw: [_f16(raw, 0) * n + _f16(raw, 2) for n in _nibbles(raw[4:])],
  "Q5_0": _q5_0, "Q4_K": lambda raw: _q45_k(raw, False), "Q5_K": lambda raw: _q45_k(raw, True),
  "Q6_K": _q6_k,
}


@pytest.mark.parametrize("name", SUPPORTED_QUANTISATIONS)
def test_each_quantisation_is_decoded_as_ggml_does(name, tmp_path):
  kind, rng = GGMLQuantizationType[name], np.random.default_rng(1)
  block, size = GGML_QUANT_SIZES[kind]
  raw = rng.integers(0, 256, (3, 2, max(256 // block, 1), size), dtype=np.uint8)
  if name in ("F32", "F16", "BF16"):
    raw[..., -1] = 0x3C  # exponents that are neither inf nor nan
  for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
    if block > 1:
      raw[..., at + 1] = 0x2C  # float16 scales around 0.06
  data = raw.reshape(3, 2, -1)
  dtype = {"F32": "<f4", "F16": "<f2"}.get(name, np.uint8)
  path = write_gguf(tmp_path / "q.gguf", "llama", {"x": (data.view(dtype), kind)})
  got = read_tensor(read_gguf(path), "x")
  want = np.array([BLOCKS[name](b) for b in raw.reshape(-1, size)], np.float64).reshape(3, 2, -1)
  assert got.dtype == np.float32 and np.isfinite(want).all() and np.abs(want).max() > 0
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_keep_float32_norms(tmp_path):
  path, *_ = random_model(tmp_path / "m.gguf", "llama")
  _, params = load_gguf(read_gguf(path), "bfloat16")
  assert params["embed"].dtype == jnp.bfloat16
  assert params["final_norm"]["scale"].dtype == jnp.float32


def test_other_quantisations_are_refused_by_name(tmp_path):
  data = np.zeros((2, GGML_QUANT_SIZES[GGMLQuantizationType.Q2_K][1]), np.uint8)
  path = write_gguf(tmp_path / "q.gguf", "llama", {"x": (data, GGMLQuantizationType.Q2_K)})
  with pytest.raises(WeightsError, match="tensor x is quantised as Q2_K; supported: F32"):
    read_gguf(path)


def test_truncated_and_foreign_files_are_refused(tmp_path):
  path, *_ = random_model(tmp_path / "m.gguf", "llama")
  content = path.read_bytes()
  for size, message in ((len(content) - 4, "truncated: tensor"), (200, "truncated: its header"),
                        (10, "not a GGUF file")):
    path.write_bytes(content[:size])
    with pytest.raises(WeightsError, match=message):
      read_gguf(path)
  path.write_bytes(b"ZIP!" + content[4:])
  with pytest.raises(WeightsError, match="not a GGUF file"):
    read_gguf(path)
  path.write_bytes(content[:4] + (9).to_bytes(4, "little") + content[8:])
  with pytest.raises(WeightsError, match="version 9 is not supported"):
    read_gguf(path)
  with pytest.raises(WeightsError, match="no such file"):
    read_gguf(tmp_path / "absent.gguf")


def test_missing_and_extra_tensors_are_named(tmp_path):
  path, _, _, tensors = random_model(tmp_path / "m.gguf", "llama")
  fewer = {name: a for name, a in tensors.items() if name != "blk.1.ffn_up.weight"}
  with pytest.raises(WeightsError, match="missing tensor blk.1.ffn_up.weight"):
    load_gguf(read_gguf(write_gguf(path, "llama", fewer)))
  more = tensors | {"blk.0.surprise.weight": np.zeros(3, np.float32)}
  with pytest.raises(WeightsError, match="has no tensor blk.0.surprise.weight"):
    load_gguf(read_gguf(write_gguf(path, "llama", more)))
