"""MLPSpeculator against the equations, written out slot by slot and path by path in float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types

import head_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from head_oracle import B, E, oracle_draws, run

from jspec.config import draft_trees
from jspec.config.methods.mlp_speculator import MlpSpeculatorOptions
from jspec.drafters import draft_laws
from jspec.drafters.mlp_speculator import build, mlp_speculator
from jspec.heads.config import MlpSpeculatorConfig
from jspec.model.execution import FAST, Execution
from jspec.speculation import tree
from jspec.types import NO_PARENT

INNER, V = 20, tiny.VOCAB
CHAIN = ((0,), (0, 0), (0, 0, 0))
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (2, 0, 0), (2, 0, 1))
GAPS = ((1,), (3,), (3, 2), (1, 1), (3, 2, 0))  # ranks whose elders are not in the tree

CONFIGS = {
  "plain": MlpSpeculatorConfig(E, V, 3, INNER),
  "scaled_input": MlpSpeculatorConfig(E, V, 3, INNER, scale_input=True),
  "tied": MlpSpeculatorConfig(E, V, 4, INNER, tie_weights=True),
}


def draw_head(config: MlpSpeculatorConfig, seed: int = 0):
  """Random parameters; logits have a standard deviation of about 2."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape, scale: (scale * rng.normal(size=shape)).astype(np.float32)

  def stage(first):
    inputs = E if first else INNER
    return {"emb": draw(V, INNER, scale=0.3),
            "proj": {"w": draw(inputs, INNER, scale=inputs**-0.5)},
            "ln": {"scale": 1 + draw(INNER, scale=0.3), "bias": draw(INNER, scale=0.3)},
            "head": {"w": draw(INNER, V, scale=2 * INNER**-0.5)}}

  stages = [stage(i == 0) for i in range(config.n_predict)]
  if config.tie_weights:  # all but the first projection, whose input is another
    stages = [s | {k: stages[0][k] for k in ("emb", "ln", "head")} for s in stages]
    stages[2:] = [s | {"proj": stages[1]["proj"]} for s in stages[2:]]
  return {"head": {"stages": stages}}


# The stages' states are normed, the first one's input is not.
slots_for = functools.partial(head_oracle.slots_for, scale=3)


# ------------------------------------------------------------------ the equations


def oracle_logits(params, config, feature, tokens):
  """After the root and the tokens below it, tokens = (root, ...), for one slot."""
  f64 = lambda x: np.asarray(x, np.float64)
  erf = np.vectorize(math.erf)
  state = f64(feature)
  if config.scale_input:
    state = state / np.sqrt((state**2).mean() + 1e-6) / np.sqrt(2)
  state_weight = 0.5 ** (0.5 / config.n_predict)
  emb_weight = np.sqrt((1 - state_weight**2) * config.inner_dim / 2)
  for stage, token in zip(params["head"]["stages"], tokens, strict=False):
    x = state @ f64(stage["proj"]["w"]) + emb_weight / state_weight * f64(stage["emb"])[token]
    x = x / np.sqrt((x**2).mean() + 1e-6) * f64(stage["ln"]["scale"]) + f64(stage["ln"]["bias"])
    state = x * (1 + erf(x / np.sqrt(2))) / 2
  return state @ f64(stage["head"]["w"])


def oracle_tree(params, config, slots, b, paths, sampled, confidence=0.0):
  """{path of ranks: (token, law or None)} of one slot, the root (its number) included."""
  nodes, stopped = {(): (b, None)}, False
  parents = sorted({p[:-1] for p in paths}, key=lambda p: (len(p), p))
  for path in parents:
    tokens = [nodes[path[:i]][0] for i in range(len(path) + 1)]
    logits = oracle_logits(params, config, slots.feature[b], tokens)
    exp = np.exp(logits - logits.max())
    stopped |= exp.max() / exp.sum() < confidence
    children = [p for p in paths if p[:-1] == path]
    if sampled:
      level = [p for p in parents if len(p) == len(path)]
      width = 1 + max(p[-1] for p in paths if len(p) == len(path) + 1)
      u = draft_laws.draft_uniforms(slots.key, len(path), (len(level), width))
      u = np.asarray(u[b, level.index(path)], np.float64)
      draws = oracle_draws(logits, float(slots.temperature[b]), u)
    else:
      draws = [(i, None) for i in sorted(range(V), key=lambda i: -logits[i])]
    nodes |= {} if stopped else {p: draws[p[-1]] for p in children}
    if stopped:  # a chain
      break
  return nodes


