"""Losses of Medusa, EAGLE-1, MLPSpeculator and draft models: loops in numpy, finite differences."""

from __future__ import annotations

import functools
import math

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_cases import TARGET, target_params
from training_cases import JOINT, KNOWN, METHODS, ONE_OF_EACH, B, T, loss_of, packed, params_of
from training_checks import accuracies, check_gradient, quickly

from jspec.model import transformer
from jspec.training import layers, terms
from jspec.training.methods import eagle1, medusa2
from jspec.training.methods.eagle1 import Eagle1Options
from jspec.training.types import Batch

# ------------------------------------------------------------------ gradients


SAME_CODE = ("medusa", "medusa_shared", "medusa2_full", "mlp", "draft_model_ce")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if name in SAME_CODE else name for name in METHODS])
def test_the_gradient_is_that_of_finite_differences(name):
  check_gradient(METHODS[name], params_of(name), target_params(), packed(), step=5)


def test_the_gradient_check_sees_a_missing_part():
  method = METHODS["medusa_vocab"]

  def cut(params, *rest):
    first = jax.lax.stop_gradient(params["heads"][0])
    return method.terms({"heads": [first, *params["heads"][1:]]}, *rest)

  with pytest.raises(AssertionError, match="heads"):
    check_gradient(method._replace(terms=cut), params_of("medusa_vocab"), target_params(), packed())


# ------------------------------------------------------------------ values, in loops


def rows_and_tokens(batch: Batch, ahead: int):
  """(row, t, token) wherever the token at t + ahead counts."""
  token, segment, loss = (np.array(x) for x in (batch.token, batch.segment, batch.loss))
  return [(row, t, token[row, t + ahead]) for row in range(B) for t in range(T - ahead)
          if segment[row, t] == segment[row, t + ahead] > 0 and loss[row, t + ahead]]


def law(logits) -> np.ndarray:
  weight = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return weight / weight.sum()


def silu(x):
  return x / (1 + np.exp(-x))


def numpy(x):
  return jax.tree.map(lambda a: np.asarray(a, np.float64), x)


def medusa_logits(head, hidden, lm_head):
  for block in head["blocks"]:
    hidden = hidden + silu(hidden @ block["w"] + block.get("b", 0))
  return hidden @ (head["head"]["w"] if "head" in head else lm_head)


def heads_loss(heads, hidden, lm_head, batch, known=None):
  total = 0
  for i, head in enumerate(heads):
    each = []
    for row, t, token in rows_and_tokens(batch, i + 2):
      if known is not None and token not in known:
        continue
      place = token if known is None else known.tolist().index(token)
      each.append(-np.log(law(medusa_logits(head, hidden[row, t], lm_head))[place]))
    total += 0.8**i * np.mean(each)
  return total


@pytest.mark.parametrize("name", ["medusa", "medusa_vocab", "medusa_shared"])
def test_medusa_loss_is_the_sum_over_heads(name):
  batch, params = packed(), numpy(params_of(name))
  want = heads_loss(params["heads"], np.array(batch.hidden), numpy(target_params())["head"]["w"],
                    batch, KNOWN if name == "medusa_vocab" else None)
  got, metrics = loss_of(name, batch)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  assert metrics["terms"] == len(rows_and_tokens(batch, 2))
  method = METHODS[name]
  want = accuracies(method, method.logits(params_of(name), target_params(), batch), batch)
  np.testing.assert_allclose([metrics[f"accuracy_{d}"] for d in (1, 2, 3)], want, rtol=1e-5)


@functools.cache
def tuned_states(name: str):
  """(the tuned target, its hidden states on the batch)."""
  tuned, batch = tuned_target(params_of(name)), packed()
  forward = jax.jit(layers.forward, static_argnums=1, compiler_options=quickly)
  return tuned, np.array(forward(tuned, TARGET, batch.token, batch.segment, batch.position)[0])


def tuned_target(params, alpha=6.0, rank=3):
  merged = jax.tree.map(np.array, target_params())
  for layer, adapters in zip(merged["layers"], params["target"]["layers"], strict=True):
    assert set(adapters) == {"q", "k", "v", "o", "gate", "up", "down"}
    for name, adapter in adapters.items():
      layer[name]["w"] = layer[name]["w"] + alpha / rank * np.array(adapter["a"]) @ adapter["b"]
  return merged


