"""EAGLE-1, -2 and -3 against an oracle in plain numpy, eagle_oracle.py."""

from __future__ import annotations

import dataclasses
import functools
import types

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jspec.config.methods.eagle import EagleOptions
from jspec.drafters import eagle
from jspec.heads.config import EagleConfig, MedusaConfig
from jspec.model.execution import FAST
from jspec.speculation import tree
from jspec.types import NO_PARENT, Committed, Slots

V, B, T = tiny.VOCAB, 4, 8
TARGET = dataclasses.replace(tiny.TARGET, num_layers=8)  # only its embedding and lm_head are used
WIDE = dataclasses.replace(tiny.TARGET, num_layers=1)
NARROW = dataclasses.replace(tiny.DRAFT, num_heads=4, num_kv_heads=2, head_dim=4)
EAGLE1 = EagleConfig(1, WIDE, TARGET.width)
EAGLE3 = EagleConfig(3, NARROW, TARGET.width, has_embed=True, has_head=True)
HEADS = {
  "v1": EAGLE1,
  "v1_two_layers": EagleConfig(1, dataclasses.replace(WIDE, num_layers=2), TARGET.width,
                               has_embed=True, has_head=True),
  "v3": EAGLE3,
  "v3_target_head": EagleConfig(3, WIDE, TARGET.width, feature_layers=(0, 5, 8)),
  "v3_before_residual": dataclasses.replace(EAGLE3, norm_before_residual=True),
  "v3_before_fc": dataclasses.replace(EAGLE3, norm_before_fc=True, norm_output=True),
  "v3_fc_norm": dataclasses.replace(EAGLE3, fc_norm=True, feature_layers=(8, 1), num_taps=2),
  "v3_vocab": dataclasses.replace(EAGLE3, draft_vocab_size=7, norm_output=True),
  "v3_two_layers": dataclasses.replace(EAGLE3, layer=dataclasses.replace(NARROW, num_layers=2),
                                       draft_vocab_size=9, norm_before_residual=True),
}
PATHS = {
  "chain": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),
  "tree": ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (2, 0, 0)),
}
DYNAMIC = {"top_k": 3, "depth": 4, "total_tokens": 11}
# Tokens observed by each slot, call by call, a proposal between them. Length 1 has no pair yet.
COUNTS = ((4, 7, 1, 0), (0, 3, 3, 1), (2, 1, 0, 0))
LENGTH = np.sum(COUNTS, 0)
TEMPERATURE = np.array([0.9, 0.0, 0.6, 1.4], np.float32)
CONFIDENCE = 0.5


def make(name, paths, **options):
  """A drafter for the named head: a tree of these paths, or dynamic where they are None."""
  args = HEADS[name], TARGET, tiny.PAGE, options.pop("dtype", jnp.float32)
  if paths is None:
    return eagle.eagle_dynamic(*args, **DYNAMIC, **options)
  return eagle.eagle(args[0], tree.shape_of(PATHS[paths]), *args[1:], **options)


@functools.cache
def params_of(name):
  return {"head": eagle_oracle.random_head(HEADS[name], sum(map(ord, name))),
          "target": {k: tiny.params_of(TARGET, 5, 2.0)[k] for k in ("embed", "head")}}


@functools.cache
def text():
  """Tokens [B, 24], and hidden states [B, 24, layers + 1, width]."""
  rng = np.random.default_rng(3)
  return (rng.integers(0, V, (B, 24)).astype(np.int32),
          rng.normal(size=(B, 24, TARGET.num_layers + 1, TARGET.width)).astype(np.float32))


jitted = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def observe_of(name):
  """Jitted once for all trees of a head, which differ in how they propose alone."""
  return jitted(make(name, "chain").observe)


