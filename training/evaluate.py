"""How good a head is: on held-out text while it trains, and in the engine when it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import LLM, SamplingParams
from jspec.checkpoints.hub import LoadedModel
from jspec.config import ModelConfig
from jspec.outputs import SpeculativeStats
from jspec.training import terms
from jspec.training.state import with_features
from jspec.training.types import Batch, Method, Params

TOP = 5


def make_evaluate(method: Method, target: ModelConfig
                  ) -> Callable[[Params, Params, Batch], dict[str, jax.Array]]:
  """evaluate(params, target params, batch [B, T]) -> counts by depth, to be summed over batches.

  rows i32[D]: places where the text goes on that far; top1, top5: where its token is the draft's
  likeliest, or among TOP; reach: places where a greedy chain drafts this deep and the text goes on
  to judge it, which needs an emitted token as its root and all drafts before right; chain: where
  this one is right, too.
  """
  def evaluate(params, target_params, batch):
    batch = with_features(batch, method, target_params, target)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, batch)
    names = ("rows", "top1", "top5", "reach", "chain")
    counts: dict[str, list[jax.Array]] = {name: [] for name in names}
    alive = terms.counted(batch, 1)
    for depth, logits in enumerate(method.logits(params, target_params, batch)):
      label, valid = terms.shifted(batch.token, depth + 2), terms.counted(batch, depth + 2)
      ids = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))[1]
      if method.target_id is not None:
        ids = jnp.asarray(method.target_id)[ids]
      hit = ids == label[..., None]
      reach = alive & valid
      alive = reach & hit[..., 0]
      for name, what in (("rows", valid), ("top1", valid & hit[..., 0]),
                         ("top5", valid & hit.any(-1)), ("reach", reach), ("chain", alive)):
        counts[name].append(what.sum())
    return {name: jnp.stack(x) for name, x in counts.items()}

  return evaluate


def summary(counts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
  """Shares by depth of the summed counts, and the tokens per step that greedy chains would give.

  The text decides what is right; where it was sampled, greedy decoding would agree more often.
  """
  total: dict[str, np.ndarray] = {}
  for one in counts:
    for name, x in one.items():
      total[name] = total.get(name, 0) + np.asarray(x, np.int64)
  if not total or not total["rows"][0]:
    raise ValueError("nothing to evaluate: the validation batches have no token to predict")
  rows, reach = (np.maximum(total[name], 1) for name in ("rows", "reach"))
  out, acceptance = {}, total["chain"] / reach
  for depth in range(len(rows)):
    out[f"top1_{depth + 1}"] = float(total["top1"][depth] / rows[depth])
    out[f"top5_{depth + 1}"] = float(total["top5"][depth] / rows[depth])
    out[f"acceptance_{depth + 1}"] = float(acceptance[depth])
    out[f"tokens_per_step_{depth + 1}"] = float(1 + np.cumprod(acceptance[:depth + 1]).sum())
  return out



# ------------------------------------------------------------------ in the engine


@dataclasses.dataclass(frozen=True)
class EngineResult:
  """What a head does in real generation."""

  num_draft_tokens: int  # K
  stats: SpeculativeStats
  identical: int  # of `prompts`, answers that are token for token those of plain decoding
  prompts: int

  def describe(self) -> str:
    depths = " ".join(f"{x:.3f}" for x in self.stats.acceptance_per_position)
    return (f"K={self.num_draft_tokens}: {self.stats.mean_acceptance_length:.3f} tokens per "
            f"drafting step, accepted by depth {depths}; {self.identical} of {self.prompts} "
            "answers as in plain decoding")


def in_engine(loaded: LoadedModel, head: str, method: str, prompts: Sequence[Sequence[int]],
              num_draft_tokens: int, max_tokens: int = 64, batch_size: int = 8) -> EngineResult:
  """Greedy answers to prompts (token ids), every draft verified, beside plain decoding's.

  head: an exported checkpoint. For time, see scripts/head_report.py.
  """
  params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
  fields: dict[str, Any] = dict(max_model_len=max(map(len, prompts)) + max_tokens,
                                max_num_seqs=min(batch_size, len(prompts)),
                                dtype=str(loaded.params["embed"].dtype), progress=False)
  plain = LLM(loaded, **fields).generate(list(prompts), params)
  drafted = LLM(loaded, **fields, speculative_config={
      "method": method, "model": head, "num_speculative_tokens": num_draft_tokens,
      "adaptive_draft_length": False}).generate(list(prompts), params)
  stats = sum((out.speculation for out in drafted), SpeculativeStats())
  same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
  return EngineResult(num_draft_tokens, stats, same, len(plain))
