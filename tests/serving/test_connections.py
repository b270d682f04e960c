"""HTTP connections that do nothing, too little, or are too many, beside clients that are served."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import resource
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest
from http_running import COMPLETIONS, MODEL, Running, running
from tiny_llm import tiny_llm

from jspec.serving import file_limits, server
from jspec.serving.http.connections import FAREWELLS, Limits
from jspec.serving.http.server import Options

REQUEST = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
  with running(tiny_llm("ngram")) as running_server:
    yield running_server


@contextlib.contextmanager
def door(served: Running, tls: dict | None = None, **limits) -> Iterator[int]:
  """The port of a door with these limits."""
  opened = served.open(limits=Limits(**limits), **(tls or {}))
  try:
    yield opened.port
  finally:
    served.run(opened.drain(0))


def connect(port: int) -> socket.socket:
  return socket.create_connection(("127.0.0.1", port), timeout=30)


def everything(connection: socket.socket) -> bytes:
  """What comes until the server closes; fails after 30 seconds."""
  parts = []
  with contextlib.suppress(ConnectionError):
    while part := connection.recv(65536):
      parts.append(part)
  return b"".join(parts)


def ask(connection: socket.socket) -> None:
  """A whole request and its answer, on a connection that stays."""
  connection.sendall(REQUEST)
  answer = b""
  while not answer.endswith(b"}"):
    part = connection.recv(65536)
    assert part
    answer += part
  assert answer.startswith(b"HTTP/1.1 200")


def is_healthy(port: int, scheme: str = "http") -> bool:
  return httpx.get(f"{scheme}://127.0.0.1:{port}/health", trust_env=False, verify=False,
                   timeout=30).status_code == 200


def refusals(served: Running) -> dict[str, float]:
  """(status, reason) -> how many, of the HTTP door."""
  rows = served.service.metrics.registry.collect()
  return {(s.labels["status"], s.labels["reason"]): s.value for row in rows for s in row.samples
          if s.name == "jspec:refusals_total" and s.labels["door"] == "http"}


def gained(served: Running, before: dict, *key: str) -> float:
  return refusals(served).get(key, 0) - before.get(key, 0)


def test_headers_that_do_not_come_end_the_connection(served):
  before = refusals(served)
  with door(served, header_timeout=0.2) as port:
    with connect(port) as silent, connect(port) as slow, connect(port) as second:
      slow.sendall(b"GET /health HT")
      ask(second)
      second.sendall(b"GET /heal")  # the time is each request's
      for connection in (silent, slow, second):
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and answer.endswith(b"}")
        assert "headers" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert is_healthy(port)
  assert gained(served, before, "408", "header_timeout") == 3


def test_a_connection_between_two_requests_has_its_own_time(served):
  with door(served, header_timeout=0.2, keep_alive=60) as port, connect(port) as kept:
    for _ in range(2):
      ask(kept)
      time.sleep(2.2)  # two looks at the connections
  with door(served, header_timeout=60, keep_alive=0.2) as port, connect(port) as kept:
    kept.sendall(REQUEST)
    assert everything(kept).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_is_let_go_and_one_that_reads_slowly_is_not(served, reads):
  before = refusals(served)
  with door(served, write_timeout=1.5) as port, socket.socket() as client:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 600)
    if reads:
      for _ in range(12):
        left = 2**19
        while left:
          left -= len(part := client.recv(left))
          assert part
        time.sleep(0.3)
    else:
      served.wait_for(lambda: gained(served, before, "408", "write_timeout") == 1)
      everything(client)
    assert is_healthy(port)
    assert gained(served, before, "408", "write_timeout") == (not reads)


def test_at_the_cap_those_that_only_wait_make_room_the_oldest_first(served):
  before = refusals(served)
  with door(served, max_connections=8, header_timeout=60) as port, contextlib.ExitStack() as stack:
    waiting = [stack.enter_context(connect(port)) for _ in range(8)]
    waiting[0].sendall(REQUEST[:-2])
    waiting[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
    ask(waiting[2])  # the newest of them by now
    for _ in range(2):
      ask(stack.enter_context(connect(port)))
    assert [everything(c) for c in waiting[:2]] == [b"", b""]
    assert gained(served, before, "503", "connections") == 2
    ask(waiting[2])


def test_where_all_are_being_answered_more_are_told_to_come_later(served):
  before = refusals(served)
  with door(served, max_connections=2) as port, served.held() as go_on:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
      with concurrent.futures.ThreadPoolExecutor(2) as pool:
        fields = {"model": MODEL, "prompt": "a", "max_tokens": 2, "ignore_eos": True}
        busy = [pool.submit(httpx.post, f"http://127.0.0.1:{port}{COMPLETIONS}", json=fields,
                            trust_env=False, timeout=60) for _ in range(2)]
        served.wait_for(lambda: served.service.engine.num_requests == 2)
        refused = client.get("/health")
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
        assert "connections" in refused.json()["error"]["message"]
        crowd = [connect(port) for _ in range(FAREWELLS + 3)]
        assert all(everything(c).startswith(b"HTTP/1.1 503") for c in crowd[:FAREWELLS // 2])
        for one in crowd:
          one.close()
        go_on.set()
        assert [b.result().status_code for b in busy] == [200, 200]
    served.wait_for(lambda: is_healthy(port))
  assert gained(served, before, "503", "connections") >= 1 + FAREWELLS // 2


def test_without_file_descriptors_it_waits_quietly_and_goes_on(served, caplog):
  """Accepting fails as it does at the limit; the log has a line a second, and no traceback."""
  with door(served) as port:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(5)]
    taken = []
    try:
      resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
      with contextlib.suppress(OSError):
        while True:
          taken.append(socket.socket())
      started = time.monotonic()
      for client in clients:
        client.connect(("127.0.0.1", port))
        client.settimeout(30)
      time.sleep(1.2)
      lines = [r for r in caplog.records if "no file descriptor" in r.message]
      assert 1 <= len(lines) <= 2 + time.monotonic() - started
      assert all(r.exc_info is None for r in caplog.records) and "EMFILE" in lines[0].message
      for one in taken[:50]:
        one.close()
      ask(clients[-1])
    finally:
      for one in (*taken, *clients):
        one.close()
      resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert is_healthy(port)


def test_clients_that_never_agree_on_tls_make_room(served, tmp_path):
  key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
  subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
                  "/CN=a", "-keyout", key, "-out", certificate], check=True, capture_output=True)
  tls = {"ssl_certfile": certificate, "ssl_keyfile": key}
  with door(served, tls, max_connections=4, header_timeout=60) as port:
    silent = [connect(port) for _ in range(4)]
    assert is_healthy(port, "https")
    assert everything(silent[0]) == b""
    for one in silent:
      one.close()
  with door(served, tls, header_timeout=0.2) as port, connect(port) as silent:
    assert everything(silent) == b""
    context = ssl._create_unverified_context()
    with context.wrap_socket(connect(port)) as late:
      assert everything(late).startswith(b"HTTP/1.1 408")


def test_what_is_no_http_is_refused_in_openais_shape_and_counted(served, caplog):
  before = refusals(served)
  with door(served) as port:
    for _ in range(20):
      with connect(port) as client:
        client.sendall(b"\0\0 nonsense\r\n\r\n")
        answer = everything(client)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}
  assert gained(served, before, "400", "no_http") == 20
  assert len([r for r in caplog.records if "http/400/no_http" in r.message]) <= 4


@pytest.mark.parametrize("wanted, limit, given", [
  ([2048, 2048], 65536, [2048, 2048]), ([2048, 0], 2208, [2048, 0]), ([2048, 0], 1184, [1024, 0]),
  ([2048, 2048], 1184, [512, 512]), ([300, 100], 360, [150, 50]), ([2048, 2048], 64, [8, 8]),
  ([2, 0], 64, [2, 0])])
def test_doors_share_the_files_that_there_may_be(wanted, limit, given):
  assert file_limits.connections(wanted, limit) == given


def test_the_soft_limit_of_files_is_raised_as_far_as_it_may_be(monkeypatch):
  limits, infinity = resource.getrlimit(resource.RLIMIT_NOFILE), resource.RLIM_INFINITY
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    wanted = file_limits.MOST if limits[1] == infinity else min(limits[1], file_limits.MOST)
    assert file_limits.raise_limit() == wanted
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, limits[1])
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_server_has_no_more_connections_than_files(monkeypatch, caplog):
  monkeypatch.setattr(file_limits, "raise_limit", lambda: file_limits.OWN + 100)
  fitted = server.within_limits(server.Settings("m", Options(), None))
  assert fitted.http is not None and fitted.http.limits == Limits(max_connections=100)
  assert "http_connections=100" in caplog.text


@pytest.mark.parametrize("name", ["max_connections", "header_timeout", "keep_alive",
                                  "write_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=name):
    Limits(**{name: value})
