"""Medusa heads against the equations, written out slot by slot and node by node in float64."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from head_oracle import B, E, oracle_draws, run, slots_for

from jspec.config.methods.medusa import MedusaOptions
from jspec.drafters import draft_laws
from jspec.drafters.medusa import build, medusa
from jspec.heads import calibration
from jspec.heads.config import MedusaConfig
from jspec.heads.medusa import head_params
from jspec.model.execution import FAST
from jspec.speculation import tree
from jspec.types import NO_PARENT

V, VD = tiny.VOCAB, 7
CHAIN = ((0,), (0, 0), (0, 0, 0))
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1))
GAPS = ((1,), (3,), (3, 2), (1, 1))  # ranks whose elders are not in the tree

CONFIGS = {
  "plain": MedusaConfig(E, V, 3),
  "two_blocks_without_bias": MedusaConfig(E, V, 3, num_layers=2, has_bias=False),
  "draft_vocabulary": MedusaConfig(E, V, 3, draft_vocab_size=VD),
  "shared_head": MedusaConfig(E, V, 4, shares_head=True),
  "shared_head_tied": MedusaConfig(E, V, 3, shares_head=True, logit_scale=0.5),
}


def draw_head(config: MedusaConfig, seed: int = 0):
  """Random parameters; logits have a standard deviation of about 2."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape, scale: (scale * rng.normal(size=shape)).astype(np.float32)

  def block():
    bias = {"b": draw(E, scale=0.5)} if config.has_bias else {}
    return {"w": draw(E, E, scale=E**-0.5)} | bias

  heads = []
  for _ in range(config.num_heads):
    heads.append({"blocks": [block() for _ in range(config.num_layers)]})
    if not config.shares_head:
      heads[-1]["head"] = {"w": draw(E, config.draft_vocab_size or V, scale=1.5 * E**-0.5)}
  out = {"heads": heads}
  if config.draft_vocab_size:
    out["target_id"] = np.sort(rng.permutation(V)[:config.draft_vocab_size]).astype(np.int32)
  return out


def params_for(name: str, seed: int = 0):
  target = dict(tiny.target_params())
  if name == "shared_head_tied":
    del target["head"]
  return head_params(draw_head(CONFIGS[name], seed), CONFIGS[name], target)


# ------------------------------------------------------------------ the equations


def oracle_logits(params, config, feature, i):
  """Of head i for one slot."""
  f64 = lambda x: np.asarray(x, np.float64)
  head = params["head"]["heads"][i]
  z = f64(feature)
  for block in head["blocks"]:
    y = z @ f64(block["w"])
    if "b" in block:
      y = y + f64(block["b"])
    z = z + y / (1 + np.exp(-y))
  if not config.shares_head:
    lm_head = f64(head["head"]["w"])
  else:
    target = params["target"]
    lm_head = f64(target["head"]["w"]) if "head" in target else f64(target["embed"]).T
  return config.logit_scale * (z @ lm_head)


def check_against_the_equations(draft, params, config, paths, slots, sampled, confidence=0.0):
  order = [(), *sorted(paths, key=lambda p: (len(p), p))]
  target_id = params["head"].get("target_id", np.arange(V))
  for b in range(B):
    stopped = False
    for level in range(max(map(len, paths))):
      logits = oracle_logits(params, config, slots.feature[b], level)
      exp = np.exp(logits - logits.max())
      stopped |= exp.max() / exp.sum() < confidence
      if sampled:
        width = 1 + max(p[-1] for p in paths if len(p) == level + 1)
        u = draft_laws.draft_uniforms(slots.key, level, (1, width))[b, 0]
        draws = oracle_draws(logits, float(slots.temperature[b]), np.asarray(u, np.float64))
      else:
        draws = [(i, None) for i in sorted(range(len(logits)), key=lambda i: -logits[i])]
      for path in [p for p in paths if len(p) == level + 1]:
        node, (chosen, q) = order.index(path), draws[path[-1]]
        assert draft.parent[b, node] == (NO_PARENT if stopped else order.index(path[:-1]))
        assert draft.token[b, node] == target_id[chosen]
        if sampled:
          wide = np.zeros(V)
          wide[target_id] = q
          np.testing.assert_allclose(draft.q_probs[b, node], wide, atol=2e-5)
  assert draft.token.shape == (B, len(order))
  np.testing.assert_array_equal(draft.token[:, 0], np.arange(B))
  assert (draft.parent[:, 0] == NO_PARENT).all()
  assert (draft.q_probs is not None) == sampled


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("paths", [CHAIN, TREE, GAPS])
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_are_those_of_the_equations(name, paths, sampled):
  config, params = CONFIGS[name], params_for(name)
  drafter = medusa(config, tree.shape_of(paths), tiny.TARGET, sampled=sampled)
  for seed in (1, 2):
    slots = slots_for(seed)
    check_against_the_equations(run(drafter, params, slots), params, config, paths, slots, sampled)


