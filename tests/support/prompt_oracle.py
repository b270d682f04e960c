"""Log-probabilities of a text under a tiny Llama, from the equations: one float64 pass of numpy."""

from __future__ import annotations

import numpy as np

NEAR = 1e-4


def log_probabilities(loaded, ids) -> np.ndarray:
  """f64[T, V]: row i is the law of what follows ids[:i + 1]. loaded: a LoadedModel."""
  c, params = loaded.config, loaded.params
  wide = lambda x: np.asarray(x, np.float64)
  norm = lambda x, p: x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * wide(p["scale"])
  times = lambda x, p: x @ wide(p["w"])
  half = c.head_dim // 2
  angle = np.arange(len(ids))[:, None] * c.rope_theta ** (-np.arange(half) / half)
  turn = lambda x: np.concatenate(
      [x[..., :half] * np.cos(angle)[:, None] - x[..., half:] * np.sin(angle)[:, None],
       x[..., half:] * np.cos(angle)[:, None] + x[..., :half] * np.sin(angle)[:, None]], -1)
  later = np.triu(np.ones((len(ids), len(ids)), bool), 1)
  x = wide(params["embed"])[list(ids)]
  for p in params["layers"]:
    y = norm(x, p["attn_norm"])
    q, k, v = (times(y, p[name]).reshape(len(ids), -1, c.head_dim) for name in "qkv")
    q, k = turn(q), turn(k)
    k, v = (np.repeat(a, c.num_heads // c.num_kv_heads, 1) for a in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
    weight = np.exp(np.where(later, -np.inf, scores))
    mixed = np.einsum("hij,jhd->ihd", weight / weight.sum(-1, keepdims=True), v)
    x = x + times(mixed.reshape(len(ids), -1), p["o"])
    y = norm(x, p["mlp_norm"])
    gate = times(y, p["gate"])
    x = x + times(gate / (1 + np.exp(-gate)) * times(y, p["up"]), p["down"])
  logits = times(norm(x, params["final_norm"]), params["head"])
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_prompt_logprobs(output, loaded, num_top: int) -> None:
  """A RequestOutput's, in vLLM's shape: None, then each token's own first, then the likeliest."""
  ids, rows = output.prompt_token_ids, output.prompt_logprobs
  assert rows is not None and len(rows) == len(ids) and rows[0] is None
  for token, row, law in zip(ids[1:], rows[1:], log_probabilities(loaded, ids), strict=False):
    own, *others = row
    assert own == token and abs(row[own].logprob - law[own]) < NEAR
    beaten_by = lambda slack, own=own, law=law: (law > law[own] + slack).sum()
    assert beaten_by(NEAR) < row[own].rank <= beaten_by(-NEAR) + 1
    top = sorted(others + ([own] if row[own].rank <= num_top else []), key=lambda t: row[t].rank)
    assert [row[t].rank for t in top] == list(range(1, num_top + 1))
    likeliest = np.sort(law)[::-1][:num_top]
    np.testing.assert_allclose([row[t].logprob for t in top], likeliest, atol=NEAR)
    np.testing.assert_allclose(law[top], likeliest, atol=NEAR)