def check_against_the_equations(draft, params, config, paths, slots, sampled, confidence=0.0):
  order = [(), *sorted(paths, key=lambda p: (len(p), p))]
  assert draft.token.shape == (B, len(order))
  assert (draft.q_probs is not None) == sampled
  for b in range(B):
    nodes = oracle_tree(params, config, slots, b, paths, sampled, confidence)
    for i, path in enumerate(order):
      in_use = path and path in nodes
      assert draft.parent[b, i] == (order.index(path[:-1]) if in_use else NO_PARENT)
      if path in nodes:
        assert draft.token[b, i] == nodes[path][0]
      if in_use and sampled:
        np.testing.assert_allclose(draft.q_probs[b, i], nodes[path][1], atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("paths", [CHAIN, TREE, GAPS])
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_are_those_of_the_equations(name, paths, sampled):
  config = CONFIGS[name]
  params = draw_head(config)
  drafter = mlp_speculator(config, tree.shape_of(paths), tiny.TARGET, sampled=sampled)
  for seed in (1, 2):
    slots = slots_for(seed)
    check_against_the_equations(run(drafter, params, slots), params, config, paths, slots, sampled)


def test_bitwise_numerics_draft_the_same():
  config = CONFIGS["scaled_input"]
  params, slots = draw_head(config), slots_for()
  drafter = mlp_speculator(config, tree.shape_of(TREE), tiny.TARGET, sampled=True,
                           how=Execution(bitwise=True))
  check_against_the_equations(run(drafter, params, slots), params, config, TREE, slots, True)


def test_a_bfloat16_head_stays_near_the_equations():
  """Of a law by bfloat16 weights and states no entry is off by more than 0.03."""
  config, slots = CONFIGS["scaled_input"], slots_for(temperature=[1.0] * B)
  half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), draw_head(config))
  draft = run(mlp_speculator(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=True), half, slots)
  for b in range(B):
    for i in (1, 2, 3):
      logits = oracle_logits(half, config, slots.feature[b], draft.token[b, :i])
      q = np.exp(logits - logits.max())
      np.testing.assert_allclose(draft.q_probs[b, i], q / q.sum(), atol=0.03)


def changed(change):
  return lambda params: {"head": {"stages": [s | change(s) for s in params["head"]["stages"]]}}


