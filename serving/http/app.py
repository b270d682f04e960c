"""The HTTP application: which path does what, on FastAPI."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jspec import Draining, __version__
from jspec.serving.http import body as http_body
from jspec.serving.http.calls import answer_call
from jspec.serving.http.gate import json_response
from jspec.serving.openai.answers import ChatAnswer, CompletionAnswer
from jspec.serving.openai.api import Call, CompletionRequest, Prompt
from jspec.serving.openai.chat import ChatRequest, DetokenizeRequest, TokenizeRequest
from jspec.serving.openai.errors import Refused, refusal
from jspec.serving.openai.fields import Fields
from jspec.serving.openai.responses import ResponsesAnswer, ResponsesRequest
from jspec.serving.service import Caller, Conversation, Service

Kind = TypeVar("Kind", bound=Fields)


def make_app(service: Service, draining: asyncio.Event) -> FastAPI:
  """The application, without what serving.http.gate does."""
  # Without pages that would load scripts from elsewhere, and without redirects, which lose keys.
  app = FastAPI(title="jspec", version=__version__, openapi_url=None, redirect_slashes=False)
  _add_generating(app, service)
  _add_tokenizing(app, service)
  _add_models(app, service)
  _add_operating(app, service, draining)
  _add_errors(app)
  return app


def _add_generating(app: FastAPI, service: Service) -> None:
  llm = service.engine.llm

  def answering(kind: type, call: Call, *more: Any) -> Any:
    return kind(call, service.model_name, llm.tokenizer, service.policy.show_cached_tokens,
                *more)

  @app.post("/v1/chat/completions")
  async def chat(content: Request) -> Response:
    request = await _read(service, content, ChatRequest)
    prompt = await _encode_chat(service, request.conversation, "messages")
    call = request.call(prompt, service.policy.defaults)
    return await answer_call(service, call, answering(ChatAnswer, call), "messages",
                             _caller(content))

  @app.post("/v1/completions")
  async def complete(content: Request) -> Response:
    request = await _read(service, content, CompletionRequest)
    call = request.call(service.policy.defaults)
    if request.add_special_tokens is False:
      call = dataclasses.replace(call, prompts=[await bare(p) for p in call.prompts])
    return await answer_call(service, call, answering(CompletionAnswer, call), "prompt",
                             _caller(content))

  async def bare(prompt: Prompt) -> Prompt:
    return (await _in_thread("prompt", llm.encode, prompt, False) if isinstance(prompt, str)
            else prompt)

  @app.post("/v1/responses")
  async def respond(content: Request) -> Response:
    request = await _read(service, content, ResponsesRequest)
    prompt = await _encode_chat(service, request.conversation, "input")
    call = request.call(prompt, service.policy.defaults)
    return await answer_call(service, call, answering(ResponsesAnswer, call, request), "input",
                             _caller(content))


def _add_tokenizing(app: FastAPI, service: Service) -> None:
  llm = service.engine.llm

  @app.post("/tokenize")
  async def tokenize(content: Request) -> Response:
    request = await _read(service, content, TokenizeRequest)
    conversation = request.conversation
    if conversation is None:
      ids = await _in_thread("prompt", llm.encode, request.prompt,
                             request.add_special_tokens is not False)
    else:
      ids = await _encode_chat(service, conversation, "messages")
    def answer() -> Response:
      spelled = llm.tokenizer.backend.id_to_token
      return json_response({
          "count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids,
          "token_strs": [spelled(i) for i in ids] if request.return_token_strs else None})

    return await asyncio.to_thread(answer)

  @app.post("/detokenize")
  async def detokenize(content: Request) -> Response:
    request = await _read(service, content, DetokenizeRequest)
    text = await _in_thread("tokens", llm.decode, request.tokens, False)
    return json_response({"prompt": text})


def _add_models(app: FastAPI, service: Service) -> None:
  started = int(time.time())

  def card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": started, "owned_by": "jspec",
            "max_model_len": service.engine.llm.max_model_len}

  @app.get("/v1/models")
  async def models() -> Response:
    return json_response({"object": "list", "data": [card(name) for name in service.model_names]})

  @app.get("/v1/models/{name:path}")
  async def model(name: str) -> Response:
    _check_model(service, name)
    return json_response(card(name))


def _add_operating(app: FastAPI, service: Service, draining: asyncio.Event) -> None:
  @app.get("/health")
  @app.get("/ping")
  @app.post("/ping")  # as SageMaker asks
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


async def _read(service: Service, content: Request, kind: type[Kind]) -> Kind:
  """The body as a request to the model that is served."""
  request = await http_body.read(content, kind, service.policy.strict)
  _check_model(service, request.model)  # type: ignore[attr-defined]  # all kinds have one
  return request


def _caller(content: Request) -> Caller:
  """As the gate and what is before it have found out."""
  return Caller(content.state.client, content.state.request_id)


def _check_model(service: Service, name: str | None) -> None:
  if name not in (None, *service.model_names):
    known = ", ".join(map(repr, service.model_names))
    raise Refused(f"there is no model {name!r:.80} here, only {known}", "model", status=404,
                  code="model_not_found")


async def _encode_chat(service: Service, conversation: Conversation, param: str) -> list[int]:
  try:
    return await service.encode_chat(conversation)
  except ValueError as error:
    raise refusal(error, param, otherwise=param) from None


async def _in_thread(param: str, function: Callable[..., Any], *arguments: Any) -> Any:
  """Long texts take a while: other requests go on. `param`: what a ValueError is about."""
  try:
    return await asyncio.to_thread(function, *arguments)
  except ValueError as error:
    raise refusal(error, param, otherwise=param) from None


def _add_errors(app: FastAPI) -> None:
  """Every error in OpenAI's shape."""
  def told(request: Request, error: Refused) -> Response:
    request.state.reason = error.reason
    return json_response(error.body, error.status, error.headers)

  @app.exception_handler(HTTPException)
  async def on_http(request: Request, error: HTTPException) -> Response:
    message = {404: f"there is no {request.url.path!r:.80} here",
               405: f"{request.url.path} does not take {request.method}"}
    text = message.get(error.status_code, error.detail)
    return told(request, Refused(text, status=error.status_code, headers=error.headers))

  async def on_error(request: Request, error: Exception) -> Response:
    return told(request, refusal(error, request_id=request.state.request_id))

  for kind in (Refused, Draining, Exception):
    app.add_exception_handler(kind, on_error)
