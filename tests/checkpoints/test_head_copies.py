"""EAGLE-1 checkpoints with the target's embedding, lm_head or norm, as some trainers save them."""

from __future__ import annotations

import dataclasses
import logging

import head_checkpoints as hc
import jax
import ml_dtypes
import numpy as np
import pytest

from jspec.checkpoints import load_head
from jspec.checkpoints.tensors import WeightsError
from jspec.model.params import init_params

TARGET = init_params(jax.random.key(0), hc.TARGET)
OF_TARGET = {"embed_tokens.weight": np.asarray(TARGET["embed"]),
             "lm_head.weight": np.asarray(TARGET["head"]["w"]).T,
             "norm.weight": np.asarray(TARGET["final_norm"]["scale"])}


def loaded(tmp_path, **changes):
  """An EAGLE-1 head with copies of all three, some of them changed, beside that target."""
  checkpoint = hc.eagle()
  checkpoint.tensors |= OF_TARGET | changes
  return load_head.load_head(hc.write(checkpoint, tmp_path), hc.TARGET, target_params=TARGET)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_copies_are_told_by_their_numbers_whatever_their_precision(dtype, tmp_path, caplog):
  config, params = loaded(tmp_path, **{name: x.astype(dtype) for name, x in OF_TARGET.items()})
  assert config == hc.eagle().head and set(params) == {"fc", "layers"}
  assert "lm_head.weight and norm.weight skipped" in caplog.text and "its own" not in caplog.text


@pytest.mark.parametrize("row", [0, hc.V - 1])
def test_an_lm_head_of_its_own_is_used(row, tmp_path, caplog, monkeypatch):
  """One number differs: then none of it is the target's. Looked at seven rows at a time."""
  monkeypatch.setattr(load_head, "_ROWS_AT_ONCE", 7)
  own = OF_TARGET["lm_head.weight"].copy()
  own[row, 3] += 0.25
  config, params = loaded(tmp_path, **{"lm_head.weight": own})
  assert config == dataclasses.replace(hc.eagle().head, has_head=True)
  np.testing.assert_array_equal(params["head"]["w"], own.T)
  assert "embed" not in params
  assert "its own lm_head.weight is used, for it is not the target's" in caplog.text


def test_an_embedding_of_its_own_is_used_and_a_norm_of_its_own_refused(tmp_path):
  config, params = loaded(tmp_path, **{"embed_tokens.weight": -OF_TARGET["embed_tokens.weight"]})
  assert config == dataclasses.replace(hc.eagle().head, has_embed=True)
  np.testing.assert_array_equal(params["embed"], -OF_TARGET["embed_tokens.weight"])
  with pytest.raises(WeightsError, match="this config has no tensor norm.weight"):
    loaded(tmp_path, **{"norm.weight": 2 * OF_TARGET["norm.weight"]})


def test_the_embedding_is_the_lm_head_of_tied_targets(tmp_path, caplog):
  tied = {name: x for name, x in TARGET.items() if name != "head"}
  checkpoint = hc.eagle()
  checkpoint.tensors |= {"lm_head.weight": OF_TARGET["embed_tokens.weight"],
                         "embed_tokens.weight": OF_TARGET["embed_tokens.weight"]}
  config, _ = load_head.load_head(hc.write(checkpoint, tmp_path), hc.TARGET, target_params=tied)
  assert config == checkpoint.head and "lm_head.weight skipped" in caplog.text


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_copy_of_the_targets_lm_head_is_skipped_with_a_note(prefix, tmp_path, caplog):
  checkpoint = hc.eagle(prefix=prefix)
  (tmp_path / "bare").mkdir(), (tmp_path / "copy").mkdir()
  config, params = load_head.load_head(hc.write(checkpoint, tmp_path / "bare"), hc.TARGET)
  assert not caplog.records
  checkpoint.new("lm_head.weight", hc.V, hc.E)
  with caplog.at_level(logging.WARNING, "jspec"):
    found = load_head.load_head(hc.write(checkpoint, tmp_path / "copy"), hc.TARGET)
  assert found[0] == config and jax.tree.structure(found[1]) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, found[1], params)
  assert [r.getMessage() for r in caplog.records] == [
      f"{tmp_path / 'copy'}: lm_head.weight skipped: heads of this kind use the target's own, of "
      "which it is a copy"]


def test_what_cannot_be_a_copy_is_refused(tmp_path):
  checkpoint = hc.eagle()
  checkpoint.new("lm_head.weight", hc.V - 1, hc.E)
  with pytest.raises(WeightsError, match=r"lm_head.weight has shape \(39, 16\), a copy of the "
                     r"target's has \(40, 16\)"):
    load_head.load_head(hc.write(checkpoint, tmp_path), hc.TARGET)