class Bench:
  """A drafter, jitted, whose pages hold NaN where nothing was written."""

  def __init__(self, name, paths, params=None, **options):
    self.drafter, self.params = make(name, paths, **options), params or params_of(name)
    self.table, num_pages = tiny.page_table(B, 12, 24)
    assert self.drafter.lookahead <= 12
    self.empty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), self.drafter.init(B, num_pages))
    self._propose, self._observe = jitted(self.drafter.propose), observe_of(name)

  def feature(self, at):
    """f32[B, n, F] at positions [B, n]; 0 before the text."""
    hidden = text()[1][np.arange(B)[:, None], np.maximum(at, 0)]
    feature = np.concatenate([hidden[:, :, tap] for tap in self.drafter.feature_layers], -1)
    return np.where(at[..., None] < 0, 0, feature)

  def slots(self, length):
    return Slots(jnp.arange(B), self.table, jnp.array(length, jnp.int32), jnp.array(TEMPERATURE),
                 jax.random.split(jax.random.key(4), B),
                 jnp.array(self.feature(length[:, None] - 1)[:, 0]))

  def observe(self, state, length, count):
    at = length[:, None] + np.arange(T)
    token = text()[0][np.arange(B)[:, None], at]
    next_token = text()[0][np.arange(B)[:, None], at + 1]
    committed = Committed(token, next_token, self.feature(at), jnp.array(count, jnp.int32))
    return self._observe(self.params, state, self.slots(length), committed)

  def propose(self, state, length, root=None):
    root = text()[0][np.arange(B), length] if root is None else root
    return self._propose(self.params, state, root, self.slots(length))

  def observed(self):
    """The state after COUNTS, with proposals of other roots scribbled in between."""
    state, length = self.empty, np.zeros(B, np.int64)
    for count in COUNTS:
      state = self.observe(state, length, np.array(count))
      length = length + count
      _, state = self.propose(state, length, np.full(B, 3))
    return state

  def oracle(self, name, slot, bug=None):
    return eagle_oracle.Oracle(HEADS[name], TARGET, self.params, text()[0][slot], text()[1][slot],
                               taps_of(HEADS[name]), bug)


def taps_of(config):
  """Of a target of eight layers: EAGLE-3's own are low, middle and high."""
  return config.feature_layers or ((8,) if config.version == 1 else (2, 4, 5))


@functools.cache
def proposed(name, paths, options=()):
  bench = Bench(name, paths, **dict(options))
  return bench, jax.tree.map(np.array, bench.propose(bench.observed(), LENGTH)[0])


def check_fixed(name, paths, options=(), bug=None):
  bench, draft = proposed(name, paths, options)
  options = dict(options)
  shape = tree.shape_of(PATHS[paths])
  ordered = sorted(PATHS[paths], key=lambda p: (len(p), p))
  having = [sum(1 for i, d in enumerate(shape.depth) if d == level and shape.children(i))
            for level in range(shape.max_depth)]
  widths = [1 + max(p[-1] for p in ordered if len(p) == level + 1)
            for level in range(shape.max_depth)]
  for slot, root in enumerate(text()[0][np.arange(B), LENGTH]):
    key = jax.random.split(jax.random.key(4), B)[slot]
    uniforms = [np.array(jax.random.uniform(jax.random.fold_in(key, level), size))
                for level, size in enumerate(zip(having, widths, strict=True))]
    want = bench.oracle(name, slot, bug).fixed(
        root, LENGTH[slot], PATHS[paths], TEMPERATURE[slot],
        uniforms if options.get("sampled") else None, options.get("confidence", 0.0))
    assert draft.token[slot, 0] == root and draft.parent[slot, 0] == NO_PARENT
    assert (draft.q_probs is not None) == bench.drafter.sampled == options.get("sampled", False)
    for node, path in enumerate(ordered, 1):
      if path not in want:
        assert draft.parent[slot, node] == NO_PARENT
        continue
      assert draft.parent[slot, node] == (ordered.index(path[:-1]) + 1 if path[:-1] else 0)
      assert draft.token[slot, node] == want[path][0]
      if draft.q_probs is not None:
        np.testing.assert_allclose(draft.q_probs[slot, node], want[path][1], atol=1e-4)


def check_dynamic(name, bug=None):
  bench, draft = proposed(name, None)
  for slot, root in enumerate(text()[0][np.arange(B), LENGTH]):
    token, parent = bench.oracle(name, slot, bug).dynamic(root, LENGTH[slot], **DYNAMIC)
    np.testing.assert_array_equal(draft.parent[slot], parent)
    np.testing.assert_array_equal(draft.token[slot], token)


@pytest.mark.parametrize(("name", "paths"), [
    *((name, "tree") for name in HEADS), ("v1", "chain"), ("v3_vocab", "chain")])
def test_greedy_drafts_are_the_oracles(name, paths):
  check_fixed(name, paths)


