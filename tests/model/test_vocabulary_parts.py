"""What sampling does part by part, for vocabularies split between devices, against the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.speculation import sampling


@pytest.mark.parametrize("size", [12, 48, 50, 1024])
def test_top_k_by_parts_is_top_k(size):
  """Equal values in the order of their index, as lax.top_k has them."""
  x = jax.random.randint(jax.random.key(size), (3, 2, size), 0, 9).astype(jnp.float32)
  for k in (1, 3, 8):
    for parts in (1, 2):
      for got, want in zip(sampling.top_k(x, k, parts), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [48, 1600, 16 * 700, 1000])
def test_the_inverse_cdf_over_parts(size):
  """Every index at the point of the cumulative sum that is its own, block and part borders too."""
  weight = np.ones((1, size), np.float32)
  weight[0, ::3] = 0
  owners = np.flatnonzero(weight[0])
  u = jnp.asarray((np.arange(len(owners)) + 0.5) / len(owners), jnp.float32)
  got = sampling.inverse_cdf(jnp.broadcast_to(weight, (len(owners), size)), u)
  np.testing.assert_array_equal(got, owners)
