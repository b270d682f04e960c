"""The life of a server: ports, engine, doors, ready, statistics, drain.

Ports are taken before the model is loaded and opened once every shape is compiled: until the
server is ready, connections are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from jspec import LLM, AsyncLLM, EngineDead, EngineStats
from jspec.serving import file_limits
from jspec.serving.http import server as http_server
from jspec.serving.http.server import reusable
from jspec.serving.log_lines import fields
from jspec.serving.metrics import Metrics
from jspec.serving.rpc import server as grpc_server
from jspec.serving.service import Policy, Service, model_defaults

LOG = logging.getLogger(__name__)
STATISTICS_EVERY = 10.0  # seconds
CLEAN, FAILED = 0, 1  # exit codes; a second signal ends with 128 + its number
PATIENCE = 10.0  # seconds for clients to read their last answer


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a server is told beside its engine.

  Args:
    model_name: what clients call the model. aliases: other names for it.
    generation_config: requests' defaults are those of the model.
  """

  model_name: str
  http: http_server.Options | None  # None: this door stays shut
  grpc: grpc_server.Options | None
  max_queue: int = 1024
  steps_per_turn: int = 1
  drain_timeout: float = 30.0  # seconds
  policy: Policy = Policy()
  generation_config: bool = True
  aliases: tuple[str, ...] = ()


class Door(Protocol):
  """A running gRPC or HTTP server."""

  port: int

  async def drain(self, grace: float, /) -> bool: ...


def run(load: Callable[[], LLM], settings: Settings) -> int:
  """Serves until a signal and returns the exit code.

  Args:
    load: makes the LLM, once the ports are known to be free.
  """
  settings = within_limits(settings)
  doors = {"http": settings.http, "grpc": settings.grpc}
  with contextlib.ExitStack() as stack:
    held = {}
    for name, options in doors.items():
      if options is not None:
        held[name] = stack.enter_context(hold_port(options.host, options.port))
        if not options.tokens and options.host not in ("127.0.0.1", "localhost", "::1"):
          LOG.warning("open to everybody %s", fields(door=name, host=options.host))
    if os.getpid() == 1:  # a container's first process hears only the signals that it handles
      signal.signal(signal.SIGTERM, lambda number, _: end_now(128 + number))
    started = time.monotonic()
    LOG.info("loading %s", fields(model=settings.model_name, pid=os.getpid()))
    llm = load()
    LOG.info("loaded %s", fields(seconds=time.monotonic() - started))
    if settings.policy.plain_message_content:
      llm.tokenizer.warm_up()
    if sys.stderr.isatty():
      llm.warm_up(progress=True)
    else:  # a line per program: a bar would be one line that never ends
      for program in llm.engine.warm_up():
        LOG.info("compiling %s", fields(program=program, seconds=time.monotonic() - started))
    LOG.info("compiled %s", fields(seconds=time.monotonic() - started))
    return asyncio.run(_serve(llm, settings, held))


def within_limits(settings: Settings) -> Settings:
  """With as many connections as there can be files, once that limit is as high as it may be."""
  limit, http, grpc = file_limits.raise_limit(), settings.http, settings.grpc
  wanted = [http.limits.max_connections if http else 0, grpc.max_connections if grpc else 0]
  of_http, of_grpc = given = file_limits.connections(wanted, limit)
  if given != wanted:
    LOG.warning("few files may be open %s", fields(
        limit=limit, http_connections=of_http, grpc_connections=of_grpc))
  return dataclasses.replace(
      settings,
      http=http and dataclasses.replace(
          http, limits=dataclasses.replace(http.limits, max_connections=of_http)),
      grpc=grpc and dataclasses.replace(grpc, max_connections=of_grpc))


def hold_port(host: str, port: int) -> socket.socket:
  """A socket that keeps the port for us, without listening; ValueError where it can't be had."""
  try:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
  except OSError as error:
    raise ValueError(f"--host {host!r} is not an address of this machine: {error.strerror}"
                     ) from None
  # A stopped server's connections linger on its port for a minute, and SO_REUSEADDR sees past them.
  # Others that have it set could bind the port, too, until somebody listens: so it is tried only if
  # need be, and goes off again until then. What it must see past had it set: see `reusable`.
  for see_past in (False, True):
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
      reusable(held, see_past)
      held.bind(address)
      reusable(held, False)
      return held
    except OSError as error:
      held.close()
      reason = error.strerror
  raise ValueError(f"can't listen on port {port} of {host}: {reason}")


async def _serve(llm: LLM, settings: Settings, held: dict[str, socket.socket]) -> int:
  stop = on_signal()
  engine = AsyncLLM(llm, max_waiting=settings.max_queue, steps_per_turn=settings.steps_per_turn)
  policy = settings.policy
  if settings.generation_config and llm.loaded.generation_defaults:
    policy = dataclasses.replace(policy, defaults=model_defaults(llm.get_default_sampling_params()))
    LOG.info("sampling defaults of the model %s", fields(**policy.defaults))
  service = Service(engine, settings.model_name, Metrics(engine, settings.model_name), policy,
                    settings.aliases)
  statistics = asyncio.create_task(_report(engine))
  try:
    doors = await _open(service, settings, held)
    where = " ".join(doors)
    LOG.info("ready %s", fields(at=where, model=settings.model_name))
    print(f"ready: {where}, model {settings.model_name}, {describe(llm)}", flush=True)
    await _wait(engine, stop)
    return await drain(engine, list(doors.values()), settings.drain_timeout)
  finally:
    statistics.cancel()
    await engine.shutdown()


