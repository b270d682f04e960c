"""The target's dense forward pass for training: against transformers' logits and jspec's pages."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import FAMILIES, PAGE_SIZE, family

from jspec.config import ModelConfig
from jspec.model import cache, transformer
from jspec.model.execution import FAST
from jspec.model.rows import chain_mask, pack
from jspec.training import layers

T = 28
quickly = functools.partial(jax.jit, static_argnames=("config", "taps"),
                            compiler_options={"xla_backend_optimization_level": 0})
forward = quickly(layers.forward)


@quickly
def paged(params, config, token, pages, taps):
  rows = pack(jnp.ones((1, T), bool), T)
  table = jnp.arange(pages.k[0].shape[0])[None]
  hidden, features, _ = transformer.forward(params, config, token, chain_mask(1, T), rows, pages,
                                      table, jnp.zeros(1, jnp.int32), feature_layers=taps)
  return hidden, features


def one_sequence(ids):
  token = jnp.asarray(ids, jnp.int32)[None]
  return token, jnp.ones_like(token), jnp.arange(token.shape[1])[None]


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_equals_transformers_and_the_paged_pass(name, tmp_path):
  config, params, ids, golden = family(name, tmp_path)
  taps = (config.num_layers, 0, 1)
  hidden, features = forward(params, config, *one_sequence(ids), taps)
  logits = np.array(transformer.logits(params, config, hidden))[0]
  assert np.abs(logits - golden).max() < 1e-4
  pages = cache.init_pages(config, -(-T // PAGE_SIZE), PAGE_SIZE, jnp.float32)
  want_hidden, want_features = paged(params, config, ids[None], pages, taps)
  np.testing.assert_allclose(hidden[0], want_hidden, atol=1e-4)
  np.testing.assert_allclose(features[0], want_features, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "opt"])  # windows and caps; learned positions
def test_packed_sequences_and_padding_do_not_see_each_other(name, tmp_path):
  config, params, ids, golden = family(name, tmp_path)
  cut = 11
  # A row [padding 2 | ids[:cut] | ids[:17]], so as long as the tests' one shape.
  row = np.concatenate([[3, 5], ids[:cut], ids[:T - cut - 2]])[None]
  segment = np.repeat([0, 1, 2], [2, cut, T - cut - 2])[None]
  position = np.concatenate([np.arange(n) for n in (2, cut, T - cut - 2)])[None]
  hidden, _ = forward(params, config, row, segment, position)
  logits = np.array(transformer.logits(params, config, hidden))[0]
  assert np.abs(logits[2:2 + cut] - golden[:cut]).max() < 1e-4
  assert np.abs(logits[2 + cut:] - golden[:T - cut - 2]).max() < 1e-4
  joined, _ = forward(params, config, row, np.ones_like(segment), position)
  assert np.abs(joined - hidden).max() > 1e-2  # the segments do matter


def test_checkpointing_changes_no_gradient(tmp_path):
  config, params, ids, _ = family("qwen3", tmp_path)

  def loss(params, checkpoint):
    hidden, features = layers.forward(params, config, *one_sequence(ids[:8]), (1,), checkpoint)
    return (hidden**2).sum() + features.sum()

  plain, kept = (jax.jit(jax.grad(functools.partial(loss, checkpoint=c)))(params)
                 for c in (False, True))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, kept)
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(plain))


@pytest.mark.parametrize("window", [None, 3])
def test_attention_with_later_entries_is_attention_over_lists(window):
  """Row t at its last entry sees the rows up to t, then its own entries alone."""
  b, t, h, kv, size, num = 2, 7, 4, 2, 6, 2
  config = ModelConfig("tiny", 5, 24, 1, h, kv, size, 8, 16, attn_soft_cap=1.5, window=window,
                       sliding_layers=() if window is None else (0,))
  rng = np.random.default_rng(0)
  draw = lambda heads: rng.normal(size=(b, t, heads, size)).astype(np.float32)
  q, k, v, later = draw(h), draw(kv), draw(kv), [(draw(kv), draw(kv)) for _ in range(num)]
  segment = np.array([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 2]])
  position = np.array([[0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2, 3]])
  flat = lambda x: x.reshape(b, t, -1)
  got = layers.attention(flat(q), flat(k), flat(v), segment, position, config,
                         sliding=window is not None,
                         later=[(flat(keys), flat(values)) for keys, values in later])
  got = got.reshape(q.shape)
  for row, at, head in np.ndindex(b, t, h):
    one = head // (h // kv)
    entries = [(position[row, j], k[row, j, one], v[row, j, one]) for j in range(at + 1)
               if segment[row, j] == segment[row, at]]
    entries += [(position[row, at] + j, keys[row, at, one], values[row, at, one])
                for j, (keys, values) in enumerate(later, 1)]
    entries = [e for e in entries if window is None or e[0] > entries[-1][0] - window]
    scores = np.array([q[row, at, head] @ e[1] for e in entries]) / np.sqrt(size)
    weight = np.exp(1.5 * np.tanh(scores / 1.5))
    want = sum(w * e[2] for w, e in zip(weight / weight.sum(), entries, strict=True))
    np.testing.assert_allclose(got[row, at, head], want, atol=1e-5)


def test_a_tapped_state_is_the_input_of_its_layer(tmp_path):
  config, params, ids, _ = family("llama_tied", tmp_path)
  args = one_sequence(ids)
  _, features = forward(params, config, *args, (0, 1))
  embedded = transformer.embed(params, config, args[0], args[2])
  np.testing.assert_array_equal(features[..., :config.width], embedded)
  shallow = {**params, "layers": params["layers"][:1]}
  hidden, _ = forward(shallow, dataclasses.replace(config, num_layers=1), *args)
  second = transformer.norm(features[..., config.width:], params["final_norm"], config, FAST)
  np.testing.assert_allclose(second, hidden, atol=1e-5)
