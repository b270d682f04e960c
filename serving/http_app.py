"""The HTTP application: which path does what, on FastAPI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jspec import Draining, __version__
from serving.http_calls import answer_call
from serving.http_gate import json_response
from serving.openai_answers import ChatAnswer, CompletionAnswer
from serving.openai_api import (
  ChatRequest,
  CompletionRequest,
  DetokenizeRequest,
  TokenizeRequest,
)
from serving.openai_errors import Refused, invalid, refusal
from serving.service import Service


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
    answer = ChatAnswer(call, service.model_name, llm.tokenizer)
    return await answer_call(service, call, answer, "messages")

  @app.post("/v1/completions")
  async def complete(request: CompletionRequest) -> Response:
    check_model(request.model)
    call = request.call()
    answer = CompletionAnswer(call, service.model_name, llm.tokenizer)
    return await answer_call(service, call, answer, "prompt")

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
