"""Around all that HTTP answers: a name for each request, a line of log, a count of refusals."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.serving.log_lines import fields
from jspec.serving.metrics import Metrics

LOG = logging.getLogger("jspec.serving.access")
PROBES = ("/health", "/ping", "/metrics")  # asked every few seconds: their answers are not logged
MAX_PATH = 200  # characters in a line
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")


class Access:
  """An ASGI application before another one, which finds the request's name in scope["state"], and
  may put a `reason` there for what it refuses."""

  def __init__(self, app: ASGIApp, metrics: Metrics, logged: bool):
    self._app, self._metrics, self._logged = app, metrics, logged

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    name, started = _name(scope), time.monotonic()
    scope["state"]["request_id"] = name
    status = 0

    async def named(message: Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        message = {**message, "headers": [*message.get("headers", ()),
                                          (b"x-request-id", name.encode())]}
      await send(message)

    try:
      await self._app(scope, receive, named)
    finally:
      if status >= 400:
        self._metrics.refused("http", status, scope["state"].get("reason", "other"))
      if self._logged and scope["path"] not in PROBES:
        # Neither queries nor headers, which may hold keys, nor anything of bodies.
        LOG.info("http %s", fields(
            client=scope["client"][0] if scope["client"] else "", method=scope["method"],
            path=scope["raw_path"].decode("ascii", "replace")[:MAX_PATH],
            status=status or "left", seconds=time.monotonic() - started, request_id=name))


def _name(scope: Scope) -> str:
  """The client's X-Request-Id, if it is one for a line of log; else a new one."""
  given = [value for key, value in scope["headers"] if key == b"x-request-id"]
  if len(given) == 1 and _NAME.fullmatch(given[0]):
    return given[0].decode()
  return uuid.uuid4().hex
