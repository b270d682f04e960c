"""What the options of the methods have in common.

A method's options are a frozen dataclass whose fields are the keys of speculative_config that this
method takes beside those that all take. No jax: the command line checks them before it is imported.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any, Self

from jspec.config import draft_trees
from jspec.config.checks import check_number, listed
from jspec.config.draft_trees import check_size

DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
TREE_KEYS = ("tree_widths", "medusa_choices", "speculative_token_tree")


@dataclasses.dataclass(frozen=True)
class Options:
  """Of a method; these have no keys of their own."""

  @classmethod
  def keys(cls) -> tuple[str, ...]:
    """The keys that make them: the names of the fields, but where one has other spellings."""
    return tuple(field.name for field in dataclasses.fields(cls))

  @classmethod
  def of_keys(cls, keys: Mapping[str, Any]) -> Self:
    """From the keys that were given; ValueError for a value that is not allowed."""
    return cls(**keys)

  @property
  def default_tokens(self) -> int | None:
    """Draft tokens where num_speculative_tokens is left out.

    0: as many as suit the drafter. None: it must not be left out.
    """
    return 0

  def check_tokens(self, tokens: int) -> None:
    """ValueError if num_speculative_tokens does not go with these options."""

  @property
  def is_sampled_chain(self) -> bool:
    """Whether drafts are chains of tokens that are drawn from a distribution."""
    return False


@dataclasses.dataclass(frozen=True)
class LookupOptions(Options):
  """Of a method that copies drafts from text that is there: it may be joined with a ModelOptions'.

  Its number of draft tokens is num_lookup_tokens then.
  """


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
  """Of a method whose drafts a model or a head makes."""

  model: str | None = None  # the draft model, or the head; never None in a SpeculativeConfig
  revision: str | None = None  # of the model's repository: a branch, tag or commit
  draft_sample_method: str = "greedy"  # "probabilistic": sample drafts, keep their distribution
  draft_confidence_threshold: float = 0.0  # a chain stops below this top probability; 0 never

  def __post_init__(self):
    if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
      raise ValueError(f"draft_sample_method must be one of {listed(DRAFT_SAMPLE_METHODS)}, "
                       f"got {self.draft_sample_method!r}")
    if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
      raise ValueError("revision must be a branch, a tag or a commit, "
                       f"got {reprlib.repr(self.revision)}")
    check_number("draft_confidence_threshold", self.draft_confidence_threshold, 0, 1)

  @property
  def is_sampled(self) -> bool:
    return self.draft_sample_method == "probabilistic"

  def check_one_shape(self, *trees: tuple[str, Any]) -> None:
    """ValueError where a draft would have several shapes.

    trees: (the option that asks for a kind of tree, whether it does).
    """
    stops = "draft_confidence_threshold", self.draft_confidence_threshold
    given = [name for name, asks in (*trees, stops) if asks]
    if len(given) > 1:
      raise ValueError(f"{' and '.join(given)} exclude each other: a draft is a chain, which may "
                       "stop, or one kind of tree")

  def check_not_sampled(self, is_cut: Any) -> None:
    """ValueError where sampled drafts would be cut to the likeliest."""
    if self.is_sampled and is_cut:
      raise ValueError("draft_sample_method 'probabilistic' is for chains and static trees: a tree "
                       "that is cut by the probabilities of its sampled tokens would not be "
                       "lossless")


@dataclasses.dataclass(frozen=True)
class HeadOptions(ModelOptions):
  """Of a method whose drafts a head makes, trained for one target."""

  tree_paths: tuple[draft_trees.Path, ...] | None = None  # a static tree: the rank at each depth

  @classmethod
  def keys(cls) -> tuple[str, ...]:
    return *(key for key in super().keys() if key != "tree_paths"), *TREE_KEYS

  @classmethod
  def of_keys(cls, keys: Mapping[str, Any]) -> Self:
    given = [key for key in TREE_KEYS if key in keys]
    if len(given) > 1:
      raise ValueError(f"{listed(given)} all describe the draft tree: give one of them")
    fields = {key: value for key, value in keys.items() if key not in TREE_KEYS}
    if given == ["tree_widths"]:
      fields["tree_paths"] = draft_trees.of_widths(draft_trees.parse_widths(keys["tree_widths"]))
    elif given:
      fields["tree_paths"] = draft_trees.parse(keys[given[0]])
    return cls(**fields)

  def __post_init__(self):
    super().__post_init__()
    check_size("the number of nodes of the draft tree", len(self.tree_paths or ()))

  def check_tokens(self, tokens: int) -> None:
    if self.tree_paths is None:
      return
    depth = max(map(len, self.tree_paths))
    if tokens not in (0, depth):
      raise ValueError(f"the draft tree is {depth} deep, but num_speculative_tokens="
                       f"{tokens}: leave that out")

  @property
  def is_sampled_chain(self) -> bool:
    return self.is_sampled and self.tree_paths is None
