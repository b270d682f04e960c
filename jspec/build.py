"""Assembles engines: a loaded target on its devices, a drafter that fits it, and their engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jspec.checkpoints.hub import LoadedModel
from jspec.config import EngineConfig, ModelConfig
from jspec.config.speculative import SpeculativeConfig
from jspec.drafters import DrafterSetup
from jspec.drafters import build as build_drafter
from jspec.engine.limits import check_rates, engine_config
from jspec.engine.loop import Engine
from jspec.engine.placement import Placement, check_attention
from jspec.heads.config import HeadConfig
from jspec.model.params import Place, Placer
from jspec.model.sharding import place_params
from jspec.model.transformer import with_vocab_size
from jspec.speculation.plan import CostModel, cpu_cost, cpu_widths

# Drafts are nearly free where a pass over the weights has arithmetic to spare: the rows that take
# as long as one pass are peak arithmetic over memory bandwidth, some hundreds on GPUs and TPUs.
ACCELERATOR_COST = CostModel(rows_per_pass=256.0)


@dataclasses.dataclass(frozen=True)
class Parts:
  """What the engines of one LLM are made of."""

  target: LoadedModel
  spec: SpeculativeConfig
  target_drafts: bool  # the draft model is the target
  load_draft: Callable[[str | None, Placer], LoadedModel]
  # (name, place on the devices, the target's parameters) -> a head that fits the target
  load_head: Callable[[str | None, Place, Any], tuple[HeadConfig, Any]]


def build_engine(parts: Parts, devices: Placement, fields: Mapping[str, Any]) -> Engine:
  """An engine on its devices, with its part of the slots and pages.

  fields: of EngineConfig, for all data-parallel engines together.

  Raises:
    ValueError: where draft, head or attention does not fit the target.
  """
  share = fields["data_parallel_size"]
  fields = {**fields, "data_parallel_size": 1, "num_pages": fields["num_pages"] // share,
            "max_num_seqs": fields["max_num_seqs"] // share}
  model, params = parts.target.config, placed(parts.target, devices.target).params
  drafter, draft_params = build_drafter(parts.spec, drafter_setup(
      parts.spec.num_speculative_tokens, model, params, devices, fields["max_model_len"],
      fields["page_size"],
      lambda name: _draft(parts, name, devices.draft),
      lambda name: parts.load_head(name, devices.head, params)))
  check_rates(parts.spec.verification.rates, drafter.max_depth)
  cost = ACCELERATOR_COST if jax.default_backend() != "cpu" else cpu_cost(
      model, fields["dtype"] == "float32" and not devices.execution.bitwise)
  if jax.default_backend() == "cpu":
    fields["widths"] = cpu_widths(fields["max_num_seqs"], drafter.num_nodes)
  config: EngineConfig = engine_config(model, drafter.lookahead, **fields)
  check_attention(devices.execution.attend, model, config, devices.kv_dtype, drafter.num_nodes)
  return Engine(model, params, drafter, draft_params, config, parts.spec, cost, devices)


def drafter_setup(num_draft: int, target: ModelConfig, params: Any, devices: Placement,
                  max_model_len: int, page_size: int,
                  load_draft: Callable[[str | None], tuple[ModelConfig, Any, int]],
                  load_head: Callable[[str | None], tuple[HeadConfig, Any]]) -> DrafterSetup:
  """What a drafter beside this target gets to work with, whether it runs or is only compiled."""
  return DrafterSetup(
      num_draft=num_draft, target=target, max_model_len=max_model_len,
      page_size=page_size, kv_dtype=devices.kv_dtype, execution=devices.draft_execution,
      load_draft=load_draft, load_head=load_head, target_params=params)


def _draft(parts: Parts, name: str | None, placer: Placer) -> tuple[ModelConfig, Any, int]:
  """With the target's rows of the vocabulary, and how many of them may be drafted.

  Checkpoints of one family pad their vocabulary by different numbers of rows (Qwen2.5 0.5B has
  151936, 7B 152064, the tokenizer 151665 tokens): rows without a token are never drafted.
  """
  target = parts.target
  draft = placed(target, placer) if parts.target_drafts else parts.load_draft(name, placer)
  if draft.tokenizer.vocab_hash() != target.tokenizer.vocab_hash():
    raise ValueError(f"draft model {name!r} has another tokenizer than the target: the same "
                     "token ids stand for other texts")
  rows, size = draft.config.vocab_size, target.config.vocab_size
  if rows != size:
    draft = placed(draft._replace(config=dataclasses.replace(draft.config, vocab_size=size),
                                  params=with_vocab_size(draft.params, size)), placer)
  return draft.config, draft.params, min(rows, size, target.tokenizer.vocab_size)


def placed(loaded: LoadedModel, placer: Placer) -> LoadedModel:
  """A model loaded before, on this engine's devices."""
  config, put = placer(loaded.config)
  return loaded._replace(config=config, params=place_params(loaded.params, put))

