"""What goes wrong with a request, as OpenAI's clients expect to hear of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jspec import Draining, EngineDead, FieldError, PromptTooLong, QueueFull, RequestFailed
from jspec.serving.shares import ShareFull

MAX_MESSAGE = 400  # characters: what a client sent is not sent back to it whole
REASONS = {400: "invalid", 404: "not_found", 405: "method", 408: "timeout"}
log = logging.getLogger("jspec.http")


class Refused(Exception):
  """A request that gets an error for an answer. `param` is the field at fault, if one is."""

  def __init__(self, message: str, param: str | None = None, *, status: int = 400,
               kind: str = "invalid_request_error", code: str | None = None,
               headers: Mapping[str, str] | None = None):
    super().__init__(message)
    self.status, self.headers = status, dict(headers or {})
    message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
    self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    self.reason = code or REASONS.get(status, "other")  # for counting: one of a few


def refusal(error: Exception, prompt_field: str | None = None,
            otherwise: str | None = None, request_id: str | None = None) -> Refused:
  """Any error as what the client is told.

  Args:
    prompt_field: what the request calls its prompt. otherwise: the field of a ValueError that names
      none. request_id: of the log.
  """
  match error:
    case Refused():
      return error
    case ValueError():  # by AsyncLLM's contract, of a request that can't be served as asked
      param = otherwise
      if isinstance(error, FieldError):
        param = prompt_field if error.field in ("prompt", "messages") else error.field
      # What gateways look for, to shorten the prompt or to choose another model.
      code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
      return Refused(str(error), param, code=code)
    case ShareFull():
      return Refused(str(error), status=429, kind="rate_limit_error", code="client_queue_full",
                     headers={"Retry-After": "1"})
    case QueueFull():
      return Refused(str(error), status=429, kind="rate_limit_error", code="queue_full",
                     headers={"Retry-After": "1"})
    case Draining() | EngineDead():
      # Why an engine died is the log's business.
      message = str(error) if isinstance(error, Draining) else "the engine has stopped"
      return Refused(message, status=503, kind="server_error", code="unavailable")
    case RequestFailed():  # the engine has logged it
      return Refused(str(error), status=500, kind="server_error", code="request_failed")
  log.error("request %s failed", request_id or "", exc_info=error)
  return Refused("internal error: see the server's log", status=500, kind="server_error",
                 code="internal_error")


def invalid(errors: Sequence[Mapping[str, Any]]) -> Refused:
  """The first of pydantic's errors of a request."""
  error = errors[0]
  path = [*error["loc"], *filter(None, [error.get("ctx", {}).get("field")])]
  if not path:
    return Refused(error["msg"])
  param = str(path[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path[1:])
  message = error["msg"].removeprefix("Value error, ")
  return Refused(f"{param}: {message[:1].lower()}{message[1:]}", param)
