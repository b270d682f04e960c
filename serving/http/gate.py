"""Before the HTTP application: keys, body limits, disconnects and the end of the server.

The application then sees whole bodies of allowed requests only, and is cancelled, wherever it is,
when its client goes away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec import Draining
from jspec.serving.auth import Tokens
from jspec.serving.openai.errors import Refused, refusal

OPEN_PATHS = ("/health", "/ping", "/metrics")  # for probes and scrapers, which have no key
DISCARDED = 16  # times max_body_bytes that are read and thrown away, to be heard by the client


def json_response(content: Any, status: int = 200,
                  headers: Mapping[str, str] | None = None) -> Response:
  return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: Any) -> bytes:
  """In ASCII: whatever reads this can't break lines or characters where there are none."""
  return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def event(content: Any) -> bytes:
  """One server-sent event."""
  return b"data: " + to_json(content) + b"\n\n"


class Gate:
  """An ASGI application before another one.

  Args:
    draining: once set, only OPEN_PATHS are let through.
    body_timeout: seconds a client may take to send its body.
  """

  def __init__(self, app: ASGIApp, tokens: Tokens, draining: asyncio.Event, *,
               max_body_bytes: int, body_timeout: float):
    self._app, self._tokens, self._draining = app, tokens, draining
    self._max_body_bytes, self._body_timeout = max_body_bytes, body_timeout
    self._running: set[asyncio.Task[None]] = set()
    self._cut = False

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      body = await self._enter(scope, receive)
    except _Gone:
      return
    except Refused as error:
      scope["state"]["reason"] = error.reason
      # The rest of the body may still be under way.
      headers = error.headers | {"Connection": "close"}
      await json_response(error.body, error.status, headers)(scope, receive, send)
    else:
      await self._run(scope, body, receive, send)

  async def idle(self, timeout: float) -> bool:
    """Waits up to `timeout` seconds for the requests that run; whether they have all ended."""
    if not self._running:
      return True
    _, late = await asyncio.wait(self._running, timeout=timeout)
    return not late

  def cut(self) -> None:
    """Ends the requests that run; their clients are told."""
    self._cut = True
    for task in self._running:
      task.cancel()

  async def _enter(self, scope: Scope, receive: Receive) -> bytes:
    """The body of an allowed request."""
    found = dict(scope["headers"]).get(b"authorization")
    header = None if found is None else found.decode("latin-1")
    is_open = scope["path"] in OPEN_PATHS
    allowed = is_open or self._tokens.allows(header)
    address = scope["client"][0] if scope["client"] else ""
    scope["state"]["client"] = self._tokens.client(header) or address
    try:
      async with asyncio.timeout(self._body_timeout):
        body = await self._read(receive, self._max_body_bytes if allowed else 0)
    except TimeoutError:
      raise Refused(f"the body did not arrive within {self._body_timeout:g} seconds",
                    status=408) from None
    if not allowed:
      raise Refused("this server needs a valid API key, as Authorization: Bearer KEY", status=401,
                    code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    if body is None:
      raise Refused(f"the body is larger than {self._max_body_bytes} bytes", status=413,
                    code="request_too_large")
    if self._draining.is_set() and not is_open:
      raise refusal(Draining())
    return body

  async def _read(self, receive: Receive, limit: int) -> bytes | None:
    """The body, or None if it is longer than `limit` bytes.

    What is beyond the limit is read, too, but not kept: a client that is refused in the middle of
    its body would see a broken connection, not the reason.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= limit + DISCARDED * self._max_body_bytes:
      message = await receive()
      if message["type"] == "http.disconnect":
        raise _Gone
      size += len(message["body"])
      if size > limit:
        parts.clear()
      else:
        parts.append(message["body"])
      more = message["more_body"]
    return b"".join(parts) if size <= limit else None

  async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    answer = _Answer(send)
    task = asyncio.create_task(self._inside(scope, body, answer))
    gone = asyncio.create_task(_disconnected(receive))
    self._running.add(task)
    try:
      await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
      # An answer that is complete counts as a disconnect, too.
      if not answer.complete:
        task.cancel()
      await asyncio.wait({task})
    finally:
      gone.cancel()
      task.cancel()
      self._running.discard(task)
    if not task.cancelled():
      if not answer.complete:
        task.result()  # raises what the application raised, for the server's log
    elif self._cut and not gone.done():
      await answer.end(refusal(Draining("the server was stopped")), scope, receive)

  async def _inside(self, scope: Scope, body: bytes, answer: _Answer) -> None:
    await self._app(scope, _replay(body), answer.send)


class _Gone(Exception):
  """The client closed the connection."""


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


def _replay(body: bytes) -> Receive:
  """`receive` for an application behind the gate, which looks after disconnects itself."""
  messages = [{"type": "http.request", "body": body, "more_body": False}]

  async def receive() -> Message:
    if not messages:
      await asyncio.Event().wait()
    return messages.pop()

  return receive


class _Answer:
  """How far the answer to a request has got."""

  def __init__(self, send: Send):
    self._send = send
    self._status: int | None = None
    self._is_stream = False
    self.complete = False

  async def send(self, message: Message) -> None:
    if message["type"] == "http.response.start":
      self._status = message["status"]
      kind = dict(message["headers"]).get(b"content-type", b"")
      self._is_stream = kind.startswith(b"text/event-stream")
    else:
      self.complete = not message.get("more_body", False)
    await self._send(message)

  async def end(self, error: Refused, scope: Scope, receive: Receive) -> None:
    """Tells the client that nothing more will come."""
    if self._status is None:
      await json_response(error.body, error.status, error.headers)(scope, receive, self._send)
    elif self._is_stream and not self.complete:
      await self._send({"type": "http.response.body", "body": event(error.body)})
