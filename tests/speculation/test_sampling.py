"""Target distribution and draws, each operation against an independent numpy answer."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llm import EOS, byte_tokenizer

from jspec.engine.slot_sampling import bad_word_ids, empty_sampling, row_inputs, sampling_row
from jspec.model.rows import pack
from jspec.sampling_params import LARGEST, SamplingParams
from jspec.speculation import sampling, tree
from jspec.types import NO_PARENT, PAD_TOKEN, DraftTree

V = 12

# Compiled: operation by operation they take ten times as long.
_probabilities, _penalised, _choose, _threshold = map(jax.jit, (
    lambda *args: jax.nn.softmax(sampling.target_scores(*args)), sampling.penalised,
    sampling.choose, sampling._threshold))


def slots(num=1, vocab=V, **fields):
  """SlotSampling with the given fields changed."""
  s = empty_sampling(num, vocab, 16, 8)
  return s.replace(**{name: jnp.asarray(value, getattr(s, name).dtype)
                      for name, value in fields.items()})


def root_context(num=1):
  return sampling.NodeContext(jnp.arange(num), jnp.zeros((num, 0), jnp.int32),
                              jnp.zeros(num, jnp.int32))


def path_context(path, slot=0):
  """One row whose node has this path of draft tokens."""
  return sampling.NodeContext(jnp.array([slot]), jnp.array([path], jnp.int32).reshape(1, -1),
                              jnp.array([len(path)]))


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def numpy_law(scores, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
  """Sort-based, float64: temperature, then min_p, top_k, top_p; ties with the last kept stay."""
  x = np.asarray(scores, np.float64) / temperature
  p = softmax(x)
  x = np.where(p < min_p * p.max(), -np.inf, x)
  if top_k:
    x = np.where(x < np.sort(x)[::-1][min(top_k, len(x)) - 1], -np.inf, x)
  p = softmax(x)
  if top_p < 1:
    order = np.sort(p)[::-1]
    x = np.where(p < order[np.argmax(np.cumsum(order) >= top_p)], -np.inf, x)
  return softmax(x)


def law(scores, num_output=0, context=None, **fields):
  s = slots(**{name: [value] for name, value in fields.items()})
  p = _probabilities(jnp.asarray(scores, jnp.float32)[None], s, jnp.array([num_output]),
                             context or root_context())
  return np.asarray(p[0])


SCORES = np.array([1.5, -0.3, 2.2, 0.0, -4.0, 2.9, 0.7, -1.1, 1.2, -2.5, 0.4, 3.3])
TIES = np.array([1.0, 3.0, 3.0, 2.0, 2.0, 2.0, 0.0, 3.0, -1.0, 1.0, 0.0, 0.0])
ALL_BUT_ONE = np.where(np.arange(V) == 7, 0.5, -np.inf)


@pytest.mark.parametrize("scores", [SCORES, TIES, ALL_BUT_ONE], ids=["distinct", "ties", "single"])
@pytest.mark.parametrize("options", [
  dict(temperature=1.0), dict(temperature=0.3), dict(temperature=7.0),
  *(dict(temperature=1.0, top_k=k) for k in (1, 2, 4, 11, 12, 500)),
  *(dict(temperature=1.0, top_p=p) for p in (0.05, 0.4, 0.77, 0.99)),
  *(dict(temperature=1.0, min_p=p) for p in (0.01, 0.2, 0.9, 1.0)),
  dict(temperature=2.0, top_k=5, top_p=0.6), dict(temperature=0.5, min_p=0.1, top_k=3, top_p=0.9),
], ids=str)
def test_law_equals_sorting_in_numpy(scores, options):
  expected = numpy_law(scores, **options)
  got = law(scores, **options)
  np.testing.assert_allclose(got, expected, atol=1e-6)
  np.testing.assert_array_equal(got > 0, expected > 0)


def test_temperature_comes_before_the_truncations():
  """At T=2 the kept set differs from that of the untempered law, for min_p and for top_p."""
  for options in (dict(min_p=0.2), dict(top_p=0.7)):
    kept = law(SCORES, temperature=2.0, **options) > 0
    np.testing.assert_array_equal(kept, numpy_law(SCORES, temperature=2.0, **options) > 0)
    assert not np.array_equal(kept, numpy_law(SCORES, **options) > 0)


def test_min_p_then_top_k_then_top_p():
  """Each truncation renormalises for the next: other orders keep other tokens here."""
  scores = np.log([0.4, 0.2, 0.15, 0.1, 0.08, 0.07])
  scores = np.concatenate([scores, np.full(V - 6, -30.0)])
  kept = lambda **options: np.flatnonzero(law(scores, temperature=1.0, **options)).tolist()
  assert kept(top_p=0.6) == [0, 1]
  assert kept(top_k=2, top_p=0.6) == [0]  # 0.4 of the 0.6 left is enough
  assert kept(min_p=0.24, top_p=0.8) == [0, 1, 2]  # over 0.85; on all of 1 it takes 4 tokens
  assert kept(top_p=0.8) == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 2e-38, 1e-42])
def test_tiny_temperatures_are_the_argmax_and_never_nan(temperature):
  scores = 20 * SCORES  # divided by 2e-38 they would overflow
  np.testing.assert_array_equal(law(scores, temperature=temperature), np.eye(V)[11])
  drawn = _choose(jnp.asarray(scores, jnp.float32)[None],
                          slots(temperature=[temperature]), jnp.zeros(1, jnp.int32),
                          jnp.ones(1, bool), root_context(), jnp.array([0.999]))
  assert int(drawn[0]) == 11


def test_greedy_takes_the_first_of_equal_scores():
  np.testing.assert_array_equal(law(TIES, temperature=0.0), np.eye(V)[1])
  for options in ({}, dict(bias=np.eye(V)[[3]])):  # without and with the general path
    s = slots(**options, biased=[bool(options)])
    x = jnp.asarray(TIES, jnp.float32)[None]
    args = s, jnp.zeros(1, jnp.int32), jnp.ones(1, bool), root_context(), jnp.zeros(1)
    assert int(_choose(x, *args)[0]) == 1


# ------------------------------------------------------------- penalties, per node

#        0
#      /   \
#     1     2        tokens 5, 7 | 3 and 4 below 1 | 5 below 2
#    / \     \
#   3   4     5
PARENTS = [NO_PARENT, 0, 0, 1, 1, 2, NO_PARENT]
TOKENS = [9, 5, 7, 5, 6, 2, 0]
PATHS = [[], [5], [7], [5, 5], [5, 6], [7, 2]]


def tree_rows():
  """The hand-built tree in slot 1 of 2 (its last node unused), and the rows of its 6 nodes."""
  parent = jnp.array([[NO_PARENT] * 7, PARENTS])
  draft = DraftTree(jnp.array([[0] * 7, TOKENS]), parent, None)
  keep = tree.used(parent).at[0].set(False)
  mask = tree.ancestors(parent, 3)
  return sampling.node_context(draft, pack(keep, 6), mask), mask


def test_node_context_holds_each_nodes_own_path():
  context, _ = tree_rows()
  assert context.slot.tolist() == [1] * 6
  assert context.depth.tolist() == [len(p) for p in PATHS]
  for row, path in zip(np.asarray(context.path), PATHS, strict=True):
    assert row.tolist() == path + [PAD_TOKEN] * (6 - len(path))


def test_penalties_count_the_prompt_the_output_and_the_nodes_own_path():
  context, _ = tree_rows()
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(6, V)) * 3
  output, prompt = np.zeros(V, int), np.zeros(V, bool)
  output[[5, 9]], prompt[[3, 2]] = (2, 1), True
  s = slots(2, repetition_penalty=[1, 1.5], presence_penalty=[0, 0.7],
            frequency_penalty=[0, -0.4], output_count=[np.zeros(V), output],
            token_flags=[np.zeros(V), prompt * sampling.IN_PROMPT])
  got = _penalised(jnp.asarray(logits, jnp.float32), s, jnp.zeros(2, jnp.int32), context)
  for row, x, path in zip(np.asarray(got), logits, PATHS, strict=True):
    count = output + np.bincount(path, minlength=V)
    x = np.where((count > 0) | prompt, np.where(x > 0, x / 1.5, x * 1.5), x)
    np.testing.assert_allclose(row, x - -0.4 * count - 0.7 * (count > 0), atol=1e-5)


def test_logit_bias_is_added_before_the_penalties():
  """Token 0 by hand: (1 + 5) / 2 = 3, not 1 / 2 + 5; token 1: its bias changes the sign."""
  logits = np.array([1.0, 0.5, -1.0, 2.0, 0.0, *[0.25] * (V - 5)])
  bias = np.array([5.0, -2.0, 1.0, 0.0, -100.0, *[0.0] * (V - 5)])
  count = np.array([1, 1, 1, 1, 0, *[0] * (V - 5)])
  expected = np.array([3 - 0.75, -3 - 0.75, 0 - 0.75, 1 - 0.75, -100, *[0.25] * (V - 5)])
  s = slots(repetition_penalty=[2.0], frequency_penalty=[0.5], presence_penalty=[0.25],
            output_count=[count], bias=[bias], biased=[True])
  got = _penalised(jnp.asarray(logits, jnp.float32)[None], s, jnp.zeros(1, jnp.int32),
                   root_context())
  np.testing.assert_array_equal(got[0], expected)


def test_the_largest_bias_and_penalty_together_stay_finite():
  bias = np.array([LARGEST, -LARGEST])[np.arange(V) % 2]
  for repetition in (LARGEST, 1 / LARGEST):
    s = slots(repetition_penalty=[repetition], output_count=[np.ones(V)], bias=[bias],
              biased=[True])
    got = _penalised(jnp.full((1, V), 30.0), s, jnp.zeros(1, jnp.int32), root_context())
    assert np.isfinite(got).all()


def test_min_tokens_forbids_stops_by_depth():
  """With 3 tokens out and min_tokens 5, nodes of depth 0 and 1 come too early."""
  context, _ = tree_rows()
  flags = np.zeros(V)
  flags[[1, 8]] = sampling.NOT_BEFORE_MIN, sampling.NOT_BEFORE_MIN | sampling.STOPS
  flags[4] = sampling.IN_PROMPT
  s = slots(2, min_tokens=[0, 5], token_flags=[np.zeros(V), flags])
  got = np.asarray(_penalised(jnp.zeros((6, V)), s, jnp.array([0, 3]), context))
  for row, path in zip(got, PATHS, strict=True):
    assert np.flatnonzero(np.isneginf(row)).tolist() == ([1, 8] if 3 + len(path) < 5 else [])


@pytest.mark.parametrize("length", range(2, 9))
@pytest.mark.parametrize("split", range(8))
def test_bad_word_is_completed_across_committed_text_and_path(length, split):
  """The word's first tokens in the text, the next ones on the path, the last one forbidden."""
  word = [(3 * i + 1) % V for i in range(length)]
  head = word[:-1]
  path = head[max(0, len(head) - split):]
  text = head[:len(head) - len(path)]
  recent = ([PAD_TOKEN] * 2 + [11] * 7 + text)[-7:]
  table = np.full((16, 8), PAD_TOKEN)
  table[3, 8 - length:] = word
  s = slots(bad_words=[table], recent=[recent])
  forbidden = lambda s, path: np.flatnonzero(np.isneginf(_penalised(
      jnp.zeros((1, V)), s, jnp.zeros(1, jnp.int32), path_context(path))[0])).tolist()
  assert forbidden(s, path) == word[-1:]
  other = [(head[-1] + 5) % V]
  if path:
    assert forbidden(s, path[:-1] + other) == []
  else:
    assert forbidden(s.replace(recent=jnp.array([recent[:-1] + other])), path) == []


