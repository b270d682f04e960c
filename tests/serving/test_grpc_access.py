"""Who may come in at the gRPC door, and how it opens and closes. Its engine is a fake one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess

import grpc
import pytest
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
  ProtoReflectionDescriptorDatabase,
)
from served import serve

from jspec import (
  Draining,
  EngineDead,
  RequestFailed,
)
from jspec.serving.auth import Tokens
from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.rpc import jspec_pb2_grpc as pb_grpc
from jspec.serving.rpc.client import TLS, AsyncClient
from jspec.serving.rpc.server import SERVICE, Options, start

SERVING, NOT_SERVING = (health_pb2.HealthCheckResponse.SERVING,
                        health_pb2.HealthCheckResponse.NOT_SERVING)


def run(scenario, **options):
  return serve(FakeEngine, scenario, **options)


async def code_of(call) -> grpc.StatusCode:
  try:
    await call
  except grpc.aio.AioRpcError as error:
    return error.code()
  return grpc.StatusCode.OK


async def health_of(address, name=SERVICE):
  async with grpc.aio.insecure_channel(address) as channel:
    check = health_pb2_grpc.HealthStub(channel).Check
    return (await check(health_pb2.HealthCheckRequest(service=name))).status


async def until_health(address, status):
  async with asyncio.timeout(60):
    while await health_of(address) != status:
      await asyncio.sleep(0.01)


# --------------------------------------------------------------------- tokens


@pytest.mark.parametrize("header, allowed", [
  ("Bearer first", True), ("Bearer second", True), ("bearer first", True), ("Bearer  first", True),
  (None, False), ("", False), ("first", False), ("Bearer", False), ("Bearer ", False),
  ("Basic first", False), ("Bearer firs", False), ("Bearer first second", False),
  ("Bearer FIRST", False), ("Bearer fïrst\udcff", False)])
def test_one_of_the_tokens_opens_and_nothing_else(header, allowed):
  assert Tokens(["first", "second"]).allows(header) is allowed
  assert Tokens([]).allows(header)


def test_every_token_is_compared_in_constant_time(monkeypatch):
  compared = []
  tokens = Tokens(["first", "second", "third"])
  monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
  assert tokens.allows("Bearer first") and not tokens.allows("Basic first")
  assert len(compared) == 6 and len(set(compared)) == 3


@pytest.mark.parametrize("tokens", [[""], ["a b"], ["é"], ["a\n"], "secret"])
def test_a_token_that_no_header_can_hold_is_refused(tokens):
  with pytest.raises(ValueError, match="token"):
    Tokens(tokens)


def test_each_call_needs_a_token_but_for_health():
  async def scenario(address, service, server):
    headers = {"none": (), "wrong": (("authorization", "Bearer c"),),
               "right": (("authorization", "Bearer b"),),
               "two": (("authorization", "Bearer b"), ("authorization", "Bearer c"))}
    async with grpc.aio.insecure_channel(address) as channel:
      stub = pb_grpc.JspecStub(channel)
      codes = {name: [await code_of(stub.Stats(pb.StatsRequest(), metadata=header)),
                      await code_of(anext(aiter(stub.Generate(pb.GenerateRequest(text="a"),
                                                              metadata=header)))),
                      await code_of(channel.unary_unary("/no.Such/Call")(b"", metadata=header))]
               for name, header in headers.items()}
    with pytest.raises(grpc.RpcError) as caught:
      await asyncio.to_thread(reflected, address)
    return codes, caught.value.code(), await health_of(address)

  codes, reflection, health = run(scenario, tokens=["a", "b"])
  refused, ok = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK
  assert codes == {"none": [refused] * 3, "wrong": [refused] * 3, "two": [refused] * 3,
                   "right": [ok, ok, grpc.StatusCode.UNIMPLEMENTED]}
  assert reflection is refused and health == SERVING


def reflected(address):
  with grpc.insecure_channel(address) as channel:
    return ProtoReflectionDescriptorDatabase(channel).get_services()


def test_the_client_brings_its_token():
  async def scenario(address, service, server):
    async with AsyncClient(address, token="b") as good, AsyncClient(address, token="c") as bad:
      return await code_of(good.stats()), await code_of(bad.stats())

  assert run(scenario, tokens=["b"]) == (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)


def test_options_keep_tokens_to_themselves():
  assert "hush" not in repr(Options(tokens=["hush"]))


# ------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
  """Two authorities, and certificates for 127.0.0.1 that each has signed."""
  folder = tmp_path_factory.mktemp("certificates")

  def openssl(*arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

  key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
  (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
  for name in ("ours", "theirs"):
    openssl("req", "-x509", *key, "-keyout", f"{name}_ca.key", "-out", f"{name}_ca.pem",
            "-subj", f"/CN={name}", "-days", "2")
    openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=leaf")
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}_ca.pem", "-CAkey",
            f"{name}_ca.key", "-CAcreateserial", "-out", f"{name}.pem", "-days", "2",
            "-extfile", "names")
  openssl("ec", "-in", "ours.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
  return folder


def tls(pem, who=None, ca="ours_ca.pem"):
  return TLS(pem / ca, *(() if who is None else (pem / f"{who}.pem", pem / f"{who}.key")))


async def stats_code(address, tls):
  async with AsyncClient(address, tls=tls, retries=0) as client:
    return await code_of(client.stats(timeout=20))


def test_over_tls_both_know_whom_they_talk_to(pem):
  async def scenario(address, service, server):
    return [await stats_code(address, how)
            for how in (tls(pem), tls(pem, ca="theirs_ca.pem"), None)]

  ok, unavailable = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
  own = dict(ssl_certfile=pem / "ours.pem", ssl_keyfile=pem / "ours.key")
  assert run(scenario, **own) == [ok, unavailable, unavailable]


def test_with_an_authority_for_clients_only_its_clients_come_in(pem):
  async def scenario(address, service, server):
    return [await stats_code(address, tls(pem, who)) for who in ("ours", "theirs", None)]

  ok, unavailable = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
  assert run(scenario, ssl_certfile=pem / "ours.pem", ssl_keyfile=pem / "ours.key",
             ssl_ca_certs=str(pem / "ours_ca.pem")) == [ok, unavailable, unavailable]


@pytest.mark.parametrize("options, message", [
  (dict(ssl_certfile="ours.pem", ssl_keyfile="absent.key"), "ssl_keyfile=.*absent.key cannot be"),
  (dict(ssl_certfile="ours.pem", ssl_keyfile="theirs.key"), "must be a certificate and its key"),
  (dict(ssl_certfile="ours.pem", ssl_keyfile="locked.key"), "without a passphrase"),
  (dict(ssl_certfile="names", ssl_keyfile="ours.key"), "must be a certificate and its key"),
  (dict(ssl_certfile="ours.pem"), "ssl_certfile and ssl_keyfile go together"),
  (dict(ssl_ca_certs="ours_ca.pem"), "ssl_ca_certs needs ssl_certfile"),
  (dict(ssl_certfile="ours.pem", ssl_keyfile="ours.key", ssl_ca_certs="names"),
   "ssl_ca_certs=.*names must hold certificates"),
])
def test_files_that_cannot_work_are_refused_at_once(pem, options, message):
  with pytest.raises(ValueError, match=message):
    Options(**{name: pem / file for name, file in options.items()})


@pytest.mark.parametrize("options, message", [
  (dict(port=70000), "port must be in 0..65535, got 70000"), (dict(port=-1), "port must be in"),
  (dict(max_message_bytes=0), "max_message_bytes must be >= 1"),
  (dict(tokens=["a", ""]), "token 1 must")])
def test_options_out_of_range_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    Options(**options)


def test_a_port_that_is_taken_is_not_shared():
  async def scenario(address, service, server):
    with pytest.raises(OSError, match=f"cannot listen on {address}"):
      other = await start(service, Options(port=server.port))
      await other.stop()

  run(scenario)


# ---------------------------------------------------------- opening and closing


def test_health_follows_the_engine():
  async def scenario(address, service, server):
    before = [await health_of(address, name) for name in ("", SERVICE)]
    service.engine.is_healthy = False
    await until_health(address, NOT_SERVING)
    after = await health_of(address, "")
    service.engine.is_healthy = True
    await until_health(address, SERVING)
    return before, after

  assert run(scenario) == ([SERVING, SERVING], NOT_SERVING)


def test_a_server_that_drains_says_so_refuses_and_finishes():
  async def scenario(address, service, server):
    async with AsyncClient(address, retries=0) as client:
      stream = client.generate("a")
      chunks = [await anext(stream)]
      draining = asyncio.create_task(server.drain(60))
      await until_health(address, NOT_SERVING)
      everything = await health_of(address, "")
      with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
        await client.generate_unary("a")
      assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
      service.engine.go.set()
      chunks += [chunk async for chunk in stream]
      complete = await draining
      closed = await code_of(client.stats())
      return everything, "".join(chunk.text for chunk in chunks), complete, closed

  assert run(scenario) == (NOT_SERVING, "ab", True, grpc.StatusCode.UNAVAILABLE)


def test_after_the_grace_what_still_runs_is_cut_off():
  async def scenario(address, service, server):
    async with AsyncClient(address) as client:
      stream = client.generate("a")
      await anext(stream)
      complete = await server.drain(0.2)
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(stream)
      return complete, caught.value.code(), service.engine.left

  assert run(scenario) == (False, grpc.StatusCode.UNAVAILABLE, 1)


@pytest.mark.parametrize("error, code, details", [
  (Draining("no more requests"), "UNAVAILABLE", "no more requests"),
  (EngineDead("the engine stopped: why"), "UNAVAILABLE", "the engine stopped: why"),
  (RequestFailed("the model gave NaN"), "INTERNAL", "the model gave NaN"),
  (KeyError("secret"), "INTERNAL", "the server failed; its log says why")])
def test_an_engine_that_fails_is_told_from_a_bad_request(error, code, details):
  async def scenario(address, service, server):
    service.engine.error = error
    async with AsyncClient(address, retries=0) as client:
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate_unary("a")
      return caught.value

  raised = run(scenario)
  assert (raised.code().name, raised.details()) == (code, details)


def test_idle_and_broken_connections_keep_nobody_out():
  async def scenario(address, service, server):
    with contextlib.ExitStack() as stack:
      for i in range(300):
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        if i % 3 == 0:
          idle.sendall(b"GET / HTTP/1.1\r\n\r\n" if i % 2 else b"\0\xff" * 50)
      service.engine.go.set()
      async with AsyncClient(address) as client:
        return (await client.generate_unary("a")).text

  assert run(scenario) == "ab"