SAMPLED, CONFIDENT = (("sampled", True),), (("confidence", CONFIDENCE),)


@pytest.mark.parametrize(("name", "paths"), [("v1", "tree"), ("v3", "tree"),
                                             ("v3_vocab", "tree"), ("v3_vocab", "chain")])
def test_sampled_drafts_and_their_laws_are_the_oracles(name, paths):
  """By the same uniforms; one of the slots is greedy."""
  check_fixed(name, paths, SAMPLED)


@pytest.mark.parametrize("options", [CONFIDENT, CONFIDENT + SAMPLED])
def test_a_chain_ends_before_the_token_it_is_not_sure_of(options):
  for name in ("v1", "v3"):
    check_fixed(name, "chain", options)
  ends = {int(n) for name in ("v1", "v3")
          for n in (proposed(name, "chain", options)[1].parent != NO_PARENT).sum(1)}
  assert len(ends) > 2  # or there was nothing to see


def test_what_no_slot_goes_on_with_is_not_computed():
  bench = Bench("v3", "chain", confidence=1.0)
  draft, state = bench.propose(bench.empty, LENGTH)
  assert (np.array(draft.parent) == NO_PARENT).all()
  written = ~np.isnan(np.array(state.k[0])).all(-1)
  assert written.sum() == B  # the root's pair in each slot


@pytest.mark.parametrize("name", ["v1", "v3", "v3_vocab", "v3_two_layers"])
def test_dynamic_trees_are_the_oracles_node_for_node(name):
  check_dynamic(name)


@pytest.mark.parametrize(("bug", "name"), [
    ("concat", "v1"), ("concat", "v3"), ("tap", "v3"), ("tap", "v1"), ("feedback", "v3"),
    ("feedback", "v3_vocab"), ("target_id", "v3_vocab"), ("shift", "v1"), ("shift", "v3"),
    ("index_0", "v1"), ("index_0", "v3"), ("position", "v1"), ("position", "v3")])
def test_the_comparison_sees(bug, name):
  """The mistake, in the laws of a sampled tree and in the shape and tokens of a dynamic one."""
  with pytest.raises(AssertionError):
    check_fixed(name, "tree", SAMPLED, bug)
  with pytest.raises(AssertionError):
    check_dynamic(name, bug)


def test_the_comparison_sees_a_missing_rerank():
  with pytest.raises(AssertionError):
    check_dynamic("v3", "rerank")


def test_every_bug_is_tried():
  marks = test_the_comparison_sees.pytestmark[0].args[1]
  assert {bug for bug, _ in marks} | {"rerank"} == set(eagle_oracle.BUGS)


@pytest.mark.parametrize(("name", "paths"), [("v1", "tree"), ("v3_two_layers", None)])
def test_full_pages_serve_another_slot(name, paths):
  """Slot 0 goes on at 8, a multiple of the page size, from the pages of slot 1, as a prefix hit."""
  bench, _ = proposed(name, paths)
  state, length = bench.observed(), np.array([0, 8, 0, 0])
  slots = bench.slots(length)
  root = jnp.full(B, 2)
  want, _ = bench._propose(bench.params, state, root, slots)
  shared = 8 // tiny.PAGE
  slots = slots.replace(
      length=slots.length.at[0].set(8), feature=slots.feature.at[0].set(slots.feature[1]),
      page_table=slots.page_table.at[0, :shared].set(slots.page_table[1, :shared]))
  got, _ = bench._propose(bench.params, state, root, slots)
  np.testing.assert_array_equal(got.token[0], want.token[1])
  np.testing.assert_array_equal(got.parent[0], want.parent[1])
  # Without what was shared it proposes something else.
  slots = slots.replace(page_table=slots.page_table.at[0].set(slots.page_table[2]))
  other, _ = bench._propose(bench.params, state, root, slots)
  assert (np.array(other.token[0]) != np.array(want.token[1])).any()


