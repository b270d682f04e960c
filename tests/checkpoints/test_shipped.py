"""The heads that come with jspec: whole, small, described, for the model they are named after."""

from __future__ import annotations

import pytest

from jspec import LLM, SamplingParams
from jspec.checkpoints import hub, load_head, shipped

MEBIBYTE = 2**20


@pytest.mark.parametrize("name", shipped.HEADS)
def test_a_shipped_head_is_whole_small_and_has_a_card(name):
  folder = hub.resolve_head(name)
  assert sum(file.stat().st_size for file in folder.iterdir()) <= 12 * MEBIBYTE
  card = (folder / "README.md").read_text(encoding="utf-8")
  for said in ("Licence", "Data", "tokens", "Acceptance", "jspec train"):
    assert said in card, said
  assert load_head.detect_method(name) == name.rsplit("-", 1)[1]


@pytest.mark.parametrize("name, target", shipped.HEADS.items())
def test_a_shipped_head_fits_the_model_it_is_for(name, target, smollm2):
  assert target in hub.DEFAULT_MODELS
  config, params = load_head.load_head(name, smollm2.config)
  assert config.draft_vocab_size == len(params["target_id"]) and not config.has_head


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped.HEADS)
def test_a_shipped_head_drafts_what_the_target_says_and_changes_no_text(name, smollm2):
  asked = [[{"role": "user", "content": text}] for text in (
      "Why is the sky blue?", "A shirt costs 12 dollars. How much are 3 shirts? Think aloud.")]
  params = SamplingParams(temperature=0.0, max_tokens=48)
  fields = dict(max_num_seqs=2, max_model_len=256)
  plain = LLM(smollm2, **fields).chat(asked, params)
  drafting = {"model": name, "num_speculative_tokens": 2, "adaptive_draft_length": False}
  drafted = LLM(smollm2, speculative_config=drafting, **fields).chat(asked, params)
  assert [x.token_ids for x in drafted] == [x.token_ids for x in plain]
  found = drafted[0].speculation + drafted[1].speculation
  assert found.acceptance_rate > 0.1
