"""Dynamic speculation: what steps really cost, and whether drafting is worth its time. No jax.

Goodput is the tokens a slot gains per second: expected accepted tokens over measured step time, at
the batch and the text lengths of the moment (as in SmartSpec, Liu et al. 2024).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE = 0.2  # of a width's cost, in the logarithm, per loop that ran it
DRIFT = 0.05  # the same for the widths that did not run: other load slows them all
RECENT = 0.15  # weight of a new loop in the averages
TRIAL = 8  # steps with drafts before they are judged, and steps without to learn their cost
PAUSES = (64, 2048)  # steps without drafts after a first failed trial, and at most
RECHECK = 512  # steps with drafts after which those without are measured again


class Loop(NamedTuple):
  """A device loop that has ended."""

  drafting: bool  # whether it was allowed to
  ran: np.ndarray  # steps at each width
  length: int  # of the longest text
  seconds: float
  tokens: int  # emitted
  slot_steps: int  # steps, counted once for each slot that took part
  batch: int  # slots
  alone: bool = True  # whether the device did nothing else, so that its time is that of its steps


@dataclasses.dataclass
class _Trial:
  """Drafting at batches of about one size."""

  # Seconds per step over the narrowest one's predicted cost, without and with drafting.
  cost: dict[bool, float]
  gain: float = 0.0  # tokens per slot and step, while drafting
  steps: int = 0  # with drafts, since they were judged
  since: int = 0  # with drafts, since there was one without
  paused: int = 0  # steps to go without
  pause: int = PAUSES[0]  # the next one


class Goodput:
  """Learns from every device loop.

  Args:
    rows: i[W], of each width. fixed, per_token: f[W], its predicted cost: plan.step_costs.
    switches: whether drafting may be paused. Not where drafts are sampled: a seeded request's
      text would depend on when.
  """

  def __init__(self, rows: np.ndarray, fixed: np.ndarray, per_token: np.ndarray, switches: bool):
    self._rows, self._fixed, self._per_token, self._switches = rows, fixed, per_token, switches
    # Seconds for each predicted pass, without and with drafting; 0: not seen yet.
    self._rate = {False: np.zeros(len(fixed)), True: np.zeros(len(fixed))}
    self._trials: dict[int, _Trial] = {}  # by the power of two that a batch reaches

  def prime(self, seconds: np.ndarray) -> None:
    """Starts from measured steps on empty texts: f[W], nan where there is none."""
    known = ~np.isnan(seconds)
    if not known.any():
      return
    rate = seconds / self._fixed
    rate = np.where(known, rate, rate[known].mean())
    for drafting in (False, True):  # what proposing costs is learned
      self._rate[drafting] = rate.copy()

  def _trial(self, batch: int) -> _Trial:
    size = batch.bit_length()
    if size not in self._trials:
      plain = int(np.argmax(self._rows >= batch))  # the narrowest width that holds all
      cost = float(self._rate[False][plain] * self._fixed[plain] / self._fixed[0])
      self._trials[size] = _Trial({False: cost, True: cost})
    return self._trials[size]

  def observe(self, loop: Loop) -> None:
    """Takes in a loop that has ended."""
    steps, trial = int(loop.ran.sum()), self._trial(loop.batch)
    if not steps or not loop.slot_steps:
      return
    if loop.alone:
      predicted = self._fixed + self._per_token * loop.length
      self._learn(self._rate[loop.drafting], loop, predicted)
      cost = loop.seconds / steps / predicted[0]
      trial.cost[loop.drafting] = _average(trial.cost[loop.drafting], cost)
    if not loop.drafting:
      trial.paused, trial.since = max(0, trial.paused - steps), 0
      return
    trial.gain = _average(trial.gain, loop.tokens / loop.slot_steps)
    trial.steps, trial.since = trial.steps + steps, trial.since + steps
    if self._switches and trial.steps >= TRIAL and trial.cost[True]:
      self._judge(trial)

  def _learn(self, rate: np.ndarray, loop: Loop, predicted: np.ndarray) -> None:
    ran = loop.ran > 0
    if not rate.any():
      rate[:] = loop.seconds / (loop.ran * predicted).sum()
      return
    factor = loop.seconds / (loop.ran * predicted * rate).sum()
    rate *= factor ** np.where(ran, LEARNING_RATE * loop.ran / loop.ran.sum(), DRIFT)

  def _judge(self, trial: _Trial) -> None:
    """Pauses drafting where it does not pay, for longer each time it did not."""
    trial.steps = 0
    if not trial.cost[False] or trial.since >= RECHECK:
      trial.paused = TRIAL  # to know what it is compared with
    elif trial.gain / trial.cost[True] < 1 / trial.cost[False]:
      trial.paused, trial.pause = trial.pause, min(2 * trial.pause, PAUSES[1])
    else:
      trial.pause = PAUSES[0]

  def drafts(self, batch: int) -> bool:
    """Whether the next loop, of this many slots, should draft."""
    return not self._trial(batch).paused

  def correction(self, drafting: bool) -> np.ndarray:
    """f32[W], measured over predicted cost of each width; only their ratios mean something."""
    rate = self._rate[drafting]
    ratio = rate / rate.mean() if rate.any() else np.ones(len(rate))
    return ratio.astype(np.float32)


class Clock:
  """Times an engine's device loops, for Goodput.

  Args:
    goodput: learns from them; None where steps cost what was predicted.
  """

  def __init__(self, goodput: Goodput | None):
    self.goodput = goodput
    self._landed = 0.0  # when the last loop's results were there
    self._alone = False  # whether nothing but loops was started since the last one

  def disturb(self) -> None:
    """The device was given something beside loops."""
    self._alone = False

  def begin(self, compiled: bool) -> bool:
    """A loop was started. Whether the time until it lands will be that of its steps alone."""
    alone, self._alone = self._alone and not compiled, True
    return alone

  def land(self, flight: Any, out: Any) -> None:
    """A loop's results are there: a Flight, and its StepOutput in numpy."""
    now = time.perf_counter()
    seconds, self._landed = now - max(flight.started, self._landed), now
    if self.goodput is not None:
      length = max(tenant.committed for tenant in flight.tenants.values())
      self.goodput.observe(Loop(
          flight.drafting, np.asarray(out.ran), length, seconds, int(out.num_tokens.sum()),
          int(out.num_steps.sum()), len(flight.tenants), flight.alone))

  def drafts(self, batch: int) -> bool:
    """Whether drafting pays for so many slots, as far as is known."""
    return self.goodput is None or self.goodput.drafts(batch)

  def correction(self, drafting: bool) -> np.ndarray | None:
    """f32[W], see Goodput; None where nothing is measured."""
    return None if self.goodput is None else self.goodput.correction(drafting)


def _average(old: float, new: float) -> float:
  return old + RECENT * (new - old) if old else new