@pytest.mark.parametrize("step", [0, 1, 2, 4, 10, 30])
@pytest.mark.parametrize("name", ["medusa2", "medusa2_distill"])
def test_medusa2_loss_is_the_targets_and_the_heads(name, step):
  batch, params = packed(), params_of(name)
  distill = name == "medusa2_distill"
  tuned, hidden = tuned_states(name)
  lm_head = numpy(target_params())["head"]["w"]
  heads, own = heads_loss(numpy(params)["heads"], hidden, lm_head, batch), []
  for row, t, token in rows_and_tokens(batch, 1):
    q = law(hidden[row, t] @ lm_head)
    p = law(np.array(batch.hidden)[row, t] @ lm_head)
    own.append((p * np.log(p / q)).sum() if distill else -np.log(q[token]))
  weight = 0.3 * np.sin(np.pi / 2 * min(1, max(0, step - 2) / 8)) if distill else 0.3
  want = heads if distill and step < 2 else np.mean(own) + weight * heads
  got, metrics = loss_of(name, batch, step)
  np.testing.assert_allclose(got, want, rtol=1e-4)
  np.testing.assert_allclose(metrics["loss_target"], np.mean(own), rtol=1e-4)
  exported = medusa2.export_target(JOINT, params, target_params())
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), exported, tuned)


def test_medusa2s_first_stage_leaves_the_target_alone():
  name = "medusa2_distill"
  args = params_of(name), target_params(), packed()
  gradient = jax.jit(lambda step: jax.grad(lambda p: METHODS[name].loss(
      p, *args[1:], step, jax.random.key(0))[0])(args[0]), compiler_options=quickly)
  largest = lambda tree: max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))
  for step, moves in ((0, False), (1, False), (2, True)):
    slope = gradient(jnp.int32(step))
    assert (largest(slope["target"]) > 0) == moves
    assert largest(slope["heads"]) > 0 or step == 2  # the sine begins at 0


def eagle_entries(params, batch: Batch, num_steps: int):
  """{(row, t): entries of steps 0.. on token t + 1 .. t + 1 + j}, by the oracle's own loops."""
  shared = {k: target_params()[k] for k in ("embed", "head")}
  out = {}
  for row in range(B):
    for number in (1, 2):
      at = np.flatnonzero(np.array(batch.segment)[row] == number)
      token, hidden = np.array(batch.token)[row, at], np.array(batch.hidden)[row, at]
      oracle = eagle_oracle.Oracle(METHODS["eagle1"].config, TARGET,
                                   {"head": params, "target": shared}, token, hidden[:, None], (0,))
      for t in range(len(at) - 1):
        seen, entry = oracle.root(token[t + 1], t + 1)
        steps = [entry]
        for position in range(t + 2, min(t + 1 + num_steps, len(at))):
          entry = oracle.entry(token[position], entry.back, position, seen + steps)
          steps.append(entry)
        out[row, at[t]] = steps
  return out


def test_eagle1_loss_is_of_features_and_of_the_targets_law():
  batch, params = packed(), params_of("eagle1")
  entries, hidden = eagle_entries(params, batch, 1), np.array(batch.hidden, np.float64)
  lm_head, features, laws = numpy(target_params())["head"]["w"], [], []
  for row, t, _ in rows_and_tokens(batch, 2):
    error = np.abs(entries[row, t][0].back - hidden[row, t + 1])
    features.append(np.mean([e * e / 2 if e < 1 else e - 0.5 for e in error]))
    laws.append(-law(hidden[row, t + 1] @ lm_head) @ np.log(law(entries[row, t][0].logits)))
  got, metrics = loss_of("eagle1", batch)
  np.testing.assert_allclose(metrics["loss_feature"], np.mean(features), rtol=1e-5)
  np.testing.assert_allclose(metrics["loss_logits"], np.mean(laws), rtol=1e-5)
  np.testing.assert_allclose(got, np.mean(features) + 0.1 * np.mean(laws), rtol=1e-5)


def test_eagle1_drafts_on_in_training_as_the_oracle_does():
  batch, params = packed(), params_of("eagle1")
  out = jax.jit(METHODS["eagle1"].logits, compiler_options=quickly)(params, target_params(), batch)
  for (row, t), steps in eagle_entries(params, batch, 3).items():
    for j, entry in enumerate(steps):
      np.testing.assert_allclose(out[j][row, t], entry.logits, atol=2e-4)


def test_eagle1_noise_is_uniform_and_the_wider_the_shorter_the_sequence():
  batch = packed()
  drawn = np.array(eagle1.noise(jax.random.key(0), batch, 4000))
  for length in (6, 7, 3, 11):
    row, at = {6: (0, 0), 7: (0, 6), 3: (1, 0), 11: (1, 3)}[length]
    scaled = drawn[row, at:at + length] / (512 / length)
    # 12000 draws or more: the ends lie within 1 % and the mean within 4 standard errors.
    assert 0.495 < scaled.max() <= 0.5 and -0.5 <= scaled.min() < -0.495
    assert abs(scaled.mean()) < 4 * 12**-0.5 / scaled.size**0.5
  noisy = eagle1.make(Eagle1Options(), TARGET)
  loss = jax.jit(noisy.loss, compiler_options=quickly)
  losses = {float(loss(params_of("eagle1"), target_params(), batch, jnp.int32(0),
                       jax.random.key(i))[0]) for i in range(2)}
  assert len(losses) == 2 and loss_of("eagle1", batch)[0] not in losses


