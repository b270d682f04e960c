"""Indices drawn in proportion to weights: the right ones, and never one of weight 0."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import draft_laws
from jspec.speculation import sampling

_inverse_cdf = jax.jit(sampling.inverse_cdf)


@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513, 1500, 49152])
def test_inverse_cdf_equals_searching_the_cumulative_sum(vocab):
  """Whole-number weights whose total is a power of two: every sum and product is exact."""
  rng = np.random.default_rng(vocab)
  weight = rng.integers(0, 4, vocab) * (rng.random(vocab) < 0.7)
  total = 1 << int(weight.sum()).bit_length()
  weight[vocab // 2] += total - weight.sum()
  upto = np.cumsum(weight)
  edges = upto[rng.integers(0, vocab, 200)]
  points = np.unique(np.concatenate([np.arange(0, total, max(1, total // 500)), edges, edges - 1]))
  points = points[(points >= 0) & (points < total)]
  points = np.concatenate([points, points + 0.5])
  u = (points / total).astype(np.float32)
  rows = jnp.broadcast_to(jnp.asarray(weight, jnp.float32), (64, vocab))
  for i in range(0, len(u), 64):
    some = np.resize(u[i:i + 64], 64)
    expected = np.searchsorted(upto, some.astype(np.float64) * total, side="right")
    np.testing.assert_array_equal(_inverse_cdf(rows, jnp.array(some)), expected)


ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(st.data())
def test_inverse_cdf_never_returns_weight_zero(data):
  """Sparse weights over many magnitudes, u at and near its ends: rounding has no way out."""
  vocab = 1100
  weight = np.zeros(vocab, np.float32)
  where = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6, unique=True))
  weight[where] = data.draw(hnp.arrays(
      np.float32, len(where), elements=st.floats(2.0**-30, 1, width=32)))
  u = data.draw(st.one_of(st.sampled_from([0.0, 0.5, ALMOST_ONE]),
                          st.floats(0, ALMOST_ONE, width=32)))
  index = int(_inverse_cdf(jnp.array(weight)[None], jnp.array([u], jnp.float32))[0])
  assert weight[index] > 0


@pytest.mark.parametrize("u", [ALMOST_ONE, 0.5, 0.0])
@pytest.mark.parametrize("vocab", [151936, 262144])
def test_truncated_rows_of_large_vocabularies_give_no_truncated_token(vocab, u):
  """96 rows, kept up to a random place: the point of u = 1 - 2**-24 lies at their total's last bit.

  XLA's prefix sums over some hundred blocks fall in the last bit, as sums of sequential adding
  never do: taking the first block that reaches the total for the last possible one drew a token of
  weight 0 for two or more rows of either vocabulary (jax 0.10, CPU).
  """
  rng = np.random.default_rng(vocab)
  weight = rng.random((96, vocab), np.float32)
  weight[np.arange(vocab) >= rng.integers(vocab // 8, vocab, 96)[:, None]] = 0
  index = np.asarray(_inverse_cdf(jnp.array(weight), jnp.full(96, u)))
  assert (index < vocab).all() and (weight[np.arange(96), index] > 0).all()
  for row, i in zip(weight, index, strict=True):
    upto = np.cumsum(row, dtype=np.float64) / row.sum(dtype=np.float64)
    assert upto[i] >= u - 1e-5 and (i == 0 or upto[i - 1] <= u + 1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1e-42, 2e-38, 1e-3])
def test_a_drafts_law_is_the_argmax_at_tiny_temperatures_and_never_nan(temperature):
  """Logits over the temperature overflow: drafts were then drawn from a law of NaN."""
  logits = jnp.array([[[30.0, -5.0, 80.0, 79.0]]])
  law = draft_laws.draft_law(logits, jnp.array([temperature]))
  np.testing.assert_array_equal(law[0, 0], [0, 0, 1, 0])
  tokens, laws = draft_laws.siblings(logits, jnp.array([temperature]), jnp.full((1, 1, 4), 0.7))
  assert tokens.tolist() == [[[2, 3, 0, 1]]]
  np.testing.assert_array_equal(laws[0, 0], np.eye(4)[[2, 3, 0, 1]])
