"""Attacks a server that it starts itself, and shows what an innocent client notices of each.

  python scripts/hostile_clients.py [--seconds 8] [flags of `jspec serve`]

On loopback and free ports only; each attack is bounded in time, connections and requests.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import random
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

from jspec.serving.process import ServerProcess

FILES = 256  # that the server may have open
CONNECTIONS, CALLERS, EVERY = 400, 16, 0.2  # of an attack; seconds between the innocent's requests
START = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer attacker\r\n"
LONG = {"prompt": "the", "max_tokens": 200, "ignore_eos": True}


def post(port: int, fields: dict | bytes, key: str = "attacker", path: str = "/v1/completions",
         method: str = "POST") -> int:
  """The status of an answer; 0 where none came."""
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
  try:
    connection.request(method, path, fields if isinstance(fields, bytes) else json.dumps(fields),
                       {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    response.read()
    return response.status
  except (OSError, http.client.HTTPException):
    return 0
  finally:
    connection.close()


def connections(port: int, until: float, begin: bytes, drip: bytes = b"") -> None:
  """Many that begin so, go on by a byte, read nothing, and come again when they are closed."""
  opened: list[socket.socket] = []
  while time.monotonic() < until:
    if len(opened) < CONNECTIONS:
      with contextlib.suppress(OSError):
        one = socket.socket()
        opened.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        one.sendall(begin)
        one.setblocking(False)
      continue
    for i, one in enumerate(opened):
      try:
        if drip:
          one.send(drip)
        elif begin != STREAM and one.recv(1) == b"":
          raise ConnectionResetError
      except BlockingIOError:
        pass
      except OSError:
        one.close()
        opened[i:i + 1] = []
        break
    time.sleep(0.002)


def calls(port: int, until: float, make: Callable[[random.Random], bytes]) -> None:
  """As many requests as so many callers get through."""
  def call(seed: int) -> None:
    chance = random.Random(seed)
    while time.monotonic() < until:
      post(port, make(chance))

  threads = [threading.Thread(target=call, args=(seed,)) for seed in range(CALLERS)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()


def stream_request() -> bytes:
  body = json.dumps(LONG | {"stream": True, "logprobs": 5}).encode()
  length = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
  return START + length + body


def malformed(chance: random.Random) -> bytes:
  body = json.dumps({"prompt": chance.choice(["a", [], [[]], {}, "\ud800", [10**30], None]),
                     chance.choice(["n", "stop", "logit_bias", "seed"]): chance.choice(
                         [-1, [[]], {"a": 1}, "x" * 1000, True, 10**30])}).encode()
  cut = chance.randrange(len(body))
  return chance.choice([body, body[:cut], body[:cut] + b"\xff\0" + body[cut:], b"[" * 50_000])


STREAM = stream_request()
DIGITS = json.dumps({"prompt": "a", "max_tokens": 10**309, "n": 10**309}).encode()
WORDS = json.dumps({"prompt": "a", "max_tokens": 1, "bad_words": ["ab cd" * 400_000] * 2}).encode()
ATTACKS: dict[str, tuple[Callable[..., None], tuple]] = {
  "idle connections": (connections, (b"",)), "slow headers": (connections, (START, b"x")),
  "readers that never read": (connections, (STREAM,)),
  "bad_words of 4 MB": (calls, (lambda chance: WORDS,)),
  "numbers of 310 digits": (calls, (lambda chance: DIGITS,)),
  "a flood from one key": (calls, (lambda chance: json.dumps(LONG).encode(),)),
  "malformed requests": (calls, (malformed,)),
}


def attack(name: str, port: int, seconds: float) -> None:
  function, arguments = ATTACKS[name]
  function(port, time.monotonic() + seconds, *arguments)


def innocent(port: int, seconds: float) -> str:
  """Median and worst latencies of short requests and of /health, in milliseconds."""
  times: dict[str, list[float]] = {"request": [], "health": []}
  failed, until = 0, time.monotonic() + seconds
  while time.monotonic() < until:
    for what, path, method in (("request", "/v1/completions", "POST"),
                               ("health", "/health", "GET")):
      start = time.monotonic()
      status = post(port, {"prompt": "the cat", "max_tokens": 4}, "innocent", path, method)
      times[what].append(1000 * (time.monotonic() - start))
      failed += status != 200
    time.sleep(EVERY)
  figures = [f"{statistics.median(t):5.0f} {max(t):5.0f}" for t in times.values()]
  return " | ".join(figures) + f" | {failed:2d} of {2 * len(times['health'])}"


def refused(port: int) -> int:
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
  connection.request("GET", "/metrics")
  text = connection.getresponse().read().decode()
  connection.close()
  return sum(round(float(n)) for n in re.findall(r"^jspec:refusals_total\{.*\} (\S+)$", text, re.M))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
  arguments, flags = parser.parse_known_args()
  limited = ("sh", "-c", f'ulimit -n {FILES}; exec "$0" "$@"', sys.executable, "-m", "jspec",
             "serve")
  usual = ["--port", "0", "--grpc-port", "0", "--max-num-seqs", "4", "--api-key", "attacker",
           "--api-key", "innocent", "--max-queue-per-client", "2", "--no-access-log",
           "--header-timeout", "5", "--write-timeout", "5", "--max-model-len", "512"]
  with ServerProcess([*usual, *flags], command=limited) as server:
    port = int(server.url.rpartition(":")[2])
    innocent(port, 2)  # the first requests are of a server that has just begun
    print(f"{'':24} | request ms  | /health ms  | failed  | refused\n"
          f"{'attack':24} | med   worst | med   worst |\n{'none':24} | "
          f"{innocent(port, arguments.seconds)} |", flush=True)
    for name in ATTACKS:
      before = refused(port)
      attacker = multiprocessing.get_context("spawn").Process(
          target=attack, args=(name, port, arguments.seconds + 1))
      attacker.start()
      time.sleep(1)
      during = innocent(port, arguments.seconds)
      attacker.join(60)
      attacker.kill()
      print(f"{name:24} | {during} | {refused(port) - before}", flush=True)
    print(f"{'none, after all':24} | {innocent(port, arguments.seconds)} |")
    return server.stop()


if __name__ == "__main__":
  sys.exit(main())
