"""Starts a server on free ports, streams an answer over gRPC and one over HTTP, and stops it.

  python scripts/serve_demo.py [flags of `jspec serve`]
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import urllib.request
from collections.abc import Iterator

from jspec.serving.process import ServerProcess
from jspec.serving.rpc.client import Client

QUESTION = (pathlib.Path(__file__).parent / "demo_prompt.txt").read_text(encoding="utf-8").strip()
MAX_TOKENS = 96


def main() -> int:
  print("starting a server; the first time it fetches the model and compiles it", flush=True)
  with ServerProcess(["--port", "0", "--grpc-port", "0", "--max-num-seqs", "4",
                      *sys.argv[1:]]) as server:
    over_grpc(server.grpc)
    over_http(server.url)
    code = server.stop()
  print(f"\nserver stopped with exit code {code}")
  return code


def over_grpc(address: str) -> None:
  with Client(address) as client:
    about = client.model_info()
    print(f"\ngRPC at {address}: {about.model_name}, speculation {about.speculative_method}, "
          f"{about.max_num_seqs} slots\n\n> {QUESTION}")
    for chunk in client.generate([{"role": "user", "content": QUESTION}],
                                 {"temperature": 0.0, "max_tokens": MAX_TOKENS}):
      print(chunk.text, end="", flush=True)
    found = chunk.statistics
    assert found is not None
    print(f"\n[{found.generated_tokens} tokens in {found.total_time:.2f} s, first after "
          f"{found.time_to_first_token:.2f} s, {found.speculation.num_steps} steps; "
          f"{found.speculation.acceptance_rate:.0%} of {found.speculation.num_draft_tokens} draft "
          "tokens accepted]")


def over_http(url: str) -> None:
  print(f"\nHTTP at {url}/v1\n\n> {QUESTION}")
  with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
    model = json.load(response)["data"][0]["id"]
  body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "stream": True,
          "temperature": 0, "max_tokens": MAX_TOKENS, "stream_options": {"include_usage": True}}
  start, first = time.perf_counter(), None
  usage: dict[str, int] = {}
  for event in events(url, body):
    for choice in event["choices"]:
      if text := choice["delta"].get("content"):
        first = first or time.perf_counter()
        print(text, end="", flush=True)
    usage = event.get("usage") or usage
  seconds = time.perf_counter() - start
  print(f"\n[{usage['completion_tokens']} tokens in {seconds:.2f} s, first after "
        f"{(first or start) - start:.2f} s; prompt {usage['prompt_tokens']} tokens]")


def events(url: str, body: dict) -> Iterator[dict]:
  """The server-sent events of a chat completion."""
  request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(),
                                   {"Content-Type": "application/json"})
  with urllib.request.urlopen(request, timeout=300) as response:
    for line in response:
      content = line.decode().strip()
      if content == "data: [DONE]":
        return
      if content.startswith("data: "):  # no comment, as of a request that waits
        yield json.loads(content.removeprefix("data: "))


if __name__ == "__main__":
  sys.exit(main())