@pytest.mark.parametrize(("name", "paths"), [("v1", "chain"), ("v1", "tree"), ("v3", None)])
def test_propose_writes_only_where_pages_are_reserved(name, paths):
  bench, _ = proposed(name, paths)
  _, state = bench.propose(jax.tree.map(jnp.zeros_like, bench.empty), LENGTH)
  written = (np.array(state.k[0]) != 0).any(-1)  # [P, S]
  allowed = np.zeros_like(written)
  for slot, length in enumerate(LENGTH):
    for at in range(length, length + bench.drafter.lookahead):
      allowed[bench.table[slot, at // tiny.PAGE], at % tiny.PAGE] = True
  assert written.any() and not (written & ~allowed).any()
  if paths is None:
    assert written.sum() == B * bench.drafter.num_scratch  # no more is reserved than is used


def test_an_idle_slot_writes_nothing_and_drafts_nothing():
  bench, _ = proposed("v1", "tree")
  slots = bench.slots(LENGTH)
  slots = slots.replace(page_table=jnp.full_like(slots.page_table, jnp.iinfo(jnp.int32).max))
  draft, state = bench._propose(bench.params, bench.empty, jnp.zeros(B, jnp.int32), slots)
  assert np.isnan(np.array(state.k[0])).all()
  assert (np.array(draft.parent) == NO_PARENT).all()


def test_half_precision_stays_near(name="v3_vocab"):
  """bfloat16 parameters over pages of their bits: the laws within 0.1 where the prefix is one."""
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16 if x.dtype == np.float32 else x.dtype),
                      params_of(name))
  bench = Bench(name, "chain", half, sampled=True, dtype=jnp.uint16)
  bench.empty = jax.tree.map(jnp.zeros_like, bench.empty)
  draft, _ = bench.propose(bench.observed(), LENGTH)
  _, exact = proposed(name, "chain", SAMPLED)
  sampled = TEMPERATURE > 0
  np.testing.assert_allclose(draft.q_probs[sampled, 1], exact.q_probs[sampled, 1], atol=0.1)


# ------------------------------------------------------------------ building


def setup(config, num_draft=0, **options):
  return EagleOptions("head", **options), types.SimpleNamespace(
      num_draft=num_draft, target=TARGET, page_size=tiny.PAGE,
      kv_dtype=jnp.float32, execution=FAST,
      load_head=lambda name: (config, {"fc": name}),
      target_params={"embed": 1, "head": 2, "layers": 3})


def test_building():
  drafter, params = eagle.build_eagle3(*setup(EAGLE3))
  assert drafter.is_chain and drafter.max_depth == 3 and not drafter.sampled
  assert drafter.feature_layers == (2, 4, 5)
  assert params == {"head": {"fc": "head"}, "target": {"embed": 1, "head": 2}}
  drafter, _ = eagle.build_eagle(*setup(EAGLE1, 5,
                                       draft_sample_method="probabilistic"))
  assert drafter.is_chain and drafter.max_depth == 5 and drafter.sampled
  assert drafter.feature_layers == (8,)
  drafter, _ = eagle.build_eagle(*setup(EAGLE1, tree_paths=PATHS["tree"]))
  assert drafter.num_nodes == 10 and drafter.max_depth == 3
  drafter, _ = eagle.build_eagle3(*setup(EAGLE3, tree_top_k=10, tree_total_tokens=60))
  assert (drafter.num_nodes, drafter.max_depth, drafter.num_scratch) == (60, 5, 41)


def test_what_cannot_be_built_is_refused():
  refuse = lambda match: pytest.raises(ValueError, match=match)
  with refuse("head for method 'eagle', not 'eagle3'"):
    eagle.build_eagle3(*setup(EAGLE1))
  with refuse("head for method 'medusa'"):
    eagle.build_eagle(*setup(MedusaConfig(32, V, 2)))
  with refuse("for chains, not for trees"):
    make("v3", "tree", confidence=0.2)
  with refuse("rank 12 needs more than 12"):
    eagle.build_eagle3(*setup(EAGLE3, tree_paths=((0,), (12,))))
  for top_k, depth, total in ((1, 3, 5), (13, 2, 9), (3, 0, 4)):
    with refuse("top_k"):
      eagle.eagle_dynamic(EAGLE3, TARGET, 4, jnp.float32, top_k=top_k, depth=depth,
                          total_tokens=total)
  for total in (4, 23):  # a chain's; more than the root and 3 + 2 * 9 nodes
    with refuse(r"must lie in 5\.\.22"):
      eagle.eagle_dynamic(EAGLE3, TARGET, 4, jnp.float32, top_k=3, depth=3, total_tokens=total)