STATE_WEIGHT = 0.5 ** (0.5 / 3)
WRONG = {  # the head as an implementation with that mistake would see it
  "norm without shift": changed(lambda s: {"ln": s["ln"] | {"bias": 0 * s["ln"]["bias"]}}),
  "norm without scale": changed(lambda s: {"ln": s["ln"] | {"scale": 1 + 0 * s["ln"]["scale"]}}),
  "not divided by state_weight": changed(lambda s: {"emb": STATE_WEIGHT * s["emb"]}),
  "no embedding": changed(lambda s: {"emb": 0 * s["emb"]}),
  "heads shifted": lambda params: {"head": {"stages": [
      s | {"head": params["head"]["stages"][i - 1]["head"]}
      for i, s in enumerate(params["head"]["stages"])]}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_heads_are_told_from_right_ones(wrong):
  config, slots = CONFIGS["plain"], slots_for()
  params = draw_head(config)
  drafter = mlp_speculator(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=True)
  with pytest.raises(AssertionError):
    check_against_the_equations(run(drafter, WRONG[wrong](params), slots), params, config, CHAIN,
                                slots, True)


def test_gelu_by_tanh_is_told_from_the_exact_one(monkeypatch):
  config, slots, gelu = CONFIGS["plain"], slots_for(), jax.nn.gelu
  params = draw_head(config)
  monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate: gelu(x, approximate=True))
  drafter = mlp_speculator(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=True)
  with pytest.raises(AssertionError, match="tolerance"):
    check_against_the_equations(run(drafter, params, slots), params, config, CHAIN, slots, True)


@pytest.mark.parametrize("wrong", [dict(scale_input=False), dict(n_predict=4)])
def test_the_configuration_counts(wrong):
  """Also where the chain is shorter than n_predict: the weights of the sum depend on it."""
  config, slots = CONFIGS["scaled_input"], slots_for()
  params = draw_head(config)
  drafter = mlp_speculator(dataclasses.replace(config, **wrong), tree.shape_of(CHAIN), tiny.TARGET,
                           sampled=True)
  with pytest.raises(AssertionError):
    check_against_the_equations(run(drafter, params, slots), params, config, CHAIN, slots, True)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_chain_stops_where_a_head_is_unsure(sampled):
  config, slots, threshold = CONFIGS["plain"], slots_for(), 0.45
  params = draw_head(config)
  drafter = mlp_speculator(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=sampled,
                           confidence=threshold)
  draft = run(drafter, params, slots)
  check_against_the_equations(draft, params, config, CHAIN, slots, sampled, threshold)
  assert len(set((draft.parent != NO_PARENT).sum(1).tolist())) > 2
  with pytest.raises(ValueError, match="may stop a chain"):
    mlp_speculator(config, tree.shape_of(TREE), tiny.TARGET, confidence=threshold)


# ------------------------------------------------------------------ candidate trees


def paths_in(draft, b):
  """The tree of one slot as a list of its paths of tokens, in the order of its nodes."""
  paths: list[tuple[int, ...] | None] = []
  for i, (token, parent) in enumerate(zip(draft.token[b], draft.parent[b], strict=True)):
    above = () if i == 0 else None if parent == NO_PARENT else paths[parent]
    paths.append(None if above is None else (*above, int(token)))
  assert paths[0] == (b,)
  return paths


@pytest.mark.parametrize("widths, num", [((4, 3, 2), 5), ((4, 3, 2), 1), ((2, 2), 9), ((3, 3), 4)])
def test_candidates_are_the_likeliest_paths_of_the_cross_product(widths, num):
  config = CONFIGS["plain"]
  params, slots = draw_head(config), slots_for()
  drafter = mlp_speculator(config, tree.shape_of(draft_trees.of_widths(widths)), tiny.TARGET,
                           n_candidates=num)
  draft = run(drafter, params, slots)
  assert draft.q_probs is None and draft.token.shape == draft.parent.shape == (
      B, drafter.num_nodes)
  for b in range(B):
    scored = []
    for ranks in itertools.product(*map(range, widths)):
      tokens, score = [b], 0.0
      for rank in ranks:
        logits = oracle_logits(params, config, slots.feature[b], tokens)
        tokens.append(int(np.argsort(-logits)[rank]))
        score += logits[tokens[-1]] - np.log(np.exp(logits).sum())
      scored.append((score, ranks, tuple(tokens)))
    chosen = sorted(scored, reverse=True)[:num]
    # Breadth-first, likelier siblings first, no prefix twice.
    prefixes = {(len(ranks[:d]), ranks[:d]): tokens[:d + 1]
                for _, ranks, tokens in chosen for d in range(len(ranks) + 1)}
    expected = [prefixes[key] for key in sorted(prefixes)]
    got = paths_in(draft, b)
    assert got[:len(expected)] == expected
    assert got[len(expected):] == [None] * (drafter.num_nodes - len(expected))
  assert (drafter.num_nodes == drafter.max_depth + 1) == (num == 1)


def test_nodes_are_reserved_for_paths_that_share_nothing():
  """As few as will do: five paths through widths 4, 3, 2 have at most 4 + 5 + 5 nodes."""
  count = lambda widths, num: mlp_speculator(
      CONFIGS["plain"], tree.shape_of(draft_trees.of_widths(widths)), tiny.TARGET,
      n_candidates=num).num_nodes
  assert count((4, 3, 2), 5) == 1 + 4 + 5 + 5
  assert count((2, 2), 9) == 1 + 2 + 4


# ------------------------------------------------------------------ build


def setup_for(config, head="the head", num_draft=0, **fields):
  return MlpSpeculatorOptions("some/head", **fields), types.SimpleNamespace(
      num_draft=num_draft, target=tiny.TARGET, execution=FAST,
      target_params=None, load_head=lambda name: (config, head))


def test_the_builder_follows_the_configuration():
  plain = CONFIGS["plain"]
  drafter, params = build(*setup_for(plain))
  assert (drafter.num_nodes, drafter.max_depth, drafter.sampled) == (4, 3, False)
  assert drafter.feature_layers == (tiny.TARGET.num_layers,) and params == {"head": "the head"}
  assert build(*setup_for(plain, num_draft=2))[0].num_nodes == 3
  sampled, _ = build(*setup_for(plain, tree_paths=TREE, draft_sample_method="probabilistic"))
  assert (sampled.num_nodes, sampled.max_depth, sampled.sampled) == (10, 3, True)
  widths = dataclasses.replace(plain, top_k_tokens_per_head=(4, 3, 2))
  assert build(*setup_for(widths, n_candidates=5))[0].num_nodes == 15
  assert build(*setup_for(widths, n_candidates=5, num_draft=2))[0].num_nodes == 10
  assert build(*setup_for(widths, n_candidates=5, tree_paths=draft_trees.of_widths((2, 2))
                         ))[0].num_nodes == 7
  params, slots = draw_head(plain), slots_for()
  drafter, _ = build(*setup_for(plain, params["head"], draft_confidence_threshold=0.4))
  check_against_the_equations(run(drafter, params, slots), params, plain, CHAIN, slots, False, 0.4)


def test_what_the_head_cannot_do_is_refused():
  plain = CONFIGS["plain"]
  widths = dataclasses.replace(plain, top_k_tokens_per_head=(4, 3, 2))
  for fields in (dict(num_draft=4), dict(num_draft=4, n_candidates=2)):
    with pytest.raises(ValueError, match="^num_speculative_tokens=4 exceeds the 3 tokens that "):
      build(*setup_for(widths, **fields))
  with pytest.raises(ValueError, match="^the draft tree's depth 4 exceeds the 3 tokens that "):
    build(*setup_for(widths, tree_paths=(*CHAIN, (0, 0, 0, 0))))
  with pytest.raises(ValueError, match="n_candidates=5 needs tree_widths: some/head has no top_k"):
    build(*setup_for(plain, n_candidates=5))
  with pytest.raises(ValueError, match="chooses tokens by their probability"):
    mlp_speculator(plain, tree.shape_of(TREE), tiny.TARGET, n_candidates=5, sampled=True)
  with pytest.raises(ValueError, match="rank 12, but some/head knows 12"):
    build(*setup_for(plain, tree_paths=((0,), (12,))))
  with pytest.raises(ValueError, match="may stop a chain"):
    mlp_speculator(plain, tree.shape_of(TREE), tiny.TARGET, confidence=0.5)
  with pytest.raises(ValueError, match="is a head for method 'other', not 'mlp_speculator'"):
    build(*setup_for(types.SimpleNamespace(method="other")))
