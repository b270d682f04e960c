"""The OpenAI-compatible HTTP door, on FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from jspec import Draining, QueueFull, RequestOutput, __version__
from serving.auth import Tokens
from serving.http_gate import Gate, event, json_response
from serving.openai_answers import Answer, ChatAnswer, CompletionAnswer
from serving.openai_api import (
  Call,
  ChatRequest,
  CompletionRequest,
  DetokenizeRequest,
  TokenizeRequest,
)
from serving.openai_errors import Refused, invalid, refusal
from serving.service import Delta, Service

BODY_TIMEOUT = 60.0  # seconds for a client to send its body
KEEP_ALIVE = 75  # seconds between requests: longer than load balancers wait, commonly 60
CLOSING = 5  # seconds for the last answers to be read once the grace is over
MAX_HEADER_BYTES = 64 * 2**10
EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies: pass it on


@dataclasses.dataclass(frozen=True)
class Options:
  """How the door is reached.

  Args:
    port: 0 takes a free one. tokens: API keys, one of which each request must bring; none: open.
    ssl_certfile, ssl_keyfile: PEM files, the server's certificate with its chain, and its key.
    max_body_bytes: of a request; longer ones are refused while they are read.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  tokens: Sequence[str] = dataclasses.field(default=(), repr=False)
  ssl_certfile: str | pathlib.Path | None = None
  ssl_keyfile: str | pathlib.Path | None = None
  max_body_bytes: int = 4 << 20

  def __post_init__(self):
    Tokens(self.tokens)
    if not 0 <= self.port <= 65535:
      raise ValueError(f"port must be in 0..65535, got {self.port}")
    if self.max_body_bytes < 1:
      raise ValueError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
    if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
      raise ValueError("ssl_certfile and ssl_keyfile go together, got "
                       f"{self.ssl_certfile} and {self.ssl_keyfile}")
    if self.ssl_certfile is not None:
      try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
      except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ValueError(f"ssl_certfile={self.ssl_certfile} and ssl_keyfile={self.ssl_keyfile} "
                         "must be a certificate and its key, in PEM without a passphrase: "
                         f"{error}") from None


async def start(service: Service, options: Options | None = None,
                listener: socket.socket | None = None) -> HttpServer:
  """A server that answers on options.host; OSError if it cannot listen there.

  Args:
    listener: a bound socket, in place of options.host and port.
  """
  options = options or Options()
  listener = listener or _bind(options.host, options.port)
  draining = asyncio.Event()
  gate = Gate(make_app(service, draining), Tokens(options.tokens), draining,
              max_body_bytes=options.max_body_bytes, body_timeout=BODY_TIMEOUT)
  server = _Uvicorn(uvicorn.Config(
      gate, http="h11", ws="none", lifespan="off", log_config=None, log_level="warning",
      access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE,
      timeout_graceful_shutdown=CLOSING, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
      ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile))
  task = asyncio.create_task(server.serve([listener]))
  while not server.started:
    if task.done():
      await task
      raise OSError("the HTTP server did not start")
    await asyncio.sleep(0.005)
  return HttpServer(listener.getsockname()[1], gate, draining, server, task)


class HttpServer:
  """A running server; `port` is where it listens."""

  def __init__(self, port: int, gate: Gate, draining: asyncio.Event, server: uvicorn.Server,
               task: asyncio.Task[None]):
    self.port = port
    self._gate, self._draining, self._server, self._task = gate, draining, server, task

  async def drain(self, grace: float) -> bool:
    """Stops once all running requests have ended, and after `grace` seconds at the latest.

    Meanwhile /health says 503 and new requests are refused. False: some were cut off.
    """
    self._draining.set()
    if not (complete := await self._gate.idle(grace)):
      self._gate.cut()
    self._server.should_exit = True
    await self._task
    return complete


class _Uvicorn(uvicorn.Server):
  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield  # signals belong to whoever runs the event loop