@pytest.mark.parametrize("name", ["mlp", "mlp_tied"])
def test_mlp_speculator_loss_is_that_of_a_stack_fed_the_text(name):
  batch, method = packed(), METHODS[name]
  stages = numpy(method.export(params_of(name), target_params()))["stages"]
  state_weight = 0.5 ** (0.5 / 3)
  emb_weight = np.sqrt((1 - state_weight**2) * 16 / 2)
  gelu = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)
  rms = lambda x: x / np.sqrt((x * x).mean() + 1e-6)
  total = []
  for i in range(3):
    each = []
    for row, t, token in rows_and_tokens(batch, i + 2):
      state = np.array(batch.hidden, np.float64)[row, t]
      state = rms(state) / np.sqrt(2) if name == "mlp" else state
      for j in range(i + 1):
        x = state @ stages[j]["proj"]["w"]
        x = x + emb_weight / state_weight * stages[j]["emb"][batch.token[row, t + 1 + j]]
        state = gelu(rms(x) * stages[j]["ln"]["scale"] + stages[j]["ln"]["bias"])
      each.append(-np.log(law(state @ stages[i]["head"]["w"])[token]))
    total.append(np.mean(each))
  got, metrics = loss_of(name, batch)
  np.testing.assert_allclose([metrics[f"loss_{i}"] for i in (1, 2, 3)], total, rtol=1e-4)
  np.testing.assert_allclose(got, sum(total), rtol=1e-4)


@pytest.mark.parametrize("name", ["draft_model", "draft_model_reverse", "draft_model_ce"])
def test_draft_model_loss_is_the_divergence_of_two_laws(name):
  batch, params, method = packed(), params_of(name), METHODS[name]
  hidden, _ = layers.forward(params, method.config, batch.token, batch.segment, batch.position)
  own, heat = np.array(transformer.logits(params, method.config, hidden), np.float64), 1.0
  if name == "draft_model":
    heat = 1.5
  each, lm_head = [], numpy(target_params())["head"]["w"]
  for row, t, _ in rows_and_tokens(batch, 1):
    p = law(np.array(batch.hidden, np.float64)[row, t] @ lm_head / heat)
    q = law(own[row, t] / heat)
    each.append({"draft_model": (p * np.log(p / q)).sum(),
                 "draft_model_reverse": (q * np.log(q / p)).sum(),
                 "draft_model_ce": -(p * np.log(q)).sum()}[name])
  np.testing.assert_allclose(loss_of(name, batch)[0], heat**2 * np.mean(each), rtol=1e-4)


# ------------------------------------------------------------------ what counts


def test_terms_are_counted_as_a_loop_counts_them():
  batch = packed()
  for ahead in (1, 2, T + 1):
    want = np.zeros((B, T), bool)
    for row, t, _ in rows_and_tokens(batch, ahead):
      want[row, t] = True
    np.testing.assert_array_equal(terms.counted(batch, ahead), want)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_other_sequences_and_padding_change_nothing(name):
  """A sequence's loss is the same wherever it lies and whatever lies around it."""
  rng = np.random.default_rng(8)
  one = packed(mask=False)

  def around(at, seed):
    other = packed(seed, mask=False)
    put = lambda x, own: np.array(x.at[0, at:at + 7].set(own[0, 6:13]))
    segment = np.array([[1] * at + [2] * 7 + [3] * (T - 7 - at), [0] * T])
    return Batch(put(other.token, one.token), segment, put(jnp.asarray(
        rng.integers(0, 9, (B, T)).astype(np.int32)), one.position), put(
            jnp.zeros((B, T), bool), one.loss), put(other.hidden, one.hidden))

  results = [loss_of(name, around(at, seed)) for at, seed in ((0, 1), (4, 2), (7, 3))]
  for total, metrics in results[1:]:
    np.testing.assert_allclose(total, results[0][0], rtol=1e-5)
    assert metrics["terms"] == results[0][1]["terms"] > 2


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_masked_token_has_no_influence_and_another_has(name):
  """The last of a sequence, which nothing is predicted from."""
  batch = packed(mask=False)
  batch = batch.replace(token=batch.token.at[1, T - 1].set(int(KNOWN[0])))
  changed = batch.replace(token=batch.token.at[1, T - 1].set(int(KNOWN[1])),
                          hidden=batch.hidden.at[1, T - 2:].add(1.0))
  masked = lambda b: b.replace(loss=b.loss.at[1, T - 1].set(False))
  assert loss_of(name, batch)[0] != loss_of(name, changed)[0]
  assert loss_of(name, masked(batch))[0] == loss_of(name, masked(changed))[0]
  assert loss_of(name, masked(batch))[0] != loss_of(name, batch)[0]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_to_learn_is_a_loss_of_0_without_nan(name):
  batch = packed().replace(loss=jnp.zeros((B, T), bool))
  total, metrics = loss_of(name, batch)
  assert total == 0 and metrics["terms"] == 0 and metrics["accuracy_1"] == 0
