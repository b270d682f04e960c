"""Tiny models, and every kind of drafter on the tiny target.

A new drafter adds rows to CASES, named `<its key in DRAFTERS>` or `<key>_<variant>`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, draft_trees
from jspec.drafters.combined import combine
from jspec.drafters.draft_model import draft_model
from jspec.drafters.eagle import eagle, eagle_dynamic
from jspec.drafters.hidden_states import hidden_states
from jspec.drafters.medusa import medusa
from jspec.drafters.mlp_speculator import mlp_speculator
from jspec.drafters.ngram import ngram
from jspec.drafters.none import none
from jspec.drafters.suffix import suffix
from jspec.heads.config import EagleConfig, MedusaConfig, MlpSpeculatorConfig
from jspec.model.attention import Attend
from jspec.model.execution import Execution
from jspec.model.params import init_params
from jspec.pallas import reference
from jspec.speculation import tree
from jspec.speculation.drafter import Drafter
from jspec.types import NO_PARENT, PAD_TOKEN, DraftTree

VOCAB, PAGE, MAX_LEN = 12, 4, 96
TARGET = ModelConfig("tiny", vocab_size=VOCAB, width=32, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=8, mlp_dim=48, max_positions=512)
DRAFT = ModelConfig("tiny", vocab_size=VOCAB, width=16, num_layers=1, num_heads=2,
                    num_kv_heads=1, head_dim=8, mlp_dim=32, max_positions=512)


def params_of(config: ModelConfig, seed: int, sharpness: float) -> Any:
  """Random parameters; logits have a standard deviation of about `sharpness`."""
  params = init_params(jax.random.key(seed), config)
  # The smaller the embedding, the more the context counts: greedy text loops less.
  return {**params, "embed": 0.7 * params["embed"], "head": {"w": sharpness * params["head"]["w"]}}


@functools.cache
def target_params() -> Any:
  return params_of(TARGET, 5, 2.0)


def noisy_params() -> Any:
  """Nearly the target: its drafts are good, not perfect."""
  noise = params_of(TARGET, 6, 2.0)
  return jax.tree.map(lambda x, e: x + 0.25 * e, target_params(), noise)


def contrary_params() -> Any:
  """Likes what the target likes least."""
  return params_of(TARGET, 5, -2.0)


def small_params() -> Any:
  """Of 400 seeds the one that agrees best with the target: 29 % of argmaxes."""
  return params_of(DRAFT, 157, 1.5)


EAGLE1 = EagleConfig(1, TARGET, TARGET.width)
EAGLE3 = EagleConfig(3, DRAFT, TARGET.width, feature_layers=(0, 1, 2), has_embed=True,
                     has_head=True, draft_vocab_size=8)
EAGLE_TREE = tree.shape_of([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])


def eagle1_head() -> Any:
  """Nearly the target: half of its argmaxes. Its first layer has no norm, so that part of it is in
  the matrices; its last no norm at all. Of 60 seeds the best."""
  first, second = target_params()["layers"]
  embed = target_params()["embed"]
  scale = first["attn_norm"]["scale"][:, None] / jnp.sqrt((embed**2).mean())
  first = {k: v for k, v in first.items() if k != "attn_norm"}
  first |= {name: {"w": first[name]["w"] * scale} for name in "qkv"}
  feature = 0.02 * jax.random.normal(jax.random.key(58), (TARGET.width,) * 2) / TARGET.width**0.5
  return {"fc": {"w": jnp.concatenate([jnp.eye(TARGET.width), feature])},
          "layers": [first, second]}


def eagle3_head() -> Any:
  """Of 400 seeds the one that agrees best with the target: 21 % of argmaxes."""
  return jax.tree.map(jnp.array, eagle_oracle.random_head(EAGLE3, 241))


_eagle, _eagle_dynamic = functools.cache(eagle), functools.cache(eagle_dynamic)


def _eagle_case(config, head, shape, **options):
  """Of one shape, or EAGLE-2's where it is None."""
  def case(target: ModelConfig, attend: Attend = reference.paged_attention):
    rest = (target, PAGE, jnp.float32)
    how = Execution(attend)
    drafter = _eagle_dynamic(config, *rest, how=how, **options) if shape is None else (
        _eagle(config, shape, *rest, how=how, **options))
    shared = {k: target_params()[k] for k in ("embed", "head")}
    return drafter, {"head": head(), "target": shared}
  return case