def _bind(host: str, port: int) -> socket.socket:
  family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
  listener = socket.socket(family, kind, proto)
  try:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
  except OSError as error:
    listener.close()
    raise OSError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
  return listener


# ---------------------------------------------------------------------------------------- routes


def make_app(service: Service, draining: asyncio.Event) -> FastAPI:
  """The application, without what serving.http_gate does."""
  # Without pages that would load scripts from elsewhere, and without redirects, which lose keys.
  app = FastAPI(title="jspec", version=__version__, openapi_url=None, redirect_slashes=False)
  llm, started = service.engine.llm, int(time.time())

  def check_model(name: str | None) -> None:
    if name not in (None, service.model_name):
      raise Refused(f"there is no model {name!r:.80} here, only {service.model_name!r}", "model",
                    status=404, code="model_not_found")

  @app.post("/v1/chat/completions")
  async def chat(request: ChatRequest) -> Response:
    check_model(request.model)
    prompt = await _in_thread("messages", llm.encode_chat, request.conversation)
    call = request.call(prompt)
    return await _answer(service, call, ChatAnswer(call, service.model_name, llm.tokenizer),
                         "messages")

  @app.post("/v1/completions")
  async def complete(request: CompletionRequest) -> Response:
    check_model(request.model)
    call = request.call()
    return await _answer(service, call, CompletionAnswer(call, service.model_name, llm.tokenizer),
                         "prompt")

  @app.get("/v1/models")
  async def models() -> Response:
    return json_response({"object": "list", "data": [card()]})

  @app.get("/v1/models/{name:path}")
  async def model(name: str) -> Response:
    check_model(name)
    return json_response(card())

  def card() -> dict[str, Any]:
    return {"id": service.model_name, "object": "model", "created": started, "owned_by": "jspec",
            "max_model_len": llm.max_model_len}

  @app.get("/health")
  async def health() -> Response:
    if draining.is_set():
      raise Draining()
    if not service.engine.is_healthy:
      raise Refused("the engine takes no requests", status=503, kind="server_error",
                    code="unavailable")
    return json_response({"status": "ok"})

  @app.get("/metrics")
  async def metrics() -> Response:
    content, kind = service.metrics.render()
    return Response(content, headers={"Content-Type": kind})

  @app.get("/version")
  async def version() -> Response:
    return json_response({"version": __version__})

  _add_tokenizing(app, service, check_model)
  _add_errors(app)
  return app


def _add_tokenizing(app: FastAPI, service: Service, check_model: Any) -> None:
  llm = service.engine.llm

  @app.post("/tokenize")
  async def tokenize(request: TokenizeRequest) -> Response:
    check_model(request.model)
    conversation = request.conversation
    if conversation is None:
      ids = await _in_thread("prompt", llm.encode, request.prompt,
                             request.add_special_tokens is not False)
    else:
      ids = await _in_thread("messages", llm.encode_chat, conversation,
                             request.add_generation_prompt is not False)
    spelled = llm.tokenizer.backend.id_to_token
    return json_response({
        "count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids,
        "token_strs": [spelled(i) for i in ids] if request.return_token_strs else None})

  @app.post("/detokenize")
  async def detokenize(request: DetokenizeRequest) -> Response:
    check_model(request.model)
    text = await _in_thread("tokens", llm.decode, request.tokens, False)
    return json_response({"prompt": text})


async def _in_thread(param: str, function: Callable[..., Any], *arguments: Any) -> Any:
  """Long texts take a while: other requests go on. `param`: what a ValueError is about."""
  try:
    return await asyncio.to_thread(function, *arguments)
  except ValueError as error:
    raise Refused(str(error), param) from None