def _shifted(params):
  heads = params["head"]["heads"]
  return {"head": params["head"] | {"heads": heads[1:] + heads[:1]}}


def _without_bias(params):
  heads = [h | {"blocks": [{"w": x["w"]} for x in h["blocks"]]} for h in params["head"]["heads"]]
  return {"head": params["head"] | {"heads": heads}}


def _without_target_ids(params):
  return {"head": params["head"] | {"target_id": np.arange(VD)}}


def _one_block(params):
  heads = [h | {"blocks": h["blocks"][:1]} for h in params["head"]["heads"]]
  return {"head": params["head"] | {"heads": heads}}


@pytest.mark.parametrize("name, wrong", [
    ("plain", _shifted), ("plain", _without_bias), ("draft_vocabulary", _without_target_ids),
    ("two_blocks_without_bias", _one_block)])
@pytest.mark.parametrize("sampled", [False, True])
def test_wrong_heads_are_told_from_right_ones(name, wrong, sampled):
  """Head i + 1 for head i, no bias, draft ids taken for the target's, a block left out."""
  config, params, slots = CONFIGS[name], params_for(name), slots_for()
  drafter = medusa(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=sampled)
  with pytest.raises(AssertionError):
    check_against_the_equations(run(drafter, wrong(params), slots), params, config, CHAIN, slots,
                                sampled)


def test_a_logit_scale_counts():
  config, params, slots = CONFIGS["shared_head_tied"], params_for("shared_head_tied"), slots_for()
  unscaled = MedusaConfig(E, V, 3, shares_head=True)
  draft = run(medusa(unscaled, tree.shape_of(CHAIN), tiny.TARGET, sampled=True), params, slots)
  with pytest.raises(AssertionError):
    check_against_the_equations(draft, params, config, CHAIN, slots, True)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_chain_stops_where_a_head_is_unsure(sampled):
  config, params, slots, threshold = CONFIGS["plain"], params_for("plain"), slots_for(3), 0.4
  drafter = medusa(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=sampled,
                   confidence=threshold)
  draft = run(drafter, params, slots)
  check_against_the_equations(draft, params, config, CHAIN, slots, sampled, threshold)
  drafted = (draft.parent != NO_PARENT).sum(1)
  assert set(drafted.tolist()) >= {0, 3} and len(set(drafted.tolist())) > 2
  with pytest.raises(ValueError, match="may stop a chain"):
    medusa(config, tree.shape_of(TREE), tiny.TARGET, confidence=threshold)


def test_heads_below_the_tree_are_not_needed():
  params, slots = params_for("plain"), slots_for()
  few = {"head": {"heads": params["head"]["heads"][:2]}}
  paths = [p for p in TREE if len(p) <= 2]
  draft = run(medusa(CONFIGS["plain"], tree.shape_of(paths), tiny.TARGET), few, slots)
  check_against_the_equations(draft, params, CONFIGS["plain"], paths, slots, False)


def test_bfloat16_heads_stay_near_the_equations():
  """Of a law by bfloat16 weights and activations no entry is off by more than 0.03."""
  config, params, slots = CONFIGS["plain"], params_for("plain"), slots_for(temperature=[1.0] * B)
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
  draft = run(medusa(config, tree.shape_of(CHAIN), tiny.TARGET, sampled=True), params, slots)
  for b in range(B):
    for level in range(3):
      logits = oracle_logits(params, config, slots.feature[b], level)
      q = np.exp(logits) / np.exp(logits).sum()
      np.testing.assert_allclose(draft.q_probs[b, level + 1], q, atol=0.03)


def fitted(hidden, true):
  """Heads whose blocks do nothing, fitted by least squares to predict true[:, i] from hidden."""
  heads = []
  for after in true.T:
    x, y = hidden[after >= 0], np.eye(V)[after[after >= 0]]
    w = np.linalg.solve(x.T @ x + 0.01 * np.eye(E), x.T @ y)
    heads.append({"blocks": [{"w": np.zeros((E, E), np.float32), "b": np.zeros(E, np.float32)}],
                  "head": {"w": w.astype(np.float32)}})
  return {"head": {"heads": heads}}


