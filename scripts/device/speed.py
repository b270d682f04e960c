"""The parts of device_check.py that time attention and the target's forward pass."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jspec.compile_check import models
from jspec.model import cache, transformer
from jspec.model.execution import Execution
from jspec.model.params import init_params
from jspec.model.rows import chain_mask, pack
from jspec.pallas import tree_bits
from scripts.device.part import Clock, Setup, say

PAGE = 128


def attention_bandwidth(setup: Setup, clock: Clock, found: dict, report: dict) -> None:
  """Bytes of keys and values per second, as a share of what a large copy moves."""
  size = 2**20 if setup.smoke else 2**30
  x = jnp.zeros(size // 4, jnp.int32)
  add = jax.jit(lambda x: x + 1)
  copied = 2 * size / _seconds([lambda: add(x)], 5)[0]
  found["copy_gb_per_s"] = copied / 1e9
  say(f"copy: {copied / 1e9:.0f} GB/s")
  found["decode"] = []
  contexts = (256,) if setup.smoke else (4096,) if setup.quick else (4096, 16384)
  rows = [(batch, context, kv_dtype, backend) for context in contexts
          for batch in ((1,) if setup.smoke else (1, 8, 32)) for kv_dtype in ("bfloat16", "int8")
          for backend in setup.backends() if backend != "reference"]
  for batch, context, kv_dtype, backend in clock.each(rows, str):
    row = {"batch": batch, "context": context, "kv_dtype": kv_dtype, "backend": backend}
    found["decode"].append(row)
    try:
      per_second = _decode_attention(setup.attend(backend), batch, context, kv_dtype, setup.smoke)
    except NotImplementedError as refusal:
      row["refused"] = str(refusal)
      say(f"{row}")
      continue
    row |= {"gb_per_s": per_second / 1e9, "share_of_copy": per_second / copied}
    say(f"{row}")


def _decode_attention(attend, batch: int, context: int, kv_dtype: str, smoke: bool) -> float:
  """Bytes per second of one query per slot, at Llama-3.1-8B's heads."""
  heads, num_kv, head_dim = (4, 2, 64) if smoke else (32, 8, 128)
  pages = batch * context // PAGE
  # As many layers as no cache holds: one layer's pages may fit a GPU's.
  layers = 2 if smoke else max(2, min(32, 2**29 // (pages * PAGE * num_kv * head_dim)))
  shape = (layers * pages, PAGE, num_kv * head_dim)
  k, v = _random_pages(0, shape, kv_dtype), _random_pages(1, shape, kv_dtype)
  scale = jnp.full((shape[0], num_kv, PAGE), 0.01) if kv_dtype == "int8" else None
  q = jax.random.normal(jax.random.key(2), (batch, 1, heads, head_dim), jnp.bfloat16)
  table = jax.random.permutation(jax.random.key(3), pages).reshape(batch, -1).astype(jnp.int32)
  length = jnp.full(batch, context - 1, jnp.int32)
  words = tree_bits.pack(jnp.ones((batch, 1, 1), bool))

  @jax.jit
  def run(q, k, v, scale):
    return jax.lax.fori_loop(0, layers, lambda i, q: attend(
        q, k, v, table + i * pages, length, words, scale=0.01, is_chain=True, k_scale=scale,
        v_scale=scale), q)

  seconds = _seconds([lambda: run(q, k, v, scale)], 5)[0] / layers
  per_position = 2 * num_kv * (head_dim * k.dtype.itemsize + (4 if scale is not None else 0))
  return batch * context * per_position / seconds


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_pages(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
  return jax.random.bits(jax.random.key(seed), shape, jnp.uint8).astype(dtype)


def _seconds(runs, repeats: int, calls: int = 4) -> list[float]:
  """Median seconds of each run, taken in turns; several calls at a time hide the host's share."""
  for run in runs:
    jax.block_until_ready(run())
  times: list[list[float]] = [[] for _ in runs]
  for _ in range(repeats):
    for run, of_run in zip(runs, times, strict=True):
      start = time.perf_counter()
      jax.block_until_ready([run() for _ in range(calls)][-1])
      of_run.append((time.perf_counter() - start) / calls)
  return [statistics.median(of_run) for of_run in times]


def verification_cost(setup: Setup, clock: Clock, found: dict, report: dict) -> None:
  """v(T)/v(1): a forward over T tokens against one over one, random Llama-3.1-8B in bfloat16."""
  full = models.find("llama-3.1-8b")
  if setup.smoke:
    full = dataclasses.replace(full, num_layers=4, width=64, vocab_size=256, mlp_dim=64,
                               num_heads=4, num_kv_heads=2, head_dim=64)
  config = models.with_depth(full, setup.layers)
  context = 256 if setup.smoke else 4096
  widths = (1, 4) if setup.smoke else (1, 8, 32) if setup.quick else (1, 2, 4, 8, 16, 32, 64)
  params = init_params(jax.random.key(0), config, jnp.bfloat16)
  size = lambda p: sum(x.nbytes for x in jax.tree.leaves(p))
  per_layer = size(params["layers"]) / setup.layers + 4 * context * (
      config.num_kv_heads * config.head_dim)
  read = per_layer * full.num_layers + size(params.get("head", params["embed"]))
  found |= {"layers_reported": full.num_layers, "context": context,
            "extrapolated_from_layers": [1, setup.layers]}
  depths = [({**params, "layers": params["layers"][:n]}, models.with_depth(config, n))
            for n in (1, setup.layers)]
  for backend in clock.each(setup.backends(), str):
    try:
      programs = [_lower(setup, backend, *depth, width, context)
                  for depth in depths for width in widths]
    except NotImplementedError as refusal:
      found[backend] = {"refused": str(refusal)}
      say(f"{backend}: {found[backend]}")
      continue
    with ThreadPoolExecutor(4) as threads:  # XLA compiles without holding Python up
      runs = list(threads.map(_compile, *zip(*programs, strict=True)))
    seconds = _seconds(runs, 3 if setup.smoke else 7)
    whole = [one + (deep - one) * (full.num_layers - 1) / (setup.layers - 1)
             for one, deep in zip(seconds, seconds[len(widths):], strict=False)]
    copied = report["attention_bandwidth"].get("copy_gb_per_s", float("nan")) * 1e9
    found[backend] = {
        "milliseconds": {t: 1e3 * s for t, s in zip(widths, whole, strict=True)},
        "over_one": {t: s / whole[0] for t, s in zip(widths, whole, strict=True)},
        "share_of_copy": read / whole[0] / copied}
    say(f"{backend}: {found[backend]}")


def _lower(setup: Setup, backend: str, params, config, width: int, context: int):
  """A forward of `width` tokens that writes its pages in place, and its arguments."""
  pages = cache.init_pages(config, context // PAGE + 1, PAGE, jnp.bfloat16)
  table = jnp.arange(context // PAGE + 1, dtype=jnp.int32)[None]
  mask, rows = chain_mask(1, width), pack(jnp.ones((1, width), bool), width)

  def forward(params, pages):
    hidden, _, pages = transformer.forward(
        params, config, jnp.zeros((1, width), jnp.int32), mask, rows, pages, table,
        jnp.array([context - width]), how=Execution(setup.attend(backend)), is_chain=True)
    return transformer.logits(params, config, hidden).argmax(-1), pages

  return jax.jit(forward, donate_argnums=1).lower(params, pages), params, pages


def _compile(lowered, params, pages):
  compiled, held = lowered.compile(), [pages]

  def run():
    token, held[0] = compiled(params, held[0])
    return token

  return run
