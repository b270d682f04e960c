"""EAGLE-3's training-time test against the oracle of inference, node for node, and its loss."""

from __future__ import annotations

import dataclasses

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_checks
from eagle3_batches import TAPS, TARGET_ID, T, packed_batch
from tiny_cases import TARGET, target_params

from jspec.training.methods import eagle3
from jspec.training.methods.eagle3 import Eagle3Options
from jspec.training.types import Batch

STEPS = 3
VARIANTS = {
    "plain": Eagle3Options(steps=STEPS, feature_layers=TAPS, fc_norm=False, train_head=True),
    "norms": Eagle3Options(steps=STEPS, feature_layers=TAPS, norm_before_residual=True,
                           norm_output=True),
    "deep": Eagle3Options(steps=STEPS, feature_layers=TAPS, num_layers=2),
}


def perturbed(method, seed=1):
  """Parameters in which no two norms or biases are alike."""
  params = method.init(jax.random.key(seed), target_params())
  keys = iter(jax.random.split(jax.random.key(seed + 1), 99))
  return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)


def unrolled(method, params, batch: Batch, bug=None) -> dict[tuple[int, int, int], np.ndarray]:
  """{(row of the batch, t, depth): logits} by the inference oracle, one draft at a time."""
  head = method.export(params, target_params())
  found = {}
  for b in range(batch.token.shape[0]):
    for segment in range(1, int(batch.segment[b].max()) + 1):
      at = np.flatnonzero(np.asarray(batch.segment[b]) == segment)
      states = np.asarray(batch.feature[b, at]).reshape(len(at), len(TAPS), -1)
      token = np.asarray(batch.token[b, at])
      oracle = eagle_oracle.Oracle(
          dataclasses.replace(method.config, feature_layers=()), TARGET,
          {"head": head, "target": target_params()}, token, states, TAPS,
          None if bug == "position" else bug)
      for root in range(1, len(at)):  # t == root - 1
        seen, entry = oracle.root(token[root], root)
        for depth in range(STEPS):
          found[b, int(at[root - 1]), depth] = entry.logits
          after = root + depth + 1
          if after == len(at):
            break
          seen = [*seen, entry]
          position = root if bug == "position" else after
          entry = oracle.entry(token[after], entry.back, position, seen)
  return found


def mismatch(name: str, bug=None) -> float:
  method = eagle3.make(VARIANTS[name], TARGET, TARGET_ID)
  params, batch = perturbed(method), packed_batch()
  logits = method.logits(params, target_params(), batch)
  want = unrolled(method, params, batch, bug)
  assert len(want) > 50
  return max(float(np.abs(np.asarray(logits[d][b, t]) - x).max()) for (b, t, d), x in want.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_training_time_test_is_the_oracle_unrolled(name):
  assert mismatch(name) < 1e-4


@pytest.mark.parametrize("bug", ["concat", "feedback", "shift", "index_0", "position"])
def test_a_wrong_unrolling_is_noticed(bug):
  assert mismatch("norms", bug) > 1e-2


def test_the_loss_is_the_sum_over_its_terms():
  options = VARIANTS["plain"]
  method = eagle3.make(options, TARGET, TARGET_ID)
  params, batch = perturbed(method), packed_batch()
  logits = unrolled(method, params, batch)
  head = np.asarray(target_params()["head"]["w"], np.float64)
  place = {int(t): i for i, t in enumerate(TARGET_ID)}
  total = 0.0
  for depth in range(STEPS):
    terms = []
    for (b, t, d), q in logits.items():
      label = t + 2 + depth
      if d != depth or label >= T or batch.segment[b, label] != batch.segment[b, t]:
        continue
      if not batch.loss[b, label] or int(batch.token[b, label]) not in place:
        continue
      teacher = (np.asarray(batch.hidden[b, label - 1], np.float64) @ head)[TARGET_ID]
      p = np.exp(teacher - teacher.max())
      log_q = q - q.max() - np.log(np.exp(q - q.max()).sum())
      terms.append(-(p / p.sum() * log_q).sum())
    assert len(terms) > 5
    total += options.step_decay**depth * np.mean(terms)
  loss, _ = method.loss(params, target_params(), batch, jnp.int32(0), jax.random.key(0))
  assert float(loss) == pytest.approx(total, rel=1e-5)


def test_the_gradient_is_that_of_finite_differences():
  method = eagle3.make(VARIANTS["plain"], TARGET, TARGET_ID)
  training_checks.check_gradient(method, perturbed(method), target_params(), packed_batch())


def test_other_segments_padding_and_unlearned_tokens_do_not_count():
  method = eagle3.make(VARIANTS["norms"], TARGET, TARGET_ID)
  params, batch = perturbed(method), packed_batch()
  of = lambda batch: float(method.loss(params, target_params(), batch, 0, None)[0])
  rubbish = jnp.where(batch.segment[..., None] == 0, 1e3, batch.feature)
  assert of(batch.replace(feature=rubbish)) == of(batch)
  alone = jax.tree.map(lambda x: x[:1], batch)
  first = alone.replace(loss=alone.loss & (alone.segment == 1))
  other = first.replace(token=jnp.where(first.segment == 2, 0, first.token),
                        feature=jnp.where(first.segment[..., None] == 2, 0.0, first.feature))
  assert of(other) == pytest.approx(of(first), rel=1e-6)


def test_a_frozen_lm_head_is_the_targets_and_gets_no_gradient():
  method = eagle3.make(VARIANTS["norms"], TARGET, TARGET_ID)
  params = method.init(jax.random.key(0), target_params())
  assert "head" not in params
  exported = method.export(params, target_params())
  np.testing.assert_array_equal(exported["head"]["w"], target_params()["head"]["w"][:, TARGET_ID])
  grads = jax.grad(lambda p: method.loss(params, p, packed_batch(), 0, None)[0])(target_params())
  assert not np.any(np.asarray(grads["head"]["w"]))


def test_a_head_can_start_from_a_layer_of_the_target():
  method = eagle3.make(dataclasses.replace(VARIANTS["norms"], init_layer=1), TARGET, TARGET_ID)
  params = method.init(jax.random.key(0), target_params())
  source, layer = target_params()["layers"][1], params["layers"][0]
  np.testing.assert_array_equal(layer["down"]["w"], source["down"]["w"])
  np.testing.assert_array_equal(layer["q"]["w"][TARGET.width:], source["q"]["w"])
  with pytest.raises(ValueError, match="init_layer=7 must lie in 0..1"):
    eagle3.make(Eagle3Options(init_layer=7), TARGET, TARGET_ID)


def test_overfitting_32_sequences_reaches_depth_one():
  method = eagle3.make(dataclasses.replace(VARIANTS["norms"], steps=2), TARGET, None)
  batch = training_checks.own_text(TARGET, target_params(), 32, T)
  accuracy = training_checks.overfit(method, TARGET, target_params(), batch, steps=300)
  assert accuracy[0] > 0.95


@pytest.mark.parametrize("fields, message", [
    ({"steps": 0}, "steps must be an integer >= 1, got 0"),
    ({"step_decay": 1.5}, "step_decay must lie in"),
])
def test_bad_options_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Eagle3Options(**fields)
