"""Pages of 8 bits: how far off a value may be, and that speculation changes no text there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llm import greedy, tiny_llm

from jspec.model import cache
from jspec.types import KVPages, Verdict

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [20, 21, 22], [9] * 12, [31, 3, 31, 3, 31]]
# Half of the last digit, as a share of the largest value (int8) or of the value (fp8).
DTYPES = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_is_off_by_half_a_digit_at_most(dtype):
  x = jax.random.normal(jax.random.key(0), (64, 3 * 8)) * 10.0 ** jnp.linspace(-6, 4, 64)[:, None]
  x = x.at[5].set(0).at[6, :8].set(0)
  values, scale = cache.quantised(x, 3, jnp.dtype(dtype))
  assert values.dtype == dtype and scale.shape == (64, 3)
  back = values.astype(jnp.float32).reshape(64, 3, 8) * scale[..., None]
  largest = jnp.abs(x.reshape(64, 3, 8)).max(-1, keepdims=True)
  assert np.isfinite(back).all()
  assert (jnp.abs(back - x.reshape(64, 3, 8)) <= 1.001 * DTYPES[dtype] * largest).all()
  np.testing.assert_array_equal(back[5], 0)


def test_commit_moves_scales_with_their_values():
  table = jnp.array([[2, 0]])
  values = jnp.arange(3 * 4 * 2, dtype=jnp.int8).reshape(3, 4, 2)
  scales = jnp.arange(3 * 1 * 4, dtype=jnp.float32).reshape(3, 1, 4)
  pages = KVPages((values,), (values,), (scales,), (scales,))
  verdict = Verdict(jnp.array([[0, 2]]), jnp.array([1]), jnp.zeros(1, jnp.int32))
  new = cache.commit(pages, table, jnp.array([2]), verdict)  # position 4 -> position 3
  np.testing.assert_array_equal(new.k[0][2, 3], values[0, 0])
  assert float(new.v_scale[0][2, 0, 3]) == float(scales[0, 0, 0])
  np.testing.assert_array_equal(new.k[0][0], values[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_where_it_is_written(value, dtype):
  """Neither in other pages, nor in other columns of its own page."""
  pages, scales = jnp.zeros((3, 4, 2), jnp.dtype(dtype)), jnp.full((3, 1, 4), 7.0)
  x = jnp.array([[1.0, 2.0], [value, 3.0], [5.0, 6.0]])
  page, offset = jnp.array([0, 2, 2]), jnp.array([1, 0, 3])
  values, scales = jax.tree.map(np.array, cache.write(pages, scales, page, offset, x))
  back = values.astype(np.float32) * scales[:, 0, :, None]
  assert not np.isfinite(back[2, 0, 0])
  np.testing.assert_allclose(back[(0, 2), (1, 3)], [[1, 2], [5, 6]], rtol=0.1)
  np.testing.assert_array_equal(scales[1], 7)
  np.testing.assert_array_equal(scales[[0, 0, 0, 2, 2], 0, [0, 2, 3, 1, 2]], 7)


@pytest.mark.parametrize("method, dtype", [
    ("draft_model", "int8"), ("ngram", "fp8"),
    *(pytest.param("ngram", dtype, marks=pytest.mark.slow) for dtype in ("int8", "fp8_e5m2"))])
def test_greedy_text_is_plain_decodings(method, dtype):
  params = greedy(max_tokens=32, ignore_eos=True)
  got, want = ([out.token_ids for out in tiny_llm(
      m, kv_cache_dtype=dtype, max_num_seqs=2).generate(PROMPTS, params)]
               for m in (method, "none"))
  assert got == want