def test_record_keeps_counts_and_the_last_tokens():
  s = slots(2, recent=[[PAD_TOKEN] * 7, [1, 2, 3, 4, 5, 6, 7]])
  s = sampling.record(s, jnp.array([[3, 3, 9], [8, 9, 10]]), jnp.array([3, 1]))
  assert s.recent.tolist() == [[PAD_TOKEN] * 4 + [3, 3, 9], [2, 3, 4, 5, 6, 7, 8]]
  assert s.output_count[0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0]
  assert s.output_count[1].tolist() == [0] * 8 + [1] + [0] * 3


# ------------------------------------------------------------------- rows of requests


def test_sampling_row_of_a_request():
  tokenizer = byte_tokenizer()
  params = SamplingParams(stop_token_ids=[7], logit_bias={5: 2.5}, bad_words=["b", "cat"],
                          min_tokens=3, logprobs=0, top_k=10**12)
  row = sampling_row(row_inputs(params, tokenizer, 64), [9, 10, 9], 64)
  flags = lambda bit: np.flatnonzero(row.token_flags & bit).tolist()
  assert flags(sampling.STOPS) == flags(sampling.NOT_BEFORE_MIN) == [EOS, 7]
  assert flags(sampling.IN_PROMPT) == [9, 10]
  b, cat = tokenizer.encode("b"), tokenizer.encode("cat")
  assert row.bias[5] == 2.5 and np.isneginf(row.bias[b]).all() and row.biased and row.logprobs
  assert row.bad_words[0].tolist() == [PAD_TOKEN] * (8 - len(cat)) + cat
  assert row.recent.tolist() == [PAD_TOKEN] * 4 + [9, 10, 9]
  assert row.top_k >= 64 and row.min_tokens == 3

  row = sampling_row(row_inputs(SamplingParams(ignore_eos=True), tokenizer, 64), range(20, 40), 64)
  assert not (row.token_flags & sampling.STOPS).any() and not row.biased and not row.logprobs
  assert flags(sampling.NOT_BEFORE_MIN) == [EOS]
  assert row.recent.tolist() == list(range(33, 40))


