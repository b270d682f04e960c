"""The page allocator: nothing is lost, nothing is given twice."""

from __future__ import annotations

import collections

import hypothesis
import hypothesis.strategies as st
import pytest

from jspec.pages import OutOfPages, PageAllocator

EVENTS = st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)),
                  max_size=60)


@hypothesis.given(st.integers(1, 9), EVENTS)
def test_accounts_balance_after_any_sequence_of_events(num_pages, events):
  """Against a multiset of owners; in the end everybody leaves and all pages are free."""
  allocator = PageAllocator(num_pages)
  owners: list[list[int]] = []
  for event, number in events:
    if event == "allocate" and number <= allocator.num_free:
      owners.append(allocator.allocate(number))
    elif event == "allocate":
      free = allocator.num_free
      with pytest.raises(OutOfPages, match=f"{number} pages wanted, {free} of {num_pages} free"):
        allocator.allocate(number)
    elif owners and event == "share":
      allocator.share(owners[number % len(owners)])
      owners.append(list(owners[number % len(owners)]))
    elif owners:
      allocator.free(owners.pop(number % len(owners)))
    held = collections.Counter(page for pages in owners for page in pages)
    assert allocator.num_free == num_pages - len(held)
    assert all(0 <= page < num_pages for page in held)
  for pages in owners:
    allocator.free(pages)
  assert sorted(allocator.allocate(num_pages)) == list(range(num_pages))


@hypothesis.given(st.lists(st.integers(0, 3), max_size=6))
def test_no_page_has_two_owners_unless_shared(sizes):
  allocator = PageAllocator(20)
  pages = [page for size in sizes for page in allocator.allocate(size)]
  assert len(set(pages)) == len(pages) == 20 - allocator.num_free


def test_freeing_or_sharing_a_free_page_is_refused():
  allocator = PageAllocator(3)
  page = allocator.allocate(1)
  allocator.share(page)
  allocator.free(page)
  allocator.free(page)
  with pytest.raises(ValueError, match=f"page {page[0]} is already free"):
    allocator.free(page)
  with pytest.raises(ValueError, match=f"page {page[0]} is free"):
    allocator.share(page)
  assert allocator.num_free == 3
