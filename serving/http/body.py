"""A request's body as an object of its kind."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from jspec.serving.openai.errors import Refused, invalid
from jspec.serving.openai.fields import Fields

Kind = TypeVar("Kind", bound=Fields)
WANTED = "the body must be a JSON object, sent with Content-Type: application/json"


async def read(request: Request, kind: type[Kind], strict: bool) -> Kind:
  """The body, checked; raises Refused.

  strict: refuse fields that nobody knows, too.
  """
  media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
  if media != "application/json" and not (media.startswith("application/")
                                          and media.endswith("+json")):
    raise Refused(WANTED)
  try:
    content = json.loads(await request.body())
  except json.JSONDecodeError as error:
    raise Refused(f"the body is not JSON: {error.msg} at character {error.pos}") from None
  except (ValueError, RecursionError):  # not UTF-8, a number of 5000 digits, nested too deeply
    raise Refused("the body cannot be read as JSON") from None
  if not isinstance(content, dict):
    raise Refused(WANTED)
  try:
    return kind.model_validate(content, context={"strict": strict})
  except ValidationError as error:
    raise invalid(error.errors(include_url=False)) from None