def test_allowed_tokens_are_the_only_ones_whatever_their_bias():
  params = SamplingParams(allowed_token_ids=[7, 5, 9, 5], bad_words=["b"],
                          logit_bias={5: 2.5, 8: 100.0})
  row = sampling_row(row_inputs(params, byte_tokenizer(), 64), [9, 10], 64)
  assert np.flatnonzero(np.isfinite(row.bias)).tolist() == [5, 7, 9] and row.biased
  assert row.bias[[5, 7, 9]].tolist() == [2.5, 0, 0]
  everything = SamplingParams(allowed_token_ids=range(64))
  assert not sampling_row(row_inputs(everything, byte_tokenizer(), 64), [9], 64).biased
  with pytest.raises(ValueError, match="allowed_token_ids names token 64, .* has 64 tokens"):
    row_inputs(SamplingParams(allowed_token_ids=[3, 64]), byte_tokenizer(), 64)


A, Q, W = (byte_tokenizer().encode(letter)[0] for letter in "aqw")


@pytest.mark.parametrize("stuck, fields", [
  (True, dict(allowed_token_ids=[A], bad_words=["a"])),
  (False, dict(allowed_token_ids=[A, Q], bad_words=["a"])),
  (True, dict(allowed_token_ids=[EOS], min_tokens=1)), (False, dict(allowed_token_ids=[EOS])),
  (True, dict(allowed_token_ids=[A, 7], stop_token_ids=[7], bad_words=["a"], min_tokens=2)),
  (True, dict(allowed_token_ids=[Q], bad_words=["qq"])),  # at its second token
  (True, dict(allowed_token_ids=[Q, W], bad_words=["qw", "wqq"])),  # after "wq"
  (False, dict(allowed_token_ids=[Q, W], bad_words=["qq", "ww"])),
  (False, dict(allowed_token_ids=[Q, W], bad_words=["qw", "wq"])),
])
def test_what_could_forbid_every_token_is_refused(stuck, fields):
  """There is no law to draw from then: taking token 0 would be as wrong as any other."""
  ask = lambda: row_inputs(SamplingParams(**fields), byte_tokenizer(), 64)
  if not stuck:
    return ask()
  with pytest.raises(ValueError, match="could leave no token to go on with"):
    ask()


