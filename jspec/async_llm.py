"""AsyncLLM: one engine that many asyncio tasks share, each streaming its own request."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from jspec.config.checks import FieldError
from jspec.engine.request import Group, failure
from jspec.llm import LLM
from jspec.outputs import EngineStats, RequestOutput
from jspec.sampling_params import SamplingParams
from jspec.text.prompt import Prompt, check_params


class QueueFull(Exception):
  """As many requests are waiting as the server holds; the caller may try again later."""


class Draining(Exception):
  """The server takes no more requests: it is about to stop."""

  def __init__(self, reason: str = "the server is shutting down and takes no more requests"):
    super().__init__(reason)


class EngineDead(Exception):
  """The engine's thread ended by an error; nothing can be served any more."""


class RequestFailed(Exception):
  """A request that was taken could not be answered, by no fault of its own; others go on."""


class AsyncLLM:
  """Runs an LLM's engine in a thread of its own.

  Args:
    llm: whose engine belongs to this object from now on.
    max_waiting: outputs that may wait for a slot; more are refused with QueueFull.
    steps_per_turn: speculation steps between two looks at who came and who went.
  """

  def __init__(self, llm: LLM, *, max_waiting: int = 1024, steps_per_turn: int = 1):
    for name, value in (("max_waiting", max_waiting), ("steps_per_turn", steps_per_turn)):
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    self.llm = llm
    self.max_waiting = max_waiting
    self._steps_per_turn = steps_per_turn
    self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
    self._streams: dict[str, _Stream] = {}  # of the event loop's thread: request id -> reader
    self._groups: dict[str, Group] = {}  # of the engine's thread
    self._error: BaseException | None = None
    self._draining = False
    self._thread = threading.Thread(target=self._serve, name="jspec-engine", daemon=True)
    self._thread.start()

  # ---------------------------------------------------------- from asyncio

  async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                     request_id: str | None = None, *,
                     priority: int = 0, cache_salt: str | None = None,
                     admit: Callable[[Group], None] | None = None,
                     queued: Callable[[], None] | None = None) -> AsyncGenerator[
                         RequestOutput, None]:
    """Snapshots of the request as tokens come, the last one finished.

    A reader that falls behind misses snapshots, never tokens: each holds all so far. The arguments
    and errors are those of `deltas`.
    """
    so_far: list[RequestOutput] = []
    deltas = self.deltas(prompt, sampling_params, request_id, priority=priority,
                         cache_salt=cache_salt, admit=admit, queued=queued)
    async with contextlib.aclosing(deltas):
      async for delta in deltas:
        so_far = [RequestOutput.joined([*so_far, delta])]
        yield so_far[0]

  async def deltas(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                   request_id: str | None = None, *,
                   priority: int = 0, cache_salt: str | None = None,
                   admit: Callable[[Group], None] | None = None,
                   queued: Callable[[], None] | None = None) -> AsyncGenerator[
                       RequestOutput, None]:
    """What the request's outputs gain as tokens come; the last delta is finished.

    They are as large as what is new, and a reader that falls behind finds several in one. See
    RequestOutput.joined. Leaving the iterator, or cancelling the task, frees the request's slot and
    pages.

    Args:
      prompt: text, token ids or a dict, see LLM.generate.
      request_id: unique among those running; None makes one.
      priority: the lower, the sooner; equal ones first come, first served.
      cache_salt: the prefix cache is shared with requests of the same one only, see LLM.prepare.
      admit: called once the request is checked; what it raises refuses it. queued: called once the
        engine has taken it.

    Raises:
      ValueError: for what cannot be served as asked. QueueFull, Draining, EngineDead,
      RequestFailed: see there.
    """
    params = SamplingParams() if sampling_params is None else check_params(sampling_params)
    if params.n > self.max_outputs:
      raise FieldError("n",
                       f"n={params.n} exceeds the {self.max_outputs} outputs that this server "
                       "holds")
    self._check_open(params.n)
    request_id = uuid.uuid4().hex if request_id is None else request_id
    # Checking may tokenize a long text: other requests go on meanwhile.
    group = await asyncio.to_thread(self.llm.prepare, prompt, params, request_id, priority,
                                    cache_salt)
    if admit is not None:
      admit(group)
    stream = self._add(group, queued)
    try:
      while True:
        delta = await stream.next()
        yield delta
        if delta.finished:
          return
    finally:
      self._streams.pop(group.request_id, None)
      if not stream.done:
        self._commands.put(_Command("abort", group))

  @property
  def max_outputs(self) -> int:
    """Outputs that may wait or be in slots."""
    return self.max_waiting + self.llm.max_num_seqs

  def _check_open(self, num_outputs: int) -> None:
    if self._error is not None:
      raise self._dead() from self._error
    if self._draining:
      raise Draining()
    # More than have slots are waiting, whether or not the engine's thread has seen them yet.
    held = sum(stream.size for stream in self._streams.values() if not stream.ended)
    if held + num_outputs > self.max_outputs:
      raise QueueFull(f"{self.max_waiting} requests are waiting already; try again later")

  def _add(self, group: Group, queued: Callable[[], None] | None) -> _Stream:
    self._check_open(len(group.requests))
    if group.request_id in self._streams:
      raise FieldError("request_id", f"request_id {group.request_id!r} is already running")
    stream = _Stream(asyncio.get_running_loop(), len(group.requests), queued)
    self._streams[group.request_id] = stream
    self._commands.put(_Command("add", group, stream))
    if self._error is not None:  # since we looked: whoever failed may have missed this one
      stream.put(self._dead())
    return stream

  def _dead(self) -> EngineDead:
    return EngineDead(f"the engine stopped: {self._error!r}")

  @property
  def num_requests(self) -> int:
    """Requests that have not been answered to the end."""
    return len(self._streams)

  @property
  def is_healthy(self) -> bool:
    """Whether new requests are taken."""
    return self._error is None and not self._draining and self._thread.is_alive()

  def stats(self) -> EngineStats:
    """Counters since the start and what is going on now. May be called from any thread."""
    return self.llm.engine.stats()

  async def drain(self, timeout: float | None = None) -> bool:
    """Takes no more requests and waits, for up to `timeout` seconds, until all are answered."""
    self._draining = True
    try:
      async with asyncio.timeout(timeout):
        while self._streams and self._error is None:
          await asyncio.sleep(0.01)
    except TimeoutError:
      return False
    return True

  async def shutdown(self) -> None:
    """Ends the engine's thread; what still runs is aborted with Draining."""
    self._draining = True
    self._commands.put(_Command("stop"))
    await asyncio.to_thread(self._thread.join)

  # --------------------------------------------------- the engine's thread

  def _serve(self) -> None:
    streams: dict[str, _Stream] = {}
    try:
      while self._obey(streams):
        engine = self.llm.engine
        engine.step(self._steps_per_turn)
        for group in list(self._groups.values()):
          try:
            self._show(group, streams)
          except Exception as error:
            self._fail(group, streams, RequestFailed(failure(error)))
      for group in self._groups.values():
        self._abort(group)
      self._end(streams, Draining("the server was stopped"))
    except BaseException as error:  # whatever it was, readers must not wait for ever
      self._error = error
      self._end(streams, self._dead())

  def _obey(self, streams: dict[str, _Stream]) -> bool:
    """Takes in commands, waiting for one where nothing runs; False ends the thread."""
    while True:
      idle = not self.llm.engine.busy and not self._groups
      try:
        command = self._commands.get(block=idle)
      except queue.Empty:
        return True
      if command.name == "stop":
        return False
      group = command.group
      if command.name == "add":  # known to us before anything can fail
        self._groups[group.request_id], streams[group.request_id] = group, command.stream
        try:
          for request in group.requests:
            self.llm.engine.add(request)
        except ValueError as error:  # such as more pages than there are
          self._fail(group, streams, error)
        except Exception as error:
          self._fail(group, streams, RequestFailed(failure(error)))
        else:
          command.stream.taken()
      elif self._groups.pop(group.request_id, None) is not None:
        del streams[group.request_id]
        self._abort(group)

  def _show(self, group: Group, streams: dict[str, _Stream]) -> None:
    """Hands the group's reader what is new."""
    if not group.news():
      return
    if group.error is not None:
      return self._fail(group, streams, RequestFailed(group.error))
    delta = group.output(delta=True)
    streams[group.request_id].put(delta)
    if delta.finished:
      del self._groups[group.request_id], streams[group.request_id]
    return None

  def _fail(self, group: Group, streams: dict[str, _Stream], error: Exception) -> None:
    """The end of one group, all its outputs, and no other."""
    del self._groups[group.request_id]
    streams.pop(group.request_id).put(error)
    self._abort(group)

  def _abort(self, group: Group) -> None:
    for request in group.requests:
      if not request.finished:
        self.llm.engine.abort(request)

  def _end(self, streams: dict[str, _Stream], error: Exception) -> None:
    for stream in streams.values():
      stream.put(error)
    while not self._commands.empty():
      command = self._commands.get()
      if command.stream is not None:
        command.stream.put(error)


