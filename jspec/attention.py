"""Chooses the paged-attention implementation: one signature, several kernels."""

from __future__ import annotations

from jspec.pallas import reference

# In order of preference. Each entry has reference.paged_attention's signature and raises
# NotImplementedError, before launching anything, for what it cannot do.
IMPLEMENTATIONS = {"reference": reference.paged_attention}


def paged_attention(q, k_pages, v_pages, page_table, length, tree_mask, **options):
  """pallas/reference.py's paged_attention, by the first implementation that can do the case."""
  for implementation in IMPLEMENTATIONS.values():
    try:
      return implementation(q, k_pages, v_pages, page_table, length, tree_mask, **options)
    except NotImplementedError:
      continue
  raise NotImplementedError(f"no paged attention for q{q.shape}, pages{k_pages.shape}")