def test_bad_words_are_forbidden_with_and_without_a_space_before():
  tokenizer = byte_tokenizer()
  the, spaced = tokenizer.encode("the"), tokenizer.encode(" the")
  assert bad_word_ids(["the"], tokenizer) == [the, spaced] and len(the) == len(spaced) == 1
  assert bad_word_ids([" "], tokenizer) == [tokenizer.encode(" ")]
  assert bad_word_ids(["xyz"], tokenizer) == [tokenizer.encode("xyz")]


def test_bad_words_beyond_a_slots_room_are_refused():
  check = lambda *words: row_inputs(SamplingParams(bad_words=words), byte_tokenizer(), 64)
  assert (check("qwqwqwqw", *"abcdefghijklmnopqrstuvwxyz").bad_words[0] != PAD_TOKEN).all()
  with pytest.raises(ValueError, match="9 tokens long; at most 8"):
    check("qwqwqwqwq")
  with pytest.raises(ValueError, match="17 token sequences .* at most 16"):
    check(*[f"q{c}" for c in "abcdefghijklmnopq"])


# ------------------------------------------------------------------------- thresholds

FLOATS = st.floats(-1e6, 1e6, width=32)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(st.data())
def test_threshold_is_the_largest_value_with_enough_weight(data):
  """Against trying every value; weights are whole numbers, so sums are exact."""
  values = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, -np.inf, 3e38]), FLOATS)
  x = data.draw(hnp.arrays(np.float32, 8, elements=values))
  weight = data.draw(hnp.arrays(np.float32, 8, elements=st.integers(0, 9).map(float)))
  amount = data.draw(st.integers(0, int(weight.sum())))
  got = float(_threshold(jnp.array(x)[None], jnp.array(weight)[None],
                         jnp.array([[float(amount)]]))[0, 0])
  assert got == max(t for t in x if weight[x >= t].sum() >= amount)


