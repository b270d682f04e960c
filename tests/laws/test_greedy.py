"""Greedy identity: whatever drafts, the text is plain decoding's, token for token (float32)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_llm

from jspec.config import ModelConfig
from jspec.model import attention, cache, transformer
from jspec.model.execution import Execution
from jspec.model.params import init_params
from jspec.model.rows import chain_mask, pack
from jspec.pallas import paged_attention_tpu
from jspec.speculation import sampling, step

B, LENGTH = 64, 40  # texts of 2 to 21 + 40 tokens: every residue of the page size
SPECULATING = [name for name in tiny.CASES if tiny.CASES[name](tiny.TARGET)[0].max_depth]
POINT_MASS = [n for n in SPECULATING if not tiny.CASES[n](tiny.TARGET)[0].sampled]


@functools.cache
def greedy(name, seed=3):
  rig = tiny.rig(name, B)
  return tiny.generate(rig, tiny.start(rig, tiny.random_prompts(B, seed)), LENGTH)


@pytest.mark.parametrize("name", tiny.quick_cases(cases=SPECULATING))
def test_greedy_text_is_plain_decodings(name):
  assert greedy(name)[0] == greedy("none")[0]
  assert len(tiny.rig(name, B).traces) == 1


@pytest.mark.parametrize("name, kernel", tiny.with_kernels(
    ("draft_model_tree", "tpu"), ("ngram", "tpu"), ("draft_model_tree", "triton")))
def test_greedy_text_with_a_kernel_in_place_of_the_reference(monkeypatch, name, kernel):
  """The Pallas kernels, interpreted, at every residue of the page size. Most of them are slow."""
  monkeypatch.setattr(paged_attention_tpu, "TILE_ROWS", tiny.PAGE)  # no tiles here
  n = tiny.CASES[name](tiny.TARGET)[0].num_nodes
  widths = None if name == "ngram" else ((24 * n, n),)  # each is compiled
  rig = tiny.rig(name, 24, widths, attend=attention.choose("cpu", kernel, interpret=True))
  got, _ = tiny.generate(rig, tiny.start(rig, tiny.random_prompts(B)[:24]), LENGTH)
  assert got == greedy("none")[0][:24]


@pytest.mark.parametrize("name", ["ngram", "draft_model_tree", "draft_model_sampled"])
def test_greedy_text_alone_is_that_in_a_batch(name):
  rig = tiny.rig(name, 1)
  for i in (3, 16, 18):
    got, _ = tiny.generate(rig, tiny.start(rig, tiny.random_prompts(B)[i:i + 1]), LENGTH)
    assert got == greedy("none")[0][i:i + 1]
  assert len(rig.traces) == 1


@pytest.mark.parametrize("name", tiny.quick_cases(cases=SPECULATING))
def test_draft_lengths_limits_and_stop_tokens_by_slot(name):
  """Each slot's text is plain's cut at its limit or first stop token; none drafts beyond its K."""
  rig = tiny.rig(name, B)
  max_draft, limit = np.arange(B) % (rig.drafter.max_depth + 1), 1 + np.arange(B) % 37
  stop = np.arange(B) % (tiny.VOCAB + 3)  # no stop token for the last few
  flags = sampling.STOPS * (np.arange(tiny.VOCAB) == stop[:, None])
  state = tiny.start(rig, tiny.random_prompts(B), max_draft=max_draft, limit=limit,
                     sampling=tiny.sampling_for(B, token_flags=flags))
  running = np.array(state.active)  # the others' first token was their last
  got, outputs = tiny.generate(rig, state, LENGTH)
  for i, (text, plain) in enumerate(zip(got, greedy("none")[0], strict=True)):
    end = plain.index(stop[i]) + 1 if stop[i] in plain else LENGTH
    assert text == plain[:min(end, limit[i])]
  accepted = np.stack([out.drafted.sum(1) for out in outputs])
  assert (accepted <= max_draft).all()
  np.testing.assert_array_equal(sum(out.finished.astype(int) for out in outputs), running)
  assert len(rig.traces) == 1


def drafted_stops(text, outputs):
  """For each slot a token whose first occurrence was an accepted draft, or -1."""
  stops = []
  for i, row in enumerate(text):
    drafted = [False]
    for out in outputs:
      drafted += out.drafted[i, :out.num_tokens[i]].tolist()
    first = (t for at, t in enumerate(row) if drafted[at] and t not in row[:at])
    stops.append(next(first, -1))
  return np.array(stops)


@pytest.mark.parametrize("name", ["ngram", "draft_model_tree", "draft_model_self_sampled"])
def test_a_stop_token_inside_an_accepted_run_cuts_there(name):
  rig, stopped = tiny.rig(name, B), 0
  for seed in (3, 4):
    stop = drafted_stops(*greedy(name, seed))
    stopped += (stop >= 0).sum()
    flags = sampling.STOPS * (np.arange(tiny.VOCAB) == stop[:, None])
    state = tiny.start(rig, tiny.random_prompts(B, seed),
                       sampling=tiny.sampling_for(B, token_flags=flags))
    got, _ = tiny.generate(rig, state, LENGTH)
    assert got == [row[:row.index(s) + 1] if s in row else row
                   for row, s in zip(greedy("none", seed)[0], stop, strict=True)]
  assert stopped > 5


@pytest.mark.parametrize("name", tiny.quick_cases(cases=POINT_MASS))
def test_seeded_text_is_the_same_with_and_without_drafts(name):
  options = tiny.sampling_for(B, temperature=0.9, top_p=np.where(np.arange(B) % 2, 0.8, 1))
  text = lambda rig: tiny.generate(
      rig, tiny.start(rig, tiny.random_prompts(B), sampling=options), LENGTH)[0]
  assert text(tiny.rig(name, B)) == text(tiny.rig("none", B))


@pytest.mark.parametrize("name", ["ngram", "draft_model_tree", "draft_model_sampled"])
def test_seeded_text_alone_is_that_in_a_batch(name):
  keys = jax.random.split(jax.random.key(4), B)
  many, one = tiny.rig(name, B), tiny.rig(name, 1)
  hot = lambda b: tiny.sampling_for(b, temperature=0.9)
  texts, _ = tiny.generate(many, tiny.start(many, tiny.random_prompts(B), keys=keys,
                                            sampling=hot(B)), LENGTH)
  for i in (0, 5, 16):
    alone, _ = tiny.generate(one, tiny.start(one, tiny.random_prompts(B)[i:i + 1],
                                             keys=keys[i:i + 1], sampling=hot(1)), LENGTH)
    assert alone == texts[i:i + 1]


@pytest.mark.parametrize("name", ["draft_model_self", "draft_model_self_sampled",
                                  "draft_model_self_tree", "draft_model_self_tree_sampled"])
def test_the_target_drafting_for_itself_is_always_accepted(name):
  """Greedy: K of K in every step. A single draft KV entry out of place would show."""
  _, outputs = greedy(name)
  depth = tiny.rig(name, B).drafter.max_depth
  assert all((out.num_tokens == depth + 1).all() for out in outputs)


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_a_slot_whose_cache_holds_a_nan_fails_alone(name):
  """The others emit what they emit beside a sound one; half of them draw."""
  rig, slot = tiny.rig(name, B), 5
  state = tiny.start(rig, tiny.random_prompts(B),
                     sampling=tiny.sampling_for(B, temperature=np.arange(B) % 2 * 0.9))
  page = state.page_table[slot, 0]
  ill = state.replace(pages=jax.tree.map(lambda x: x.at[page, 0].set(jnp.nan), state.pages))
  (_, sound), (ill, out) = (rig.step(rig.params, tiny.copy(s)) for s in (state, ill))
  others = np.arange(B) != slot
  np.testing.assert_array_equal(out.failed, ~others)
  np.testing.assert_array_equal(out.tokens[others], sound.tokens[others])
  assert out.finished[slot] and out.num_tokens[slot] == 0 and not ill.active[slot]
  assert not sound.failed.any() and (out.tokens[slot] == -1).all()
  assert len(rig.traces) == 1


def test_multi_step_is_as_many_steps(name="ngram"):
  rig, prompts = tiny.rig(name, B), tiny.random_prompts(B)
  run, traces = tiny.compiled(step.make_multi_step(rig.config, rig.drafter, 8), 1)
  state, outputs = tiny.start(rig, prompts), []
  roots = [[int(t)] for t in state.root]
  for num_steps in (3, 8):
    state, out = run(rig.params, state, jnp.int32(num_steps))
    for row, tokens, n in zip(roots, *map(np.array, (out.tokens, out.num_tokens)), strict=True):
      row += tokens[:n].tolist()
    outputs.append(np.array(out.num_steps).tolist())
  single, _ = tiny.generate(rig, tiny.start(rig, prompts), max(map(len, roots)))
  assert roots == [row[:len(got)] for row, got in zip(single, roots, strict=True)]
  assert outputs == [[3] * B, [8] * B] and len(traces) == 1


# ------------------------------------------------------------------ bitwise numerics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bitwise_logits_do_not_depend_on_the_width(dtype):
  """Verification of N tokens of B slots gives the bits of decoding them one by one, alone."""
  config = ModelConfig("tiny", 320, 96, 1, 6, 2, 16, 224, 64)
  params = init_params(jax.random.key(1), config, jnp.dtype(dtype))
  token = jax.random.randint(jax.random.key(2), (3, 24), 0, 320)
  how = Execution(bitwise=True)

  @functools.partial(jax.jit, static_argnums=0, compiler_options=tiny_llm.AS_SHIPPED)
  def forward(n, token, pages, table, length):
    b = token.shape[0]
    hidden, _, pages = transformer.forward(
        params, config, token, chain_mask(b, n), pack(jnp.ones((b, n), bool), b * n),
        pages, table, length, how=how)
    return transformer.logits(params, config, hidden, how).reshape(b, n, -1), pages

  def decode(slots, n):
    pages = cache.init_pages(config, 9, 8, jnp.dtype(dtype))
    table = jnp.array([[4, 2, 7], [0, 8, 1], [3, 5, 6]])[slots]
    out = []
    for at in range(0, 24 // n * n, n):
      logits, pages = forward(n, token[slots, at:at + n], pages, table,
                              jnp.full(len(slots), at))
      out.append(np.array(logits))
    return np.concatenate(out, 1)

  alone = [decode(np.array([i]), 1)[0] for i in range(3)]
  for slots in ([0], [0, 1, 2]):
    for n in (1, 2, 3, 4, 5, 8):
      for i, got in zip(slots, decode(np.array(slots), n), strict=True):
        np.testing.assert_array_equal(got, alone[i][:got.shape[0]])