class _Command(NamedTuple):
  name: str  # "add", "abort" or "stop"
  group: Any = None
  stream: Any = None


class _Stream:
  """A request's deltas, on their way from the engine's thread to a task."""

  def __init__(self, loop: asyncio.AbstractEventLoop, size: int,
               queued: Callable[[], None] | None):
    self._loop, self._queued = loop, queued
    self.size = size  # outputs
    self.ended = False  # on the engine's side
    self._ready = asyncio.Event()
    self._unread: collections.deque[RequestOutput | Exception] = collections.deque()
    self.done = False

  def put(self, item: RequestOutput | Exception) -> None:
    """From the engine's thread."""
    self._unread.append(item)
    self.ended = isinstance(item, Exception) or item.finished
    self._call(self._ready.set)

  def taken(self) -> None:
    """From the engine's thread."""
    if self._queued is not None:
      self._call(self._queued)

  def _call(self, function: Callable[[], None]) -> None:
    try:
      self._loop.call_soon_threadsafe(function)
    except RuntimeError:  # the event loop is closed: nobody reads any more
      pass

  async def next(self) -> RequestOutput:
    """All that is unread as one delta; an error goes before it."""
    while not self._unread:  # a delta may be taken before its signal comes
      await self._ready.wait()
      self._ready.clear()
    deltas = []
    while self._unread:
      item = self._unread.popleft()
      if isinstance(item, Exception):
        self.done = True
        raise item
      deltas.append(item)
    self.done = deltas[-1].finished
    return RequestOutput.joined(deltas)
