"""Safetensors -> parameter tree: right places, right shapes, and damage named."""

from __future__ import annotations

import json
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import CONFIG, CONFIGS, random_tensors, save

from jspec.checkpoints.tensors import Leaf, Part, StoredTensor, WeightsError, write_safetensors
from jspec.checkpoints.weights import build_params, load_params, safetensors_source
from jspec.model.params import init_params, param_shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_tree_is_the_one_that_model_py_makes(name, tmp_path):
  config = CONFIGS[name]
  params = load_params(save(tmp_path, random_tensors(config)), config)
  expected = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
  assert len(param_shapes(config)) == len(jax.tree.leaves(expected))


def test_values_land_where_they_belong(tmp_path):
  tensors = random_tensors(CONFIG)
  params = load_params(save(tmp_path, tensors), CONFIG)
  np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
  np.testing.assert_array_equal(params["head"]["w"], tensors["lm_head.weight"].T)
  np.testing.assert_array_equal(params["layers"][1]["down"]["w"],
                                tensors["model.layers.1.mlp.down_proj.weight"].T)


def test_gemma_norms_become_one_plus_w_and_opt_loses_two_position_rows(tmp_path):
  (tmp_path / "gemma").mkdir(), (tmp_path / "opt").mkdir()
  gemma, opt = random_tensors(CONFIGS["gemma"]), random_tensors(CONFIGS["opt"])
  params = load_params(save(tmp_path / "gemma", gemma), CONFIGS["gemma"])
  np.testing.assert_array_equal(params["final_norm"]["scale"], 1 + gemma["model.norm.weight"])
  params = load_params(save(tmp_path / "opt", opt), CONFIGS["opt"])
  np.testing.assert_array_equal(params["positions"],
                                opt["model.decoder.embed_positions.weight"][2:])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stored_dtype_converts_and_norms_stay_float32(stored, dtype, tmp_path):
  tensors = {name: array.astype(stored) for name, array in random_tensors(CONFIG).items()}
  params = load_params(save(tmp_path, tensors), CONFIG, dtype)
  assert params["embed"].dtype == dtype and params["final_norm"]["scale"].dtype == jnp.float32
  expected = tensors["model.embed_tokens.weight"].astype(np.float32).astype(jnp.dtype(dtype))
  np.testing.assert_array_equal(np.asarray(params["embed"]), expected)


def test_shards_and_the_missing_one(tmp_path):
  tensors = random_tensors(CONFIG)
  names = sorted(tensors)
  parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  for file, part in parts.items():
    save(tmp_path, {name: tensors[name] for name in part}, file)
  index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  params = load_params(tmp_path, CONFIG)
  np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
  again = load_params([tmp_path / file for file in parts], CONFIG)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, params, again))
  (tmp_path / "b.safetensors").unlink()
  with pytest.raises(WeightsError, match="b.safetensors is listed in .* but missing"):
    load_params(tmp_path, CONFIG)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
  name = "model.layers.2.self_attn.q_proj.weight"
  tensors = random_tensors(CONFIG)
  with pytest.raises(WeightsError, match=f"missing tensor {name}"):
    load_params(save(tmp_path, {k: v for k, v in tensors.items() if k != name}), CONFIG)
  with pytest.raises(WeightsError, match="has no tensor model.surprise"):
    load_params(save(tmp_path, {**tensors, "model.surprise": np.zeros(3)}), CONFIG)
  with pytest.raises(WeightsError, match=f"{name} has shape \\(31, 32\\).*needs \\(32, 32\\)"):
    load_params(save(tmp_path, {**tensors, name: tensors[name][1:].copy()}), CONFIG)


