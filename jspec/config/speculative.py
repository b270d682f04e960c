"""What speculation to do, as one frozen configuration: speculative_parse.py makes it of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jspec.config.checks import check_flag, check_int, listed
from jspec.config.draft_trees import check_size
from jspec.config.methods import OPTIONS, LookupOptions, ModelOptions, Options
from jspec.config.verification import Verification

MANY = 2**30  # more draft tokens than any drafter has


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
  """The speculation of an engine. Without arguments: none."""

  method: str = "none"  # a row of OPTIONS, or a lookup and one with a model joined by "+"
  options: tuple[Options, ...] = (Options(),)  # of each part of the method, what it alone takes
  # Draft tokens per step, the depth where drafts are trees; 0: as many as suit the drafter.
  num_speculative_tokens: int = 0
  num_lookup_tokens: int = 0  # of the lookup in a joined method; 0: num_speculative_tokens
  schedule: tuple[tuple[int, int, int], ...] = ()  # (first, last batch size, draft tokens)
  # False: every draft is verified whole, as in vLLM, whatever past acceptance promises.
  adaptive_draft_length: bool = True
  verification: Verification = Verification()

  def __post_init__(self):
    check_method(self.method)
    if [type(part) for part in self.options] != [OPTIONS[part] for part in self.parts]:
      raise ValueError(f"method {self.method!r} has options of "
                       f"{' and '.join(OPTIONS[part].__name__ for part in self.parts)}, "
                       f"got {list(self.options)}")
    for name in ("num_speculative_tokens", "num_lookup_tokens"):
      check_size(name, check_int(name, getattr(self, name), 0))
    check_flag("adaptive_draft_length", self.adaptive_draft_length)
    drafting = self.options[-1]
    if isinstance(drafting, ModelOptions) and not (
        isinstance(drafting.model, str) and drafting.model):
      raise ValueError(f"method {self.method!r} needs a model, got {self.model!r}")
    drafting.check_tokens(self.num_speculative_tokens)
    if self.num_lookup_tokens and len(self.parts) == 1:
      raise ValueError(f"num_lookup_tokens={self.num_lookup_tokens} belongs to a joined method, "
                       f"such as 'ngram+eagle3', got method {self.method!r}")
    if self.verification.name == "block" and not (
        drafting.is_sampled_chain and len(self.parts) == 1):
      raise ValueError("rejection_sample_method 'block' is for chains of sampled drafts "
                       "(draft_sample_method 'probabilistic', no tree, one method)")
    _check_schedule(self.schedule)

  @property
  def parts(self) -> tuple[str, ...]:
    return tuple(self.method.split("+"))

  @property
  def model(self) -> str | None:
    """The draft model, or the head; None where the method has none."""
    drafting = self.options[-1]
    return drafting.model if isinstance(drafting, ModelOptions) else None

  @property
  def revision(self) -> str | None:
    """Of the model's repository: a branch, tag or commit."""
    drafting = self.options[-1]
    return drafting.revision if isinstance(drafting, ModelOptions) else None

  @property
  def draft_tensor_parallel_size(self) -> int:
    """Devices that share the draft model; 1: each has all of it."""
    return getattr(self.options[-1], "draft_tensor_parallel_size", 1)

  def draft_tokens_at(self, batch_size: int) -> int:
    """The most draft tokens per step at a batch size; MANY where the drafter alone decides.

    Gaps in the schedule go on with what came before.
    """
    most = max(self.num_speculative_tokens, self.num_lookup_tokens)
    most = most if self.num_speculative_tokens else MANY
    tokens = most
    for first, _, scheduled in self.schedule:
      if batch_size < first:
        break
      tokens = scheduled
    return min(tokens, most)


def check_method(method: Any) -> None:
  """ValueError unless it is a method, or two that can be joined."""
  parts = str(method).split("+")
  known = len(parts) == 1 and method in OPTIONS
  joined = len(parts) == 2 and parts[0] in lookups() and parts[1] in OPTIONS and (
      issubclass(OPTIONS[parts[1]], ModelOptions))
  if not known and not joined:
    raise ValueError(f"speculative method {method!r} is not one of {listed(OPTIONS)}, or "
                     f"{listed(lookups())} joined with one that has a model, as in 'ngram+eagle3'")


def lookups() -> list[str]:
  """The methods that may stand first in a joined one."""
  return [name for name, options in OPTIONS.items() if issubclass(options, LookupOptions)]


def _check_schedule(schedule: Sequence[tuple[int, int, int]]) -> None:
  name, before = "num_speculative_tokens_per_batch_size", 0
  for first, last, tokens in schedule:
    for value, low in ((first, 1), (last, 1), (tokens, 0)):
      check_int(f"each number of {name}", value, low)
    if first <= before or last < first:
      raise ValueError(f"{name} must have rising ranges that don't overlap, got {list(schedule)}")
    if not before and first != 1:
      raise ValueError(f"{name} must start at batch size 1, got {list(schedule)}")
    before = last
