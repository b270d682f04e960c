"""What the host hands to the device for one slot: numpy, alike in all processes of a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np

from jspec.engine.request import Request
from jspec.engine.scheduler import Tenant
from jspec.engine.slot_sampling import sampling_row
from jspec.types import SlotRequest


def slot_request(tenant: Tenant, page_row: np.ndarray, max_depth: int,
                 vocab_size: int) -> SlotRequest:
  """max_depth: of the drafter's drafts, where the request does not say how deep they may be."""
  request, draft = tenant.request, tenant.request.params.num_speculative_tokens
  fields: dict[str, Any] = dict(
      page_table=page_row, length=np.int32(tenant.done), limit=np.int32(request.limit),
      max_draft=np.int32(max_depth if draft is None else draft), key=request.key,
      sampling=sampling_row(request.row, request.prompt_ids, vocab_size, request.tokens))
  return SlotRequest(**fields)


def prompt_chunk(tenant: Tenant, size: int, count: int) -> np.ndarray:
  """i32[size + 1]: `count` tokens from where the tenant is, and what follows them."""
  request: Request = tenant.request
  text = [*tenant.text[tenant.done:tenant.done + count + 1], *request.tokens[-1:]][:count + 1]
  chunk = np.zeros(size + 1, np.int32)
  chunk[:len(text)] = text
  return chunk
