"""Clients of a jspec server over gRPC. They need neither jax nor the rest of jspec."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving import jspec_pb2 as pb
from serving import jspec_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Jspec"].full_name
MAX_RETRIES = 4  # gRPC's own limit is five attempts
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
  cached_tokens: int  # of the prompt, found in the prefix cache
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


@dataclasses.dataclass(frozen=True)
class TLS:
  """Files in PEM: who signs the server's certificate (None: the usual authorities), and, where the
  server asks for one, the client's own certificate and key."""

  ca_certs: str | pathlib.Path | None = None
  certfile: str | pathlib.Path | None = None
  keyfile: str | pathlib.Path | None = None

  def credentials(self) -> grpc.ChannelCredentials:
    if (self.certfile is None) != (self.keyfile is None):
      raise ValueError(f"certfile and keyfile go together, got {self.certfile} and {self.keyfile}")
    signers, key, certificate = (None if path is None else pathlib.Path(path).read_bytes()
                                 for path in (self.ca_certs, self.keyfile, self.certfile))
    return grpc.ssl_channel_credentials(signers, key, certificate)


@dataclasses.dataclass(frozen=True)
class Connection:
  """How to reach a server.

  Args:
    address: "host:port". token: what the server's operator gave out. tls: None goes unencrypted.
    retries: attempts after the first where the server is UNAVAILABLE, with growing, jittered
      pauses, and never after a stream's first message has come.
    max_message_bytes: of an answer.
  """

  address: str
  token: str | None = dataclasses.field(default=None, repr=False)
  tls: TLS | None = None
  retries: int = 3
  max_message_bytes: int = 64 << 20

  def __post_init__(self):
    if not 0 <= self.retries <= MAX_RETRIES:
      raise ValueError(f"retries must be in 0..{MAX_RETRIES}, got {self.retries}")

  def open(self, module: Any) -> Any:
    """A channel of grpc or of grpc.aio."""
    policy = {"maxAttempts": self.retries + 1, "initialBackoff": "0.2s", "maxBackoff": "5s",
              "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}
    retrying: dict[str, Any] = {"retryPolicy": policy} if self.retries else {}
    options = [
      ("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], **retrying}]})),
      # What does not fit in this buffer would not be sent again.
      ("grpc.per_rpc_retry_buffer_size", self.max_message_bytes),
      ("grpc.max_receive_message_length", self.max_message_bytes),
      ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 20_000)]
    if self.tls is None:
      return module.insecure_channel(self.address, options)
    return module.secure_channel(self.address, self.tls.credentials(), options)

  @property
  def metadata(self) -> tuple[tuple[str, str], ...]:
    return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


class Client:
  """Calls that wait. Each takes a `timeout` in seconds, after which the server drops the request.

  Errors of the server are grpc.RpcError, with code() and details().
  """

  def __init__(self, address: str, *, token: str | None = None, tls: TLS | None = None,
               retries: int = 3, max_message_bytes: int = 64 << 20):
    connection = Connection(address, token, tls, retries, max_message_bytes)
    self._metadata = connection.metadata
    self._channel = connection.open(grpc)
    self._stub = pb_grpc.JspecStub(self._channel)
    self._health = health_pb2_grpc.HealthStub(self._channel)

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    self._channel.close()

  def generate(self, prompt: Prompt, params: Params = None, *, request_id: str | None = None,
               priority: int = 0, timeout: float | None = None) -> Iterator[Chunk]:
    """Text as it is generated. Leaving the iterator ends the request.

    Args:
      prompt: a text, token ids, or messages of a conversation.
      params: None has the defaults of jspec.SamplingParams. priority: the lower, the sooner.
    """
    call = self._stub.Generate(_request(prompt, params, request_id, priority), timeout=timeout,
                               metadata=self._metadata)
    try:
      for reply in call:
        yield _chunk(reply)
    finally:
      call.cancel()

  def generate_unary(self, prompt: Prompt, params: Params = None, *,
                     request_id: str | None = None, priority: int = 0,
                     timeout: float | None = None) -> Chunk:
    """All of it at once."""
    return _chunk(self._stub.GenerateUnary(_request(prompt, params, request_id, priority),
                                           timeout=timeout, metadata=self._metadata))

  def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None,
               timeout: float | None = None) -> list[int]:
    """The ids of a text, or of a conversation up to where its answer begins."""
    return list(self._stub.Tokenize(_tokenize(prompt, add_special_tokens), timeout=timeout,
                                    metadata=self._metadata).token_ids)

  def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True,
                 timeout: float | None = None) -> str:
    request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    return self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata).text

  def model_info(self, *, timeout: float | None = None) -> ModelInfo:
    return ModelInfo(**_fields(self._stub.ModelInfo(pb.ModelInfoRequest(), timeout=timeout,
                                                    metadata=self._metadata)))

  def stats(self, *, timeout: float | None = None) -> Stats:
    return Stats(**_fields(self._stub.Stats(pb.StatsRequest(), timeout=timeout,
                                            metadata=self._metadata)))

  def health(self, *, timeout: float | None = None) -> bool:
    """Whether the server takes requests. Needs no token."""
    return _serving(self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE),
                                       timeout=timeout))


