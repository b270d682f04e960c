"""A target whose next token depends on the last one alone, and heads that know it by heart.

Its layers add nothing to the embedding e_x, so the logits after x are a table T[x]. Each head can
then be given parameters that make its greedy draft always right, or always wrong.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import tiny

from jspec.config import ModelConfig
from jspec.heads.config import EagleConfig, MedusaConfig, MlpSpeculatorConfig
from jspec.heads.init import init_head

V, E = tiny.VOCAB, tiny.TARGET.width
LAYER = ModelConfig("tiny", vocab_size=V, width=E, num_layers=1, num_heads=4, num_kv_heads=2,
                    head_dim=8, mlp_dim=48, max_positions=512)
MEDUSA = MedusaConfig(E, V, num_heads=4)
MLP = MlpSpeculatorConfig(E, V, n_predict=4, inner_dim=E)
EAGLE = EagleConfig(1, LAYER, E)
EAGLE3 = EagleConfig(3, LAYER, E, feature_layers=(0, 1, 2), has_head=True,
                     norm_before_residual=True)


@functools.cache
def embedding():
  """[V, E] of one norm, so that RMSNorm leaves it alone; its first coordinate is constant."""
  x = np.random.default_rng(0).normal(size=(V, E))
  x[:, 0] = 0
  x *= np.sqrt(E - 1) / np.linalg.norm(x, axis=1, keepdims=True)
  x[:, 0] = 1
  return x


@functools.cache
def table():
  """[V, V], the logits after each token: a clear favourite, a permutation of one long cycle."""
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(V, V))
  order = rng.permutation(V)
  logits[order, np.roll(order, -1)] = logits.max(1)[order] + 4
  return logits


def after(x, times):
  for _ in range(times):
    x = table().argmax(1)[x]
  return x


def solve(rows, images):
  """The matrix that maps each of V independent rows to its image."""
  matrix, *_ = np.linalg.lstsq(rows, images, rcond=None)
  np.testing.assert_allclose(rows @ matrix, images, atol=1e-6)
  return jnp.array(matrix, jnp.float32)


def zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


@functools.cache
def target_params():
  params = tiny.params_of(tiny.TARGET, 0, 1.0)
  for layer in params["layers"]:
    layer["o"], layer["down"] = zeros(layer["o"]), zeros(layer["down"])
  params["final_norm"] = {"scale": jnp.ones(E)}
  return {**params, "embed": jnp.array(embedding(), jnp.float32),
          "head": {"w": solve(embedding(), table())}}


def head_params(config, right: bool):
  """Drafters' params of a head that is always right, or always wrong."""
  params = init_head(jax.random.key(3), config)
  make = {MedusaConfig: medusa, MlpSpeculatorConfig: mlp}.get(type(config)) or (
      eagle if config.version == 1 else eagle3)
  sign = 1 if right else -1  # wrong: what is true is what it likes least
  shared = {name: x for name, x in target_params().items() if name != "layers"}
  return {"head": make(params, sign), "target": shared}


def medusa(params, sign):
  """Head i knows the token i + 2 after the one whose hidden state it sees."""
  for i, head in enumerate(params["heads"]):
    head["blocks"] = zeros(head["blocks"])
    head["head"] = {"w": solve(embedding(), sign * np.eye(V)[after(np.arange(V), i + 2)])}
  return params


def mlp(params, sign):
  """The state of each stage is that of its token alone."""
  n = len(params["stages"])
  state_weight = 0.5 ** (0.5 / n)
  factor = math.sqrt((1 - state_weight**2) * E / 2) / state_weight
  for stage in params["stages"]:
    stage["proj"] = zeros(stage["proj"])
    x = np.array(stage["emb"], np.float64) * factor
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    state = x * scipy.special.ndtr(x)
    stage["head"] = {"w": solve(state, sign * table())}
  return params


def eagle(params, sign):
  """The next feature is the embedding, or its opposite."""
  layer = params["layers"][0]
  layer["o"], layer["down"] = zeros(layer["o"]), zeros(layer["down"])
  return {**params, "fc": {"w": jnp.concatenate([sign * jnp.eye(E), jnp.zeros((E, E))])}}


def eagle3(params, sign):
  """Nothing is left of the feature; attention finds the token itself alone, and its embedding."""
  layer = params["layers"][0]
  heads, kv, h = LAYER.num_heads, LAYER.num_kv_heads, LAYER.head_dim
  constant = lambda size: jnp.zeros((2 * E, size)).at[0].set(
      jnp.tile(jnp.where(jnp.arange(h) < h // 2, 50.0, 0.0), size // h))
  layer["q"], layer["k"] = {"w": constant(heads * h)}, {"w": constant(kv * h)}
  seen = np.random.default_rng(4).normal(size=(E, kv * h)) / np.sqrt(E)
  layer["v"] = {"w": jnp.concatenate([jnp.array(seen, jnp.float32), jnp.zeros((E, kv * h))])}
  back = np.zeros((heads * h, E))  # one query head of each kv head
  back[[*range(h), *range(2 * h, 3 * h)]] = solve(embedding() @ seen, embedding())
  layer["o"] = {"w": jnp.array(back, jnp.float32)}
  layer["down"], layer["feature_norm"] = zeros(layer["down"]), zeros(layer["feature_norm"])
  return {**params,
          "head": {"w": solve(embedding(), sign * table())}}
