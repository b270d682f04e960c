"""Connections of the HTTP door: how many there may be, and for how long one may do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import heapq
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jspec.serving.log_lines import Tally

LOG = logging.getLogger(__name__)
BACKLOG = 2048  # connections that the system holds until they are accepted
BATCH = 64  # connections accepted before others get their turn
SHARE = 16  # one of so many connections makes room when there is none
PAUSE = 0.1  # seconds without accepting while the process has no file descriptor left
FAREWELLS = 64  # connections refused whose answer is given a moment to arrive
FAREWELL = 1.0  # seconds of it
NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclasses.dataclass(frozen=True)
class Limits:
  """What connections may do.

  Args:
    max_connections: at the cap those that have sent no whole request make room, the oldest first;
      where all have, more are refused.
    header_timeout: seconds for a request's headers, from their first byte or from the connection's
      beginning. keep_alive: seconds between two requests. write_timeout: seconds in which a client
      must read some of what it was sent.
  """

  max_connections: int = 2048
  header_timeout: float = 20.0
  keep_alive: float = 75.0  # longer than load balancers wait, commonly 60
  write_timeout: float = 60.0

  def __post_init__(self):
    if not self.max_connections >= 1:
      raise ValueError(f"max_connections must be >= 1, got {self.max_connections}")
    for name in ("header_timeout", "keep_alive", "write_timeout"):
      if not 0 < getattr(self, name) <= 1e6:
        raise ValueError(f"{name} must be in 0..1e6 seconds, and not 0, "
                         f"got {getattr(self, name)}")


class _Counting(asyncio.Transport):
  """A transport that knows how much of what was written to it has gone out.

  The size of its buffer does not tell: what a slow client reads makes room for more at once.
  """

  def __init__(self, transport: asyncio.Transport):
    self._transport, self._written = transport, 0

  def get_extra_info(self, name: str, default: Any = None) -> Any:
    return self._transport.get_extra_info(name, default)

  def is_closing(self) -> bool:
    return self._transport.is_closing()

  def close(self) -> None:
    self._transport.close()

  def abort(self) -> None:
    self._transport.abort()

  def pause_reading(self) -> None:
    self._transport.pause_reading()

  def resume_reading(self) -> None:
    self._transport.resume_reading()

  def write(self, data: Any) -> None:
    self._written += len(data)
    self._transport.write(data)

  @property
  def unsent(self) -> int:
    return self._transport.get_write_buffer_size()

  @property
  def sent(self) -> int:
    return self._written - self.unsent


class Connection(H11Protocol):
  """uvicorn's, with an account of what its client does.

  Args:
    refused: called with (status, reason) where no request can be made of what came.
  """

  def __init__(self, config: uvicorn.Config, state: ServerState,
               refused: Callable[[int, str], None]):
    super().__init__(config, state, {})
    self._refused = refused
    self.since = self._moved = time.monotonic()  # a request was expected; bytes last went out
    self._begun = True  # a request is expected: of a new connection at once
    self._sent = 0  # bytes

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    self._out = _Counting(transport)
    super().connection_made(self._out)

  @property
  def is_idle(self) -> bool:
    """Whether the next request's headers have not come yet."""
    return self.cycle is None or self.cycle.response_complete

  @property
  def is_waiting(self) -> bool:
    """Whether there is no whole request to be answered."""
    return self.is_idle or self.cycle.more_body

  def data_received(self, data: bytes) -> None:
    if self.is_idle and not self._begun:
      self._begun, self.since = True, time.monotonic()
    super().data_received(data)

  def on_response_complete(self) -> None:
    self._begun, self.since = False, time.monotonic()
    super().on_response_complete()

  def look(self, now: float, limits: Limits) -> None:
    """Ends the connection where its client's time is over."""
    if not self._out.unsent or self._out.sent > self._sent:
      self._moved, self._sent = now, self._out.sent
    if now - self._moved > limits.write_timeout:
      self._refused(408, "write_timeout")
      self.transport.abort()
    elif self.is_idle and self._begun and now - self.since > limits.header_timeout:
      if not self.transport.is_closing():
        self._refused(408, "header_timeout")
        self.transport.write(_answer(408, "Request Timeout", "the headers did not arrive within "
                                     f"{limits.header_timeout:g} seconds"))
        self.transport.close()

  def send_400_response(self, msg: str) -> None:
    self._refused(400, "no_http")
    self.transport.write(_answer(400, "Bad Request", msg))
    self.transport.close()