class AsyncClient:
  """Client's calls for asyncio."""

  def __init__(self, address: str, *, token: str | None = None, tls: TLS | None = None,
               retries: int = 3, max_message_bytes: int = 64 << 20):
    connection = Connection(address, token, tls, retries, max_message_bytes)
    self._metadata = connection.metadata
    self._channel = connection.open(grpc.aio)
    self._stub = pb_grpc.JspecStub(self._channel)
    self._health = health_pb2_grpc.HealthStub(self._channel)

  async def __aenter__(self) -> AsyncClient:
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  async def close(self) -> None:
    await self._channel.close()

  async def generate(self, prompt: Prompt, params: Params = None, *,
                     request_id: str | None = None, priority: int = 0,
                     timeout: float | None = None) -> AsyncIterator[Chunk]:
    call = self._stub.Generate(_request(prompt, params, request_id, priority), timeout=timeout,
                               metadata=self._metadata)
    try:
      async for reply in call:
        yield _chunk(reply)
    finally:
      call.cancel()

  async def generate_unary(self, prompt: Prompt, params: Params = None, *,
                           request_id: str | None = None, priority: int = 0,
                           timeout: float | None = None) -> Chunk:
    return _chunk(await self._stub.GenerateUnary(_request(prompt, params, request_id, priority),
                                                 timeout=timeout, metadata=self._metadata))

  async def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None,
                     timeout: float | None = None) -> list[int]:
    reply = await self._stub.Tokenize(_tokenize(prompt, add_special_tokens), timeout=timeout,
                                      metadata=self._metadata)
    return list(reply.token_ids)

  async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True,
                       timeout: float | None = None) -> str:
    request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    reply = await self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata)
    return reply.text

  async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
    return ModelInfo(**_fields(await self._stub.ModelInfo(
        pb.ModelInfoRequest(), timeout=timeout, metadata=self._metadata)))

  async def stats(self, *, timeout: float | None = None) -> Stats:
    return Stats(**_fields(await self._stub.Stats(pb.StatsRequest(), timeout=timeout,
                                                  metadata=self._metadata)))

  async def health(self, *, timeout: float | None = None) -> bool:
    return _serving(await self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE),
                                             timeout=timeout))


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
    if name in ("stop", "bad_words") and isinstance(value, str):
      value = [value]
    one: Any = {name: value}
    try:
      message.MergeFrom(pb.SamplingParams(**one))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}: {error}") from None
  return message


def _request(prompt: Prompt, params: Params, request_id: str | None,
             priority: int) -> pb.GenerateRequest:
  request = pb.GenerateRequest(params=sampling_message(params), request_id=request_id,
                               priority=priority)
  if isinstance(prompt, str):
    request.text = prompt
  elif len(prompt) and isinstance(prompt[0], Mapping):
    request.chat.CopyFrom(_chat(prompt))
  else:
    request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
  return request


def _tokenize(prompt: str | Messages, add_special_tokens: bool | None) -> pb.TokenizeRequest:
  request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
  if isinstance(prompt, str):
    request.text = prompt
  else:
    request.chat.CopyFrom(_chat(prompt))
  return request


def _chat(messages: Sequence[Any]) -> pb.Chat:
  return pb.Chat(messages=[pb.Message(**message) for message in messages])


def _chunk(reply: pb.GenerateReply) -> Chunk:
  statistics = (Statistics(**_fields(reply.statistics)) if reply.HasField("statistics")
                else None)
  return Chunk(reply.request_id, tuple(_output(out) for out in reply.outputs), statistics)


def _output(out: pb.Output) -> Output:
  rows = tuple({entry.token_id: Logprob(entry.logprob, entry.rank, entry.decoded_token)
                for entry in row.logprobs} for row in out.logprobs)
  stop = out.WhichOneof("stop_reason")
  return Output(out.index, out.text, tuple(out.token_ids), rows, out.finish_reason or None,
                None if stop is None else getattr(out, stop))


def _fields(message: Any) -> dict[str, Any]:
  """The fields of a message with Python's own types, for the dataclass of the same names."""
  fields: dict[str, Any] = {}
  for field in message.DESCRIPTOR.fields:
    value = getattr(message, field.name)
    if isinstance(value, pb.Speculation):
      value = Speculation(**_fields(value))
    elif isinstance(value, Mapping):
      value = dict(value)
    elif not isinstance(value, (str, int, float)):
      value = tuple(value)
    fields[field.name] = value
  return fields


def _serving(reply: health_pb2.HealthCheckResponse) -> bool:
  return reply.status == health_pb2.HealthCheckResponse.SERVING