def test_harmless_extras_are_allowed(tmp_path):
  tied = CONFIGS["tied"]
  tensors = random_tensors(tied)
  extras = {"lm_head.weight": tensors["model.embed_tokens.weight"],
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
  assert "head" not in load_params(save(tmp_path, tensors | extras), tied)
  images = {"vision_tower.x.weight": np.ones(2, np.float32)}
  gemma = random_tensors(CONFIGS["gemma"], "language_model.model.")
  (tmp_path / "gemma").mkdir()
  load_params(save(tmp_path / "gemma", gemma | images), CONFIGS["gemma"])


@pytest.mark.parametrize("size", [3, 100, -1])
def test_truncated_file_is_named(size, tmp_path):
  save(tmp_path, random_tensors(CONFIG))
  file = tmp_path / "model.safetensors"
  content = file.read_bytes()
  file.write_bytes(content[:size])
  with pytest.raises(WeightsError, match="model.safetensors is truncated"):
    load_params(tmp_path, CONFIG)


def test_damaged_headers_and_foreign_dtypes_are_refused(tmp_path):
  file = tmp_path / "model.safetensors"
  file.write_bytes((20).to_bytes(8, "little") + b"{" * 20)
  with pytest.raises(WeightsError, match="header is damaged"):
    load_params(tmp_path, CONFIG)
  tensors = random_tensors(CONFIG)
  tensors["model.norm.weight"] = np.zeros(32, np.int8)
  with pytest.raises(WeightsError, match="model.norm.weight has dtype I8; supported: F64"):
    load_params(save(tmp_path, tensors), CONFIG)
  file.unlink()
  with pytest.raises(WeightsError, match="no .safetensors file"):
    load_params(tmp_path, CONFIG)
  with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16"):
    load_params(save(tmp_path, random_tensors(CONFIG)), CONFIG, "int8")


def test_written_files_are_what_the_safetensors_library_reads(tmp_path):
  tensors = random_tensors(CONFIG)
  file = tmp_path / "model.safetensors"
  write_safetensors(file, {name: a.shape for name, a in tensors.items()}, tensors.__getitem__)
  again = safetensors.numpy.load_file(file)
  assert again.keys() == tensors.keys()
  for name, array in tensors.items():
    np.testing.assert_array_equal(again[name], array)


def test_at_most_one_tensor_is_held_besides_the_tree(tmp_path):
  """When a tensor is read, the ones read before it are gone, but for the last."""
  source, alive = safetensors_source(save(tmp_path, random_tensors(CONFIG)), CONFIG), []

  def noted(tensor):
    def read():
      assert sum(ref() is not None for ref in alive) <= 1
      array = tensor.read()
      alive.append(weakref.ref(array))
      return array
    return tensor._replace(read=read)

  build_params(source._replace(tensors={
      name: noted(tensor) for name, tensor in source.tensors.items()}), CONFIG)
  assert len(alive) == len(param_shapes(CONFIG))


def test_a_leaf_may_be_made_of_several_stored_tensors(tmp_path):
  """Int8 rows and their scales, as quantised formats keep a matrix."""
  source = safetensors_source(save(tmp_path, random_tensors(CONFIG)), CONFIG)
  path, name = ("layers", 1, "up", "w"), "model.layers.1.mlp.up_proj"
  rows = np.arange(48 * 32).reshape(48, 32).astype(np.int8)
  scale = np.linspace(0.5, 2, 48, dtype=np.float32)
  stored = {f"{name}.{part}": StoredTensor(array.dtype, array.shape, lambda array=array: array)
            for part, array in (("rows", rows), ("scale", scale))}
  tensors = {key: tensor for key, tensor in source.tensors.items() if not key.startswith(name)}
  leaf = Leaf((Part(f"{name}.rows", (48, 32)), Part(f"{name}.scale", (48,))),
              lambda rows, scale: rows * scale[:, None])
  packed = source._replace(tensors=tensors | stored, leaves={**source.leaves, path: leaf})
  np.testing.assert_array_equal(build_params(packed, CONFIG)["layers"][1]["up"]["w"],
                                (rows * scale[:, None]).T)
  with pytest.raises(WeightsError, match=f"missing tensor {name}.scale"):
    build_params(packed._replace(tensors=tensors | {f"{name}.rows": stored[f"{name}.rows"]}),
                 CONFIG)
  wrong = leaf._replace(parts=(leaf.parts[0], Part(f"{name}.scale", (32,))))
  with pytest.raises(WeightsError, match=f"{name}.scale has shape \\(48,\\), .* needs \\(32,\\)"):
    build_params(packed._replace(leaves={**source.leaves, path: wrong}), CONFIG)


def test_progress_bar_is_on_stderr_and_only_when_asked(tmp_path, capsys):
  folder = save(tmp_path, random_tensors(CONFIG))
  load_params(folder, CONFIG)
  assert capsys.readouterr() == ("", "")
  load_params(folder, CONFIG, progress=True)
  captured = capsys.readouterr()
  assert captured.out == "" and "loading weights" in captured.err
