"""Dynamic speculation: costs that are measured, drafting that stops where it does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from jspec.engine.goodput import PAUSES, RECHECK, TRIAL, Goodput, Loop

ROWS = np.array([2, 4, 8])
FIXED, PER_TOKEN = np.array([1.0, 1.5, 3.0]), np.array([0.0, 0.001, 0.002])


def goodput(switches=True) -> Goodput:
  return Goodput(ROWS, FIXED, PER_TOKEN, switches)


def loop(width, seconds, tokens=1.0, drafting=True, length=0, batch=2, alone=True) -> Loop:
  ran = np.zeros(3, int)
  ran[width] = 1
  return Loop(drafting, ran, length, seconds, tokens * batch, batch, batch, alone)


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
    model.observe(Loop(True, ran, 0, seconds, int(ran.sum()), int(ran.sum()), 1))
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
             batch=lambda step: 2, alone=lambda step: True) -> np.ndarray:
  """Whether each step was allowed to draft; one costs `plain` seconds, or with drafts `seconds`."""
  drafted = []
  for step in range(steps):
    drafting = model.drafts(batch(step))
    drafted.append(drafting)
    model.observe(loop(1 if drafting else 0, seconds if drafting else plain,
                       tokens if drafting else 1.0, drafting, batch=batch(step),
                       alone=alone(step)))
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
  """But for looks at what a step without costs: 2 % of the steps."""
  drafted = simulate(goodput(), 5000, 1.0, seconds, tokens)
  assert (~drafted).mean() <= (TRIAL + 8) / RECHECK


def test_drafting_comes_back_when_it_begins_to_pay():
  model = goodput()
  simulate(model, 3000, 1.0, 1.5, 1.0)
  drafted = simulate(model, PAUSES[1] + 500, 1.0, 1.5, 3.0)
  assert drafted[-400:].mean() > 0.97


def test_a_slow_moment_is_not_believed_for_ever():
  """Plain steps took twice their time while they were measured: drafts that lose seem to win."""
  model = goodput()
  assert simulate(model, 200, 2.0, 1.5, 1.1)[-100:].all()
  drafted = simulate(model, 6000, 1.0, 1.5, 1.1)
  assert drafted[3000:].mean() <= 0.02


@pytest.mark.parametrize("batch", [lambda step: 1 + (step % 41 > 0), lambda step: 4 - 2 * (
    step % 22 < 2), lambda step: 16 - 8 * (step % 41 == 0)])
def test_clients_that_come_and_go_start_no_new_trials(batch):
  drafted = simulate(goodput(), 20000, 1.0, 1.5, 1.0, batch)
  assert drafted[10000:].mean() <= 0.02


def test_pauses_pass_beside_prompts_too():
  model = goodput()
  simulate(model, 100, 1.0, 1.5, 1.0)
  assert not model.drafts(2)
  drafted = simulate(model, 200, 1.0, 1.5, 1.0, alone=lambda step: False)
  assert drafted.any()


def test_what_ran_beside_a_prompt_says_nothing_about_costs():
  model = goodput()
  model.prime(np.array([1.0, 2.0, 3.0]))
  before = learned(model)
  for width in (0, 1, 2):
    model.observe(loop(width, 99.0, alone=False))
  np.testing.assert_array_equal(learned(model), before)


def test_each_batch_size_is_tried_on_its_own():
  model = goodput()
  assert not simulate(model, 3000, 1.0, 1.5, 1.0, batch=lambda step: 9)[-1]
  assert model.drafts(8) is False and model.drafts(15) is False
  assert model.drafts(2) is True and model.drafts(16) is True


def test_where_drafts_are_sampled_nothing_is_switched_off():
  assert simulate(goodput(switches=False), 500, 1.0, 5.0, 1.0).all()
