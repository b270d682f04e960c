"""The page allocator: which pages of the KV pools are whose. No jax."""

from __future__ import annotations


class OutOfPages(Exception):
  """The pool cannot give that many pages now."""


class PageAllocator:
  """Reference-counted pages 0..num_pages - 1; the same ids serve the target and every drafter."""

  def __init__(self, num_pages: int):
    self.num_pages = num_pages
    self._free = list(range(num_pages - 1, -1, -1))
    self._count = [0] * num_pages

  @property
  def num_free(self) -> int:
    return len(self._free)

  def allocate(self, count: int) -> list[int]:
    if count > len(self._free):
      raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
    pages = [self._free.pop() for _ in range(count)]
    for page in pages:
      self._count[page] = 1
    return pages

  def share(self, pages: list[int]) -> None:
    """One more owner for each page."""
    for page in pages:
      if not self._count[page]:
        raise ValueError(f"page {page} is free and cannot be shared")
      self._count[page] += 1

  def free(self, pages: list[int]) -> None:
    """One owner less for each page; the last one returns it to the pool."""
    for page in pages:
      if not self._count[page]:
        raise ValueError(f"page {page} is already free")
      self._count[page] -= 1
      if not self._count[page]:
        self._free.append(page)