class Connections:
  """Accepts what comes to a listening socket.

  asyncio's own server, when the process is out of file descriptors, logs a traceback for each
  connection that waits, and again without an end; and it has no cap.

  Args:
    refused: called with (status, reason).
  """

  def __init__(self, listener: socket.socket, limits: Limits, config: uvicorn.Config,
               state: ServerState, refused: Callable[[int, str], None]):
    self._listener, self._limits, self._config, self._state = listener, limits, config, state
    self._refused = refused
    self._make = functools.partial(Connection, config, state, refused)
    self._greeting: dict[asyncio.Task[Any], None] = {}  # until TLS is agreed on, in order
    self._leaving: set[socket.socket] = set()
    self._tally = Tally(LOG, "no file descriptor for a connection")
    self._retry: asyncio.TimerHandle | None = None

  def start(self) -> None:
    self._listener.setblocking(False)
    asyncio.get_running_loop().add_reader(self._listener, self._accept)

  def stop(self) -> None:
    """Takes no more; those that there are stay."""
    asyncio.get_running_loop().remove_reader(self._listener)
    if self._retry is not None:
      self._retry.cancel()
    for task in self._greeting:
      task.cancel()

  def look(self) -> None:
    """Once a second or so: ends those whose time is over."""
    now = time.monotonic()
    for connection in self._all():
      connection.look(now, self._limits)

  def _all(self) -> list[Connection]:
    return [c for c in self._state.connections if isinstance(c, Connection)]

  def _accept(self) -> None:
    for _ in range(BATCH):
      try:
        connection, _ = self._listener.accept()
      except (BlockingIOError, InterruptedError, ConnectionError):
        return
      except OSError as error:
        if error.errno not in NO_RESOURCE:
          raise
        self._rest(error)
        return
      connection.setblocking(False)
      if self._has_room() or self._make_room():
        task = asyncio.get_running_loop().create_task(self._greet(connection))
        self._greeting[task] = None
        task.add_done_callback(lambda done: self._greeting.pop(done, None))
      else:
        self._turn_away(connection)

  def _has_room(self) -> bool:
    return len(self._state.connections) + len(self._greeting) < self._limits.max_connections

  def _make_room(self) -> bool:
    """Whether some connections could be ended that only wait; the oldest of those are."""
    count = 1 + self._limits.max_connections // SHARE
    waiting = heapq.nsmallest(count, filter(lambda c: c.is_waiting, self._all()),
                              key=lambda c: c.since)
    for connection in waiting:
      self._state.connections.discard(connection)
      connection.transport.abort()
    greeting = list(self._greeting)[:count - len(waiting)] if self._config.is_ssl else []
    for task in greeting:
      del self._greeting[task]
      task.cancel()
    for _ in (*waiting, *greeting):
      self._refused(503, "connections")
    return self._has_room()

  async def _greet(self, connection: socket.socket) -> None:
    timeout = self._limits.header_timeout if self._config.is_ssl else None
    with contextlib.suppress(OSError):  # of TLS, too: it is the client's affair
      await asyncio.get_running_loop().connect_accepted_socket(
          self._make, connection, ssl=self._config.ssl, ssl_handshake_timeout=timeout)

  def _turn_away(self, connection: socket.socket) -> None:
    """Says that there are too many, as far as that can be said at once."""
    self._refused(503, "connections")
    if self._config.is_ssl or len(self._leaving) >= FAREWELLS:
      connection.close()
      return
    try:
      connection.send(_answer(503, "Service Unavailable", "the server has as many connections as "
                              "it takes; try again later", "Retry-After: 1\r\n"))
      connection.shutdown(socket.SHUT_WR)
    except OSError:
      connection.close()
      return
    # To close before the request is read would take the answer away from the client.
    self._leaving.add(connection)
    asyncio.get_running_loop().call_later(FAREWELL, self._close, connection)

  def _close(self, connection: socket.socket) -> None:
    self._leaving.discard(connection)
    connection.close()

  def _rest(self, error: OSError) -> None:
    """Accepts nothing for a moment, and lets those go that only wait."""
    self._tally.note(errno.errorcode[error.errno or 0])
    loop = asyncio.get_running_loop()
    loop.remove_reader(self._listener)
    self._make_room()
    self._retry = loop.call_later(PAUSE, loop.add_reader, self._listener, self._accept)


def _answer(status: int, phrase: str, message: str, headers: str = "") -> bytes:
  """A whole answer, the last one of its connection."""
  kind = "server_error" if status >= 500 else "invalid_request_error"
  body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})
  return (f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n{headers}"
          f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}").encode()
