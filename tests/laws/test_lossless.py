"""Lossless in law on the real jitted step: chi-square of the joint law of the next three tokens.

For every sampled case and two sampling settings N = 4096 texts (32 slots x 128 sets of keys) follow
one prompt and root. The exact law comes from the target alone: one flat forward pass over every
context, softmax and top-p in numpy. Four statistics per setting: the joint law (cells expected
less than 5 times pooled) and each token's own, whose few degrees of freedom find small biases.
All tests together reject a lossless jspec with probability ALPHA = 1e-4 (Bonferroni); the seeds
are fixed, so they don't. Power: each mutant below is rejected at the same bound and N.
Point-mass drafters must give the very text of plain sampling with the same keys, whose law is
that of the case "none": that takes few texts. Every drafter must leave the KV of a fresh prefill,
which is what shows a missing commit.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny

from jspec.model import attention, cache, transformer
from jspec.model.rows import chain_mask, pack
from jspec.pallas import paged_attention_tpu
from jspec.speculation import judge, sampling, step
from jspec.speculation import verify as rule

B, REPEATS, LENGTH, V = 64, 128, 3, tiny.VOCAB
FEW = 10  # sets of keys, where texts are compared one by one
PROMPT = [1, 2, 3, 4, 10, 3, 5, 10, 3]  # its end has occurred before
SETTINGS = ((0.9, 1.0), (1.3, 0.7))  # (temperature, top_p), in alternate slots
ALPHA = 1e-4
BOUND = ALPHA / (len(SETTINGS) * (1 + LENGTH) * 3 * len(tiny.CASES))
SAMPLED = [name for name in tiny.CASES if tiny.CASES[name](tiny.TARGET)[0].sampled]
POINT_MASS = [name for name in tiny.CASES if name not in ("none", *SAMPLED)]


@functools.cache
def target_logits(root: int) -> np.ndarray:
  """f64[V, V, 3, V]: logits after (root), (root, a), (root, a, b)."""
  pairs = list(itertools.product(range(V), repeat=2))
  token = jnp.array([[*PROMPT, root, *pair] for pair in pairs], jnp.int32)
  b, n = token.shape
  pages = cache.init_pages(tiny.TARGET, b, 16, jnp.float32)
  hidden, _, _ = transformer.forward(
      tiny.target_params(), tiny.TARGET, token, chain_mask(b, n),
      pack(jnp.ones((b, n), bool), b * n), pages, jnp.arange(b)[:, None],
      jnp.zeros(b, jnp.int32))
  logits = transformer.logits(tiny.target_params(), tiny.TARGET, hidden)
  return np.array(logits, np.float64).reshape(V, V, n, V)[:, :, -3:]


def distribution(logits, temperature, top_p):
  """Softmax, then the smallest set of likeliest tokens that holds top_p, renormalised."""
  p = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
  p /= p.sum(-1, keepdims=True)
  order = np.argsort(-p, -1)
  before = np.cumsum(np.take_along_axis(p, order, -1), -1) - np.take_along_axis(p, order, -1)
  keep = np.take_along_axis(before < top_p, np.argsort(order, -1), -1)
  return p * keep / (p * keep).sum(-1, keepdims=True)


def exact_law(root, setting):
  """f64[V, V, V], the target's joint law of three tokens."""
  p = distribution(target_logits(root), *setting)
  return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


@functools.cache
def prefilled(rig: tiny.Rig):
  """Every slot with the same prompt and the same (greedy) root."""
  return tiny.start(rig, [PROMPT] * B)


def texts(rig: tiny.Rig, step_function=None, repeats=REPEATS):
  """Root, and i32[slots * repeats, 3] for each setting: the next three tokens."""
  temperature, top_p = np.array(SETTINGS).T[:, np.arange(B) % 2]
  start = prefilled(rig)
  sampled = start.sampling.replace(temperature=jnp.array(temperature, jnp.float32),
                                   top_p=jnp.array(top_p, jnp.float32))
  rows = []
  for repeat in range(repeats):
    keys = jax.random.split(jax.random.key(100 + repeat), B)
    state = tiny.copy(start.replace(key=keys, sampling=sampled))
    rows.append([row[1:] for row in tiny.generate(rig, state, 1 + LENGTH, step_function)[0]])
  rows = np.array(rows)
  (root,) = set(np.array(start.root).tolist())
  return root, [rows[:, i::2].reshape(-1, LENGTH) for i in range(2)]


