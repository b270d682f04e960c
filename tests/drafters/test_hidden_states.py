"""What training asks of the engine: hidden states of finished requests, drafts verified whole."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llm import OPTIONS, tiny_model

from jspec import LLM, SamplingParams
from jspec.speculation.plan import CostModel, StepConfig, plan
from jspec.training import layers
from jspec.types import NO_PARENT, DraftTree

LAYERS = [0, 1, 2]


def make(speculation):
  return LLM(tiny_model(), speculative_config=speculation, progress=False,
             **OPTIONS | {"max_num_seqs": 2})


def test_every_token_but_the_last_comes_with_its_hidden_states():
  llm = make({"method": "extract_hidden_states", "hidden_state_layers": LAYERS})
  prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1], [3], [2, 2]]  # more than slots: pages are reused
  outputs = llm.generate(prompts, SamplingParams(max_tokens=9, temperature=1.0, seed=1))
  for prompt, output in zip(prompts, outputs, strict=True):
    token = jnp.array([[*prompt, *output.token_ids[:-1]]])
    ones = jnp.ones_like(token)
    _, want = layers.forward(llm.loaded.params, llm.config, token, ones,
                                  jnp.arange(token.shape[1])[None], tuple(LAYERS))
    states = output.outputs[0].hidden_states
    assert states.dtype == jnp.bfloat16
    np.testing.assert_allclose(states.astype(np.float32), want[0], rtol=1e-2, atol=1e-2)


def test_other_methods_keep_none():
  llm = make(None)
  assert llm.generate([[1, 2]], SamplingParams(max_tokens=2))[0].outputs[0].hidden_states is None


@pytest.mark.parametrize("layers, message", [
    ([], "needs hidden_state_layers"), ([-1], "needs hidden_state_layers"),
    ([0, 99], r"hidden_state_layers=\[0, 99\] must lie in 0..2"),
])
def test_layers_that_are_not_there_are_refused(layers, message):
  with pytest.raises(ValueError, match=message):
    make({"method": "extract_hidden_states", "hidden_state_layers": layers})


@pytest.mark.parametrize("adaptive, kept", [(True, [1, 0, 0, 0]), (False, [1, 1, 1, 1])])
def test_drafts_are_verified_whole_where_their_length_is_not_adaptive(adaptive, kept):
  """Rows that cost as much as a pass, and a drafter that was always wrong."""
  config = StepConfig(tiny_model().config, ((1, 1), (4, 4)), CostModel(rows_per_pass=1.0),
                      adaptive=adaptive)
  one = lambda value: jnp.array([value])
  state = types.SimpleNamespace(active=one(True), accepted=one(0.0), tested=one(9.0),
                                limit=one(50), num_output=one(1), length=one(5))
  draft = DraftTree(jnp.array([[1, 2, 3, 4]]), jnp.array([[NO_PARENT, 0, 1, 2]]), None)
  keep, _ = plan(draft, state, config, jnp.float32(1000))
  assert keep.astype(int).tolist() == [kept]


def test_the_engine_passes_the_choice_on():
  adaptive = lambda llm: llm.engine.device._step_config.adaptive
  assert not adaptive(make({"method": "ngram", "adaptive_draft_length": False}))
  assert adaptive(make(None))