def _chain(num_draft):
  return tree.shape_of(draft_trees.of_widths((1,) * num_draft))


_draft_model = functools.cache(draft_model)


def _draft(widths, sampled, config=DRAFT, params=small_params, confidence=0.0):
  def case(target: ModelConfig, attend: Attend = reference.paged_attention):
    assert config.vocab_size == target.vocab_size
    return _draft_model(config, widths, PAGE, jnp.float32, sampled, Execution(attend),
                        confidence=confidence), params()
  return case


def _suffix(num_draft: int, num_nodes: int | None = None):
  """With a window that any text can match."""
  def case(target: ModelConfig, attend=None):
    windows = np.full((1, 2, 16), PAD_TOKEN, np.int32)
    windows[0, 0, :12] = np.arange(12) % target.vocab_size
    return suffix(num_draft, 6, 2.0, 0.1, MAX_LEN + 1, PAGE, num_nodes), {"windows": windows}
  return case


def _combined(first, second):
  def case(target: ModelConfig, attend: Attend = reference.paged_attention):
    return combine(*first(target, attend), *second(target, attend))
  return case


def _plain(make: Callable[[ModelConfig], Drafter]):
  """The case of a drafter without a model of its own."""
  return lambda target, attend=None: (make(target), ())


def random_trees(num_nodes: int, vocab_size: int) -> Drafter:
  """Point-mass trees of random shape, size and tokens (siblings repeat), from the slot's key."""

  def propose_slot(root, key):
    keys = jax.random.split(key, 3)
    token = jax.random.randint(keys[0], (num_nodes,), 0, vocab_size).at[0].set(root)
    u = jax.random.uniform(keys[1], (num_nodes,))
    parent = [jnp.int32(NO_PARENT), jnp.int32(0), jnp.int32(0)]  # node 2 keeps it from a chain
    for i in range(3, num_nodes):  # parents never fall: breadth-first
      parent.append(parent[-1] + (u[i] * (i - parent[-1])).astype(jnp.int32))
    size = jax.random.randint(keys[2], (), 1, num_nodes + 1)
    return token, jnp.where(jnp.arange(num_nodes) < size, jnp.stack(parent), NO_PARENT)

  def propose(params, state, root, slots):
    del params  # unused
    return DraftTree(*jax.vmap(propose_slot)(root, slots.key), None), state

  return Drafter(lambda num_slots, num_pages: (), propose,
                 lambda params, state, slots, committed: state, num_nodes, num_nodes - 2)


MEDUSA = MedusaConfig(TARGET.width, VOCAB, num_heads=3)
MEDUSA_SOME = dataclasses.replace(MEDUSA, draft_vocab_size=8)
MLP = MlpSpeculatorConfig(TARGET.width, VOCAB, n_predict=3, inner_dim=16, scale_input=True)
LINE = draft_trees.of_widths((1, 1, 1))
BUSH = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def _normal(seed: int):
  rng = np.random.default_rng(seed)
  return lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)


def medusa_heads(config: MedusaConfig) -> Any:
  """Of 600 random ones each; a quarter of their argmaxes agree with the target's greedy text."""
  some = jnp.array([1, 2, 3, 4, 8, 9, 10, 11])  # what that text is mostly made of

  def head(seed, e=TARGET.width):
    draw = _normal(seed)
    block, w = {"w": draw(e, e) / e**0.5, "b": draw(e) / 4}, draw(e, VOCAB) / 2
    return {"blocks": [block], "head": {"w": w[:, some] if config.draft_vocab_size else w}}

  heads = {"heads": [head(seed) for seed in (596, 287, 338)]}
  return heads | ({"target_id": some} if config.draft_vocab_size else {})


def mlp_stages(config: MlpSpeculatorConfig) -> Any:
  """Of 600 random ones each; a third of their argmaxes agree with the target's greedy text."""
  def stage(seed, size):
    draw, inner = _normal(seed), config.inner_dim
    return {"emb": draw(VOCAB, inner) / 3, "proj": {"w": draw(size, inner) / size**0.5},
            "ln": {"scale": 1 + draw(inner) / 4, "bias": draw(inner) / 4},
            "head": {"w": draw(inner, VOCAB) / 2}}

  return {"stages": [stage(72, config.width), stage(528, config.inner_dim),
                     stage(319, config.inner_dim)]}


