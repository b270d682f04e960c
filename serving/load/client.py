"""Sends a load test's requests, over HTTP or gRPC, and notes when what came back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
import httpx

from jspec.serving.load.workload import Planned
from jspec.serving.rpc import jspec_pb2, jspec_pb2_grpc

_COUNTERS = {  # name here -> in /metrics
  "memory_bytes": "process_resident_memory_bytes", "running": "jspec:num_requests_running",
  "waiting": "jspec:num_requests_waiting", "kv_cache_usage": "jspec:kv_cache_usage_perc",
  "drafts": "jspec:spec_decode_num_drafts_total",
  "draft_tokens": "jspec:spec_decode_num_draft_tokens_total",
  "accepted_tokens": "jspec:spec_decode_num_accepted_tokens_total",
  "prefix_queries": "jspec:prefix_cache_queries_total",
  "prefix_hits": "jspec:prefix_cache_hits_total",
  "preemptions": "jspec:num_preemptions_total",
}


class Progress(NamedTuple):
  """What one message of a stream brings."""

  has_text: bool
  finish_reason: str | None = None
  prompt_tokens: int = 0  # known at the end
  output_tokens: int = 0  # likewise


@dataclasses.dataclass(frozen=True)
class Record:
  """What became of a request. Times are seconds since the run began."""

  due: float  # when it should have been sent; latencies count from here
  sent: float
  first: float | None  # first text
  last: float
  prompt_tokens: int = 0
  output_tokens: int = 0
  finish_reason: str | None = None
  error: str | None = None
  left: bool = False  # the client went away, as planned

  @property
  def completed(self) -> bool:
    return self.finish_reason is not None and self.error is None

  @property
  def lost(self) -> bool:
    """The stream ended, and neither the answer nor an error had come."""
    return not (self.completed or self.left or self.error)


class Door(Protocol):
  """A server, through one of its doors."""

  def stream(self, planned: Planned) -> AsyncGenerator[Progress, None]: ...

  async def counters(self) -> dict[str, float]: ...


class HttpDoor:
  """/v1/chat/completions, or /v1/completions for prompts without a chat template."""

  def __init__(self, client: httpx.AsyncClient, model: str, raw: bool = False):
    self._client, self._model, self._raw = client, model, raw

  async def stream(self, planned: Planned) -> AsyncGenerator[Progress, None]:
    body: dict[str, Any] = {
      "model": self._model, "max_tokens": planned.max_tokens, "temperature": planned.temperature,
      "seed": planned.seed, "ignore_eos": planned.ignore_eos, "stream": True,
      "stream_options": {"include_usage": True}}
    if planned.cold:
      body["cache_salt"] = uuid.uuid4().hex
    if self._raw:
      body["prompt"] = _joined(planned)
    else:
      body["messages"] = [dict(message) for message in planned.messages]
    path = "/v1/completions" if self._raw else "/v1/chat/completions"
    async with self._client.stream("POST", path, json=body) as response:
      response.raise_for_status()
      finish = None
      async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
          continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
          raise ServerError(f"{event['error'].get('type')} in the stream")
        for choice in event["choices"]:
          text = choice["text"] if self._raw else choice["delta"].get("content")
          finish = choice.get("finish_reason") or finish
          yield Progress(bool(text))
        if event.get("usage"):
          usage = event["usage"]
          yield Progress(False, finish, usage["prompt_tokens"], usage["completion_tokens"])

  async def counters(self) -> dict[str, float]:
    response = await self._client.get("/metrics")
    response.raise_for_status()
    found = totals(response.text)
    return {name: found[theirs] for name, theirs in _COUNTERS.items() if theirs in found}


class GrpcDoor:
  """The Generate call. No retries: a refusal is a result."""

  def __init__(self, channel: grpc.aio.Channel, api_key: str | None = None, raw: bool = False):
    self._stub, self._raw = jspec_pb2_grpc.JspecStub(channel), raw
    self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

  async def stream(self, planned: Planned) -> AsyncGenerator[Progress, None]:
    request = jspec_pb2.GenerateRequest(params=jspec_pb2.SamplingParams(
        temperature=planned.temperature, seed=planned.seed, max_tokens=planned.max_tokens,
        ignore_eos=planned.ignore_eos), cache_salt=uuid.uuid4().hex if planned.cold else None)
    if self._raw:
      request.text = _joined(planned)
    else:
      request.chat.messages.extend(jspec_pb2.Message(**m) for m in planned.messages)
    call = self._stub.Generate(request, metadata=self._metadata)
    finish = None
    try:
      async for reply in call:
        for output in reply.outputs:
          finish = output.finish_reason or finish
        yield Progress(any(output.text for output in reply.outputs))
        if reply.HasField("statistics"):
          counts = reply.statistics
          yield Progress(False, finish, counts.prompt_tokens, counts.generated_tokens)
    finally:
      call.cancel()

  async def counters(self) -> dict[str, float]:
    stats = await self._stub.Stats(jspec_pb2.StatsRequest(), metadata=self._metadata)
    drafts = stats.speculation
    return {
      "running": stats.num_running, "waiting": stats.num_waiting,
      "kv_cache_usage": 1 - stats.num_free_pages / stats.num_pages, "drafts": drafts.num_drafts,
      "draft_tokens": drafts.num_draft_tokens, "accepted_tokens": drafts.num_accepted_tokens,
      "prefix_queries": stats.prefix_queries, "prefix_hits": stats.prefix_hits,
      "preemptions": stats.num_preemptions}


class ServerError(Exception):
  """An error in the middle of a stream."""


def _joined(planned: Planned) -> str:
  return "\n\n".join(message["content"] for message in planned.messages)


def totals(exposition: str) -> dict[str, float]:
  """Prometheus text -> the sum over the labels of each name."""
  found: dict[str, float] = {}
  for line in exposition.splitlines():
    if line and not line.startswith("#"):
      series, value = line.rsplit(" ", 1)
      name = series.split("{", 1)[0]
      found[name] = found.get(name, 0.0) + float(value)
  return found


# ----------------------------------------------------------------------- runs


async def open_loop(door: Door, planned: Iterator[Planned], times: Sequence[float],
                    timeout: float) -> list[Record]:
  """Sends a request at each of these times, however many are still under way."""
  start = time.monotonic()

  async def at(due: float, request: Planned) -> Record:
    await asyncio.sleep(due - (time.monotonic() - start))
    return await ask(door, request, start, due, timeout)

  tasks = [asyncio.create_task(at(due, next(planned))) for due in times]
  return list(await asyncio.gather(*tasks))


async def closed_loop(door: Door, planned: Iterator[Planned], clients: int, timeout: float, *,
                      seconds: float | None = None, requests: int | None = None) -> list[Record]:
  """So many clients, each asking again as soon as it has been answered."""
  start, records, taken = time.monotonic(), [], 0

  async def client() -> None:
    nonlocal taken
    while (requests is None or taken < requests) and (
        seconds is None or time.monotonic() - start < seconds):
      taken += 1
      records.append(await ask(door, next(planned), start, time.monotonic() - start, timeout))

  await asyncio.gather(*(client() for _ in range(clients)))
  return records


async def ask(door: Door, request: Planned, start: float, due: float, timeout: float) -> Record:
  """One request from beginning to end; whatever goes wrong becomes its record's error."""
  sent = time.monotonic() - start
  first, seen, left, final, error = None, 0, False, Progress(False), None
  try:
    async with asyncio.timeout(timeout), contextlib.aclosing(door.stream(request)) as stream:
      async for progress in stream:
        seen += 1
        if first is None and (progress.has_text or progress.finish_reason):
          first = time.monotonic() - start
        if progress.finish_reason is not None:
          final = progress
        elif request.leaves_after is not None and seen >= request.leaves_after:
          left = True
          break
  except Exception as caught:
    error = name_of(caught)
  return Record(due, sent, first, time.monotonic() - start, final.prompt_tokens,
                final.output_tokens, final.finish_reason, error, left)


