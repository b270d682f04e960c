"""Connections of gRPC clients: how often they may ping, how many there may be, how long idle."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import pathlib

import grpc
import pytest
from fake_engine import FakeEngine
from served import serve

from jspec.serving.rpc import client
from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.rpc import jspec_pb2_grpc as pb_grpc
from jspec.serving.rpc import options as grpc_options
from jspec.serving.shares import Shares

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # RFC 9113, 3.4


def test_every_option_is_one_that_the_library_knows():
  found = importlib.util.find_spec("grpc._cython.cygrpc")
  assert found is not None and found.origin is not None
  library = pathlib.Path(found.origin).read_bytes()
  channels = []

  class Module:
    def insecure_channel(self, address, options):
      channels.append(options)

  client.Connection("127.0.0.1:1").open(Module())
  names = [name for name, _ in grpc_options.Options().channel() + channels[0]]
  assert len(names) > 10
  for name in names:
    assert name.encode() + b"\0" in library, name
  assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in library


@pytest.mark.parametrize("every, state", [(50, grpc.ChannelConnectivity.READY),
                                          (60_000, grpc.ChannelConnectivity.IDLE)])
def test_an_idle_client_may_ping_as_often_as_is_said_and_not_more(monkeypatch, every, state):
  monkeypatch.setattr(grpc_options, "PINGS_EVERY", every)

  async def scenario(address, service, server):
    options = [("grpc.keepalive_time_ms", 200), ("grpc.keepalive_permit_without_calls", 1),
               ("grpc.http2.max_pings_without_data", 0)]
    async with grpc.aio.insecure_channel(address, options) as channel:
      await channel.channel_ready()
      with contextlib.suppress(TimeoutError):  # an idle channel is one that got GOAWAY
        await asyncio.wait_for(
            channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 5)
      return channel.get_state()

  assert serve(FakeEngine, scenario) is state


def test_clients_that_ping_every_ten_seconds_are_within_what_is_allowed():
  allowed = dict(grpc_options.Options().channel())
  assert allowed["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000 - 1000


def test_connections_beyond_the_cap_are_closed_and_those_within_are_served():
  async def scenario(address, service, server):
    host, port = address.split(":")
    writers, first = [], []
    for _ in range(4):
      reader, writer = await asyncio.open_connection(host, int(port))
      writers.append(writer)
      writer.write(HELLO)
      with contextlib.suppress(ConnectionError):
        first.append(len(await asyncio.wait_for(reader.read(9), 20)))
    for writer in writers:
      writer.close()
    return first

  assert serve(FakeEngine, scenario, max_connections=2)[:2] == [9, 9]  # the server's settings
  assert sum(serve(FakeEngine, scenario, max_connections=2)) == 18
  assert sum(serve(FakeEngine, scenario, max_connections=4)) == 36


def test_a_connection_without_calls_is_closed_in_the_end():
  async def scenario(address, service, server):
    async with grpc.aio.insecure_channel(address) as channel:
      await channel.channel_ready()
      await asyncio.wait_for(
          channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 60)
      return channel.get_state()

  assert serve(FakeEngine, scenario, keep_alive=1) is grpc.ChannelConnectivity.IDLE


def test_calls_are_counted_logged_and_bounded_by_client(caplog):
  async def scenario(address, service, server):
    service.shares = Shares(max_outputs=1)
    async with client.AsyncClient(address, token="a", retries=0) as a, client.AsyncClient(
        address, token="b", retries=0) as b, client.AsyncClient(address, retries=0) as nobody:
      stream = a.generate("secret")
      await anext(stream)
      with pytest.raises(grpc.aio.AioRpcError) as full:
        await a.generate_unary("secret")
      service.engine.go.set()
      assert (await b.generate_unary("secret")).text == "ab"
      with pytest.raises(grpc.aio.AioRpcError, match="--scheduling-policy fcfs"):
        await b.generate_unary("secret", priority=1)
      with pytest.raises(grpc.aio.AioRpcError):
        await nobody.generate_unary("secret")
      async for _ in stream:
        pass
      assert (await a.generate_unary("secret")).text == "ab"
    rows = service.metrics.registry.collect()
    counts = {(s.labels["status"], s.labels["reason"]): s.value for row in rows
              for s in row.samples if s.name == "jspec:refusals_total"}
    return full.value, counts

  caplog.set_level(logging.INFO)
  full, counts = serve(FakeEngine, scenario, tokens=["a", "b"])
  assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
  assert ("retry-after", "1") in tuple(full.trailing_metadata())
  assert counts == {("RESOURCE_EXHAUSTED", "client_queue_full"): 1,
                    ("INVALID_ARGUMENT", "invalid"): 1, ("UNAUTHENTICATED", "invalid_api_key"): 1}
  lines = [r.message for r in caplog.records if r.name == "jspec.serving.access"]
  assert len(lines) == 5 and "secret" not in caplog.text
  assert lines[0].startswith("grpc client=127.0.0.1 method=GenerateUnary status=RESOURCE_EXHAUSTED")


def test_a_stream_begins_while_its_request_waits():
  class Waiting(FakeEngine):
    async def deltas(self, *arguments, queued, **options):
      queued()
      await self.go.wait()
      async for output in super().deltas(*arguments, queued=None, **options):
        yield output

  async def scenario(address, service, server):
    async with grpc.aio.insecure_channel(address) as channel:
      call = pb_grpc.JspecStub(channel).Generate(pb.GenerateRequest(text="a"))
      await asyncio.wait_for(call.initial_metadata(), 30)  # waits for ever where it comes late
      service.engine.go.set()
      return "".join([o.text async for reply in call for o in reply.outputs])

  assert serve(Waiting, scenario) == "ab"
