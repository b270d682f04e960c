"""Sampled drafts under every parameter that looks at the text: the joint law of three tokens.

In float64, to 1e-12, without sampling: the real `judge` and the real cut at stop tokens, as
functions of the coins, whose thresholds are bisected as in exact_law.py; all 25 chains of two
draft tokens, with the probability that the drafter gives them. Against numpy, which knows texts
and nothing of nodes. Logits and parameters are binary fractions, so that what top_k keeps is no
matter of rounding. A mutant is rejected where it is off by more than 1e-3 somewhere.
"""

from __future__ import annotations

import itertools
import types
from unittest import mock

import exact_block as block
import exact_law as exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import Verification
from jspec.engine.slot_sampling import empty_sampling
from jspec.model.rows import pack
from jspec.speculation import judge, sampling, step, tree
from jspec.types import PAD_TOKEN, DraftTree

V, LENGTH, STOP = 5, 3, 4
PROMPT, OUTPUT = [0, 3, 0], [1, 3]  # the last one is the root
WORDS = [(1, 2), (3, 0)]  # the first one on the path, the second across its beginning
BIAS = np.array([0.75, -0.5, 0.25, 0.5, 1.0])
TEMPERATURE, REPETITION, PRESENCE, FREQUENCY = 0.5, 2.0, 0.5, 0.25
MIN_TOKENS, TOP_K = len(OUTPUT) + 2, 3  # the stop token may be the third one drawn, or the second

RNG = np.random.default_rng(11)
TEXTS = [path for n in range(LENGTH) for path in itertools.product(range(V), repeat=n)]
LOGITS = {path: np.round(RNG.normal(size=V) * 64) / 64 for path in TEXTS}
Q_LAWS = {path: RNG.dirichlet(np.ones(V)) for path in TEXTS}


def law_after(path, min_tokens):
  """The target's law of the next token, by the rules as vLLM documents them."""
  text = [*PROMPT, *OUTPUT, *path]
  count = np.bincount([*OUTPUT, *path], minlength=V)
  x = LOGITS[path] + BIAS
  for token in set(text):
    x[token] = x[token] / REPETITION if x[token] > 0 else x[token] * REPETITION
  x = x - FREQUENCY * count - PRESENCE * (count > 0)
  if len(OUTPUT) + len(path) < min_tokens:
    x[STOP] = -np.inf
  for first, second in WORDS:
    if text[-1] == first:
      x[second] = -np.inf
  x = np.where(x < np.sort(x)[-TOP_K], -np.inf, x) / TEMPERATURE
  p = np.exp(x - x.max())
  return p / p.sum()


def state_of(size: int, min_tokens: int):
  """What `judge` and the cut read of a SpecState: every slot has the same text and parameters."""
  s = empty_sampling(size, V, len(WORDS), 2)
  flags = np.zeros(V, np.uint8)
  flags[PROMPT] |= sampling.IN_PROMPT
  flags[STOP] |= sampling.STOPS | sampling.NOT_BEFORE_MIN
  fields = dict(temperature=TEMPERATURE, repetition_penalty=REPETITION, presence_penalty=PRESENCE,
                frequency_penalty=FREQUENCY, min_tokens=min_tokens, top_k=TOP_K, bias=BIAS,
                biased=True, token_flags=flags, output_count=np.bincount(OUTPUT, minlength=V),
                bad_words=np.array(WORDS), recent=[OUTPUT[-1]])
  put = lambda name, x: jnp.broadcast_to(jnp.asarray(x, getattr(s, name).dtype),
                                         getattr(s, name).shape)
  return types.SimpleNamespace(
      sampling=s.replace(**{name: put(name, x) for name, x in fields.items()}),
      num_output=jnp.full(size, len(OUTPUT)), active=jnp.ones(size, bool),
      limit=jnp.full(size, 10**6))


