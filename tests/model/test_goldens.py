"""forward() against transformers: every family, SmolLM2 and Gemma 3 (scripts/make_goldens.py)."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import FAMILIES, GOLDENS, PAGE_SIZE, family

from jspec.checkpoints import hub
from jspec.model import cache, transformer
from jspec.model.rows import pack


@functools.partial(jax.jit, static_argnames="config")
def _chunk_logits(params, config, token, pages, length):
  num = token.shape[1]
  rows = pack(jnp.ones((1, num), bool), num)
  page_table = jnp.arange(pages.k[0].shape[0])[None]
  mask = jnp.tril(jnp.ones((1, num, num), bool))
  hidden, _, pages = transformer.forward(
      params, config, token, mask, rows, pages, page_table, length)
  return transformer.logits(params, config, hidden), pages


def sequence_logits(params, config, ids, chunk, capacity=64) -> np.ndarray:
  """float32[T, V] of a whole sequence, `chunk` tokens at a time, so that later ones read the KV."""
  token = np.pad(np.asarray(ids, np.int32), (0, -len(ids) % chunk)).reshape(-1, 1, chunk)
  assert token.size <= capacity
  pages, out = cache.init_pages(config, -(-capacity // PAGE_SIZE), PAGE_SIZE, jnp.float32), []
  for i, part in enumerate(token):
    logits, pages = _chunk_logits(params, config, part, pages, jnp.array([i * chunk]))
    out.append(np.asarray(logits))
  return np.concatenate(out)[:len(ids)]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_logits_equal_transformers(name, tmp_path):
  config, params, ids, golden = family(name, tmp_path)
  logits = sequence_logits(params, config, ids, chunk=11)
  assert np.abs(golden).max() > 0.5
  assert np.abs(logits - golden).max() < 1e-4


@pytest.mark.parametrize("name, change", [
  ("llama_tied", {"rope_scaling": None}), ("llama_untied", {"rope_scaling": None}),
  ("mistral", {"window": 9}), ("qwen2_window", {"sliding_layers": (0,)}),
  ("gemma3", {"attn_soft_cap": None}), ("gemma3", {"final_soft_cap": None}),
  ("gemma3", {"window": 7}), ("gemma3", {"rope_theta_local": 1000.0}),
  ("gemma3", {"attn_scale": None}), ("gemma3", {"embed_scale": 1.0})])
def test_goldens_notice_a_wrong_config(name, change, tmp_path):
  """The comparison above fails for each of these mistakes, so it can see them."""
  config, params, ids, golden = family(name, tmp_path)
  logits = sequence_logits(params, dataclasses.replace(config, **change), ids, chunk=11)
  assert np.abs(logits - golden).max() > 1e-3


def _check_model(name, loaded, tolerance):
  with np.load(GOLDENS / f"{name}.npz") as golden:
    count = sum(key.startswith("ids") for key in golden)
    for i in range(count):
      ids = golden[f"ids{i}"].tolist()
      logits = sequence_logits(loaded.params, loaded.config, ids, chunk=64, capacity=512)
      picked = logits[golden[f"positions{i}"]][:, golden["some"]]
      assert np.abs(picked - golden[f"logits{i}"]).max() < tolerance


def test_smollm2_logits_equal_transformers(smollm2):
  _check_model("smollm2", smollm2, 1e-3)


def test_smollm2_greedy_continuations_equal_transformers(smollm2):
  """One pass per text: each golden token is the argmax after the tokens before it."""
  rows = json.loads((GOLDENS / "smollm2.json").read_text(encoding="utf-8"))["greedy"]
  assert len(rows) == 10 and all(row["smallest_gap"] > 1e-3 for row in rows)
  for row in rows:
    ids = row["ids"] + row["greedy"][:-1]
    logits = sequence_logits(smollm2.params, smollm2.config, ids, chunk=64,
                             capacity=512)
    assert logits[len(row["ids"]) - 1:].argmax(-1).tolist() == row["greedy"]


@pytest.mark.slow
def test_gemma_270m_logits_and_ids_equal_transformers():
  try:
    loaded = hub.load_model("gemma-3-270m")
  except ValueError as error:
    if "can't download" not in str(error):
      raise
    pytest.skip(str(error))
  texts = json.loads((GOLDENS / "gemma.json").read_text(encoding="utf-8"))["texts"]
  for row in texts:
    assert loaded.tokenizer.encode(row["text"]) == row["ids"]
  _check_model("gemma", loaded, 1e-3)
