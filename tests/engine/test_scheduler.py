"""Admission, growth and preemption: in order, within slots and pages."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from tiny_llm import byte_tokenizer

from jspec.engine.request import NewToken, Request
from jspec.engine.scheduler import Scheduler
from jspec.sampling_params import SamplingParams

TOKENIZER = byte_tokenizer()


def request(name="r", prompt=3, limit=5, priority=0, token=5) -> Request:
  return Request(name, 0, (token,) * prompt, SamplingParams(ignore_eos=True), limit, TOKENIZER,
                 priority=priority)


def admit(scheduler):
  return list(iter(scheduler.admit_next, None))


def admitted(scheduler):
  return [(t.slot, t.request.request_id, len(t.pages)) for t in admit(scheduler)]


def prefilled(tenant):
  tenant.done, tenant.is_active = len(tenant.text), True


def generated(tenant, tokens):
  for token in tokens:
    tenant.request.push(NewToken(token))


@pytest.mark.parametrize("prompt, limit, lookahead, most, first", [
  (1, 1, 1, 1, 1), (3, 4, 1, 1, 1), (3, 4, 2, 2, 1), (8, 8, 8, 3, 2), (7, 1, 2, 2, 2)])
def test_pages_hold_the_prompt_and_a_step_and_later_the_output(prompt, limit, lookahead, most,
                                                               first):
  scheduler = Scheduler(1, 10, 8, lookahead)
  scheduler.add(r := request(prompt=prompt, limit=limit))
  assert scheduler.most_pages(r) == most and admitted(scheduler) == [(0, "r", first)]
  tenant = scheduler.running[0]
  assert scheduler.grow(tenant, prompt + limit) and len(tenant.pages) == most


def test_a_request_larger_than_the_pool_is_refused():
  scheduler = Scheduler(num_slots=2, num_pages=3, page_size=4, lookahead=2)
  scheduler.add(request(prompt=6, limit=4))  # exactly three pages
  with pytest.raises(ValueError, match="big needs 4 pages of 4 tokens, but the cache has 3"):
    scheduler.add(request("big", prompt=6, limit=5))
  assert scheduler.num_waiting == 1 and len(admitted(scheduler)) == 1


def test_a_small_request_does_not_overtake_a_large_one():
  scheduler = Scheduler(num_slots=3, num_pages=5, page_size=4, lookahead=1, caching=False)
  for name, prompt in (("a", 5), ("large", 15), ("small", 1)):
    scheduler.add(request(name, prompt, limit=1))
  [(slot, name, _)] = admitted(scheduler)
  assert name == "a" and admitted(scheduler) == []  # though "small" would fit
  scheduler.finish(scheduler.running[slot])
  assert [name for _, name, _ in admitted(scheduler)] == ["large"]


def test_priority_goes_before_arrival():
  scheduler = Scheduler(num_slots=1, num_pages=9, page_size=4, lookahead=1)
  for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
    scheduler.add(request(name, priority=priority))
  order = []
  while scheduler.num_waiting:
    order += [name for _, name, _ in admitted(scheduler)]
    scheduler.finish(scheduler.running[0])
  assert order == ["c", "b", "d", "a"]


def test_requests_wait_for_a_slot():
  scheduler = Scheduler(num_slots=2, num_pages=99, page_size=4, lookahead=1)
  for name in "abc":
    scheduler.add(request(name))
  first = admitted(scheduler)
  assert [name for _, name, _ in first] == ["a", "b"]
  scheduler.finish(scheduler.running[first[0][0]])
  assert [(slot, name) for slot, name, _ in admitted(scheduler)] == [(first[0][0], "c")]


def test_whoever_comes_in_leaves_the_others_a_page_each():
  scheduler = Scheduler(num_slots=3, num_pages=4, page_size=4, lookahead=1, caching=False)
  for name in "abc":
    scheduler.add(request(name, prompt=2, limit=2))
  assert [name for _, name, _ in admitted(scheduler)] == ["a", "b"]


def test_abort_finds_waiting_and_running_requests_by_identity():
  scheduler = Scheduler(num_slots=1, num_pages=99, page_size=4, lookahead=1)
  running, waiting, stranger = request("x"), request("x"), request("x")
  scheduler.add(running)
  scheduler.add(waiting)
  [(slot, _, _)] = admitted(scheduler)
  assert scheduler.abort(stranger) is None
  assert scheduler.waiting == [waiting] and scheduler.running[slot].request is running
  assert scheduler.abort(waiting) is None and not scheduler.waiting
  assert scheduler.abort(running).slot == slot and not scheduler.running
  assert scheduler.abort(running) is None
  assert scheduler.allocator.num_free == 99


# ---------------------------------------------------------------- preemption


def test_the_last_in_order_is_preempted_and_comes_back_at_its_place():
  scheduler = Scheduler(num_slots=2, num_pages=5, page_size=4, lookahead=1, caching=False)
  for name in ("old", "young", "later"):
    scheduler.add(request(name, prompt=6, limit=9))
  assert len(admitted(scheduler)) == 2
  old, young = scheduler.running[0], scheduler.running[1]
  for tenant in (old, young):
    prefilled(tenant)
    generated(tenant, [7, 8, 9])
  assert scheduler.grow(old, 9) and not scheduler.grow(old, 14)
  assert scheduler.last() is young
  scheduler.preempt(young)
  assert scheduler.grow(old, 14) and scheduler.num_preemptions == 1
  assert [r.request_id for r in scheduler.waiting] == ["young", "later"]
  scheduler.finish(old)
  (back,) = admit(scheduler)
  assert back.request is young.request and back is not young
  assert back.text == [*young.request.prompt_ids, 7, 8]  # the KV of the last token is not there
  assert [r.request_id for r in scheduler.waiting] == ["later"]


def test_a_preempted_text_is_found_again():
  scheduler = Scheduler(num_slots=1, num_pages=5, page_size=4, lookahead=1)
  scheduler.add(request(prompt=6, limit=9))
  (tenant,) = admit(scheduler)
  prefilled(tenant)
  generated(tenant, [7, 8, 9])
  scheduler.grow(tenant, 9)
  scheduler.preempt(tenant)
  (back,) = admit(scheduler)
  assert back.done == 8 and back.pages[:2] == tenant.pages[:2]


def test_a_text_that_begins_alike_shares_full_pages():
  scheduler = Scheduler(num_slots=2, num_pages=20, page_size=4, lookahead=1)
  scheduler.add(request("a", prompt=11))
  (first,) = admit(scheduler)
  scheduler.begin(first)
  scheduler.add(request("early", prompt=11))
  (early,) = admit(scheduler)
  assert early.done == 0  # nothing is there yet
  first.done = 9
  scheduler.publish(first)
  free = scheduler.allocator.num_free
  scheduler.begin(early)  # but now
  assert early.done == 8 and early.pages[:2] == first.pages[:2]
  assert scheduler.allocator.num_free == free + 2
  scheduler.finish(early)
  for prompt, shared in ((11, 8), (7, 4), (8, 8), (3, 0)):
    scheduler.add(request("b", prompt=prompt))
    (second,) = admit(scheduler)
    scheduler.begin(second)
    assert second.done == shared and second.pages[:shared // 4] == first.pages[:shared // 4]
    assert not set(second.pages[shared // 4:]) & set(first.pages)
    scheduler.finish(second)
  scheduler.add(request("c", prompt=11, token=6))
  (other,) = admit(scheduler)
  scheduler.begin(other)
  assert other.done == 0
  assert scheduler.prefix_hits == 28 and scheduler.prefix_queries == 11 * 4 + 7 + 8 + 3


EVENTS = st.lists(st.tuples(
    st.sampled_from(["add", "admit", "begin", "prefill", "generate", "grow", "preempt", "finish",
                     "abort"]),
    st.integers(0, 40)), max_size=80)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(1, 4), st.integers(1, 12), st.booleans(), EVENTS)
def test_any_sequence_of_events_balances_to_zero(num_slots, num_pages, caching, events):
  """No page has two owners but by its contents, and in the end all is free again."""
  scheduler = Scheduler(num_slots, num_pages, page_size=4, lookahead=2, caching=caching)
  requests: list[Request] = []
  contents: dict[int, tuple[int, ...]] = {}  # of pages, as far as they are written
  for event, number in events:
    running = sorted(scheduler.running.values(), key=lambda t: t.slot)
    tenant = running[number % len(running)] if running else None
    if event == "add":
      r = request(prompt=number % 9 + 1, limit=number + 1, priority=number % 3, token=number % 2)
      if scheduler.most_pages(r) <= num_pages:
        scheduler.add(r)
        requests.append(r)
      else:
        with pytest.raises(ValueError):
          scheduler.add(r)
    elif event == "admit":
      ahead = scheduler.waiting
      came = admit(scheduler)
      assert [t.request for t in came] == ahead[:len(came)]
    elif event == "begin" and tenant is not None and not tenant.has_begun:
      scheduler.begin(tenant)
      tenant.has_begun = True
      for i in range(tenant.done // 4):  # what it was promised is really there
        assert contents[tenant.pages[i]] == tuple(tenant.text[:4 * i + 4])
    elif tenant is None:
      continue
    elif event == "prefill" and tenant.has_begun and not tenant.is_active:
      tenant.done = min(len(tenant.text), tenant.done + number)
      tenant.is_active = tenant.done == len(tenant.text)
      scheduler.publish(tenant)
    elif event == "generate" and tenant.is_active and not tenant.request.finished:
      if scheduler.grow(tenant, tenant.committed + 1):
        generated(tenant, [number % 2])
    elif event == "grow":
      scheduler.grow(tenant, tenant.committed + number)
    elif event in ("preempt", "finish", "abort"):
      {"preempt": scheduler.preempt, "finish": scheduler.finish,
       "abort": lambda t: scheduler.abort(t.request)}[event](tenant)
    owners: dict[int, list] = {}
    for t in scheduler.running.values():
      text = [*t.request.prompt_ids, *t.request.tokens]
      assert len(t.pages) * 4 >= t.committed
      for i, page in enumerate(t.pages):
        owners.setdefault(page, []).append(tuple(text[:4 * i + 4])
                                           if t.committed >= 4 * i + 4 else object())
        if t.committed >= 4 * i + 4:
          contents[page] = tuple(text[:4 * i + 4])
    assert all(len(set(texts)) == 1 for texts in owners.values())
    assert scheduler.allocator.num_free == num_pages - len(owners)
    assert len(scheduler.running) <= num_slots
  for r in requests:
    scheduler.abort(r)
  assert scheduler.allocator.num_free == num_pages and not scheduler.running
  scheduler.add(request(prompt=1, limit=1))
  assert len(admitted(scheduler)) == 1
