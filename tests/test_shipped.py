"""The heads that come with jspec: whole, small, described, for the model they are named after."""

from __future__ import annotations

import pytest

from jspec import heads, hub, shipped

MEBIBYTE = 2**20


@pytest.mark.parametrize("name", shipped.HEADS)
def test_a_shipped_head_is_whole_small_and_has_a_card(name):
  folder = hub.resolve_head(name)
  assert sum(file.stat().st_size for file in folder.iterdir()) <= 12 * MEBIBYTE
  card = (folder / "README.md").read_text(encoding="utf-8")
  for said in ("Licence", "Data", "tokens", "Acceptance", "python -m training.train"):
    assert said in card, said
  assert heads.detect_method(name) == name.rsplit("-", 1)[1]


@pytest.mark.parametrize("name, target", shipped.HEADS.items())
def test_a_shipped_head_fits_the_model_it_is_for(name, target, smollm2):
  assert target in hub.DEFAULT_MODELS
  config, params = heads.load_head(name, smollm2.config)
  assert config.draft_vocab_size == len(params["target_id"]) and not config.has_head
