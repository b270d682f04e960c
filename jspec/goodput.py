"""Dynamic speculation: what steps really cost, and whether drafting is worth its time. No jax.

Goodput is the tokens a slot gains per second: expected accepted tokens over measured step time, at
the batch and the text lengths of the moment (as in SmartSpec, Liu et al. 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEARNING_RATE = 0.2  # of a width's cost, in the logarithm, per loop that ran it
DRIFT = 0.05  # the same for the widths that did not run: other load slows them all
RECENT = 0.15  # weight of a new loop in the averages
TRIAL = 8  # steps with drafts before they are judged, and steps without to learn their cost
PAUSES = (64, 2048)  # steps without drafts after a first failed trial, and at most


class Loop(NamedTuple):
  """A device loop that has ended."""

  drafting: bool  # whether it was allowed to
  ran: np.ndarray  # steps at each width
  length: int  # of the longest text
  seconds: float
  tokens: int  # emitted
  slot_steps: int  # steps, counted once for each slot that took part


class Goodput:
  """Learns from every device loop.

  Args:
    fixed, per_token: f[W], each width's predicted cost: plan.step_costs.
    switches: whether drafting may be paused. Not where drafts are sampled: a seeded request's
      text would depend on when.
  """

  def __init__(self, fixed: np.ndarray, per_token: np.ndarray, switches: bool):
    self._fixed, self._per_token, self._switches = fixed, per_token, switches
    # Seconds for each predicted pass, without and with drafting; 0: not seen yet.
    self._rate = {False: np.zeros(len(fixed)), True: np.zeros(len(fixed))}
    self._gain = 0.0  # tokens per slot and step, while drafting
    self._cost = {False: 0.0, True: 0.0}  # seconds per step over the plain step's predicted cost
    self._steps = 0  # of the trial so far
    self._paused, self._pause = 0, PAUSES[0]
    self._batch = 0

  def prime(self, seconds: np.ndarray) -> None:
    """Starts from measured steps on empty texts: f[W], nan where there is none."""
    known = ~np.isnan(seconds)
    if not known.any():
      return
    rate = seconds / self._fixed
    rate = np.where(known, rate, rate[known].mean())
    for drafting in (False, True):  # what proposing costs is learned
      self._rate[drafting] = rate.copy()
      self._cost[drafting] = float(rate[0])

  def observe(self, loop: Loop) -> None:
    """Takes in a loop that ran alone on the device."""
    steps = int(loop.ran.sum())
    if not steps or not loop.slot_steps:
      return
    predicted = self._fixed + self._per_token * loop.length
    self._learn(self._rate[loop.drafting], loop, predicted)
    cost = loop.seconds / steps / predicted[0]
    self._cost[loop.drafting] = _average(self._cost[loop.drafting], cost)
    if not loop.drafting:
      self._paused = max(0, self._paused - steps)
      return
    self._gain = _average(self._gain, loop.tokens / loop.slot_steps)
    self._steps += steps
    if self._switches and self._steps >= TRIAL:
      self._judge()

  def _learn(self, rate: np.ndarray, loop: Loop, predicted: np.ndarray) -> None:
    ran = loop.ran > 0
    known = rate > 0
    if not known.any():
      rate[:] = loop.seconds / (loop.ran * predicted).sum()
      return
    factor = loop.seconds / (loop.ran * predicted * rate).sum()
    rate *= factor ** np.where(ran, LEARNING_RATE * loop.ran / loop.ran.sum(), DRIFT)

  def _judge(self) -> None:
    """Pauses drafting where it does not pay, for longer each time it did not."""
    self._steps = 0
    if not self._cost[False]:
      self._paused = TRIAL  # to know what it is compared with
    elif self._gain / self._cost[True] < 1 / self._cost[False]:
      self._paused, self._pause = self._pause, min(2 * self._pause, PAUSES[1])
    else:
      self._pause = PAUSES[0]

  def drafts(self, batch: int) -> bool:
    """Whether the next loop, of this many slots, should draft."""
    if not self._batch / 2 < batch < self._batch * 2:
      self._batch, self._paused, self._pause, self._steps = batch, 0, PAUSES[0], 0
    return not self._paused

  def correction(self, drafting: bool) -> np.ndarray:
    """f32[W], measured over predicted cost of each width; only their ratios mean something."""
    rate = self._rate[drafting]
    ratio = rate / rate.mean() if rate.any() else np.ones(len(rate))
    return ratio.astype(np.float32)


def _average(old: float, new: float) -> float:
  return old + RECENT * (new - old) if old else new
