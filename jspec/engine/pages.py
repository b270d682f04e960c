"""The page allocator: which pages of the KV pools are whose, and what they hold. No jax."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import numpy as np


class OutOfPages(Exception):
  """The pool cannot give that many pages now."""


class PageAllocator:
  """Reference-counted pages 0..num_pages - 1; the same ids serve the target and every drafter.

  A full page may be published under a key that names its contents. It then outlives its owners, as
  long as nobody needs the room: pages without an owner are given away the longest unused first.
  """

  def __init__(self, num_pages: int):
    self.num_pages = num_pages
    self._empty = list(range(num_pages - 1, -1, -1))
    self._count = [0] * num_pages
    self._page: dict[bytes, int] = {}  # published, by key
    self._key: dict[int, bytes] = {}
    # Published pages without an owner, the longest unused first.
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

  @property
  def num_free(self) -> int:
    """Pages that nobody owns, published ones among them."""
    return len(self._empty) + len(self._idle)

  def allocate(self, count: int) -> list[int]:
    """Pages for a new owner; published contents go only where no empty page is left."""
    if count > self.num_free:
      raise OutOfPages(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
    pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
    for page in pages:
      self._count[page] = 1
    return pages

  def _evict(self) -> int:
    page, _ = self._idle.popitem(last=False)
    del self._page[self._key.pop(page)]
    return page

  def share(self, pages: Sequence[int]) -> None:
    """One more owner for each page."""
    for page in pages:
      if not self._count[page] and page not in self._idle:
        raise ValueError(f"page {page} is free and cannot be shared")
      self._idle.pop(page, None)
      self._count[page] += 1

  def free(self, pages: Sequence[int]) -> None:
    """One owner less for each page; without any it is free, contents and all.

    The last pages of a text go first where room is needed: the others are of use without them.
    """
    for page in reversed(pages):
      if not self._count[page]:
        raise ValueError(f"page {page} is already free")
      self._count[page] -= 1
      if not self._count[page]:
        if page in self._key:
          self._idle[page] = None
        else:
          self._empty.append(page)

  def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
    """Full pages can be found by their keys from now on; of two alike the first is kept."""
    for page, key in zip(pages, keys, strict=True):
      if key not in self._page and page not in self._key:
        self._page[key], self._key[page] = page, key

  def withdraw(self, pages: Sequence[int]) -> None:
    """What these pages hold, which somebody owns, is found by nobody any more."""
    for page in pages:
      key = self._key.pop(page, None)
      if key is not None:
        del self._page[key]

  def forget(self) -> None:
    """Nothing that was published is found any more; who owns pages keeps them."""
    self._empty += self._idle
    self._idle.clear()
    self._page.clear()
    self._key.clear()

  def find(self, keys: Sequence[bytes]) -> list[int]:
    """The published pages of the first keys, up to one that is missing. Share them at once."""
    pages = []
    for key in keys:
      if key not in self._page:
        break
      pages.append(self._page[key])
    return pages

  def num_idle(self, pages: Sequence[int]) -> int:
    """Of the pages, those that nobody owns now."""
    return sum(page in self._idle for page in pages)


class PageKeys:
  """The keys of a text's full pages; each depends on all tokens up to the page's end.

  cache_salt: texts have keys in common only where theirs are equal.
  """

  def __init__(self, page_size: int, cache_salt: str | None = None):
    self._page_size = page_size
    self._keys: list[bytes] = []
    # Named apart from the pages, so that no tokens stand for a salt.
    self._salt = b"" if cache_salt is None else hashlib.blake2b(
        cache_salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache_salt").digest()

  def upto(self, text: Sequence[int], count: int) -> list[bytes]:
    """Of the full pages among the first `count` tokens of a text that only ever grows."""
    size = self._page_size
    for start in range(len(self._keys) * size, count - size + 1, size):
      before = self._keys[-1] if self._keys else self._salt
      page = np.asarray(text[start:start + size], np.int32).tobytes()
      self._keys.append(hashlib.blake2b(before + page, digest_size=16).digest())
    return self._keys[:count // size]
