"""What speculation to do, as one frozen configuration: speculative_parse.py makes it of keys."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

from jspec.config.checks import check_int, check_number
from jspec.config.verification import Verification

LOOKUPS = ("ngram", "suffix")  # drafts copied from text that is there: they need no model
HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3")  # trained for one target
NEURAL = ("draft_model", *HEADS)
EXTRACT = "extract_hidden_states"  # drafts nothing, keeps what heads are trained on
DRAFTING = ("none", *LOOKUPS, *NEURAL)
METHODS = (*DRAFTING, EXTRACT)  # and "lookup+neural", e.g. "ngram+eagle3"
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
MANY = 2**30  # more draft tokens than any drafter has
# Tokens of a draft. A step lays out, for every slot, which of them sees which, and memory and time
# go with the square of their number.
MAX_DRAFT = 1024

# Fields that only some methods know -> these methods.
BELONGS = {
  "model": NEURAL,
  "revision": NEURAL,
  "prompt_lookup_max": ("ngram",),
  "prompt_lookup_min": ("ngram",),
  "prompt_lookup_latest": ("ngram",),
  "draft_sample_method": NEURAL,
  "tree_widths": ("draft_model",),  # of heads they become tree_paths
  "tree_paths": HEADS,
  "tree_top_k": ("eagle", "eagle3"),
  "tree_total_tokens": ("eagle", "eagle3", "suffix"),
  "n_candidates": ("mlp_speculator",),
  "draft_confidence_threshold": NEURAL,
  "suffix_max_tree_depth": ("suffix",),
  "suffix_max_cached_requests": ("suffix",),
  "suffix_max_spec_factor": ("suffix",),
  "suffix_min_token_prob": ("suffix",),
  "draft_tensor_parallel_size": ("draft_model",),
  "hidden_state_layers": (EXTRACT,),
}


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
  """The speculation of an engine. Without arguments: none."""

  method: str = "none"  # one of METHODS, or a lookup and a neural method joined by "+"
  model: str | None = None  # the draft model, or the head
  # Draft tokens per step, the depth where drafts are trees; 0: as many as suit the head.
  num_speculative_tokens: int = 0
  prompt_lookup_max: int = 0  # longest and shortest n-gram looked up
  prompt_lookup_min: int = 0
  prompt_lookup_latest: bool = False  # of several matches the latest, not the earliest
  draft_sample_method: str = "greedy"  # "probabilistic": sample drafts, keep their distribution
  tree_widths: tuple[int, ...] | None = None  # children per node at each depth; None: a chain
  schedule: tuple[tuple[int, int, int], ...] = ()  # (first, last batch size, draft tokens)
  draft_tensor_parallel_size: int = 1  # devices that share the draft model; 1: each has all of it
  tree_paths: tuple[tuple[int, ...], ...] | None = None  # a static tree: the rank at each depth
  tree_top_k: int = 0  # dynamic trees (EAGLE-2): nodes expanded at each depth, 0 is a static shape
  tree_total_tokens: int = 0  # nodes of a dynamic tree, root included
  n_candidates: int = 0  # complete paths kept of a candidate tree, 0 is none
  draft_confidence_threshold: float = 0.0  # a chain stops below this top probability; 0 never
  suffix_max_tree_depth: int = 24  # longest match
  suffix_max_cached_requests: int = 10000  # past outputs that are searched, too: as many as fit
  suffix_max_spec_factor: float = 1.0  # draft tokens per matched token
  suffix_min_token_prob: float = 0.1  # of a path
  num_lookup_tokens: int = 0  # of the lookup in a joined method; 0: num_speculative_tokens
  hidden_state_layers: tuple[int, ...] = ()  # to keep, named as in transformers' hidden_states
  # False: every draft is verified whole, as in vLLM, whatever past acceptance promises.
  adaptive_draft_length: bool = True
  verification: Verification = Verification()
  revision: str | None = None  # of the model's repository: a branch, tag or commit

  def __post_init__(self):
    _check_method(self.method)
    neural = [part for part in self.parts if part in NEURAL]
    low = 0 if self.method == "none" or set(self.parts) & {*HEADS, "suffix", EXTRACT} else 1
    check_int("num_speculative_tokens", self.num_speculative_tokens, low)
    self._check_size()
    if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
      raise ValueError(f"draft_sample_method must be one of {listed(DRAFT_SAMPLE_METHODS)}, "
                       f"got {self.draft_sample_method!r}")
    if not isinstance(self.prompt_lookup_latest, bool):
      raise ValueError(f"prompt_lookup_latest must be true or false, "
                       f"got {self.prompt_lookup_latest!r}")
    if not isinstance(self.adaptive_draft_length, bool):
      raise ValueError(f"adaptive_draft_length must be true or false, "
                       f"got {self.adaptive_draft_length!r}")
    self._check_belonging()
    if neural and (not isinstance(self.model, str) or not self.model):
      raise ValueError(f"method {self.method!r} needs a model, got {self.model!r}")
    if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
      raise ValueError("revision must be a branch, a tag or a commit, "
                       f"got {reprlib.repr(self.revision)}")
    if "ngram" in self.parts:
      self._check_ngram()
    if self.method == EXTRACT:
      self._check_extract()
    self._check_numbers()
    self._check_trees()
    self._check_verification()
    _check_schedule(self.schedule)

  @property
  def parts(self) -> tuple[str, ...]:
    return tuple(self.method.split("+"))

  def _check_size(self):
    for name in ("num_speculative_tokens", "num_lookup_tokens", "tree_total_tokens", "tree_top_k"):
      check_size(name, getattr(self, name))
    check_size("the number of nodes of the draft tree", len(self.tree_paths or ()))

  def _check_belonging(self):
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    for name, methods in BELONGS.items():
      if getattr(self, name) != defaults[name] and not set(methods) & set(self.parts):
        shown = name.replace("suffix_", "suffix_decoding_")
        raise ValueError(f"{shown}={getattr(self, name)!r} belongs to method {listed(methods)}, "
                         f"got method {self.method!r}")
    if self.num_lookup_tokens and len(self.parts) == 1:
      raise ValueError(f"num_lookup_tokens={self.num_lookup_tokens} belongs to a joined method, "
                       f"such as 'ngram+eagle3', got method {self.method!r}")

  def _check_ngram(self):
    check_int("prompt_lookup_min", self.prompt_lookup_min, 1)
    check_int("prompt_lookup_max", self.prompt_lookup_max, 1)
    if self.prompt_lookup_min > self.prompt_lookup_max:
      raise ValueError(f"prompt_lookup_min={self.prompt_lookup_min} must not exceed "
                       f"prompt_lookup_max={self.prompt_lookup_max}")

  def _check_extract(self):
    layers = self.hidden_state_layers
    if not layers or any(type(i) is not int or i < 0 for i in layers):
      raise ValueError(f"method {EXTRACT!r} needs hidden_state_layers, a list of numbers >= 0, "
                       f"got {list(layers)}")
    if self.num_speculative_tokens:
      raise ValueError(f"method {EXTRACT!r} drafts nothing, got num_speculative_tokens="
                       f"{self.num_speculative_tokens}")

  def _check_numbers(self):
    for name, low in (("draft_tensor_parallel_size", 1), ("tree_top_k", 0),
                      ("tree_total_tokens", 0), ("n_candidates", 0), ("num_lookup_tokens", 0)):
      check_int(name, getattr(self, name), low)
    check_int("suffix_decoding_max_tree_depth", self.suffix_max_tree_depth, 1)
    check_int("suffix_decoding_max_cached_requests", self.suffix_max_cached_requests, 0)
    check_number("draft_confidence_threshold", self.draft_confidence_threshold, 0, 1)
    check_number("suffix_decoding_min_token_prob", self.suffix_min_token_prob, 0, 1)
    check_number("suffix_decoding_max_spec_factor", self.suffix_max_spec_factor, 0, 1e6)

  def _check_trees(self):
    if self.tree_widths is not None:
      _check_tree(self.tree_widths, self.num_speculative_tokens)
    if self.tree_paths is not None:
      depth = max(map(len, self.tree_paths))
      if self.num_speculative_tokens not in (0, depth):
        raise ValueError(f"the draft tree is {depth} deep, but num_speculative_tokens="
                         f"{self.num_speculative_tokens}: leave that out")
    eagle = set(self.parts) & {"eagle", "eagle3"}
    if self.tree_top_k and not self.tree_total_tokens or (
        eagle and self.tree_total_tokens and not self.tree_top_k):
      raise ValueError("a dynamic tree needs tree_top_k and tree_total_tokens, got "
                       f"tree_top_k={self.tree_top_k}, tree_total_tokens={self.tree_total_tokens}")
    trees = [name for name, given in (
        ("a static tree", self.tree_paths or self.tree_widths), ("tree_top_k", self.tree_top_k),
        ("n_candidates", self.n_candidates and not self.tree_paths),
        ("draft_confidence_threshold", self.draft_confidence_threshold)) if given]
    if len(trees) > 1:
      raise ValueError(f"{' and '.join(trees)} exclude each other: a draft is a chain, which may "
                       "stop, or one kind of tree")
    if self.draft_sample_method == "probabilistic" and (self.tree_top_k or self.n_candidates):
      raise ValueError("draft_sample_method 'probabilistic' is for chains and static trees: a tree "
                       "that is cut by the probabilities of its sampled tokens would not be "
                       "lossless")

  def _check_verification(self):
    if self.verification.name != "block":
      return
    if self.draft_sample_method != "probabilistic" or self.tree_widths or self.tree_paths or (
        len(self.parts) > 1):
      raise ValueError("rejection_sample_method 'block' is for chains of sampled drafts "
                       "(draft_sample_method 'probabilistic', no tree, one method)")

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


def _check_method(method: Any) -> None:
  parts = str(method).split("+")
  known = len(parts) == 1 and method in METHODS
  joined = len(parts) == 2 and parts[0] in LOOKUPS and parts[1] in NEURAL
  if not known and not joined:
    raise ValueError(f"speculative method {method!r} is not one of {listed(METHODS)}, or "
                     f"{listed(LOOKUPS)} joined with one that has a model, as in 'ngram+eagle3'")


def _check_tree(widths: Sequence[int], num_speculative_tokens: int) -> None:
  check_widths(widths)
  if len(widths) != num_speculative_tokens:
    raise ValueError(f"tree_widths must have one number per depth: got {len(widths)} for "
                     f"{num_speculative_tokens=}")


def check_widths(widths: Sequence[int]) -> None:
  """ValueError unless these are numbers of children per node, of a tree that is no giant."""
  nodes, level = 0, 1
  for width in widths:
    level *= check_int("each of tree_widths", width, 1)
    nodes += level
    check_size("the number of nodes of tree_widths", nodes)


def check_size(name: str, size: Any) -> None:
  if isinstance(size, int) and size > MAX_DRAFT:
    raise ValueError(f"{name} must be <= {MAX_DRAFT}, got {size}: each step has a mask of all "
                     "drafted tokens by all drafted tokens")


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


def listed(names) -> str:
  return ", ".join(repr(name) for name in names)