def test_a_step_accepts_what_calibration_counts(monkeypatch):
  """The finished greedy text alone says how many tokens every step with a draft has brought."""
  config, num_slots, size = CONFIGS["plain"], 4, 64
  case = medusa(config, tree.shape_of(CHAIN), tiny.TARGET), params_for("plain")
  monkeypatch.setitem(tiny.CASES, "calibrated", lambda target, attend: case)
  rig, prompts = tiny.rig("calibrated", num_slots), tiny.random_prompts(num_slots)
  texts, _ = tiny.generate(rig, tiny.start(rig, prompts), 40)
  whole = [np.array(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
  hidden_states = jax.jit(lambda token: calibration.hidden_states(
      tiny.target_params(), tiny.TARGET, token))
  hidden = [np.array(hidden_states(np.pad(w, (0, size - len(w))))) for w in whole]
  true = [calibration.predicted(w, 3, len(prompt) - 1, size)
          for w, prompt in zip(whole, prompts, strict=True)]

  params = fitted(np.concatenate(hidden), np.concatenate(true))
  rig = dataclasses.replace(rig, params=rig.params.replace(draft=params))
  again, outputs = tiny.generate(rig, tiny.start(rig, prompts), 40)
  assert again == texts
  likeliest = jax.jit(lambda hidden: calibration.likeliest(params, config, tiny.TARGET, hidden, 1))
  counts = []
  for slot in range(num_slots):
    hit = np.array(likeliest(hidden[slot]))[..., 0] == true[slot]
    length = len(prompts[slot])
    for out in outputs:
      if out.drafted_at[slot, len(CHAIN)] and length + 1 + len(CHAIN) < len(whole[slot]):
        counts.append(out.num_tokens[slot])
        assert counts[-1] == 1 + np.cumprod(hit[length - 1]).sum()
      length += out.num_tokens[slot]
  assert len(counts) > 20 and np.mean(counts) > 2


# ------------------------------------------------------------------ build


def setup_for(config, head=None, target_params=None, num_draft=0, **fields):
  return MedusaOptions("some/head", **fields), types.SimpleNamespace(
      num_draft=num_draft, target=tiny.TARGET, execution=FAST,
      target_params=target_params or tiny.target_params(),
      load_head=lambda name: (config, head))


def test_the_builder_follows_the_configuration():
  plain = CONFIGS["plain"]
  drafter, params = build(*setup_for(plain, "the head"))
  assert (drafter.num_nodes, drafter.max_depth, drafter.sampled) == (4, 3, False)
  assert drafter.feature_layers == (tiny.TARGET.num_layers,) and params == {"head": "the head"}
  assert build(*setup_for(plain, num_draft=2))[0].num_nodes == 3
  sampled, _ = build(*setup_for(plain, tree_paths=TREE, draft_sample_method="probabilistic"))
  assert (sampled.num_nodes, sampled.max_depth, sampled.sampled) == (10, 3, True)
  head = draw_head(plain)
  drafter, params = build(*setup_for(plain, head, draft_confidence_threshold=0.4))
  draft = run(drafter, params, slots_for(3))
  check_against_the_equations(draft, params, plain, CHAIN, slots_for(3), False, 0.4)


def test_heads_that_share_the_lm_head_get_that_and_no_more():
  config, target = CONFIGS["shared_head"], tiny.target_params()
  assert set(build(*setup_for(config))[1]["target"]) == {"head"}
  tied = {k: v for k, v in target.items() if k != "head"}
  assert set(build(*setup_for(config, target_params=tied))[1]["target"]) == {"embed"}


def test_what_the_heads_cannot_do_is_refused():
  plain = CONFIGS["plain"]
  with pytest.raises(ValueError, match="^num_speculative_tokens=7 exceeds the 3 heads of some/"):
    build(*setup_for(plain, num_draft=7))
  with pytest.raises(ValueError, match="^the draft tree's depth 4 exceeds the 3 heads"):
    build(*setup_for(plain, tree_paths=(*CHAIN, (0, 0, 0, 0))))
  with pytest.raises(ValueError, match="rank 7, but the heads of some/head know 7"):
    build(*setup_for(CONFIGS["draft_vocabulary"], tree_paths=((0,), (7,))))
  with pytest.raises(ValueError, match="may stop a chain"):
    medusa(plain, tree.shape_of(TREE), tiny.TARGET, confidence=0.5)
  with pytest.raises(ValueError, match="is a head for method 'other', not 'medusa'"):
    build(*setup_for(types.SimpleNamespace(method="other")))