def emitted_law(rule: str, min_tokens: int):
  """{emitted tokens: probability} of one step with two sampled draft tokens."""
  tokens, qs, weight = exact.drafts(tree.chain(2), exact.independent(Q_LAWS), V)
  size, n = tokens.shape
  logits = jnp.array([LOGITS[tuple(row[1:i + 1].tolist())] for row in tokens for i in range(n)])
  draft = DraftTree(jnp.array(tokens, jnp.int32).at[:, 0].set(OUTPUT[-1]),
                    jnp.tile(jnp.array(tree.chain(2), jnp.int32), (size, 1)), jnp.array(qs))
  mask, state = tree.ancestors(draft.parent, 2), state_of(size, min_tokens)
  rows = pack(jnp.ones((size, n), bool), size * n)

  @jax.jit
  def judged(u, bonus):
    with mock.patch.object(judge, "_coins", lambda mask, state: (u, bonus)):
      verdict, broken = judge.judge(logits, draft, mask, rows, state, True, Verification(rule))
    row = tree.along_path(rows.of_node, verdict.path)
    committed = step._cut(draft, verdict, broken, jnp.zeros((size * n, 0)), row, state)[0]
    return verdict, committed.count

  run = lambda u, bonus: jax.tree.map(np.array, judged(u, np.repeat(bonus[:, None], n, 1)))
  if rule == "block":
    return block.law_of_chain(run, tokens, weight, 2, V)[0]
  return exact.law_of(run, tokens, weight, V)


def error(rule: str, min_tokens: int = MIN_TOKENS) -> float:
  """Largest difference of the joint law, shorter runs going on by numpy's law."""
  with jax.enable_x64(True):
    law = emitted_law(rule, min_tokens)
  assert abs(sum(law.values()) - 1) < exact.BOUND
  ended = lambda text: text[-1] == STOP
  texts = [text for n in range(1, LENGTH + 1) for text in itertools.product(range(V), repeat=n)
           if STOP not in text[:-1] and (n == LENGTH or ended(text))]
  chance = lambda text, start: np.prod([law_after(text[:i], min_tokens)[text[i]]
                                        for i in range(start, len(text))])
  assert abs(sum(chance(text, 0) for text in texts) - 1) < exact.BOUND
  assert all(key[:-1].count(STOP) == 0 for key in law)  # nothing after a stop token
  return max(abs(sum(law.get(text[:k], 0.0) * chance(text, k) for k in range(1, len(text) + 1))
                 - chance(text, 0)) for text in texts)


@pytest.mark.parametrize("min_tokens", [MIN_TOKENS, MIN_TOKENS - 1])
@pytest.mark.parametrize("rule", ["lossless", "block"])
def test_three_tokens_have_the_joint_law_of_numpy(rule, min_tokens):
  assert error(rule, min_tokens) < exact.BOUND


def test_every_parameter_matters_here():
  """The law without any one of them is another one: none could go ignored unseen."""
  honest = np.array([law_after(path, MIN_TOKENS) for path in TEXTS])
  for name, neutral in dict(TEMPERATURE=1.0, REPETITION=1.0, PRESENCE=0.0, FREQUENCY=0.0, TOP_K=V,
                            WORDS=WORDS[1:], BIAS=BIAS * 0).items():
    with mock.patch.dict(globals(), {name: neutral}):
      without = np.array([law_after(path, MIN_TOKENS) for path in TEXTS])
    assert np.abs(without - honest).max() > 0.01, name
  assert np.abs(np.array([law_after(path, 0) for path in TEXTS]) - honest).max() > 0.01


# ------------------------------------------------------------------ mutants

NOTHING = lambda c: jnp.full_like(c.path, PAD_TOKEN)
MUTANTS = {
  "empty path, depth 0": lambda c: c.replace(path=NOTHING(c), depth=c.depth * 0),
  "empty path": lambda c: c.replace(path=NOTHING(c)),
  "path without its last token": lambda c: c.replace(
      path=jnp.where(jnp.arange(c.path.shape[1]) < c.depth[:, None] - 1, c.path, PAD_TOKEN)),
  "path without its first token": lambda c: c.replace(
      path=jnp.roll(c.path, -1, 1).at[:, -1].set(PAD_TOKEN)),
  "path of the next chain": lambda c: c.replace(path=jnp.roll(c.path, 3, 0)),
  "depth too large by one": lambda c: c.replace(depth=c.depth + 1),
  "depth too small by one": lambda c: c.replace(depth=jnp.maximum(c.depth - 1, 0)),
  "depth 0": lambda c: c.replace(depth=c.depth * 0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("rule", ["lossless", "block"])
def test_wrong_paths_and_depths_are_noticed(monkeypatch, rule, mutant):
  honest = sampling.node_context
  monkeypatch.setattr(sampling, "node_context", lambda *args: MUTANTS[mutant](honest(*args)))
  assert error(rule) > exact.MUTANT


def test_counts_of_the_prompt_alone_are_noticed(monkeypatch):
  honest = sampling.penalised
  forget = lambda logits, s, num_output, context: honest(
      logits, s.replace(output_count=s.output_count * 0), num_output,
      context.replace(path=NOTHING(context)))
  monkeypatch.setattr(sampling, "penalised", forget)
  assert error("lossless") > exact.MUTANT
