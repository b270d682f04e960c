"""Where a run begins: a head that was trained before, and the draft vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jspec.checkpoints import hub, load_head
from jspec.heads.config import EagleConfig
from jspec.model.params import on_device
from jspec.training.config import TrainConfig
from jspec.training.data import shards
from jspec.training.data.shards import Sequences
from jspec.training.export.formats import sayable
from jspec.training.export.write import differences
from jspec.training.methods import METHODS
from jspec.training.types import Method, Params


def start_from(config: TrainConfig, loaded: hub.LoadedModel) -> tuple[Any, Params] | None:
  """Configuration and parameters of the head to start from."""
  if not config.init_from:
    return None
  if config.method == "draft_model":
    draft = hub.load_model(config.init_from, dtype="float32")
    return draft.config, draft.params
  return load_head.load_head(config.init_from, loaded.config, dtype="float32", progress=False,
                         put=on_device, method=METHODS[config.method].speculative_method)


def vocabulary(config: TrainConfig, training: Sequences, vocab_size: int,
               start: tuple[Any, Params] | None) -> np.ndarray | None:
  """The draft vocabulary: that of the head to start from, or the most frequent tokens."""
  if not config.draft_vocab_size:
    return None
  if start is None:
    return shards.draft_vocabulary(training, config.draft_vocab_size, vocab_size)
  ids = np.asarray(start[1].get("target_id", np.arange(vocab_size)))
  if len(ids) != config.draft_vocab_size:
    raise ValueError(f"init_from={config.init_from!r} drafts from {len(ids)} tokens, but "
                     f"draft_vocab_size={config.draft_vocab_size}")
  return ids


def like(template: Params, given: Params, name: str) -> Params:
  """What `template` has, from a tree that may have the draft vocabulary and a frozen lm_head, too.

  Of a target that is trained along (Medusa-2), the template's own stays.
  """
  tree = given if "target" not in template else {"heads": given["heads"],
                                                 "target": template["target"]}
  extra = {key for key in tree if key not in template} - {"target_id", "head"}
  if extra:
    raise ValueError(f"init_from={name!r} has {', '.join(sorted(extra))}, which these options do "
                     "not have")
  kept = {key: tree[key] for key in template if key in tree}
  names = lambda params: {jax.tree_util.keystr(path)
                          for path, _ in jax.tree_util.tree_leaves_with_path(params)}
  other = sorted(names(template) ^ names(kept))
  if other:
    raise ValueError(f"init_from={name!r} does not have the parameters that these options train: "
                     f"{other[0]} is in one of them only")
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(template), jax.tree.leaves(kept),
                          strict=True):
    if x.shape != y.shape:
      raise ValueError(f"init_from={name!r}: {jax.tree_util.keystr(path)} is {y.shape}, these "
                       f"options need {x.shape}")
  return kept


def check_same_head(config: TrainConfig, method: Method, start: Any) -> None:
  """Refuses a head to start from that computes something else than these options say."""
  def bare(head: Any) -> Any:  # without what may be the target's or the head's own
    head = sayable(head)
    return dataclasses.replace(head, has_head=False, has_embed=False) if isinstance(
        head, EagleConfig) else head

  wrong = list(differences(bare(method.config), bare(start)))
  if wrong:
    raise ValueError(f"init_from={config.init_from!r} is another kind of head than these options "
                     f"say: {', '.join(wrong)}")