def p_value(counts, law):
  """Of Pearson's chi-square, cells expected less than 5 times pooled; 0 for the impossible."""
  if counts[law == 0].any():
    return 0.0
  expected = law * counts.sum()
  large = expected >= 5
  seen, due = counts[large], expected[large]
  if expected[~large].sum() >= 5:
    seen, due = np.append(seen, counts[~large].sum()), np.append(due, expected[~large].sum())
  return scipy.stats.chi2.sf(((seen - due)**2 / due).sum(), len(due) - 1)


def smallest_p_value(root, samples):
  values = []
  for setting, sample in zip(SETTINGS, samples, strict=True):
    law, counts = exact_law(root, setting), np.zeros((V,) * LENGTH)
    np.add.at(counts, tuple(sample.T), 1)
    values.append(p_value(counts, law))
    for i in range(LENGTH):
      others = tuple(j for j in range(LENGTH) if j != i)
      values.append(p_value(counts.sum(others), law.sum(others)))
  print("p-values", np.array(values).round(4))
  return min(values)


@functools.cache
def plain_texts():
  return texts(tiny.rig("none", B), repeats=FEW)[1]


@pytest.mark.parametrize("name, kernel", tiny.with_kernels(
    ("random_trees", "tpu"), ("random_trees", "triton")))
def test_the_law_with_a_kernel_in_place_of_the_reference(monkeypatch, name, kernel):
  """The Pallas kernels, interpreted, at one width. Most of the combinations are slow."""
  monkeypatch.setattr(paged_attention_tpu, "TILE_ROWS", tiny.PAGE)  # no tiles here
  attend = attention.choose("cpu", kernel, interpret=True)
  n = tiny.CASES[name](tiny.TARGET)[0].num_nodes
  rig = tiny.rig(name, B, ((B * n, n),), attend=attend)
  root, samples = texts(rig)
  assert smallest_p_value(root, samples) > BOUND


@pytest.mark.parametrize("name", tiny.quick_cases(cases=["none", *SAMPLED]))
def test_next_three_tokens_have_the_targets_law(name):
  rig = tiny.rig(name, B)
  root, samples = texts(rig)
  assert [len(sample) for sample in samples] == [4096, 4096]
  assert smallest_p_value(root, samples) > BOUND
  assert len(rig.traces) == 1


@pytest.mark.parametrize("name", tiny.quick_cases(cases=POINT_MASS))
def test_next_three_tokens_are_those_of_plain_sampling(name):
  rig = tiny.rig(name, B)
  np.testing.assert_array_equal(texts(rig, repeats=FEW)[1], plain_texts())
  assert len(rig.traces) == 1


def test_cutting_drafts_to_the_width_keeps_the_text():
  """Two rows per slot on average, given to the nodes that past steps trust."""
  rig = tiny.rig("ngram", B, ((B, 1), (2 * B, 5), (5 * B, 5)), rows_per_pass=B)
  np.testing.assert_array_equal(texts(rig, repeats=FEW)[1], plain_texts())


def test_widths_for_fewer_slots_keep_the_text():
  """As slots end, fewer rows do: 4 for the last four slots, 1 for the last one."""
  limit = 1 + np.arange(B) % 7
  limit[:3], limit[5] = 25, 40
  run = lambda rig: tiny.generate(rig, tiny.start(rig, tiny.random_prompts(B), limit=limit), 40)
  widths = ((1, 1), (4, 4), (B, 1), (2 * B, 5), (5 * B, 5))
  text, outputs = run(tiny.rig("ngram", B, widths, rows_per_pass=4))
  assert text == run(tiny.rig("none", B))[0]
  ran = sum(out.ran for out in outputs)
  active = [int((out.num_steps > 0).sum()) for out in outputs]
  assert ran[0] > 0 and ran[1] > 0 and ran[2:].sum() <= sum(n > 4 for n in active)


# ------------------------------------------------------------------ the KV left behind


@jax.jit
def fresh_prefill(token):
  b, n = token.shape
  pages = cache.init_pages(tiny.TARGET, b, n, jnp.float32)
  return transformer.forward(tiny.target_params(), tiny.TARGET, token, chain_mask(b, n),
                       pack(jnp.ones((b, n), bool), b * n), pages, jnp.arange(b)[:, None],
                       jnp.zeros(b, jnp.int32))[2]


