"""Draft models whose rows of the vocabulary are not the target's: padding is never drafted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_llm import NAME, OPTIONS, byte_tokenizer, greedy, tiny_llm, tiny_model

from jspec.checkpoints import hub
from jspec.drafters.draft_model import draft_model
from jspec.llm import LLM
from jspec.model import cache, transformer
from jspec.model.rows import chain_mask, pack
from jspec.types import Committed

B, KNOWN, TEXT = 16, 9, [3, 1, 4, 1, 5]


def draft_params(rows: int):
  """Of so many rows; those from KNOWN on are much the likeliest, whatever the text."""
  params = tiny.params_of(dataclasses.replace(tiny.DRAFT, vocab_size=20), 3, 1.5)
  params = transformer.with_vocab_size(params, rows)
  w = params["head"]["w"].at[:, KNOWN:].multiply(1000.0)
  return {**params, "head": {"w": w}}


def proposed(rows: int, widths, sampled: bool):
  """Trees for slots with one text, by a draft model of `rows` rows for tiny.TARGET's 12."""
  drafter = draft_model(tiny.DRAFT, widths, tiny.PAGE, jnp.float32, sampled, num_tokens=KNOWN)
  params = transformer.with_vocab_size(draft_params(rows), tiny.VOCAB)
  table, num_pages = tiny.page_table(B, drafter.lookahead, tiny.MAX_LEN)
  slots = lambda length: tiny.slots_of(table, [length] * B, temperature=1.3)
  token = jnp.tile(jnp.array(TEXT), (B, 1))
  committed = Committed(token, token, jnp.zeros((*token.shape, 0)), jnp.full(B, len(TEXT)))

  @jax.jit
  def run():
    state = drafter.observe(params, drafter.init(B, num_pages), slots(0), committed)
    return drafter.propose(params, state, jnp.full(B, 2), slots(len(TEXT)))[0]

  return jax.tree.map(np.array, run())


def law_after(rows: int, drafted, temperature: float):
  """f64[KNOWN], by a pass of the draft model as it is over the whole text."""
  config = dataclasses.replace(tiny.DRAFT, vocab_size=rows)
  token = jnp.array([[*TEXT, 2, *drafted]])
  n = token.shape[1]
  hidden, _, _ = transformer.forward(
      draft_params(rows), config, token, chain_mask(1, n),
      pack(jnp.ones((1, n), bool), n),
      cache.init_pages(config, 1, n, jnp.float32), jnp.zeros((1, 1), jnp.int32),
      jnp.zeros(1, jnp.int32))
  x = np.array(transformer.logits(draft_params(rows), config, hidden)[-1, :KNOWN], np.float64)
  p = np.exp((x - x.max()) / temperature)
  return p / p.sum()


@pytest.mark.parametrize("rows", [10, 20], ids=["fewer rows", "more rows"])
def test_sampled_drafts_are_drawn_from_the_tokens_alone_and_q_says_so(rows):
  draft = proposed(rows, (1, 1), True)
  assert draft.q_probs.shape == (B, 3, tiny.VOCAB)
  assert (draft.token < KNOWN).all() and (draft.q_probs[:, :, KNOWN:] == 0).all()
  for slot in range(3):
    for depth in (1, 2):
      expected = law_after(rows, draft.token[slot, 1:depth], 1.3)
      np.testing.assert_allclose(draft.q_probs[slot, depth, :KNOWN], expected, atol=1e-5)
  assert len({tuple(row) for row in draft.token}) > 1


def test_greedy_trees_hold_the_likeliest_tokens_alone():
  draft = proposed(20, (3,), False)
  expected = np.argsort(-law_after(20, (), 1.0), kind="stable")[:3]
  np.testing.assert_array_equal(draft.token[:, 1:], np.tile(expected, (B, 1)))


def test_a_tree_wider_than_the_tokens_is_refused():
  with pytest.raises(ValueError, match=r"widths \[10\] needs more than 9 tokens"):
    draft_model(tiny.DRAFT, (10,), tiny.PAGE, jnp.float32, False, num_tokens=9)


@pytest.mark.parametrize("of_target, of_draft", [(80, 64), (64, 72), (72, 80)])
def test_padded_models_of_one_tokenizer_draft_for_each_other(monkeypatch, of_target, of_draft):
  """The same model with other numbers of zeros after its 64 rows: its drafts are always right."""
  own = tiny_model()
  padded = lambda rows, name: own._replace(
      config=dataclasses.replace(own.config, vocab_size=rows), name=name,
      params=transformer.with_vocab_size(own.params, rows), tokenizer=byte_tokenizer())
  monkeypatch.setattr(hub, "load_model", lambda name, **options: padded(of_draft, name))
  llm = LLM(padded(of_target, NAME), progress=False, **OPTIONS,
            speculative_config={"method": "draft_model", "model": "org/draft",
                                "num_speculative_tokens": 3})
  params = llm.engine.inputs.draft
  assert params["embed"].shape[0] == params["head"]["w"].shape[1] == of_target
  if (of_target, of_draft) == (80, 64):  # one is enough: each is a program
    text = [5, 6, 7, 8]
    (got,), (plain,) = (x.generate([text], greedy(max_tokens=30, ignore_eos=True))
                        for x in (llm, tiny_llm("none")))
    assert got.token_ids == plain.token_ids
    assert got.speculation.acceptance_rate == 1 and got.speculation.num_draft_tokens > 15
