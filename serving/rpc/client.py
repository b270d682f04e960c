"""Python clients of a jspec server over gRPC. They need neither jax nor the rest of jspec."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.rpc import jspec_pb2_grpc as pb_grpc
from jspec.serving.rpc.client_messages import (
  Chunk,
  Messages,
  ModelInfo,
  Params,
  Prompt,
  Stats,
  chunk,
  fields_of,
  generate_request,
  tokenize_request,
)

SERVICE = pb.DESCRIPTOR.services_by_name["Jspec"].full_name
MAX_RETRIES = 4  # gRPC's own limit is five attempts


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
               priority: int = 0, cache_salt: str | None = None,
               timeout: float | None = None) -> Iterator[Chunk]:
    """Text as it is generated. Leaving the iterator ends the request.

    Args:
      prompt: a text, token ids, or messages of a conversation.
      params: None has the server's defaults. priority: the lower, the sooner.
      cache_salt: prompts share the prefix cache only where theirs are equal.
    """
    request = generate_request(prompt, params, request_id, priority, cache_salt)
    call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
    try:
      for reply in call:
        yield chunk(reply)
    finally:
      call.cancel()

  def generate_unary(self, prompt: Prompt, params: Params = None, *,
                     request_id: str | None = None, priority: int = 0,
                     cache_salt: str | None = None, timeout: float | None = None) -> Chunk:
    """All of it at once."""
    request = generate_request(prompt, params, request_id, priority, cache_salt)
    return chunk(self._stub.GenerateUnary(request, timeout=timeout, metadata=self._metadata))

  def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None,
               timeout: float | None = None) -> list[int]:
    """The ids of a text, or of a conversation up to where its answer begins."""
    return list(self._stub.Tokenize(tokenize_request(prompt, add_special_tokens), timeout=timeout,
                                    metadata=self._metadata).token_ids)

  def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True,
                 timeout: float | None = None) -> str:
    request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    return self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata).text

  def model_info(self, *, timeout: float | None = None) -> ModelInfo:
    return ModelInfo(**fields_of(self._stub.ModelInfo(pb.ModelInfoRequest(), timeout=timeout,
                                                    metadata=self._metadata)))

  def stats(self, *, timeout: float | None = None) -> Stats:
    return Stats(**fields_of(self._stub.Stats(pb.StatsRequest(), timeout=timeout,
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
                     cache_salt: str | None = None,
                     timeout: float | None = None) -> AsyncIterator[Chunk]:
    request = generate_request(prompt, params, request_id, priority, cache_salt)
    call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
    try:
      async for reply in call:
        yield chunk(reply)
    finally:
      call.cancel()

  async def generate_unary(self, prompt: Prompt, params: Params = None, *,
                           request_id: str | None = None, priority: int = 0,
                           cache_salt: str | None = None, timeout: float | None = None) -> Chunk:
    request = generate_request(prompt, params, request_id, priority, cache_salt)
    return chunk(await self._stub.GenerateUnary(request, timeout=timeout,
                                                metadata=self._metadata))

  async def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None,
                     timeout: float | None = None) -> list[int]:
    reply = await self._stub.Tokenize(tokenize_request(prompt, add_special_tokens), timeout=timeout,
                                      metadata=self._metadata)
    return list(reply.token_ids)

  async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True,
                       timeout: float | None = None) -> str:
    request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    reply = await self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata)
    return reply.text

  async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
    return ModelInfo(**fields_of(await self._stub.ModelInfo(
        pb.ModelInfoRequest(), timeout=timeout, metadata=self._metadata)))

  async def stats(self, *, timeout: float | None = None) -> Stats:
    return Stats(**fields_of(await self._stub.Stats(pb.StatsRequest(), timeout=timeout,
                                                  metadata=self._metadata)))

  async def health(self, *, timeout: float | None = None) -> bool:
    return _serving(await self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE),
                                             timeout=timeout))


def _serving(reply: health_pb2.HealthCheckResponse) -> bool:
  return reply.status == health_pb2.HealthCheckResponse.SERVING
