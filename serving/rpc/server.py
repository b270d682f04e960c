"""The gRPC door: jspec.v1.Jspec over grpc.aio, with health checks and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jspec import (
  Draining,
  EngineDead,
  QueueFull,
  RequestFailed,
  RequestOutput,
  SamplingParams,
  __version__,
)
from jspec.serving.auth import Tokens
from jspec.serving.log_lines import fields
from jspec.serving.metrics import Metrics
from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.rpc.messages import (
  BadField,
  check_known,
  conversation,
  generate_reply,
  naming_the_field,
  sampling_params,
  stats_reply,
)
from jspec.serving.rpc.options import Options
from jspec.serving.service import Caller, Service, num_tokens
from jspec.serving.shares import ShareFull

SERVICE = pb.DESCRIPTOR.services_by_name["Jspec"].full_name
HEALTH_SERVICES = ("", SERVICE)
HEALTH_INTERVAL = 0.25  # seconds between two looks at the engine
FLUSH = 1.0  # seconds at most for the last answers to leave, once all have been made
MAX_DETAILS = 400  # characters of an error: it travels in a header, which may have 8 KiB
CODES: dict[type[Exception], grpc.StatusCode] = {
  BadField: grpc.StatusCode.INVALID_ARGUMENT, QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
  Draining: grpc.StatusCode.UNAVAILABLE, EngineDead: grpc.StatusCode.UNAVAILABLE,
  RequestFailed: grpc.StatusCode.INTERNAL, ShareFull: grpc.StatusCode.RESOURCE_EXHAUSTED}
REASONS: dict[type[Exception], str] = {  # as HTTP counts them
  BadField: "invalid", QueueFull: "queue_full", Draining: "unavailable", EngineDead: "unavailable",
  RequestFailed: "request_failed", ShareFull: "client_queue_full"}
logger = logging.getLogger(__name__)
ACCESS = logging.getLogger("jspec.serving.access")


async def start(service: Service, options: Options | None = None) -> GrpcServer:
  """A server that answers on options.host; OSError if it cannot listen there."""
  options = options or Options()
  credentials, tokens = options.credentials(), Tokens(options.tokens)
  server = grpc.aio.server(
      interceptors=[_Guard(tokens, service.metrics)], options=options.channel())
  door, checks = _Door(service, tokens), health.aio.HealthServicer()
  server.add_generic_rpc_handlers((_handlers(door),))
  health_pb2_grpc.add_HealthServicer_to_server(checks, server)
  reflection.enable_server_reflection(
      (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
  address = f"[{options.host}]" if ":" in options.host else options.host
  address += f":{options.port}"
  try:
    port = (server.add_insecure_port(address) if credentials is None
            else server.add_secure_port(address, credentials))
  except RuntimeError:
    raise OSError(f"cannot listen on {address}: the port is taken, or the address is not this "
                  "machine's") from None
  handle = GrpcServer(server, port, door, checks)
  await handle.start()
  return handle


class GrpcServer:
  """A running server; `port` is where it listens."""

  def __init__(self, server: grpc.aio.Server, port: int, door: _Door,
               checks: health.aio.HealthServicer):
    self.port = port
    self._server, self._door, self._checks = server, door, checks
    self._watch: asyncio.Task[None] | None = None

  async def start(self) -> None:
    await self._report(self._door.service.engine.is_healthy)
    await self._server.start()
    self._watch = asyncio.create_task(self._watch_engine())

  async def drain(self, grace_seconds: float) -> bool:
    """Stops once all running requests have ended, and after `grace_seconds` at the latest.

    Health checks say NOT_SERVING first, then new requests are refused. False: some were cut off.
    """
    await self._checks.enter_graceful_shutdown()
    self._door.draining = True
    try:
      async with asyncio.timeout(grace_seconds):
        while self._door.running:
          await asyncio.sleep(0.01)
    except TimeoutError:
      pass
    complete = not self._door.running
    await self.stop(FLUSH if complete else None)  # health watchers would stay for ever
    return complete

  async def stop(self, flush: float | None = None) -> None:
    """At once, or `flush` seconds later: what still runs is cut off with UNAVAILABLE."""
    if self._watch is not None:
      self._watch.cancel()
    await self._server.stop(flush)

  async def _watch_engine(self) -> None:
    healthy = None
    while True:
      if healthy != (healthy := self._door.service.engine.is_healthy):
        await self._report(healthy)
      await asyncio.sleep(HEALTH_INTERVAL)

  async def _report(self, healthy: bool) -> None:
    statuses = health_pb2.HealthCheckResponse
    for name in HEALTH_SERVICES:
      await self._checks.set(name, statuses.SERVING if healthy else statuses.NOT_SERVING)


class _Guard(grpc.aio.ServerInterceptor):
  """Lets calls with a valid token pass, and health checks, which load balancers make."""

  def __init__(self, tokens: Tokens, metrics: Metrics):
    self._tokens, self._metrics = tokens, metrics

  async def intercept_service(self, continuation: Callable[..., Awaitable[Any]],
                              handler_call_details: grpc.HandlerCallDetails) -> Any:
    open_to_all = handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/")
    if open_to_all or self._tokens.allows(
        _authorization(handler_call_details.invocation_metadata)):
      return await continuation(handler_call_details)
    self._metrics.refused("grpc", grpc.StatusCode.UNAUTHENTICATED.name, "invalid_api_key")
    # Of any method: a handler of streams answers before it has read anything.
    return grpc.stream_stream_rpc_method_handler(_refuse)


def _authorization(metadata: Any) -> str | None:
  given = [value for key, value in metadata or () if key == "authorization"]
  return given[0] if len(given) == 1 else None


async def _refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
  del requests  # unused
  await context.abort(grpc.StatusCode.UNAUTHENTICATED,
                      "a valid token is needed, as metadata `authorization: Bearer TOKEN`")


class _Door:
  """The service's methods, of parsed requests."""

  def __init__(self, service: Service, tokens: Tokens):
    self.service, self._tokens = service, tokens
    self.draining = False
    self.running = 0  # calls that generate

  def client(self, context: grpc.aio.ServicerContext) -> str:
    """Of which key a call is, or from which address."""
    key = self._tokens.client(_authorization(context.invocation_metadata()))
    return key or address_of(context)

  async def generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
    begun: list[asyncio.Task[None]] = []

    def queued() -> None:  # whoever is in between sees that the answer has begun
      begun.append(asyncio.create_task(context.send_initial_metadata(())))

    with self._one_more_running():
      prompt, params = await self._read(request)
      with naming_the_field(request.WhichOneof("prompt")):
        stream = self.service.stream(prompt, params, queued=queued, **self._named(request, context))
        async with contextlib.aclosing(stream):
          generated = 0
          async for delta in stream:
            await asyncio.gather(*begun)
            generated += num_tokens(delta)
            if delta.news or delta.finished:
              await context.write(self._reply(delta, generated))

  async def generate_unary(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
                           ) -> pb.GenerateReply:
    with self._one_more_running():
      prompt, params = await self._read(request)
      with naming_the_field(request.WhichOneof("prompt")):
        output = await self.service.complete(prompt, params, **self._named(request, context))
    return self._reply(output, num_tokens(output))

  def _named(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
             ) -> dict[str, Any]:
    """What a request says beside its prompt and its parameters, and who asks."""
    request_id = request.request_id if request.HasField("request_id") else None
    return {"request_id": request_id,
            "cache_salt": request.cache_salt if request.HasField("cache_salt") else None,
            "priority": request.priority, "caller": Caller(self.client(context), request_id)}

  def _reply(self, output: RequestOutput, generated: int) -> pb.GenerateReply:
    return generate_reply(output, generated, self.service.policy.show_cached_tokens)

  async def _read(self, request: pb.GenerateRequest) -> tuple[str | list[int], SamplingParams]:
    """Prompt and sampling parameters."""
    for name in ("request_id", "cache_salt"):
      if request.HasField(name) and not getattr(request, name):  # type: ignore[arg-type]
        raise BadField(name, "must not be empty; leave it unset")
    params = sampling_params(request.params, self.service.policy.defaults)
    match request.WhichOneof("prompt"):
      case "text":
        return request.text, params
      case "token_ids":
        return list(request.token_ids.ids), params
      case "chat":
        return await self._encode_chat(request.chat), params
    raise BadField("prompt", "one of text, token_ids and chat must be set")

  @contextlib.contextmanager
  def _one_more_running(self) -> Iterator[None]:
    if self.draining:
      raise Draining()
    self.running += 1
    try:
      yield
    finally:
      self.running -= 1

  async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
    match request.WhichOneof("prompt"):
      case "text":
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        with naming_the_field("text"):
          encode = self.service.engine.llm.encode
          return pb.TokenizeReply(token_ids=await asyncio.to_thread(encode, request.text, special))
      case "chat":
        if request.HasField("add_special_tokens"):
          raise BadField("add_special_tokens", "is of text only: a chat template writes its own")
        return pb.TokenizeReply(token_ids=await self._encode_chat(request.chat))
    raise BadField("prompt", "one of text and chat must be set")

  async def _encode_chat(self, chat: pb.Chat) -> list[int]:
    with naming_the_field("chat"):
      return await self.service.encode_chat(conversation(chat))

  async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
    decode, ids = self.service.engine.llm.decode, list(request.token_ids)
    skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
    with naming_the_field("token_ids"):
      return pb.DetokenizeReply(text=await asyncio.to_thread(decode, ids, skip))

  async def model_info(self, request: pb.ModelInfoRequest) -> pb.ModelInfoReply:
    del request  # unused
    llm = self.service.engine.llm
    return pb.ModelInfoReply(
        model_name=self.service.model_name, vocab_size=llm.config.vocab_size,
        max_model_len=llm.max_model_len, max_num_seqs=llm.max_num_seqs,
        speculative_method=llm.speculative.method,
        num_speculative_tokens=llm.engine.drafter.max_depth, jspec_version=__version__)

  async def stats(self, request: pb.StatsRequest) -> pb.StatsReply:
    del request  # unused
    return stats_reply(self.service.engine.stats())


