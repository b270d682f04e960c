"""The page allocator: nothing is lost, nothing is given twice."""

from __future__ import annotations

import collections

import hypothesis
import hypothesis.strategies as st
import pytest

from jspec.engine.pages import OutOfPages, PageAllocator, PageKeys

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


# ------------------------------------------------------------------ contents

CACHE_EVENTS = st.lists(st.tuples(
    st.sampled_from(["begin", "publish", "end", "end", "forget"]), st.integers(0, 7),
    st.integers(0, 4)), max_size=80)


def text_of(number: int, length: int) -> list[int]:
  """Texts of 2-token pages that begin alike: number's bits say which way each page goes."""
  return [token for i in range(length) for token in (i, number >> i & 1)]


@hypothesis.given(st.integers(1, 8), CACHE_EVENTS)
def test_what_is_found_is_what_was_published(num_pages, events):
  """Against a model that remembers the contents each page was given."""
  allocator, held, written = PageAllocator(num_pages), [], {}
  for event, number, length in events:
    text = text_of(number, length)
    keys = PageKeys(2).upto(text, len(text))
    if event == "begin":
      found = allocator.find(keys)
      assert [written[page] for page in found] == [tuple(text[:2 * i + 2])
                                                   for i in range(len(found))]
      if length - len(found) > allocator.num_free - allocator.num_idle(found):
        continue
      allocator.share(found)
      pages = found + allocator.allocate(length - len(found))
      assert len(set(pages)) == length
      written |= {page: tuple(text[:2 * i + 2]) for i, page in enumerate(pages)}
      held.append((pages, keys))
    elif event == "forget":
      allocator.forget()
      assert allocator.find(keys) == []
    elif held and event == "publish":
      allocator.publish(*held[number % len(held)])
    elif held:
      allocator.free(held.pop(number % len(held))[0])
    owned = {page for pages, _ in held for page in pages}
    assert allocator.num_free == num_pages - len(owned)
  for pages, _ in held:
    allocator.free(pages)
  assert sorted(allocator.allocate(num_pages)) == list(range(num_pages))
  assert not any(allocator.find(PageKeys(2).upto(text_of(n, 1), 2)) for n in range(8))


def test_the_longest_unused_goes_first_and_a_texts_end_before_its_beginning():
  allocator, keys = PageAllocator(6), {}
  for name in (1, 2, 4):
    pages = allocator.allocate(2)
    keys[name] = PageKeys(1).upto([name, name], 2)
    allocator.publish(pages, keys[name])
    allocator.free(pages)
  found = lambda name: len(allocator.find(keys[name]))
  first = allocator.find(keys[1])
  allocator.share(first)  # used again: now 2 is the longest unused
  allocator.free(first)
  allocator.allocate(1)
  assert [found(name) for name in (1, 2, 4)] == [2, 1, 2]
  allocator.allocate(2)
  assert [found(name) for name in (1, 2, 4)] == [2, 0, 1]


def test_a_page_in_use_is_never_given_away():
  allocator = PageAllocator(2)
  mine = allocator.allocate(1)
  allocator.publish(mine, [b"mine"])
  allocator.allocate(1)
  with pytest.raises(OutOfPages):
    allocator.allocate(1)
  assert allocator.find([b"mine"]) == mine


def test_keys_depend_on_all_that_came_before():
  keys = lambda text, count: PageKeys(2).upto(text, count)
  assert keys([1, 2, 3, 4, 5], 5) == keys([1, 2, 3, 4, 9, 9], 5)  # the fifth fills no page
  assert len({*keys([1, 2, 3, 4], 4), *keys([1, 9, 3, 4], 4), *keys([3, 4], 2)}) == 5
  salted = [PageKeys(2, salt).upto([1, 2, 3, 4], 4) for salt in (None, "a", "b", "a")]
  assert salted[1] == salted[3] and len({key for keys in salted for key in keys}) == 6
  grows = PageKeys(2)
  assert grows.upto([1, 2, 3], 3) + grows.upto([1, 2, 3, 4], 4)[1:] == keys([1, 2, 3, 4], 4)
