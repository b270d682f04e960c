"""Messages of the gRPC interface <-> jspec's objects, on the server's side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jspec import (
  CompletionOutput,
  EngineStats,
  FieldError,
  Logprob,
  RequestOutput,
  SamplingParams,
  SpeculativeStats,
)
from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.service import Conversation, any_seed


class BadField(ValueError):
  """A request that cannot be served as asked, with the field that asks for it."""

  def __init__(self, field: str, reason: object):
    super().__init__(f"{field}: {reason}")


def check_known(message: Message, path: str = "") -> None:
  """Refuses fields of a newer interface than this one, which would go without effect."""
  unknown = UnknownFieldSet(message)
  if len(unknown):
    where = path or message.DESCRIPTOR.name
    raise BadField(where, f"this server knows no field {unknown[0].field_number} of "
                          f"{message.DESCRIPTOR.full_name}")
  for field, value in message.ListFields():
    if field.message_type is not None and not isinstance(value, Mapping):
      for inner in [value] if isinstance(value, Message) else value:
        check_known(inner, f"{path}.{field.name}".lstrip("."))


def sampling_params(message: pb.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
  """What is set in the message, the server's defaults, and SamplingParams' own for the rest."""
  fields: dict[str, Any] = {**defaults, **{
      field.name: _plain(value) for field, value in message.ListFields()}}
  fields["seed"] = any_seed(fields.get("seed"))
  if fields.pop("as_many_as_fit", False):
    fields["max_tokens"] = None
  with naming_the_field("params"):
    return SamplingParams(**fields)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return dict(value)
  return value if isinstance(value, (bool, int, float, str)) else tuple(value)


def conversation(chat: pb.Chat) -> Conversation:
  for i, message in enumerate(chat.messages):
    if not message.role:
      raise BadField("chat", f"message {i} has no role")
  messages = [{"role": message.role, "content": message.content} for message in chat.messages]
  goes_on = chat.continue_final_message
  opening = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not goes_on
  if goes_on and opening:
    raise BadField("chat", "add_generation_prompt and continue_final_message exclude each other")
  more = None
  if chat.HasField("chat_template_kwargs"):
    try:
      more = json.loads(chat.chat_template_kwargs)
    except (ValueError, RecursionError):
      more = None
    if not isinstance(more, dict):
      raise BadField("chat", f"chat_template_kwargs must be a JSON object, got "
                             f"{chat.chat_template_kwargs!r:.60}")
  return Conversation(messages, opening, goes_on, more or None)


@contextlib.contextmanager
def naming_the_field(otherwise: str) -> Iterator[None]:
  """Gives a ValueError the name that this interface has for the field that it is about.

  Args:
    otherwise: the name where it says none, or one that this interface has not.
  """
  try:
    yield
  except BadField:
    raise
  except ValueError as error:
    named = error.field if isinstance(error, FieldError) else ""
    if named in pb.SamplingParams.DESCRIPTOR.fields_by_name:
      raise BadField(f"params.{named}", error) from None
    known = named in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    raise BadField(named if known else otherwise, error) from None


def generate_reply(output: RequestOutput, generated: int, show_cached: bool) -> pb.GenerateReply:
  """A whole output or a delta; with statistics, and what is known of the prompt, if finished.

  generated: tokens so far.
  """
  return pb.GenerateReply(
      request_id=output.request_id, outputs=[_output(out) for out in output.news],
      statistics=_statistics(output, generated, show_cached) if output.finished else None,
      prompt_logprobs=_rows(output.prompt_logprobs) if output.finished else ())


def _output(out: CompletionOutput) -> pb.Output:
  reason = out.stop_reason
  return pb.Output(
      index=out.index, text=out.text, token_ids=out.token_ids, logprobs=_rows(out.logprobs),
      finish_reason=out.finish_reason or "",
      stop_token_id=reason if isinstance(reason, int) else None,
      stop_string=reason if isinstance(reason, str) else None)


def _rows(rows: Sequence[Mapping[int, Logprob] | None] | None) -> list[pb.TokenLogprobs]:
  return [pb.TokenLogprobs(logprobs=[
      pb.Logprob(token_id=token, logprob=value.logprob, rank=value.rank,
                 decoded_token=value.decoded_token) for token, value in (row or {}).items()])
          for row in rows or ()]


def _statistics(output: RequestOutput, generated: int, show_cached: bool) -> pb.Statistics:
  return pb.Statistics(
      prompt_tokens=len(output.prompt_token_ids),
      generated_tokens=generated, speculation=_speculation(output.speculation),
      cached_tokens=output.num_cached_tokens if show_cached else None,
      time_in_queue=output.timing.admitted,
      time_to_first_token=output.timing.first_token, total_time=output.timing.finished)


def _speculation(stats: SpeculativeStats) -> pb.Speculation:
  return pb.Speculation(**dataclasses.asdict(stats), acceptance_rate=stats.acceptance_rate)


def stats_reply(stats: EngineStats) -> pb.StatsReply:
  fields = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
  return pb.StatsReply(**fields | {"finished": dict(stats.finished),
                                   "speculation": _speculation(stats.speculation)})
