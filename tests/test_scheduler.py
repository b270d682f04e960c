"""Admission: first come, first served, within slots and pages."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from tiny_llm import byte_tokenizer

from jspec.request import Request
from jspec.sampling_params import SamplingParams
from jspec.scheduler import Scheduler

TOKENIZER = byte_tokenizer()


def request(name="r", prompt=3, limit=5) -> Request:
  return Request(name, 0, (5,) * prompt, SamplingParams(), limit, TOKENIZER)


def admitted(scheduler):
  return [(slot, r.request_id, len(pages)) for slot, r, pages in scheduler.admit()]


@pytest.mark.parametrize("prompt, limit, lookahead, pages", [
  (1, 1, 1, 1), (3, 4, 1, 1), (3, 4, 2, 2), (8, 8, 8, 3), (7, 1, 1, 2)])
def test_pages_hold_prompt_output_and_lookahead(prompt, limit, lookahead, pages):
  scheduler = Scheduler(1, 10, 8, lookahead)
  assert scheduler.pages_for(request(prompt=prompt, limit=limit)) == pages


def test_a_request_larger_than_the_pool_is_refused():
  scheduler = Scheduler(num_slots=2, num_pages=3, page_size=4, lookahead=2)
  scheduler.add(request(prompt=6, limit=4))  # exactly three pages
  with pytest.raises(ValueError, match="big needs 4 pages of 4 tokens, but the cache has 3"):
    scheduler.add(request("big", prompt=6, limit=5))
  assert len(scheduler.waiting) == 1 and len(admitted(scheduler)) == 1


def test_a_small_request_does_not_overtake_a_large_one():
  scheduler = Scheduler(num_slots=3, num_pages=4, page_size=4, lookahead=1)
  for name, limit in (("a", 5), ("large", 12), ("small", 1)):
    scheduler.add(request(name, limit=limit))
  [(slot, name, _)] = admitted(scheduler)
  assert name == "a" and admitted(scheduler) == []  # though "small" would fit
  scheduler.finish(slot)
  assert [name for _, name, _ in admitted(scheduler)] == ["large"]


def test_requests_wait_for_a_slot():
  scheduler = Scheduler(num_slots=2, num_pages=99, page_size=4, lookahead=1)
  for name in "abc":
    scheduler.add(request(name))
  first = admitted(scheduler)
  assert [name for _, name, _ in first] == ["a", "b"]
  scheduler.finish(first[0][0])
  assert [(slot, name) for slot, name, _ in admitted(scheduler)] == [(first[0][0], "c")]


def test_abort_finds_waiting_and_running_requests_by_identity():
  scheduler = Scheduler(num_slots=1, num_pages=99, page_size=4, lookahead=1)
  running, waiting, stranger = request("x"), request("x"), request("x")
  scheduler.add(running)
  scheduler.add(waiting)
  [(slot, _, _)] = admitted(scheduler)
  assert scheduler.abort(stranger) is None
  assert list(scheduler.waiting) == [waiting] and scheduler.running == {slot: running}
  assert scheduler.abort(waiting) is None and not scheduler.waiting
  assert scheduler.abort(running) == slot and not scheduler.running
  assert scheduler.abort(running) is None
  assert scheduler.allocator.num_free == 99


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(1, 4), st.integers(1, 12), st.lists(st.tuples(
    st.sampled_from(["add", "admit", "finish", "abort"]), st.integers(0, 40)), max_size=60))
def test_any_sequence_of_events_is_fair_and_balances_to_zero(num_slots, num_pages, events):
  """Admission order is arrival order, pages are disjoint, and in the end all is free again."""
  scheduler = Scheduler(num_slots, num_pages, page_size=4, lookahead=2)
  order, started, pages = [], [], {}
  gone = set()
  for event, number in events:
    alive = [r for r in order if id(r) not in gone]
    if event == "add":
      r = request(limit=number + 1)
      fits = scheduler.pages_for(r) <= num_pages
      if fits:
        scheduler.add(r)
        order.append(r)
      else:
        with pytest.raises(ValueError):
          scheduler.add(r)
    elif event == "admit":
      for slot, r, own in scheduler.admit():
        assert slot not in pages and 0 <= slot < num_slots
        assert not set(own) & {p for other in pages.values() for p in other}
        pages[slot] = own
        started.append(r)
    elif event == "finish" and scheduler.running:
      slot = sorted(scheduler.running)[number % len(scheduler.running)]
      gone.add(id(scheduler.running[slot]))
      scheduler.finish(slot)
      del pages[slot]
    elif event == "abort" and alive:
      r = alive[number % len(alive)]
      gone.add(id(r))
      pages.pop(scheduler.abort(r), None)
    assert scheduler.allocator.num_free == num_pages - sum(map(len, pages.values()))
  places = [order.index(r) for r in started]
  assert places == sorted(places)
  for r in order:
    scheduler.abort(r)
  assert scheduler.allocator.num_free == num_pages and not scheduler.running
  small = request(limit=1)
  if scheduler.pages_for(small) <= num_pages:
    for _ in range(num_slots + 1):
      scheduler.add(request(limit=1))
    assert len(admitted(scheduler)) == min(num_slots, num_pages // scheduler.pages_for(small))
