"""Before the gate: answers to browsers of other sites (CORS), and paths with a slash at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclasses.dataclass(frozen=True)
class Cors:
  """Which sites' pages may use the server from their readers' browsers, in vLLM's words.

  Args:
    allowed_origins: such as "https://chat.example.org"; "*" is every site, none none.
    allow_credentials: browsers may send cookies along.
    allowed_methods, allowed_headers: of requests; "*" is all.
  """

  allowed_origins: Sequence[str] = ()
  allow_credentials: bool = False
  allowed_methods: Sequence[str] = ("*",)
  allowed_headers: Sequence[str] = ("*",)


def front(app: ASGIApp, cors: Cors) -> ASGIApp:
  """The application as clients meet it."""
  app = _without_last_slash(app)
  if not cors.allowed_origins:
    return app
  # Before the gate: a browser asks first, without a key, and must be able to read refusals.
  return CORSMiddleware(app, allow_origins=cors.allowed_origins,
                        allow_methods=cors.allowed_methods, allow_headers=cors.allowed_headers,
                        allow_credentials=cors.allow_credentials)


def _without_last_slash(app: ASGIApp) -> ASGIApp:
  """/v1/models/ is /v1/models. A redirect would lose a POST's body or key with some clients."""
  async def shorter(scope: Scope, receive: Receive, send: Send) -> None:
    await app({**scope, "path": scope["path"].rstrip("/") or "/"}, receive, send)

  return shorter
