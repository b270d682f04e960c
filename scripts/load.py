"""Load on a server: latencies, throughput, goodput and acceptance, against rate or concurrency.

  python scripts/load.py --url http://127.0.0.1:8000 --rate 0.5 1 2 --duration 60 --plot load.png
  python scripts/load.py --compare --concurrency 1 4 16 --requests 48 --serve "--max-num-seqs 16"

--compare starts servers with speculation on, off and dynamic and gives each level to each of them
in turn: the same requests, in one session. Every draw comes from --seed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import shlex
import ssl
import sys
from typing import Any

import grpc
import httpx

from jspec.bench.datasets import load_prompts
from jspec.bench.report import environment
from jspec.serving.load import report as load_report
from jspec.serving.load.client import GrpcDoor, HttpDoor, closed_loop, open_loop, watched
from jspec.serving.load.workload import Lengths, Workload, arrivals
from jspec.serving.process import ServerProcess

MODES = {"on": [], "off": ["--no-speculation"], "dynamic": ["--dynamic-speculation"]}


def parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--url", help="of a running server's HTTP door")
  add("--grpc", metavar="HOST:PORT", help="of a running server's gRPC door")
  add("--compare", nargs="*", choices=tuple(MODES), metavar="MODE",
      help=f"start servers of one's own: {', '.join(MODES)} (default: all of them)")
  add("--serve", default="", metavar="FLAGS", help="of `jspec serve`, for all of these servers")
  add("--speculation", default="", metavar="FLAGS", help="likewise, but not for the mode off")
  add("--over", choices=("http", "grpc"), help="default: http where there is a URL")
  add("--api-key")
  add("--ca", metavar="FILE", help="certificates to trust; makes gRPC use TLS")
  level = parser.add_mutually_exclusive_group(required=True)
  level.add_argument("--rate", type=float, nargs="+", help="Poisson arrivals per second")
  level.add_argument("--concurrency", type=int, nargs="+", help="clients that ask again at once")
  add("--duration", type=float, default=60.0, metavar="SECONDS", help="default: %(default)g")
  add("--requests", type=int, help="of each level of --concurrency, in place of --duration")
  add("--repeats", type=int, default=1)
  add("--prompts", type=pathlib.Path, action="append", default=[], metavar="FILE",
      help="as `jspec bench` reads them (default: its built-in ones)")
  add("--prompt-words", type=Lengths.parse, metavar="LENGTHS", help="prompts of so many random "
      "words instead: N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA")
  add("--output-tokens", type=Lengths.parse, default="uniform:16:96", metavar="LENGTHS",
      help="at most (default: %(default)s)")
  add("--system-words", type=int, default=0, help="of a system message that all have in common")
  add("--raw", action="store_true", help="don't apply the chat template")
  add("--warm-prompts", action="store_true", help="let prompts that come again be found in the "
      "prefix cache (default: all are new, but for --system-words)")
  add("--temperature", type=float, default=0.0)
  add("--ignore-eos", action="store_true", help="outputs as long as drawn; they may loop")
  add("--leaving", type=float, default=0.0, metavar="SHARE", help="clients that go away early")
  add("--timeout", type=float, default=300.0, help="seconds for one request")
  add("--slo-ttft", type=float, default=1.0, help="seconds, for goodput (default: %(default)g)")
  add("--slo-tpot", type=float, default=0.1, help="seconds per token (default: %(default)g)")
  add("--sample-every", type=float, default=5.0, metavar="SECONDS", help="memory and counters")
  add("--seed", type=int, default=0)
  add("--json", type=pathlib.Path)
  add("--plot", type=pathlib.Path)
  return parser


def check(args: argparse.Namespace) -> None:
  if (args.compare is None) == (args.url is None and args.grpc is None):
    raise ValueError("give --url or --grpc of a running server, or --compare")
  if args.over and args.compare is None and vars(args)["url" if args.over == "http" else "grpc"
                                                       ] is None:
    raise ValueError(f"--over {args.over} needs that door's address")
  levels = args.rate or args.concurrency
  if min(*levels, args.duration, args.timeout, args.sample_every, args.repeats,
         args.requests or 1) <= 0 or not 0 <= args.leaving < 1 or args.system_words < 0:
    raise ValueError("rates, concurrency, times and counts must be > 0, --leaving in [0, 1)")
  if args.prompts and args.prompt_words:
    raise ValueError("give --prompts or --prompt-words, not both")
  if args.requests and args.rate:
    raise ValueError("--requests goes with --concurrency; with --rate give --duration")
  for path in (args.json, args.plot):
    if path and not path.absolute().parent.is_dir():
      raise ValueError(f"can't write {path}: its folder doesn't exist")


def workload(args: argparse.Namespace) -> Workload:
  words = args.prompt_words
  prompts = () if words else [prompt.messages for prompt in load_prompts(args.prompts)]
  return Workload(words or prompts, args.output_tokens, args.system_words,
                  args.temperature, args.ignore_eos, args.leaving, args.seed,
                  args.warm_prompts)


def serve(args: argparse.Namespace, mode: str, stack: contextlib.ExitStack) -> ServerProcess:
  flags = ["--port", "0", "--grpc-port", "0", *shlex.split(args.serve), *MODES[mode]]
  return stack.enter_context(ServerProcess(
      flags + (shlex.split(args.speculation) if mode != "off" else [])))


async def open_door(args: argparse.Namespace, url: str | None, address: str | None,
                    stack: contextlib.AsyncExitStack) -> tuple[Any, Any]:
  """(for requests, for counters): the latter over HTTP where possible, as it tells the memory."""
  trust = ssl.create_default_context(cafile=args.ca)
  doors: dict[str, Any] = {}
  if url:
    client = await stack.enter_async_context(httpx.AsyncClient(
        base_url=url, timeout=None, verify=trust, limits=httpx.Limits(max_connections=None),
        headers={"authorization": f"Bearer {args.api_key}"} if args.api_key else {}))
    models = (await client.get("/v1/models")).raise_for_status().json()["data"]
    doors["http"] = HttpDoor(client, models[0]["id"], args.raw)
  if address:
    channel = await stack.enter_async_context(
        grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(
            pathlib.Path(args.ca).read_bytes())) if args.ca
        else grpc.aio.insecure_channel(address))
    doors["grpc"] = GrpcDoor(channel, args.api_key, args.raw)
  return doors[args.over or next(iter(doors))], doors.get("http", doors.get("grpc"))


async def run(args: argparse.Namespace, plan: Workload, door: Any, counters: Any, level: float,
              name: str) -> dict[str, Any]:
  """The figures of one level on one server."""
  async with watched(counters, args.sample_every) as samples:
    if args.rate:
      times = arrivals(level, args.duration, random.Random(f"{args.seed} {name}"))
      records = await open_loop(door, plan.requests(name), times, args.timeout)
    else:
      records = await closed_loop(
          door, plan.requests(name), int(level), args.timeout, requests=args.requests,
          seconds=None if args.requests else args.duration)
  goals = load_report.Goals(args.slo_ttft, args.slo_tpot)
  return {"kind": "rate" if args.rate else "concurrency", "level": level,
          **load_report.summary(records, samples, goals)}


async def measure(args: argparse.Namespace, plan: Workload,
                  addresses: dict[str, tuple[str | None, str | None]]) -> list[dict[str, Any]]:
  runs = []
  async with contextlib.AsyncExitStack() as stack:
    doors = {mode: await open_door(args, *pair, stack) for mode, pair in addresses.items()}
    for repeat in range(args.repeats):
      for level in args.rate or args.concurrency:
        for mode, pair in doors.items():
          found = await run(args, plan, *pair, level, f"level {level:g}, repeat {repeat}")
          runs.append({"speculation": mode, "repeat": repeat, **found})
          print(load_report.table(runs[-1:]), file=sys.stderr, flush=True)
  return runs


def main(argv: list[str] | None = None) -> int:
  args = parser().parse_args(argv)
  try:
    check(args)
    plan = workload(args)
    report = environment(sys.argv)
    with contextlib.ExitStack() as stack:
      if args.compare is None:
        addresses = {"server": (args.url, args.grpc)}
      else:
        servers = {mode: serve(args, mode, stack) for mode in args.compare or MODES}
        addresses = {mode: (server.url, server.grpc) for mode, server in servers.items()}
      runs = asyncio.run(measure(args, plan, addresses))
      if args.compare is not None:
        codes = {mode: server.stop() for mode, server in servers.items()}
        report["exit_codes"] = codes
  except (ValueError, RuntimeError, OSError, httpx.HTTPError, grpc.RpcError) as error:
    print(f"load.py: error: {error}", file=sys.stderr)
    return 2
  print(load_report.table(runs))
  if args.json:
    args.json.write_text(json.dumps({**report, "runs": runs}, indent=2) + "\n", encoding="utf-8")
  if args.plot:
    load_report.plot(runs, f"{report['machine']['cpu']}, {report['machine']['cores']} cores  "
                     f"{args.serve}", args.plot)
  return int(any(run["lost"] for run in runs))


if __name__ == "__main__":
  sys.exit(main())