_medusa, _mlp_speculator = functools.cache(medusa), functools.cache(mlp_speculator)


def _medusa_case(paths, config=MEDUSA, **options):
  return lambda target, attend=None: (
      _medusa(config, tree.shape_of(paths), target, **options), {"head": medusa_heads(config)})


def _mlp_case(paths, **options):
  return lambda target, attend=None: (
      _mlp_speculator(MLP, tree.shape_of(paths), target, **options), {"head": mlp_stages(MLP)})


CASES: dict[str, Callable[..., tuple[Drafter, Any]]] = {  # (target, attend) -> drafter, params
    "none": _plain(lambda target: none()),
    "ngram": _plain(lambda target: ngram(4, 2, 1, MAX_LEN + 1, PAGE)),
    "ngram_latest": _plain(lambda target: ngram(3, 3, 1, MAX_LEN + 1, PAGE, latest=True)),
    "draft_model": _draft((1, 1, 1), False, TARGET, noisy_params),
    "draft_model_sampled": _draft((1, 1, 1), True),
    "draft_model_confident": _draft((1, 1, 1, 1), False, TARGET, noisy_params, confidence=0.6),
    "draft_model_confident_sampled": _draft((1, 1, 1, 1), True, TARGET, noisy_params, 0.3),
    "draft_model_tree": _draft((3, 2), False, TARGET, noisy_params),
    "draft_model_tree_sampled": _draft((3, 2, 1), True),
    "draft_model_self": _draft((1, 1, 1), False, TARGET, target_params),
    "draft_model_self_sampled": _draft((1, 1, 1), True, TARGET, target_params),
    "draft_model_self_tree": _draft((3, 2), False, TARGET, target_params),
    "draft_model_self_tree_sampled": _draft((2, 2), True, TARGET, target_params),
    "draft_model_contrary_sampled": _draft((1, 1), True, TARGET, contrary_params),
    "suffix": _suffix(5),
    "suffix_tree": _suffix(4, 9),
    "ngram+draft_model_sampled": _combined(
        _plain(lambda target: ngram(4, 3, 2, MAX_LEN + 1, PAGE)), _draft((1, 1, 1), True)),
    "suffix+draft_model_tree": _combined(
        _suffix(5, 8), _draft((3, 2), False, TARGET, noisy_params)),
    "medusa": _medusa_case(LINE),
    "medusa_confident": _medusa_case(LINE, confidence=0.6),
    "medusa_sampled": _medusa_case(LINE, MEDUSA_SOME, sampled=True, confidence=0.4),
    "medusa_tree": _medusa_case(BUSH, MEDUSA_SOME),
    "medusa_tree_sampled": _medusa_case(BUSH, sampled=True),
    "mlp_speculator": _mlp_case(LINE),
    "mlp_speculator_sampled": _mlp_case(LINE, sampled=True, confidence=0.4),
    "mlp_speculator_tree_sampled": _mlp_case(BUSH, sampled=True),
    "mlp_speculator_candidates": _mlp_case(draft_trees.of_widths((3, 2, 2)), n_candidates=4),
    "eagle": _eagle_case(EAGLE1, eagle1_head, _chain(3)),
    "eagle_confident": _eagle_case(EAGLE1, eagle1_head, _chain(4), confidence=0.5),
    "eagle_tree": _eagle_case(EAGLE1, eagle1_head, EAGLE_TREE),
    "eagle_tree_sampled": _eagle_case(EAGLE1, eagle1_head, EAGLE_TREE, sampled=True),
    "eagle_dynamic": _eagle_case(EAGLE1, eagle1_head, None, top_k=2, depth=3, total_tokens=7),
    "eagle3": _eagle_case(EAGLE3, eagle3_head, _chain(3)),
    "eagle3_tree_sampled": _eagle_case(EAGLE3, eagle3_head, EAGLE_TREE, sampled=True),
    "eagle3_sampled": _eagle_case(EAGLE3, eagle3_head, _chain(3), sampled=True),
    "eagle3_dynamic": _eagle_case(EAGLE3, eagle3_head, None, top_k=3, depth=3, total_tokens=9),
    "extract_hidden_states": _plain(
        lambda target: hidden_states((0, 1, 2), 3 * target.width, PAGE)),
    "random_trees": _plain(lambda target: random_trees(7, target.vocab_size)),
}
