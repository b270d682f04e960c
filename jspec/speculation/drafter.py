"""The drafter protocol: a bundle of pure functions, in the manner of an optax transformation.

Five laws, tested for every entry of DRAFTERS by tests/laws/test_laws.py:
  1. well-formed: parent[0] is NO_PARENT, parent[i] < i, breadth-first, tokens in the vocabulary;
  2. state keeps its structure, shapes and dtypes;
  3. propose commits nothing: proposing twice gives the same tree;
  4. observing in chunks is observing at once;
  5. honest q: each token was drawn from the q_probs it carries (point mass where None), and the
     text that comes out is distributed as the target's.

There is no rollback. Unaccepted work lies beyond the committed length and is overwritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.config.methods import ModelOptions
from jspec.heads.config import HeadConfig
from jspec.model.execution import Execution
from jspec.types import NO_PARENT, Committed, DraftTree, Slots


class Feed(NamedTuple):
  """What a drafter knows from the host: arrays for each device loop.

  They are made while the loop before runs, from what was known when that began.
  """

  # ends: by slot, the last `context` tokens of its text, None where it is idle -> drafter's params
  params: Callable[[Sequence[Sequence[int] | None]], Any]
  context: int
  finished: Callable[[Sequence[int], Sequence[int]], None]  # prompt and output of a request
  forget: Callable[[], None]  # what finished requests have taught it


class Drafter(NamedTuple):
  """propose sees (params, its state, root, slots), observe (params, its state, slots, committed).

  A page id names the same page in the target's KV pool and in every drafter's, so slots.page_table
  serves both, and slots.length is where both stand.
  """

  # (num_slots, num_pages) -> state
  init: Callable[[int, int], Any]
  # root i32[B]; may scribble in its state, never commits
  propose: Callable[[Any, Any, Any, Slots], tuple[DraftTree, Any]]
  # the only teacher: prompt chunks and accepted tokens alike; slots as they were before them
  observe: Callable[[Any, Any, Slots, Committed], Any]
  num_nodes: int  # N of every tree it proposes, root included
  max_depth: int  # D; N == D + 1 makes every tree a chain
  feature_layers: tuple[int, ...] = ()  # target hidden states that fill Committed.feature
  sampled: bool = False  # whether trees carry q_probs
  num_scratch: int = 0  # KV positions from length on that propose may write, if more than num_nodes
  feed: Feed | None = None  # the half of it that lives on the host, if any
  # (state, page table i32[max_pages], tokens) -> [tokens, F]: what it kept of a finished request
  collect: Callable[[Any, np.ndarray, int], np.ndarray] | None = None

  @property
  def is_chain(self) -> bool:
    return self.num_nodes == self.max_depth + 1

  @property
  def lookahead(self) -> int:
    """Positions beyond the committed length that a slot needs pages for."""
    return max(self.num_nodes, self.num_scratch)


@dataclasses.dataclass(frozen=True)
class DrafterSetup:
  """What a builder in DRAFTERS gets to work with, beside the options of its method."""

  num_draft: int  # draft tokens per step, the depth of trees; 0: as many as suit the drafter
  target: ModelConfig
  max_model_len: int
  page_size: int
  kv_dtype: Any  # of KV pages, see cache.stored_dtype
  execution: Execution  # of the drafter's own model or head
  # model name -> a draft with the target's rows of the vocabulary, of which the first n are tokens
  load_draft: Callable[[str | None], tuple[ModelConfig, Any, int]]
  load_head: Callable[[str | None], tuple[HeadConfig, Any]]  # name -> a head that fits the target
  target_params: Any  # model/transformer.py's tree: heads may share its embedding and lm_head


def load_head(options: ModelOptions, setup: DrafterSetup, method: str) -> tuple[Any, Any]:
  """Configuration and parameters of the head that was asked for; ValueError if it is another's."""
  config, params = setup.load_head(options.model)
  if config.method != method:
    raise ValueError(f"{options.model} is a head for method {config.method!r}, not {method!r}")
  return config, params


def root_only(root, num_nodes: int) -> DraftTree:
  """The tree of a drafter with nothing to say."""
  token = jnp.zeros((root.shape[0], num_nodes), jnp.int32).at[:, 0].set(root)
  return DraftTree(token, jnp.full_like(token, NO_PARENT), None)
