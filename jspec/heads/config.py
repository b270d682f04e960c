"""What a drafting head is: frozen, hashable, validated when built; its parameter tree beside it.

All matrices (in, out), norms always float32, as in model/transformer.py. Every kind of head says of
itself, so that nobody need ask which kind it is:

  method: the name that speculative_config knows it under;
  width, target_width, vocab_size: of its layers, of the target's features, of the target;
  draft_vocab_size: how many tokens it can draft, 0: all of the target's;
  shared: which of "embedding" and "lm_head" it uses of the target;
  taps(num_layers): the target's hidden states that fill the feature, for a target of that many
    layers; (): the final one, as it is;
  reads_features(target_width): the leaf that meets the features first, and its shape (out, in) in
    checkpoints for a target of that width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.config import MAX_LAYERS, MAX_REAL, MAX_SIZE, ModelConfig
from jspec.config.checks import check_int, check_number

Path = tuple[Any, ...]  # of a leaf of a parameter tree


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Medusa heads (Cai et al. 2024). Head i predicts the token i + 2 places after the hidden state.

    heads: list of {blocks: list of {w [E, E], b? [E]}, head: {w [E, Vd]}};
    target_id? i32[Vd], where the heads know only some of the target's tokens
  """

  width: int  # E, of the target's final hidden state
  vocab_size: int  # V, the target's
  num_heads: int
  num_layers: int = 1  # residual blocks per head
  has_bias: bool = True
  shares_head: bool = False  # logits by the target's own lm_head: no `head` in the tree
  draft_vocab_size: int = 0  # Vd; 0: V, and no target_id
  logit_scale: float = 1.0

  def __post_init__(self):
    _check_sizes(self, "width", "vocab_size")
    for name in ("num_heads", "num_layers"):
      check_int(f"head config: {name}", getattr(self, name), 1, MAX_LAYERS)
    check_number("head config: logit_scale", self.logit_scale, -MAX_REAL, MAX_REAL)
    _check_draft_vocab(self)

  method = "medusa"

  @property
  def target_width(self) -> int:
    return self.width

  @property
  def shared(self) -> tuple[str, ...]:
    return ("lm_head",) if self.shares_head else ()

  def taps(self, num_layers: int) -> tuple[int, ...]:
    return ()

  def reads_features(self, target_width: int) -> tuple[Path, tuple[int, int]]:
    return ("heads", 0, "blocks", 0, "w"), (target_width, target_width)


@dataclasses.dataclass(frozen=True)
class MlpSpeculatorConfig:
  """MLPSpeculator (Wertheimer et al. 2024): n_predict MLPs, each fed the last one's state.

    stages: list of n_predict {emb [V, I], proj: {w [E or I, I]}, ln: {scale [I], bias [I]},
                               head: {w [I, V]}}; tied ones are the same arrays
  """

  width: int  # E, of the target's final hidden state
  vocab_size: int
  n_predict: int
  inner_dim: int  # I
  scale_input: bool = False
  tie_weights: bool = False  # as in the checkpoint; the tree has every stage in any case
  top_k_tokens_per_head: tuple[int, ...] = ()  # for candidate trees
  n_candidates: int = 5  # as the checkpoint suggests

  def __post_init__(self):
    _check_sizes(self, "width", "vocab_size", "inner_dim", "n_candidates")
    check_int("head config: n_predict", self.n_predict, 1, MAX_LAYERS)
    for number in self.top_k_tokens_per_head:
      check_int("head config: each of top_k_tokens_per_head", number, 1, MAX_SIZE)
    if self.top_k_tokens_per_head and len(self.top_k_tokens_per_head) != self.n_predict:
      raise ValueError(f"head config: top_k_tokens_per_head={self.top_k_tokens_per_head} must have "
                       f"n_predict={self.n_predict} numbers")

  method = "mlp_speculator"
  draft_vocab_size = 0

  @property
  def shared(self) -> tuple[str, ...]:
    return ()

  @property
  def target_width(self) -> int:
    return self.width

  def taps(self, num_layers: int) -> tuple[int, ...]:
    return ()

  def reads_features(self, target_width: int) -> tuple[Path, tuple[int, int]]:
    return ("stages", 0, "proj", "w"), (self.inner_dim, target_width)


