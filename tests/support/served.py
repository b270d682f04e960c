"""A gRPC server on loopback for as long as a test's scenario lasts."""

from __future__ import annotations

import asyncio

from jspec.serving.metrics import Metrics
from jspec.serving.rpc.server import Options, start
from jspec.serving.service import Service

NAME = "served"


async def until(happened):
  async with asyncio.timeout(60):
    while not happened():
      await asyncio.sleep(0.01)


def serve(make_engine, scenario, close=None, **options):
  """What `scenario(address, service, server)` returns.

  Args:
    make_engine: called in the event loop. close: awaited with the engine at the end.
    options: of the server, on a free port.
  """
  async def main():
    engine = make_engine()
    service = Service(engine, NAME, Metrics(engine, NAME))
    server = await start(service, Options(port=0, **options))
    try:
      return await asyncio.wait_for(
          scenario(f"127.0.0.1:{server.port}", service, server), 120)
    finally:
      await server.stop()
      if close is not None:
        await close(engine)

  return asyncio.run(main())
