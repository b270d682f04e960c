"""Running a call: its prompts through the engine, its answer whole or as events."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from starlette.responses import Response, StreamingResponse

from jspec import QueueFull, RequestOutput
from jspec.serving.http.gate import json_response
from jspec.serving.openai.answers import Answer
from jspec.serving.openai.api import Call
from jspec.serving.openai.errors import Refused, refusal
from jspec.serving.service import Caller, Service

EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies: pass it on

# A comment, for whoever is in between and ends connections that are silent; and seconds.
QUEUED, COMMENT_AFTER, COMMENT_EVERY = b": queued\n\n", 1.0, 15.0


class _News(NamedTuple):
  """A delta of one of a call's prompts."""

  prompt: int
  delta: RequestOutput


async def answer_call(service: Service, call: Call, answer: Answer, prompt_field: str,
                      caller: Caller) -> Response:
  """Runs a call. Whatever refuses it does so before the answer has begun.

  A stream begins once the engine has taken the call's requests, though they may wait for slots.
  """
  try:
    await _check(service, call)
    queued = asyncio.Event()
    news = _run(service, call, answer.id, caller, queued)
    if call.stream:
      return await _stream(answer, news, queued, caller)
    deltas: dict[int, list[RequestOutput]] = collections.defaultdict(list)
    async with contextlib.aclosing(news):
      async for prompt, delta in news:
        deltas[prompt].append(delta)
  except Exception as error:
    raise refusal(error, prompt_field, request_id=caller.request_id) from error
  return json_response(answer.whole([RequestOutput.joined(deltas[i])
                                     for i in range(len(call.prompts))]))


async def _stream(answer: Answer, news: AsyncGenerator[_News], queued: asyncio.Event,
                  caller: Caller) -> Response:
  first = asyncio.ensure_future(anext(news))

  async def leave() -> None:
    first.cancel()
    await asyncio.wait({first})
    await news.aclose()

  taken = asyncio.create_task(queued.wait())
  try:
    await asyncio.wait({first, taken}, return_when=asyncio.FIRST_COMPLETED)
    if first.done():
      first.result()
  except BaseException:
    await leave()
    raise
  finally:
    taken.cancel()
  return _EventStream(_events(answer, first, news, caller), leave)


async def _check(service: Service, call: Call) -> None:
  """Refuses a call of many prompts before any of them runs."""
  count, engine = len(call.prompts), service.engine
  if count == 1:
    return
  if count > engine.max_outputs:
    raise Refused(f"{count} prompts are more than the {engine.max_outputs} requests that this "
                  "server holds", "prompt")
  for prompt in call.prompts:
    await asyncio.to_thread(engine.llm.prepare, prompt, call.params)
  if engine.num_requests + count > engine.max_outputs:
    raise QueueFull(f"there is no room for {count} more requests now; try again later")


async def _run(service: Service, call: Call, name: str, caller: Caller, queued: asyncio.Event
               ) -> AsyncGenerator[_News]:
  """Deltas of all prompts as they come. Leaving it ends the requests.

  queued: is set once the engine has taken all of them.
  """
  # Of one: what a slow reader leaves unread the engine joins.
  news: asyncio.Queue[_News | Exception] = asyncio.Queue(1)
  untaken = set(range(len(call.prompts)))

  def taken(i: int) -> None:
    untaken.discard(i)
    if not untaken:
      queued.set()

  async def follow(i: int) -> None:
    try:
      stream = service.stream(call.prompts[i], call.params, request_id=f"{name}-{i}",
                              priority=call.priority, cache_salt=call.cache_salt,
                              caller=caller, queued=functools.partial(taken, i))
      async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for delta in stream:
          await news.put(_News(i, delta))
    except Exception as error:
      await news.put(error)

  tasks = [asyncio.create_task(follow(i)) for i in range(len(call.prompts))]
  try:
    left = len(tasks)
    while left:
      item = await news.get()
      if isinstance(item, Exception):
        raise item
      left -= item.delta.finished
      yield item
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.wait(tasks)


async def _events(answer: Answer, first: asyncio.Future[_News], news: AsyncGenerator[_News],
                  caller: Caller) -> AsyncIterator[bytes]:
  try:
    for pause in itertools.chain([COMMENT_AFTER], itertools.repeat(COMMENT_EVERY)):
      if (await asyncio.wait({first}, timeout=pause))[0]:
        break
      yield QUEUED
    item: _News | None = await first
    while item is not None:
      yield b"".join(map(answer.event, answer.chunks(*item)))
      item = await anext(news, None)
    yield b"".join(map(answer.event, answer.closing())) + answer.last_event
  except Exception as error:  # the status is sent: all that is left is an event
    yield answer.failure(refusal(error, request_id=caller.request_id))


class _EventStream(StreamingResponse):
  """Ends what its events come from when it is over or cancelled, at once, even if none was sent;
  StreamingResponse leaves that to chance."""

  def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], Awaitable[None]]):
    super().__init__(events, media_type="text/event-stream", headers=EVENT_HEADERS)
    self._events, self._leave = events, leave

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    try:
      async with contextlib.aclosing(self._events):  # type: ignore[type-var]
        await self.stream_response(send)
    finally:
      await self._leave()