def _add_errors(app: FastAPI) -> None:
  """Every error in OpenAI's shape."""
  def told(error: Refused) -> Response:
    return json_response(error.body, error.status, error.headers)

  @app.exception_handler(RequestValidationError)
  async def on_invalid(request: Request, error: RequestValidationError) -> Response:
    return told(invalid(error.errors()))

  @app.exception_handler(HTTPException)
  async def on_http(request: Request, error: HTTPException) -> Response:
    message = {400: "the body cannot be read as JSON",  # such as not UTF-8, or nested too deeply
               404: f"there is no {request.url.path!r:.80} here",
               405: f"{request.url.path} does not take {request.method}"}
    return told(Refused(message.get(error.status_code, error.detail), status=error.status_code,
                        headers=error.headers))

  async def on_error(request: Request, error: Exception) -> Response:
    return told(refusal(error))

  for kind in (Refused, Draining, Exception):
    app.add_exception_handler(kind, on_error)


# ------------------------------------------------------------------------------------- generating


class _News(NamedTuple):
  """A snapshot of one of a call's prompts."""

  prompt: int
  output: RequestOutput
  deltas: list[Delta]


async def _answer(service: Service, call: Call, answer: Answer, prompt_field: str) -> Response:
  """Runs a call. Whatever refuses it does so before the answer has begun."""
  try:
    await _check(service, call)
    news = _run(service, call, answer.id)
    if call.stream:
      first = await anext(news)
      return _EventStream(_events(answer, first, news), media_type="text/event-stream",
                          headers=EVENT_HEADERS)
    finished: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(news):
      async for prompt, output, _ in news:
        finished[prompt] = output
  except Exception as error:
    raise refusal(error, prompt_field) from error
  return json_response(answer.whole([finished[i] for i in range(len(call.prompts))]))


async def _check(service: Service, call: Call) -> None:
  """Refuses a call of many prompts before any of them runs."""
  count, engine = len(call.prompts), service.engine
  if count == 1:
    return
  if count > engine.max_outputs:
    raise Refused(f"{count} prompts are more than the {engine.max_outputs} requests that this "
                  "server holds", "prompt")
  for prompt in call.prompts:
    await asyncio.to_thread(engine.llm.prepare, prompt, call.params)
  if engine.num_requests + count > engine.max_outputs:
    raise QueueFull(f"there is no room for {count} more requests now; try again later")


async def _run(service: Service, call: Call, name: str) -> AsyncGenerator[_News]:
  """Snapshots of all prompts as they come. Leaving it ends the requests."""
  news: asyncio.Queue[_News | Exception] = asyncio.Queue(1)  # a reader that is slow misses some

  async def follow(i: int) -> None:
    try:
      stream = service.stream(call.prompts[i], call.params, request_id=f"{name}-{i}",
                              priority=call.priority)
      async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for output, deltas in stream:
          await news.put(_News(i, output, deltas))
    except Exception as error:
      await news.put(error)

  tasks = [asyncio.create_task(follow(i)) for i in range(len(call.prompts))]
  try:
    left = len(tasks)
    while left:
      item = await news.get()
      if isinstance(item, Exception):
        raise item
      left -= item.output.finished
      yield item
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.wait(tasks)


async def _events(answer: Answer, first: _News, news: AsyncGenerator[_News]
                  ) -> AsyncIterator[bytes]:
  finished: dict[int, RequestOutput] = {}
  try:
    async with contextlib.aclosing(news):
      yield b"".join(map(event, answer.opening()))
      item: _News | None = first
      while item is not None:
        finished[item.prompt] = item.output
        yield b"".join(map(event, answer.chunks(item.prompt, item.deltas)))
        item = await anext(news, None)
    outputs = [finished[i] for i in range(len(finished))]
    yield b"".join(map(event, answer.closing(outputs))) + b"data: [DONE]\n\n"
  except Exception as error:  # the status is sent: all that is left is an event
    yield event(refusal(error).body)


class _EventStream(StreamingResponse):
  """Closes its events when it is cancelled, at once; StreamingResponse leaves that to chance."""

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
      await self.stream_response(send)
