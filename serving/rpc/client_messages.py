"""Messages of the gRPC interface <-> Python's own objects, on the client's side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.serving.rpc import jspec_pb2 as pb

Messages = Sequence[Mapping[str, str]]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int] | Messages
Params = Any  # a dataclass such as jspec.SamplingParams, or a mapping with the names of its fields


@dataclasses.dataclass(frozen=True)
class Logprob:
  logprob: float
  rank: int  # 1 is the likeliest token
  decoded_token: str


@dataclasses.dataclass(frozen=True)
class Output:
  """What one of a request's n outputs has gained, or all of it. Text never splits a character."""

  index: int
  text: str
  token_ids: tuple[int, ...]
  logprobs: tuple[dict[int, Logprob], ...]  # per token, if asked for: sampled first, then top
  finish_reason: str | None  # "stop" or "length" where it ends
  stop_reason: int | str | None  # the stop token or string, None for the model's own end


@dataclasses.dataclass(frozen=True)
class Speculation:
  """As jspec.SpeculativeStats."""

  num_steps: int
  num_drafts: int
  num_draft_tokens: int
  num_accepted_tokens: int
  num_generated_tokens: int
  accepted_histogram: tuple[int, ...]
  drafted_histogram: tuple[int, ...]
  acceptance_rate: float


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Of a finished request; times in seconds since the server had checked it."""

  prompt_tokens: int
  cached_tokens: int | None  # of the prompt, in the prefix cache; None where that is not shown
  generated_tokens: int  # of all outputs
  speculation: Speculation
  time_in_queue: float
  time_to_first_token: float
  total_time: float


@dataclasses.dataclass(frozen=True)
class Chunk:
  """News of a request; the last one has its statistics."""

  request_id: str
  outputs: tuple[Output, ...]
  statistics: Statistics | None
  # Per token of the prompt, with the statistics, if asked for; the first has none.
  prompt_logprobs: tuple[dict[int, Logprob], ...] = ()

  @property
  def text(self) -> str:
    """Of the first output."""
    return "".join(out.text for out in self.outputs if out.index == 0)


@dataclasses.dataclass(frozen=True)
class ModelInfo:
  model_name: str
  vocab_size: int
  max_model_len: int
  max_num_seqs: int
  speculative_method: str
  num_speculative_tokens: int
  jspec_version: str


@dataclasses.dataclass(frozen=True)
class Stats:
  """As jspec.EngineStats."""

  num_running: int
  num_waiting: int
  num_pages: int
  num_free_pages: int
  prefix_queries: int
  prefix_hits: int
  num_preemptions: int
  prompt_tokens: int
  generation_tokens: int
  finished: dict[str, int]
  speculation: Speculation
  corrupted_requests: int


def sampling_message(params: Params) -> pb.SamplingParams:
  """Sampling parameters for the wire. None leaves a field at its default, but for max_tokens,
  where it means as many as fit, as in jspec.SamplingParams."""
  if params is None:
    return pb.SamplingParams()
  fields = params if isinstance(params, Mapping) else {
    f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
  message: Any = pb.SamplingParams()
  known = [name for name in message.DESCRIPTOR.fields_by_name if name != "as_many_as_fit"]
  for name, value in fields.items():
    if name not in known:
      raise ValueError(f"{name!r} is no sampling parameter; there are {', '.join(known)}")
    if value is None:
      if name == "max_tokens":
        message.as_many_as_fit = True
      continue
    if name == "allowed_token_ids" and not list(value):  # which on the wire allows all
      raise ValueError("allowed_token_ids: must name at least one token (None allows all), got []")
    if name in ("stop", "bad_words") and isinstance(value, str):
      value = [value]
    one: Any = {name: value}
    try:
      message.MergeFrom(pb.SamplingParams(**one))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}: {error}") from None
  return message


def generate_request(prompt: Prompt, params: Params, request_id: str | None, priority: int,
                     cache_salt: str | None) -> pb.GenerateRequest:
  request = pb.GenerateRequest(params=sampling_message(params), request_id=request_id,
                               priority=priority, cache_salt=cache_salt)
  if isinstance(prompt, str):
    request.text = prompt
  elif len(prompt) and isinstance(prompt[0], Mapping):
    request.chat.CopyFrom(_chat(prompt))
  else:
    request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
  return request


def tokenize_request(prompt: str | Messages, add_special_tokens: bool | None) -> pb.TokenizeRequest:
  request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
  if isinstance(prompt, str):
    request.text = prompt
  else:
    request.chat.CopyFrom(_chat(prompt))
  return request


def _chat(messages: Sequence[Any]) -> pb.Chat:
  return pb.Chat(messages=[pb.Message(**message) for message in messages])


def chunk(reply: pb.GenerateReply) -> Chunk:
  statistics = (Statistics(**fields_of(reply.statistics)) if reply.HasField("statistics")
                else None)
  return Chunk(reply.request_id, tuple(_output(out) for out in reply.outputs), statistics,
               _rows(reply.prompt_logprobs))


def _output(out: pb.Output) -> Output:
  stop = out.WhichOneof("stop_reason")
  return Output(out.index, out.text, tuple(out.token_ids), _rows(out.logprobs),
                out.finish_reason or None, None if stop is None else getattr(out, stop))


def _rows(rows: Sequence[pb.TokenLogprobs]) -> tuple[dict[int, Logprob], ...]:
  return tuple({entry.token_id: Logprob(entry.logprob, entry.rank, entry.decoded_token)
                for entry in row.logprobs} for row in rows)


def fields_of(message: Any) -> dict[str, Any]:
  """The fields of a message with Python's own types, for the dataclass of the same names."""
  fields: dict[str, Any] = {}
  for field in message.DESCRIPTOR.fields:
    value = getattr(message, field.name)
    if field.has_presence and field.message_type is None and not message.HasField(field.name):
      value = None
    elif isinstance(value, pb.Speculation):
      value = Speculation(**fields_of(value))
    elif isinstance(value, Mapping):
      value = dict(value)
    elif not isinstance(value, (str, int, float)):
      value = tuple(value)
    fields[field.name] = value
  return fields
