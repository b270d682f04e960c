"""Dynamic speculation: costs that are measured, drafting that stops where it does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from jspec.goodput import PAUSES, TRIAL, Goodput, Loop

FIXED, PER_TOKEN = np.array([1.0, 1.5, 3.0]), np.array([0.0, 0.001, 0.002])


def goodput(switches=True) -> Goodput:
  return Goodput(FIXED, PER_TOKEN, switches)


def loop(width, seconds, tokens=1.0, drafting=True, steps=1, length=0, slots=2) -> Loop:
  ran = np.zeros(3, int)
  ran[width] = steps
  return Loop(drafting, ran, length, seconds, tokens * steps * slots, steps * slots)


def learned(model: Goodput, drafting=True) -> np.ndarray:
  """The cost ratios that plan() would compare, of an empty text."""
  cost = model.correction(drafting) * FIXED
  return cost / cost[0]


def test_before_anything_is_measured_the_prediction_stands():
  np.testing.assert_array_equal(goodput().correction(True), [1, 1, 1])


def test_costs_are_learned_from_loops_of_one_width_and_of_several():
  rng, model = np.random.default_rng(0), goodput(switches=False)
  true = np.array([0.02, 0.05, 0.055])
  for _ in range(300):
    ran = rng.multinomial(rng.integers(1, 5), [0.5, 0.3, 0.2])
    seconds = float(ran @ true * rng.uniform(0.9, 1.1))
    model.observe(Loop(True, ran, 0, seconds, int(ran.sum()), int(ran.sum())))
  np.testing.assert_allclose(learned(model), true / true[0], rtol=0.1)


def test_a_longer_text_is_not_taken_for_a_slower_machine():
  model = goodput(switches=False)
  for length in (0, 500, 1000, 2000):
    for width in (0, 1, 2):
      predicted = FIXED[width] + PER_TOKEN[width] * length
      for _ in range(20):
        model.observe(loop(width, 0.01 * predicted, length=length))
  np.testing.assert_allclose(model.correction(True), [1, 1, 1], rtol=1e-6)


def test_measured_steps_are_where_it_starts_from():
  model = goodput()
  model.prime(np.array([0.01, 0.04, np.nan]))
  for drafting in (False, True):
    np.testing.assert_allclose(learned(model, drafting)[:2], [1, 4])
    assert np.isfinite(model.correction(drafting)).all()
  untouched = goodput()
  untouched.prime(np.full(3, np.nan))
  np.testing.assert_array_equal(untouched.correction(True), [1, 1, 1])


def simulate(model: Goodput, steps: int, plain: float, seconds: float, tokens: float,
             batch=2) -> np.ndarray:
  """Whether each step was allowed to draft; one costs `plain` seconds, or with drafts `seconds`."""
  drafted = []
  for _ in range(steps):
    drafting = model.drafts(batch)
    drafted.append(drafting)
    model.observe(loop(1 if drafting else 0, seconds if drafting else plain,
                       tokens if drafting else 1.0, drafting))
  return np.array(drafted)


@pytest.mark.parametrize("primed", [False, True])
@pytest.mark.parametrize("seconds, tokens", [(1.5, 1.2), (3.0, 2.0), (1.1, 1.0)])
def test_drafting_stops_where_it_loses(primed, seconds, tokens):
  """In the long run at most 2 % of the steps draft: well under the 5 % that may be lost."""
  model = goodput()
  if primed:
    model.prime(np.array([1.0, 1.1, 1.2]))
  drafted = simulate(model, 4000, 1.0, seconds, tokens)
  assert drafted[:TRIAL].all() and 0 < drafted[1000:].mean() <= 0.02


@pytest.mark.parametrize("seconds, tokens", [(1.5, 1.8), (1.0, 1.1), (3.0, 3.5)])
def test_drafting_goes_on_where_it_wins(seconds, tokens):
  model = goodput()
  drafted = simulate(model, 1000, 1.0, seconds, tokens)
  assert (~drafted).sum() <= TRIAL  # to learn what a step without costs


def test_drafting_comes_back_when_it_begins_to_pay():
  model = goodput()
  simulate(model, 3000, 1.0, 1.5, 1.0)
  drafted = simulate(model, PAUSES[1] + 500, 1.0, 1.5, 3.0)
  assert drafted[-400:].all()


def test_another_batch_size_is_tried_at_once():
  model = goodput()
  assert not simulate(model, 3000, 1.0, 1.5, 1.0, batch=8)[-1]
  assert model.drafts(9) is False and model.drafts(5) is False
  assert model.drafts(2) is True


def test_where_drafts_are_sampled_nothing_is_switched_off():
  assert simulate(goodput(switches=False), 500, 1.0, 5.0, 1.0).all()
