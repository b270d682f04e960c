"""A server's port: free again as soon as it has stopped, and shared with nobody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys

import grpc
import pytest
from fake_engine import FakeEngine
from served import serve

from jspec.serving.http.server import reusable
from jspec.serving.server import hold_port

HOST = "127.0.0.1"


def used_and_closed(listener: socket.socket) -> int:
  """Closes a listener after a connection that lingers on its port, which is returned."""
  reusable(listener, True)  # as http_server.start does
  listener.listen()
  address = listener.getsockname()
  with socket.create_connection(address) as client:
    accepted, _ = listener.accept()
    accepted.close()  # the side that closes first is the one that waits
    assert client.recv(1) == b""
  listener.close()
  return address[1]


def test_a_stopped_servers_port_can_be_had_at_once_again_and_again():
  port = used_and_closed(hold_port(HOST, 0))
  with socket.socket() as plain, pytest.raises(OSError):
    plain.bind((HOST, port))  # something does linger
  for _ in range(3):
    assert used_and_closed(hold_port(HOST, port)) == port


def test_a_port_after_a_server_that_lingers_is_held_against_a_second_one():
  port = used_and_closed(hold_port(HOST, 0))
  with hold_port(HOST, port) as held:
    for _ in range(2):  # while the model loads, and when the server listens
      with pytest.raises(ValueError, match=f"can't listen on port {port} of {HOST}: Address"):
        hold_port(HOST, port)
      reusable(held, True)
      held.listen()


def test_a_process_that_was_killed_leaves_its_port_free():
  source = ("from jspec.serving.server import hold_port\n"
            "from jspec.serving.http.server import reusable\n"
            "s = hold_port('127.0.0.1', 0); reusable(s, True); s.listen()\n"
            "print(s.getsockname()[1], flush=True); c, _ = s.accept(); c.recv(1)\n")
  with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
    assert process.stdout is not None
    port = int(process.stdout.readline())
    with socket.create_connection((HOST, port)) as client:
      process.kill()
      process.wait()
      with contextlib.suppress(ConnectionError):
        client.recv(1)
  hold_port(HOST, port).close()


def test_a_stopped_grpc_servers_port_can_be_had_at_once():
  async def scenario(address, service, server):
    async with grpc.aio.insecure_channel(address) as channel:
      await channel.channel_ready()
      await server.stop()
      await asyncio.sleep(0.1)
    return int(address.split(":")[1])

  port = serve(FakeEngine, scenario)
  hold_port(HOST, port).close()
