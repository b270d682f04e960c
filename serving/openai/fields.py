"""What the fields of OpenAI's requests are made of: bounded numbers, text, and unknown names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
  AfterValidator,
  BaseModel,
  BeforeValidator,
  ConfigDict,
  FailFast,
  Field,
  ValidationInfo,
  model_validator,
)
from pydantic_core import PydanticCustomError


class _FailFast(FailFast):
  __hash__ = object.__hash__  # typing's unions need one


FIRST = _FailFast()  # of a list with a million bad elements pydantic would report them all


class Fields(BaseModel):
  """A JSON object whose known fields have their very types.

  A field that we know and don't do is refused as soon as it asks for something. One that nobody
  knows passes, unless the validation's context has strict=True.
  """

  model_config = ConfigDict(strict=True, extra="ignore")
  asks_nothing: ClassVar[Mapping[str, tuple]] = {}  # field that we don't do -> values we can ignore

  @model_validator(mode="before")
  @classmethod
  def _check_names(cls, content: Any, run: ValidationInfo) -> Any:
    # By hand, as pydantic lists all unknown fields, of which a body has room for a million.
    strict = run.context is not None and run.context["strict"]
    for name in content if isinstance(content, dict) else ():
      if name in cls.model_fields:
        continue
      if name in cls.asks_nothing:
        if content[name] not in cls.asks_nothing[name]:
          raise unsupported(name)
      elif strict:
        raise wrong(name[:80], "there is no such field")
    return content


def wrong(field: str, message: str) -> PydanticCustomError:
  """For a validator of a whole object, about one of its fields."""
  shown = field.encode("ascii", "backslashreplace").decode()  # half of a character has no UTF-8
  return PydanticCustomError("wrong", message, {"field": shown})  # type: ignore[arg-type]


def unsupported(field: str, message: str = "this is not supported: leave it out"
                ) -> PydanticCustomError:
  return wrong(field, message)


def _unicode(text: str) -> str:
  if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
    raise ValueError("must be valid Unicode text")
  return text


def _finite(value: Any) -> Any:
  """Python's integers have no bound, and JSON's numbers may be beyond a float's."""
  if type(value) in (int, float) and not is_finite(value):
    raise ValueError("must be a finite number")
  return value


def is_finite(value: float) -> bool:
  try:
    return math.isfinite(value)
  except OverflowError:
    return False


def _as_list(value: Any) -> Any:
  if not isinstance(value, (str, list)):
    raise ValueError("must be a string or a list of strings")
  return [value] if isinstance(value, str) else value


def _small_map(value: Any) -> Any:
  """Pydantic would list every bad entry."""
  if isinstance(value, dict) and any(type(v) not in (int, float) or not is_finite(v)
                                     for v in value.values()):
    raise ValueError("must map token ids to finite numbers")
  return value


def _small_list(value: Any) -> Any:
  if isinstance(value, list) and any(type(v) is not int for v in value):
    raise ValueError("must be a list of token ids")
  return value


Int = Annotated[int, Field(ge=-2**63, lt=2**63)]
Float = Annotated[float, BeforeValidator(_finite)]
Text = Annotated[str, AfterValidator(_unicode)]
Texts = Annotated[list[Text], FIRST]
TextOrTexts = Annotated[list[Text], FIRST, BeforeValidator(_as_list)]
Tokens = Annotated[list[Int], FIRST, BeforeValidator(_small_list)]
TokenBias = Annotated[dict[str, Float], BeforeValidator(_small_map)]