async def _open(service: Service, settings: Settings, held: dict[str, socket.socket]
                ) -> dict[str, Door]:
  """The doors by their addresses."""
  doors: dict[str, Door] = {}
  try:
    if settings.http is not None:
      http = await http_server.start(service, settings.http, held["http"])
      doors[_address("http", settings.http, http.port)] = http
    if settings.grpc is not None:
      port = held["grpc"].getsockname()[1]
      held["grpc"].close()  # gRPC makes its own
      grpc = await grpc_server.start(service, dataclasses.replace(settings.grpc, port=port))
      doors[_address("grpc", settings.grpc, grpc.port)] = grpc
  except OSError as error:
    raise ValueError(str(error)) from error
  return doors


def _address(scheme: str, options: http_server.Options | grpc_server.Options, port: int) -> str:
  host = f"[{options.host}]" if ":" in options.host else options.host
  return f"{scheme}{'s' if options.ssl_certfile else ''}://{host}:{port}"


def describe(llm: LLM) -> str:
  """Speculation and slots, for the line that says ready."""
  spec = llm.speculative
  tokens = f" of {spec.num_speculative_tokens} tokens" if spec.num_speculative_tokens else ""
  return f"speculation {spec.method}{tokens}, {llm.max_num_seqs} slots"


def on_signal() -> asyncio.Event:
  """Set by the first SIGTERM or SIGINT; the second one ends the process on the spot."""
  stop = asyncio.Event()

  def received(number: signal.Signals) -> None:
    if stop.is_set():
      LOG.warning("stopped at once %s", fields(signal=number.name))
      end_now(128 + number)
    LOG.info("stopping %s", fields(signal=number.name))
    stop.set()

  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    try:
      loop.add_signal_handler(number, received, number)
    except NotImplementedError:  # on Windows
      signal.signal(number, lambda given, _: loop.call_soon_threadsafe(
          received, signal.Signals(given)))
  return stop


def end_now(code: int) -> NoReturn:
  """Without waiting for the engine's thread, which may be in the middle of a step."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


async def _wait(engine: AsyncLLM, stop: asyncio.Event) -> None:
  """Until a signal, or until the engine is dead."""
  while not stop.is_set() and engine.is_healthy:
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(stop.wait(), 0.5)


async def drain(engine: AsyncLLM, doors: list[Door], timeout: float) -> int:
  """Refuses what is new, lets what runs end, ends the rest after `timeout` seconds.

  The doors stay open until then: they say that the server takes no more requests.
  """
  alive = engine.is_healthy
  if alive:
    running = engine.num_requests
    LOG.info("draining %s", fields(requests=running, timeout=timeout))
    complete = await engine.drain(timeout)
    LOG.log(logging.INFO if complete else logging.WARNING, "drained %s",
            fields(answered=running - engine.num_requests, aborted=engine.num_requests))
    await engine.shutdown()  # what still runs gets an error to read
  else:
    LOG.error("the engine died", exc_info=await _cause(engine))
  closed = await asyncio.gather(*(door.drain(PATIENCE) for door in doors))
  if not all(closed):
    LOG.warning("clients were cut off that did not read their answers")
  return CLEAN if alive and complete and all(closed) else FAILED


async def _cause(engine: AsyncLLM) -> BaseException:
  """What ended the engine's thread: it says so to whoever asks for a token."""
  try:
    async for _ in engine.generate([0]):
      pass
  except EngineDead as error:
    return error
  return RuntimeError("unknown")


# ------------------------------------------------------------------ statistics


async def _report(engine: AsyncLLM) -> None:
  """A line every few seconds in which something happened."""
  before, then = engine.stats(), time.monotonic()
  while True:
    await asyncio.sleep(STATISTICS_EVERY)
    now, at = engine.stats(), time.monotonic()
    if now != before or now.num_running or now.num_waiting:
      LOG.info("statistics %s", fields(**statistics(before, now, at - then)))
    before, then = now, at


def statistics(before: EngineStats, now: EngineStats, seconds: float) -> dict[str, Any]:
  """Rates between two looks at the engine, and how full it is."""
  def gained(name: str) -> int:
    return vars(now)[name] - vars(before)[name]

  def drafts(name: str) -> int:
    return vars(now.speculation)[name] - vars(before.speculation)[name]

  accepted, steps = drafts("num_accepted_tokens"), drafts("num_drafts")
  return {
    "prompt_tokens_per_s": gained("prompt_tokens") / seconds,
    "generation_tokens_per_s": gained("generation_tokens") / seconds,
    "running": now.num_running, "waiting": now.num_waiting,
    "kv_cache_usage": now.kv_cache_usage,
    "prefix_hit_rate": _share(gained("prefix_hits"), gained("prefix_queries")),
    "preemptions": gained("num_preemptions"),
    "acceptance_rate": _share(accepted, drafts("num_draft_tokens")),
    "mean_acceptance_length": 1 + _share(accepted, steps),
  }


def _share(part: int, whole: int) -> float:
  return part / whole if whole else 0.0