def kv_error(rig: tiny.Rig, step_function=None):
  """Largest difference between committed KV after six steps and a fresh prefill's."""
  start = prefilled(rig)
  hot = start.sampling.replace(temperature=jnp.full(B, 0.9, jnp.float32))
  state, text = tiny.copy(start.replace(sampling=hot)), [[*PROMPT] for _ in range(B)]
  for _ in range(6):
    root = np.array(state.root)
    state, out = (step_function or rig.step)(rig.params, state)
    for row, first, tokens, n in zip(text, root, *map(np.array, (out.tokens, out.num_tokens)),
                                     strict=True):
      row += [first, *tokens[:n - 1]]
  size = len(PROMPT) + 6 * (rig.drafter.max_depth + 1)
  token = np.zeros((B, len(PROMPT) + 36), np.int32)
  assert size <= token.shape[1] and (np.array(state.length) == [len(row) for row in text]).all()
  for row, tokens in zip(token, text, strict=True):
    row[:len(tokens)] = tokens
  flat = lambda pages: pages[state.page_table].reshape(B, -1, pages.shape[-1])[:, :token.shape[1]]
  committed = np.arange(token.shape[1]) < np.array(state.length)[:, None]
  pairs = zip(jax.tree.leaves(state.pages), jax.tree.leaves(fresh_prefill(token)), strict=True)
  return max(np.abs(np.array(flat(got) - want))[committed].max() for got, want in pairs)


@pytest.mark.parametrize("name", tiny.quick_cases())
def test_committed_kv_is_that_of_a_fresh_prefill(name):
  rig = tiny.rig(name, B)
  assert kv_error(rig) < 1e-4
  assert len(rig.traces) == 1


# ------------------------------------------------------------------ mutants


def no_residual(honest, on):
  return lambda p, q: jnp.where(on, p, honest(p, q))


def accept_without_q(honest, on):
  """Coins are compared with p alone, the residual still subtracts q."""
  def verify(draft, scores, of_node, u_accept, u_bonus):
    x = jnp.take_along_axis(draft.q_probs, draft.token[..., None], -1)[..., 0]
    return honest(draft, scores, of_node, u_accept / jnp.where(on, jnp.maximum(x, 1e-9), 1),
                  u_bonus)
  return verify


def neighbours_p(honest, on):
  return lambda draft, scores, of_node, *rest: honest(
      draft, scores, jnp.where(on, jnp.roll(of_node, 1, axis=1), of_node), *rest)


def one_key(honest, on):
  return jnp.where(on, sampling.DRAFT, honest)


def neighbours_choice(honest, on):
  return lambda draft, choice, mask: honest(
      draft, jnp.where(on, jnp.roll(choice, 1, axis=1), choice), mask)


def no_commit(honest, on):
  return lambda pages, *rest: jax.tree.map(
      lambda old, new: jnp.where(on, old, new), pages, honest(pages, *rest))


CHAIN, TREE = "draft_model_sampled", "draft_model_self_tree"
MUTANTS = {  # by the drafter that shows it
    CHAIN: {"no residual": (rule, "residual", no_residual),
            "q ignored by the coins": (judge, "verify", accept_without_q),
            "p of the neighbour": (judge, "verify", neighbours_p),
            "draft and coin share a key": (sampling, "ACCEPT", one_key)},
    TREE: {"choice of the neighbour": (judge, "verify_point_mass", neighbours_choice),
           "missing commit": (cache, "commit", no_commit)},
}


@functools.cache
def _mutable_step(name):
  """step(inputs, mutant, state) of one width, with what `mutant` says wrong: one for all."""
  drafter = tiny.rig(name, B).drafter
  n = drafter.num_nodes
  honest = step.make_step(tiny.step_config(drafter, B, ((B * n, n),)), drafter)

  def run(inputs, mutants, state):
    with pytest.MonkeyPatch.context() as patch:  # while it is traced
      for mutant, (module, attribute, change) in MUTANTS[name].items():
        patch.setattr(module, attribute, change(getattr(module, attribute), mutants[mutant]))
      return honest(inputs, state)

  return jax.jit(run, donate_argnums=2)


def mutated_step(name, mutant=None):
  on = {other: jnp.bool_(other == mutant) for other in MUTANTS[name]}
  return lambda inputs, state: _mutable_step(name)(inputs, on, state)


@pytest.mark.parametrize("name, mutant", [
    *((CHAIN, mutant) for mutant in MUTANTS[CHAIN]), (TREE, "choice of the neighbour")])
def test_mutants_are_rejected(name, mutant):
  rig = tiny.rig(name, B)
  assert smallest_p_value(*texts(rig, mutated_step(name, mutant))) < BOUND


@pytest.mark.parametrize("name", MUTANTS)
def test_the_program_of_the_mutants_without_one_is_not_rejected(name):
  assert smallest_p_value(*texts(tiny.rig(name, B), mutated_step(name))) > BOUND


def test_a_missing_commit_is_noticed():
  rig = tiny.rig(TREE, B)
  assert kv_error(rig, mutated_step(TREE)) < 1e-4
  assert kv_error(rig, mutated_step(TREE, "missing commit")) > 0.1
