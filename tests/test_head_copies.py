"""EAGLE-1 checkpoints that hold the target's lm_head, as some trainers save them."""

from __future__ import annotations

import logging

import head_checkpoints as hc
import jax
import numpy as np
import pytest

from jspec import heads
from jspec.weights import WeightsError


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_copy_of_the_targets_lm_head_is_skipped_with_a_note(prefix, tmp_path, caplog):
  checkpoint = hc.eagle(prefix=prefix)
  (tmp_path / "bare").mkdir(), (tmp_path / "copy").mkdir()
  config, params = heads.load_head(hc.write(checkpoint, tmp_path / "bare"), hc.TARGET)
  assert not caplog.records
  checkpoint.new("lm_head.weight", hc.V, hc.E)
  with caplog.at_level(logging.WARNING, "jspec"):
    found = heads.load_head(hc.write(checkpoint, tmp_path / "copy"), hc.TARGET)
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
    heads.load_head(hc.write(checkpoint, tmp_path), hc.TARGET)
