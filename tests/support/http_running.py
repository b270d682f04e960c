"""A running HTTP server over a tiny engine, in a thread of its own, for tests with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import openai

from jspec import LLM, AsyncLLM
from jspec.serving.http import server as http_server
from jspec.serving.metrics import Metrics
from jspec.serving.service import Service

COMPLETIONS = "/v1/completions"
MODEL = "tiny/ngram"  # a slash, as the names of Hugging Face have
JSON = {"Content-Type": "application/json"}
TURNS = 100  # of the event loop, in which a snapshot is surely shown


class Running:
  """The event loop that serves, seen from the thread that tests."""

  def __init__(self, service: Service, run: Callable[[Coroutine], Any]):
    self.service, self.run = service, run
    self.door: http_server.HttpServer = None  # type: ignore[assignment]

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.door.port}"

  def open(self, **options: Any) -> http_server.HttpServer:
    """Another door to the same engine."""
    options = {"port": 0, **options}
    return self.run(http_server.start(self.service, http_server.Options(**options)))

  def client(self, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, **options)

  def post(self, path: str, **fields: Any) -> httpx.Response:
    with self.client() as client:
      return client.post(path, content=json.dumps({"model": MODEL, **fields}), headers=JSON)

  def chunks(self, path: str, **fields: Any) -> list[dict]:
    """The events of a streamed answer, without comments."""
    body = self.post(path, stream=True, **fields).text
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]

  @contextlib.contextmanager
  def openai(self) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of this server."""
    with httpx.Client(trust_env=False) as transport:
      yield openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0,
                          http_client=transport)

  @contextlib.contextmanager
  def paused(self, pause: Callable[[], Any]) -> Iterator[None]:
    """The engine's thread calls `pause` before each of its turns."""
    engine = self.service.engine.llm.engine
    step = engine.step

    def paused_step(*arguments):
      pause()
      return step(*arguments)

    engine.step = paused_step
    try:
      yield
    finally:
      engine.step = step

  @contextlib.contextmanager
  def held(self) -> Iterator[threading.Event]:
    """The engine stands still until the event is set, or the block left."""
    go_on = threading.Event()
    with self.paused(go_on.wait):
      try:
        yield go_on
      finally:
        go_on.set()

  def in_step(self) -> contextlib.AbstractContextManager[None]:
    """The engine waits until the event loop has shown all: no reader misses a snapshot."""
    async def turns() -> None:
      for _ in range(TURNS):
        await asyncio.sleep(0)

    return self.paused(lambda: self.run(turns()))

  def wait_for(self, condition: Callable[[], bool], timeout: float = 30) -> None:
    until = time.monotonic() + timeout
    while not condition():
      assert time.monotonic() < until, "waited in vain"
      time.sleep(0.01)

  def wait_until_idle(self) -> None:
    """Fails where a slot, a page or a request stays taken."""
    def idle() -> bool:
      stats, count = self.service.engine.stats(), self.service.engine.num_requests
      return (not (stats.num_running or stats.num_waiting or count)
              and stats.num_free_pages == stats.num_pages)

    self.wait_for(idle)


@contextlib.contextmanager
def running(llm: LLM, **options: Any) -> Iterator[Running]:
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever)
  thread.start()

  def run(coroutine: Coroutine) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

  engine = AsyncLLM(llm)
  server = Running(Service(engine, MODEL, Metrics(engine, MODEL)), run)
  try:
    server.door = server.open(**options)
    yield server
    run(server.door.drain(0))
  finally:
    run(engine.shutdown())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def error_of(response: httpx.Response, status: int) -> dict:
  """Fails unless it is an error in OpenAI's shape."""
  assert response.status_code == status
  assert response.headers["content-type"] == "application/json"
  assert set(response.json()) == {"error"}
  error = response.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  assert error["message"] and error["type"] and len(response.content) < 1000
  return error
