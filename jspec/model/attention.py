"""Chooses the paged-attention implementation: one signature, several kernels."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jspec.config import ATTENTION_BACKENDS

Attend = Callable[..., jax.Array]  # reference.paged_attention's signature

MODULES = {  # name -> module of jspec.pallas with a `paged_attention`
  "reference": "reference",
  "tpu": "paged_attention_tpu",
  "mosaic_gpu": "paged_attention_gpu",
  "triton": "paged_attention_triton",
}
PREFERENCE = {  # platform -> the implementations that run on it, best first
  "cpu": ("reference",),
  "gpu": ("mosaic_gpu", "triton", "reference"),
  "tpu": ("tpu", "reference"),
}


def choose(platform: str, backend: str = "auto", *, interpret: object = False,
           mesh: Mesh | None = None, split_heads: bool = True) -> Attend:
  """The attention for a platform ("cpu" | "gpu" | "tpu"), to be handed to model.forward.

  Each implementation raises NotImplementedError, before it launches anything, for what it cannot
  do; the next one is then tried. A backend asked for by name is the only one tried.

  Args:
    interpret: run the Pallas kernels on any platform, slowly: True, or parameters of an
      interpreter.
    mesh: heads, and the pages' kv heads, are split over its axis "tp", unless split_heads is
      False: then every device attends with all of them.
  """
  if backend not in ATTENTION_BACKENDS:
    raise ValueError(f"attention_backend {backend!r} is not one of {ATTENTION_BACKENDS}")
  if backend == "auto":
    names = PREFERENCE[platform]
  elif backend in PREFERENCE[platform] or interpret:
    names = (backend,)
  else:
    raise ValueError(f"attention_backend {backend!r} does not run on {platform}; "
                     f"use one of {('auto', *PREFERENCE[platform])}")

  def paged_attention(q, k_pages, v_pages, page_table, length, ancestors, **options):
    refused = []
    for name in names:
      try:
        out = _load(name, interpret)(q, k_pages, v_pages, page_table, length, ancestors, **options)
      except NotImplementedError as error:
        refused.append(f"{name}: {error}")
        continue
      _log(platform, name, tuple(refused))
      return out
    raise NotImplementedError(
        f"no paged attention for q{list(q.shape)} {q.dtype} with pages{list(k_pages.shape)} "
        f"{k_pages.dtype}: {'; '.join(refused)}")

  return paged_attention if mesh is None else _over_heads(paged_attention, mesh, split_heads)


def _load(name: str, interpret: object) -> Attend:
  kernel = importlib.import_module(f"jspec.pallas.{MODULES[name]}").paged_attention
  return kernel if name == "reference" else functools.partial(kernel, interpret=interpret)


@functools.cache
def _log(platform: str, name: str, refused: tuple[str, ...]) -> None:
  """Once for each choice and reason."""
  because = f" ({'; '.join(refused)})" if refused else ""
  logging.getLogger("jspec").info("paged attention on %s: %s%s", platform, name, because)


def _over_heads(attend: Attend, mesh: Mesh, split: bool) -> Attend:
  """Each device attends with its own heads to its own part of the pages: XLA splits no kernel."""
  heads, pages, scales = (P(None, None, "tp"), P(None, None, "tp"), P(None, "tp")) if split else (
      P(), P(), P())

  def paged_attention(q, k_pages, v_pages, page_table, length, ancestors, *, k_scale=None,
                      v_scale=None, **options):
    scale = None if k_scale is None else scales

    def local(q, k_pages, v_pages, page_table, length, ancestors, k_scale, v_scale):
      return attend(q, k_pages, v_pages, page_table, length, ancestors, k_scale=k_scale,
                    v_scale=v_scale, **options)

    # A kernel says nothing about which mesh axes its result varies over.
    return jax.shard_map(
        local, mesh=mesh, in_specs=(heads, pages, pages, P(), P(), P(), scale, scale),
        out_specs=heads, check_vma=False)(
            q, k_pages, v_pages, page_table, length, ancestors, k_scale, v_scale)

  return paged_attention
