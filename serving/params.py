"""Messages of the gRPC interface <-> jspec's objects, on the server's side."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jspec import CompletionOutput, EngineStats, RequestOutput, SamplingParams, SpeculativeStats
from serving import jspec_pb2 as pb
from serving.service import Delta, sampling_field


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


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
  """What is set in the message; the rest has SamplingParams' own defaults."""
  fields: dict[str, Any] = {field.name: _plain(value) for field, value in message.ListFields()}
  if fields.pop("as_many_as_fit", False):
    fields["max_tokens"] = None
  with naming_the_field("params"):
    return SamplingParams(**fields)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return dict(value)
  return value if isinstance(value, (bool, int, float, str)) else tuple(value)


def messages(chat: pb.Chat) -> list[dict[str, str]]:
  """A conversation, for LLM.encode_chat."""
  for i, message in enumerate(chat.messages):
    if not message.role:
      raise BadField("chat", f"message {i} has no role")
  return [{"role": message.role, "content": message.content} for message in chat.messages]


@contextlib.contextmanager
def naming_the_field(otherwise: str) -> Iterator[None]:
  """Gives a ValueError the name of the field that it is about: the one that its text begins with.

  Args:
    otherwise: the name for what says nothing of that kind.
  """
  try:
    yield
  except BadField:
    raise
  except ValueError as error:
    if field := sampling_field(str(error)):
      raise BadField(f"params.{field}", error) from None
    word = re.split(r"\W", str(error), maxsplit=1)[0]
    raise BadField(word if word in ("request_id", "priority") else otherwise, error) from None


def generate_reply(output: RequestOutput,
                   news: Sequence[Delta | CompletionOutput]) -> pb.GenerateReply:
  """News of a request; with its statistics if it is finished."""
  return pb.GenerateReply(
      request_id=output.request_id, outputs=[_output(out) for out in news],
      statistics=_statistics(output) if output.finished else None)


def _output(out: Delta | CompletionOutput) -> pb.Output:
  reason = out.stop_reason
  rows = [pb.TokenLogprobs(logprobs=[
      pb.Logprob(token_id=token, logprob=value.logprob, rank=value.rank,
                 decoded_token=value.decoded_token) for token, value in row.items()])
          for row in out.logprobs or ()]
  return pb.Output(
      index=out.index, text=out.text, token_ids=out.token_ids, logprobs=rows,
      finish_reason=out.finish_reason or "",
      stop_token_id=reason if isinstance(reason, int) else None,
      stop_string=reason if isinstance(reason, str) else None)


def _statistics(output: RequestOutput) -> pb.Statistics:
  return pb.Statistics(
      prompt_tokens=len(output.prompt_token_ids),
      generated_tokens=sum(len(out.token_ids) for out in output.outputs),
      speculation=_speculation(output.speculation),
      cached_tokens=output.num_cached_tokens, time_in_queue=output.timing.admitted,
      time_to_first_token=output.timing.first_token, total_time=output.timing.finished)


def _speculation(stats: SpeculativeStats) -> pb.Speculation:
  return pb.Speculation(**dataclasses.asdict(stats), acceptance_rate=stats.acceptance_rate)


def stats_reply(stats: EngineStats) -> pb.StatsReply:
  fields = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
  return pb.StatsReply(**fields | {"finished": dict(stats.finished),
                                   "speculation": _speculation(stats.speculation)})