@dataclasses.dataclass(frozen=True)
class EagleConfig:
  """EAGLE-1/2 (Li et al. 2024) and EAGLE-3 (Li et al. 2025) heads.

    fc: {w [F, E], b?} for version 3, {w [2E, E], b?} for version 1, input (embedding, feature);
    layers: as in the target, but the first has no attn_norm; in version 3 its q, k and v are
      [2E, ...], input (embedding, feature), and it has embed_norm [E] and feature_norm [E];
    final_norm?: version 3; head? {w [E, Vd]}: without one (has_head) the target's lm_head is used,
      its rows at target_id where there is one;
    embed? [V, E]: else the target's; target_id? i32[Vd]: the target's token of each draft token;
    fc_norm?: one norm over F (norm_before_fc), or a list of one per tap (fc_norm)
  F is the width of the target's features, len(taps) * target_width.
  """

  version: int  # 1 (EAGLE-1 and -2) or 3
  layer: ModelConfig  # of the decoder layers; its vocab_size is the target's
  target_width: int
  draft_vocab_size: int = 0  # Vd; 0: V, and no target_id
  feature_layers: tuple[int, ...] = ()  # version 3: hidden states as in transformers' output;
  # (): (2, L // 2, L - 3) of the target's L layers. Version 1 uses the final hidden state.
  num_taps: int = 3  # feature_layers, or as many as fc was made for
  has_embed: bool = False
  has_head: bool = False
  norm_before_residual: bool = False  # the residual stream starts with the normed feature
  norm_before_fc: bool = False
  fc_norm: bool = False
  norm_output: bool = False  # feed back the normed hidden state, not the residual stream

  def __post_init__(self):
    if self.version not in (1, 3):
      raise ValueError(f"head config: EAGLE version must be 1 or 3, got {self.version}")
    _check_sizes(self, "target_width", "num_taps")
    if self.feature_layers and len(self.feature_layers) != self.num_taps:
      raise ValueError(f"head config: feature_layers={self.feature_layers} must have "
                       f"num_taps={self.num_taps} numbers")
    if self.norm_before_fc and self.fc_norm:
      raise ValueError("head config: norm_before_fc and fc_norm exclude each other")
    _check_draft_vocab(self)

  @property
  def method(self) -> str:
    return "eagle3" if self.version == 3 else "eagle"

  @property
  def width(self) -> int:
    return self.layer.width

  @property
  def vocab_size(self) -> int:
    return self.layer.vocab_size

  @property
  def shared(self) -> tuple[str, ...]:
    return (() if self.has_embed else ("embedding",)) + (() if self.has_head else ("lm_head",))

  def taps(self, num_layers: int) -> tuple[int, ...]:
    if self.version == 1:
      return (num_layers,)
    return self.feature_layers or (2, num_layers // 2, num_layers - 3)

  def reads_features(self, target_width: int) -> tuple[Path, tuple[int, int]]:
    inputs = self.width + target_width if self.version == 1 else self.num_taps * target_width
    return ("fc", "w"), (self.width, inputs)


HeadConfig = MedusaConfig | MlpSpeculatorConfig | EagleConfig


def _check_sizes(config, *names: str) -> None:
  for name in names:
    check_int(f"head config: {name}", getattr(config, name), 1, MAX_SIZE)


def _check_draft_vocab(config) -> None:
  check_int("head config: draft_vocab_size", config.draft_vocab_size, 0, MAX_SIZE)
  if config.draft_vocab_size > config.vocab_size:
    raise ValueError(f"head config: draft_vocab_size={config.draft_vocab_size} must lie in "
                     f"0..vocab_size={config.vocab_size}")