def _handlers(door: _Door) -> grpc.GenericRpcHandler:
  """For gRPC. Requests come as bytes, so that malformed ones are refused like other bad ones."""
  methods: dict[str, tuple[Callable[..., Awaitable[Any]], type[Message]]] = {
    "Generate": (door.generate, pb.GenerateRequest),
    "GenerateUnary": (door.generate_unary, pb.GenerateRequest),
    "Tokenize": (door.tokenize, pb.TokenizeRequest),
    "Detokenize": (door.detokenize, pb.DetokenizeRequest),
    "ModelInfo": (door.model_info, pb.ModelInfoRequest),
    "Stats": (door.stats, pb.StatsRequest),
  }
  described = pb.DESCRIPTOR.services_by_name["Jspec"].methods_by_name
  handlers = {}
  for name, (method, kind) in methods.items():
    streams = described[name].server_streaming
    handler = (grpc.unary_stream_rpc_method_handler if streams
               else grpc.unary_unary_rpc_method_handler)
    handlers[name] = handler(functools.partial(_answer, door.service, name, method, kind),
                             response_serializer=lambda reply: reply.SerializeToString())
  return grpc.method_handlers_generic_handler(SERVICE, handlers)


async def _answer(service: Service, name: str, method: Callable[..., Awaitable[Any]],
                  kind: type[Message], request: bytes, context: grpc.aio.ServicerContext) -> Any:
  """The method's answer; an error becomes a status that says whose fault it is."""
  started, code, reason = time.monotonic(), None, "invalid"
  try:
    message = kind.FromString(request)
    check_known(message)
    more = (context,) if kind is pb.GenerateRequest else ()
    answer = await method(message, *more)
    code = grpc.StatusCode.OK
    return answer
  except tuple(CODES) as error:
    code, details, reason = CODES[type(error)], str(error), REASONS[type(error)]
  except DecodeError:
    code = grpc.StatusCode.INVALID_ARGUMENT
    details = f"{len(request)} bytes are not a {kind.DESCRIPTOR.full_name}"
  except Exception:
    logger.exception("a call failed")
    code, details = grpc.StatusCode.INTERNAL, "the server failed; its log says why"
    reason = "internal_error"
  finally:
    if service.policy.access_log:
      ACCESS.info("grpc %s", fields(client=address_of(context), method=name,
                                    status=code.name if code else "left",
                                    seconds=time.monotonic() - started))
  service.metrics.refused("grpc", code.name, reason)
  # As HTTP's Retry-After.
  later = (("retry-after", "1"),) if code is grpc.StatusCode.RESOURCE_EXHAUSTED else ()
  await context.abort(code, details[:MAX_DETAILS], later)


def address_of(context: grpc.aio.ServicerContext) -> str:
  """The client's, without its port: "ipv4:127.0.0.1:4711" is 127.0.0.1."""
  kind, _, address = context.peer().partition(":")
  return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else context.peer()
