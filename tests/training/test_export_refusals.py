"""Exports that are refused or fail: one sentence each, and nothing half written."""

from __future__ import annotations

import dataclasses
import pathlib

import head_checkpoints as hc
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from export_cases import (
  BF16,
  EAGLE,
  EAGLE3,
  F32,
  LAYER,
  MEDUSA,
  MLP,
  NAME,
  TARGET,
  assert_same,
  head_of,
  model_of,
  tensors_of,
)

from jspec.checkpoints import load_head
from jspec.training.export.write import export


def replaced(config, **changes):
  return dataclasses.replace(config, **changes)


def with_layer(**changes):
  return replaced(EAGLE3, layer=replaced(LAYER, **changes))


@pytest.mark.parametrize("config, style, words", [
  (MEDUSA, "specforge", "is no export style of method 'medusa': its styles are fasterdecoding"),
  (replaced(MEDUSA, has_bias=False), None, "cannot say has_bias=False"),
  (replaced(MEDUSA, shares_head=True), "vllm", "cannot say shares_head=True"),
  (replaced(MEDUSA, logit_scale=0.5), None, r"logit_scale=0.5 \(it would be read as 1.0\)"),
  (replaced(MEDUSA, draft_vocab_size=hc.VD), None, "cannot say .*draft_vocab_size=12"),
  (replaced(EAGLE, norm_output=True), None, "'safeailab' cannot say norm_output=True"),
  (replaced(EAGLE, has_embed=True), None, "cannot say has_embed=True"),
  (replaced(EAGLE3, feature_layers=(0, 2, 4)), None, "0 is the embedding; use 'speculators'"),
  (replaced(EAGLE3, num_taps=2), None, "cannot say num_taps=2"),
  (replaced(EAGLE3, has_head=False), None, "cannot say has_head=False"),
  (with_layer(qk_norm=True), None, "'specforge' cannot say qk_norm=True"),
  (with_layer(qkv_bias=True), "specforge", "cannot say qkv_bias=True without out_bias"),
  (with_layer(qkv_bias=True), "speculators", "cannot say qkv_bias=True without out_bias"),
  (with_layer(out_bias=True), None, "layer.qkv_bias=False"),
  (with_layer(window=4, sliding_layers=(0,)), "speculators", "layer.window=4 .*sliding_layers"),
  (with_layer(attn_soft_cap=5.0), "compact", "layer.attn_soft_cap=5.0"),
  (with_layer(post_norms=True), None, "a model with post_norms has no public checkpoint format"),
  (replaced(EAGLE3, target_width=24), None, "for targets of width 24: this target has 16"),
  (replaced(EAGLE3, feature_layers=(1, 2, 9)), None, r"reads hidden states \[1, 2, 9\]"),
  (replaced(EAGLE3, layer=replaced(LAYER, vocab_size=50)), None, "vocabulary of 50 tokens"),
])
def test_what_a_style_cannot_say_is_refused(config, style, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    export(tmp_path / "head", config, head_of(config), TARGET, NAME, style)
  assert not list(tmp_path.iterdir())


def test_damaged_parameters_are_refused_by_name(tmp_path):
  def refuse(words, config, params, **keywords):
    with pytest.raises(ValueError, match=words):
      export(tmp_path / "head", config, params, TARGET, NAME, **keywords)
    assert not list(tmp_path.iterdir())

  params = head_of(EAGLE3)
  refuse("'specforge' cannot say a bias of fc", EAGLE3, params | {
    "fc": params["fc"] | {"b": jnp.ones(hc.E)}})
  for config in (MEDUSA, EAGLE):
    refuse("have embed, which the config has not", config, head_of(config) | {
      "embed": jnp.ones((hc.V, hc.E))})
  refuse("missing tensor norm.weight", EAGLE3, {k: v for k, v in params.items()
                                                if k != "final_norm"})
  refuse(r"fc.weight has shape \(16, 40\)", EAGLE3, params | {"fc": {"w": jnp.ones((40, hc.E))}})
  refuse("fc.w has numbers that are not finite", EAGLE3, params | {
    "fc": {"w": params["fc"]["w"] * np.nan}})
  refuse(r"size=12 .* target_id of shape \(3,\)", EAGLE3, params | {"target_id": jnp.arange(3)})
  refuse("size=0 of the config does not fit", EAGLE, head_of(EAGLE) | {"target_id": jnp.arange(3)})
  refuse("ascending", EAGLE3, params | {"target_id": params["target_id"][::-1]})
  tied = replaced(MLP, tie_weights=True)
  refuse("stages.1.emb is tied to another leaf by the config", tied, head_of(MLP))
  refuse("dtype='int8' needs style 'compact', got 'specforge'", EAGLE3, params, dtype="int8")
  refuse("dtype='float16' is not one of bfloat16, float32, int8", EAGLE3, params, dtype="float16")
  refuse("a tokenizer goes with a draft model", EAGLE3, params, tokenizer=tmp_path)
  model = model_of(LAYER)
  refuse("has no tokenizer: none of", LAYER, model, tokenizer="/nowhere")
  refuse("missing tensor lm_head.weight", LAYER, {k: v for k, v in model.items() if k != "head"})
  other = replaced(LAYER, vocab_size=20)
  refuse("for a vocabulary of 20 tokens, the target has 40", other, model_of(other))
  refuse("a model with learned_positions has no", replaced(LAYER, learned_positions=True), model)


def test_scales_that_do_not_fit_their_int8_rows_are_refused(tmp_path):
  folder = export(tmp_path / "head", EAGLE3, head_of(EAGLE3), TARGET, NAME, "compact", "int8")
  file, tensors = folder / "model.safetensors", tensors_of(folder)

  def refuse(words, changed):
    safetensors.numpy.save_file(changed, file)
    with pytest.raises(ValueError, match=words):
      load_head.load_head(folder, TARGET)

  scale = tensors["fc.weight_scale"]
  refuse(r"fc.weight_scale has shape \(15,\) and dtype float32, fc.weight needs \(16,\)",
         tensors | {"fc.weight_scale": scale[1:]})
  refuse("fc.weight_scale has .* float16", tensors | {"fc.weight_scale": scale.astype(np.float16)})
  refuse("fc.weight holds int8 numbers, not floating-point", {
    name: array for name, array in tensors.items() if name != "fc.weight_scale"})
  refuse("has no tensor fc.weight_scale", tensors | {"fc.weight": np.ones((16, 48), F32)})


# ------------------------------------------------------------ the folder


def test_a_folder_that_holds_something_is_kept_unless_it_may_be_overwritten(tmp_path):
  folder, params = tmp_path / "head", head_of(EAGLE3)
  folder.mkdir()
  export(folder, EAGLE3, params, TARGET, NAME)  # an empty one will do
  with pytest.raises(ValueError, match="is not empty: choose another folder"):
    export(folder, MLP, head_of(MLP), TARGET, NAME)
  assert load_head.detect_method(folder) == "eagle3"
  export(folder, MEDUSA, head_of(MEDUSA), TARGET, NAME, overwrite=True)
  assert {file.name for file in folder.iterdir()} == {"config.json", "medusa_lm_head.safetensors"}
  (folder / "config.json").unlink()
  with pytest.raises(ValueError, match="is no checkpoint, it has no config.json"):
    export(folder, EAGLE3, params, TARGET, NAME, overwrite=True)
  with pytest.raises(ValueError, match="is a file: exports are folders"):
    export(folder / "medusa_lm_head.safetensors", EAGLE3, params, TARGET, NAME)
  assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_export_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
  folder, params = tmp_path / "head", head_of(EAGLE3)
  export(folder, EAGLE3, params, TARGET, NAME)

  def full(tensors, file, metadata):
    file.write_bytes(b"half a")
    raise OSError("no space left")

  monkeypatch.setattr(safetensors.numpy, "save_file", full)
  for place in (folder, tmp_path / "other"):
    with pytest.raises(OSError, match="no space left"):
      export(place, EAGLE3, head_of(EAGLE3, 5), TARGET, NAME, overwrite=True)
  assert [path.name for path in tmp_path.iterdir()] == ["head"]
  monkeypatch.undo()
  rename = pathlib.Path.rename

  def fail_for_new(path, to):
    if path.name == "new":
      raise OSError("cannot rename")
    return rename(path, to)

  monkeypatch.setattr(pathlib.Path, "rename", fail_for_new)
  with pytest.raises(OSError, match="cannot rename"):
    export(folder, EAGLE3, head_of(EAGLE3, 5), TARGET, NAME, overwrite=True)
  monkeypatch.undo()
  assert_same(load_head.load_head(folder, TARGET)[1], params, BF16)