def name_of(error: Exception) -> str:
  """Short enough to count by."""
  if isinstance(error, grpc.aio.AioRpcError):
    return f"gRPC {error.code().name}"
  if isinstance(error, httpx.HTTPStatusError):
    return f"HTTP {error.response.status_code}"
  if isinstance(error, TimeoutError):
    return "timeout"
  return str(error) if isinstance(error, ServerError) else type(error).__name__


@contextlib.asynccontextmanager
async def watched(door: Door, every: float) -> AsyncIterator[list[tuple[float, dict[str, float]]]]:
  """(seconds, counters) of the server: at the beginning, every so often, and at the end."""
  start = time.monotonic()
  samples: list[tuple[float, dict[str, float]]] = []

  async def look() -> None:
    samples.append((time.monotonic() - start, await door.counters()))

  async def watch() -> None:
    while True:
      await asyncio.sleep(every)
      with contextlib.suppress(httpx.HTTPError, grpc.aio.AioRpcError):  # a look missed is no loss
        await look()

  await look()
  task = asyncio.create_task(watch())
  try:
    yield samples
  finally:
    task.cancel()
  await _until_idle(door)
  await look()


async def _until_idle(door: Door, seconds: float = 30.0) -> None:
  """The server hears of a client that left a moment later. One that never becomes idle leaks."""
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    counters = await door.counters()
    if not counters.get("running") and not counters.get("waiting"):
      return
    await asyncio.sleep(0.1)
