"""Running a call: its prompts through the engine, its answer whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

from starlette.responses import Response, StreamingResponse

from jspec import QueueFull, RequestOutput
from serving.http_gate import json_response
from serving.openai_answers import Answer
from serving.openai_api import Call
from serving.openai_errors import Refused, refusal
from serving.service import Delta, Service

EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies: pass it on


class _News(NamedTuple):
  """A snapshot of one of a call's prompts."""

  prompt: int
  output: RequestOutput
  deltas: list[Delta]


async def answer_call(service: Service, call: Call, answer: Answer,
                      prompt_field: str) -> Response:
  """Runs a call. Whatever refuses it does so before the answer has begun."""
  try:
    await _check(service, call)
    news = _run(service, call, answer.id)
    if call.stream:
      first = await anext(news)
      return _EventStream(_events(answer, first, news), media_type="text/event-stream",
                          headers=EVENT_HEADERS)
    finished: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(news):
      async for prompt, output, _ in news:
        finished[prompt] = output
  except Exception as error:
    raise refusal(error, prompt_field) from error
  return json_response(answer.whole([finished[i] for i in range(len(call.prompts))]))


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


async def _run(service: Service, call: Call, name: str) -> AsyncGenerator[_News]:
  """Snapshots of all prompts as they come. Leaving it ends the requests."""
  news: asyncio.Queue[_News | Exception] = asyncio.Queue(1)  # a reader that is slow misses some

  async def follow(i: int) -> None:
    try:
      stream = service.stream(call.prompts[i], call.params, request_id=f"{name}-{i}",
                              priority=call.priority, cache_salt=call.cache_salt)
      async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for output, deltas in stream:
          await news.put(_News(i, output, deltas))
    except Exception as error:
      await news.put(error)

  tasks = [asyncio.create_task(follow(i)) for i in range(len(call.prompts))]
  try:
    left = len(tasks)
    while left:
      item = await news.get()
      if isinstance(item, Exception):
        raise item
      left -= item.output.finished
      yield item
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.wait(tasks)


async def _events(answer: Answer, first: _News, news: AsyncGenerator[_News]
                  ) -> AsyncIterator[bytes]:
  try:
    async with contextlib.aclosing(news):
      item: _News | None = first
      while item is not None:
        yield b"".join(map(answer.event, answer.chunks(*item)))
        item = await anext(news, None)
    yield b"".join(map(answer.event, answer.closing())) + answer.last_event
  except Exception as error:  # the status is sent: all that is left is an event
    yield answer.failure(refusal(error))


class _EventStream(StreamingResponse):
  """Closes its events when it is cancelled, at once; StreamingResponse leaves that to chance."""

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
      await self.stream_response(send)