# ------------------------------------------------------------------------------ draws


def test_draws_follow_the_law():
  """4000 uniforms on an even grid: each token's count is its share, within one per edge."""
  u = jnp.arange(4000) / 4000
  p = numpy_law(SCORES, temperature=1.3, top_p=0.9)
  s = slots(temperature=[1.3], top_p=[0.9])
  context = sampling.NodeContext(jnp.zeros(4000, jnp.int32), jnp.zeros((4000, 0), jnp.int32),
                                 jnp.zeros(4000, jnp.int32))
  drawn = _choose(jnp.tile(jnp.asarray(SCORES, jnp.float32), (4000, 1)), s,
                          jnp.zeros(1, jnp.int32), jnp.ones(1, bool), context, u)
  assert np.abs(np.bincount(drawn, minlength=V) - 4000 * p).max() <= 1.5


def test_each_row_of_a_mixed_batch_is_what_it_would_be_alone():
  rows = [dict(temperature=0.0), dict(temperature=1.0), dict(temperature=2.0, top_p=0.5),
          dict(temperature=0.7, top_k=2), dict(temperature=0.0, repetition_penalty=5.0),
          dict(temperature=1.0, min_p=0.5)]
  s = slots(len(rows), output_count=np.tile(np.arange(V) == 11, (len(rows), 1)))
  alone = []
  for i, row in enumerate(rows):
    for name, value in row.items():
      s = s.replace(**{name: getattr(s, name).at[i].set(value)})
  logits = jax.random.normal(jax.random.key(1), (len(rows), V)) * 3
  logits = logits.at[4].set(SCORES)
  u = jax.random.uniform(jax.random.key(2), (len(rows),))
  zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
  for i in range(len(rows)):
    own = jax.tree.map(lambda x, i=i: x[i:i + 1], s)
    alone.append(int(_choose(logits[i:i + 1], own, zero, one, root_context(),
                                     u[i:i + 1])[0]))
  together = _choose(logits, s, jnp.zeros(len(rows), jnp.int32),
                             jnp.ones(len(rows), bool), root_context(len(rows)), u)
  assert together.tolist() == alone
  assert alone[0] == int(logits[0].argmax()) and alone[4] != 11


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "presence_penalty",
                                   "frequency_penalty", "min_tokens", "biased", "bad_words"])
def test_every_option_that_changes_scores_takes_the_general_path(field):
  s = slots(2)
  assert not sampling.needs_scores(s, jnp.ones(2, bool))
  s = s.replace(**{field: getattr(s, field).at[1].set(field == "biased" or 2)})
  assert sampling.needs_scores(s, jnp.ones(2, bool))
  assert not sampling.needs_scores(s, jnp.array([True, False]))


def test_random_numbers_depend_on_request_position_and_role_only():
  keys = jax.random.split(jax.random.key(0), 3)
  draw = lambda keys, position, role: sampling.uniforms(keys, jnp.array(position), role).tolist()
  a = draw(keys, [5, 6, 7], sampling.TARGET)
  assert draw(keys[::-1], [7, 6, 5], sampling.TARGET) == a[::-1]
  others = [a, draw(keys, [6, 7, 8], sampling.TARGET), draw(keys, [5, 6, 7], sampling.DRAFT),
            draw(keys, [5, 6, 7], sampling.ACCEPT)]
  assert len(set(sum(others, []))) == 12 and all(0 <= u < 1 for u in sum(others, []))


def test_logprobs_and_ranks():
  x = np.random.default_rng(3).normal(size=(5, V)).astype(np.float32) * 4
  x[0] = TIES
  token = np.array([7, 0, 4, 11, 2])
  logprob, rank, top, top_logprob = sampling.logprobs(jnp.array(x), jnp.array(token), 4, 1)
  expected = np.log(np.stack([softmax(row.astype(np.float64)) for row in x]))
  rows = np.arange(5)
  np.testing.assert_allclose(logprob, expected[rows, token], atol=1e-5)
  assert rank.tolist() == [1 + int((row > row[t]).sum()) for row, t in zip(x, token, strict=True)]
  np.testing.assert_array_equal(top, np.argsort(-x, kind="stable")[:, :4])
  np.testing.assert_allclose(top_logprob, np.take_along_axis(expected, np.asarray(top), 1),
                             atol=1e-5)
