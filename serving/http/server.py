"""The OpenAI-compatible HTTP door, on uvicorn: ports, TLS, the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from jspec.serving.auth import Tokens
from jspec.serving.http.access import Access
from jspec.serving.http.app import make_app
from jspec.serving.http.connections import BACKLOG, Connections, Limits
from jspec.serving.http.front import Cors, front
from jspec.serving.http.gate import Gate
from jspec.serving.service import Service

BODY_TIMEOUT = 60.0  # seconds for a client to send its body
CLOSING = 5  # seconds for the last answers to be read once the grace is over
MAX_HEADER_BYTES = 64 * 2**10


@dataclasses.dataclass(frozen=True)
class Options:
  """How the door is reached.

  Args:
    port: 0 takes a free one. tokens: API keys, one of which each request must bring; none: open.
    ssl_certfile, ssl_keyfile: PEM files, the server's certificate with its chain, and its key.
    max_body_bytes: of a request; longer ones are refused while they are read.
    limits: of connections. cors: what browsers let other sites' pages do; nothing by default.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  tokens: Sequence[str] = dataclasses.field(default=(), repr=False)
  ssl_certfile: str | pathlib.Path | None = None
  ssl_keyfile: str | pathlib.Path | None = None
  max_body_bytes: int = 4 << 20
  limits: Limits = Limits()
  cors: Cors = Cors()

  def __post_init__(self):
    Tokens(self.tokens)
    if not 0 <= self.port <= 65535:
      raise ValueError(f"port must be in 0..65535, got {self.port}")
    if self.max_body_bytes < 1:
      raise ValueError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
    if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
      raise ValueError("ssl_certfile and ssl_keyfile go together, got "
                       f"{self.ssl_certfile} and {self.ssl_keyfile}")
    if self.ssl_certfile is not None:
      try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
      except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ValueError(f"ssl_certfile={self.ssl_certfile} and ssl_keyfile={self.ssl_keyfile} "
                         "must be a certificate and its key, in PEM without a passphrase: "
                         f"{error}") from None


async def start(service: Service, options: Options | None = None,
                listener: socket.socket | None = None) -> HttpServer:
  """A server that answers on options.host; OSError if it cannot listen there.

  Args:
    listener: a bound socket, in place of options.host and port.
  """
  options = options or Options()
  listener = listener or _bind(options.host, options.port)
  reusable(listener, True)
  try:
    listener.listen(BACKLOG)
  except OSError as error:
    raise OSError(f"cannot listen on port {listener.getsockname()[1]}: {error.strerror}") from None
  draining = asyncio.Event()
  gate = Gate(make_app(service, draining), Tokens(options.tokens), draining,
              max_body_bytes=options.max_body_bytes, body_timeout=BODY_TIMEOUT)
  app = Access(front(gate, options.cors), service.metrics, service.policy.access_log)
  # uvicorn's warnings are a line for each malformed request: those are counted instead.
  server = _Uvicorn(uvicorn.Config(
      app, http="h11", ws="none", lifespan="off", log_config=None,
      log_level="error", access_log=False, server_header=False,
      timeout_keep_alive=options.limits.keep_alive,  # type: ignore[arg-type]  # call_later's
      timeout_graceful_shutdown=CLOSING, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
      ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile),
      listener, options.limits, functools.partial(service.metrics.refused, "http"))
  task = asyncio.create_task(server.serve([listener]))
  while not server.started:
    if task.done():
      await task
      raise OSError("the HTTP server did not start")
    await asyncio.sleep(0.005)
  return HttpServer(listener.getsockname()[1], gate, draining, server, task)


class HttpServer:
  """A running server; `port` is where it listens."""

  def __init__(self, port: int, gate: Gate, draining: asyncio.Event, server: uvicorn.Server,
               task: asyncio.Task[None]):
    self.port = port
    self._gate, self._draining, self._server, self._task = gate, draining, server, task

  async def drain(self, grace: float) -> bool:
    """Stops once all running requests have ended, and after `grace` seconds at the latest.

    Meanwhile /health says 503 and new requests are refused. False: some were cut off.
    """
    self._draining.set()
    if not (complete := await self._gate.idle(grace)):
      self._gate.cut()
    self._server.should_exit = True
    await self._task
    return complete


class _Uvicorn(uvicorn.Server):
  """uvicorn on connections of our own making."""

  def __init__(self, config: uvicorn.Config, listener: socket.socket, limits: Limits,
               refused: Callable[[int, str], None]):
    super().__init__(config)
    self._connections = Connections(listener, limits, config, self.server_state, refused)

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await self.lifespan.startup()
    self.servers = []
    self._connections.start()
    self.started = True

  async def on_tick(self, counter: int) -> bool:
    if counter % 10 == 0:  # each second
      self._connections.look()
    return await super().on_tick(counter)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    self._connections.stop()
    await super().shutdown(sockets)

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield  # signals belong to whoever runs the event loop


def reusable(listener: socket.socket, yes: bool) -> None:
  """Whether the port of this socket, and of the connections it accepts, can be had again while the
  connections linger. On Windows the option lets others take over a port that is in use."""
  if os.name == "posix":
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, yes)


def _bind(host: str, port: int) -> socket.socket:
  family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
  listener = socket.socket(family, kind, proto)
  try:
    reusable(listener, True)
    listener.bind(address)
  except OSError as error:
    listener.close()
    raise OSError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
  return listener
