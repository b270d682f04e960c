"""`jspec serve`: what flags mean, what is refused, and the life of a server process."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request

import grpc
import jax
import pytest

from jspec import EngineDead, EngineStats, SpeculativeStats
from jspec.cli import endings, main
from jspec.cli import flags as cli_flags
from jspec.engine import loop
from jspec.serving import command, server
from jspec.serving.http import server as http_server
from jspec.serving.log_lines import fields
from jspec.serving.process import ServerProcess
from jspec.serving.rpc import server as grpc_server
from jspec.serving.rpc.client import Client
from jspec.serving.service import Policy

ROOT = pathlib.Path(__file__).parents[2]
# The tiny model behind the real command: with room for answers that take a while, and with one
# prefill program and one step, since a server compiles all it has before it is ready.
SCRIPT = textwrap.dedent("""
    import dataclasses, sys
    from tiny_llm import tiny_model
    from jspec import LLM, build
    from jspec.cli import flags, main

    whole = build.engine_config
    build.engine_config = lambda *args, **fields: whole(*args, prefill_chunks=(16,), **fields)

    def load(model, speculative_config):
      loaded = tiny_model()
      loaded = loaded._replace(config=dataclasses.replace(loaded.config, max_positions=1024))
      return LLM(loaded, dtype="float32", max_model_len=1024, max_num_seqs=2, page_size=32,
                 progress=False)

    flags.load_llm = load
    sys.exit(main.main(sys.argv[1:]))
""")
SHORT = {"temperature": 0.0, "max_tokens": 12}
# Four answers for two slots, a step for each token: hundreds of milliseconds at the very least.
LONG = {"n": 4, "max_tokens": 900, "ignore_eos": True, "seed": 1}


@pytest.fixture
def served(monkeypatch):
  """(arguments of cli_flags.load_llm, Settings) of the last `jspec serve` that was not refused."""
  found = []

  def run(load, settings):
    found[:] = [load(), settings]
    return 0

  monkeypatch.delenv(command.KEY_VARIABLE, raising=False)
  monkeypatch.setattr(cli_flags, "load_llm", lambda model, **keywords: {"model": model, **keywords})
  monkeypatch.setattr(server, "run", run)

  def parse(*flags):
    assert main.main(["serve", *flags]) == 0
    return tuple(found)

  return parse


def refused(capsys, *flags: str) -> str:
  """The one sentence that bad input gets."""
  assert main.main(["serve", *flags]) == endings.BAD_INPUT
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("jspec: error: ") and err.count("\n") == 1, err
  return err


# ------------------------------------------------------------------------ flags


def test_without_flags_the_default_model_drafts_by_ngrams_on_the_usual_ports(served):
  llm, settings = served()
  assert llm == {"model": cli_flags.DEFAULT_MODEL, "speculative_config": {"method": "ngram"}}
  assert settings == server.Settings(
      model_name=cli_flags.DEFAULT_MODEL, max_queue=1024, steps_per_turn=1, drain_timeout=30.0,
      http=http_server.Options(host="127.0.0.1", port=8000, max_body_bytes=4 * 2**20),
      grpc=grpc_server.Options(host="127.0.0.1", port=50051, max_message_bytes=4 * 2**20))


def test_engine_flags_reach_the_engine(served):
  llm, _ = served(
      "--model", "some/model", "--dtype", "bfloat16", "--max-model-len", "512",
      "--max-num-seqs", "16", "--page-size", "64", "--kv-cache-dtype", "int8", "--num-pages", "99",
      "--tensor-parallel-size", "2", "--max-num-batched-tokens", "128", "--seed", "7",
      "--no-enable-prefix-caching", "--dynamic-speculation", "--cache-dir", "cache")
  assert llm == {
      "model": "some/model", "speculative_config": {"method": "ngram"}, "dtype": "bfloat16",
      "max_model_len": 512, "max_num_seqs": 16, "page_size": 64, "kv_cache_dtype": "int8",
      "num_pages": 99, "tensor_parallel_size": 2, "max_num_batched_tokens": 128, "seed": 7,
      "enable_prefix_caching": False, "dynamic_speculation": True, "cache_dir": "cache"}


def test_server_flags_reach_the_server(served, tmp_path, monkeypatch):
  keys = tmp_path / "keys"
  keys.write_text("c\n\n d \n")
  monkeypatch.setenv(command.KEY_VARIABLE, "b,a")
  _, settings = served(
      "--host", "0.0.0.0", "--port", "0", "--grpc-port", "77", "--served-model-name", "mine",
      "--api-key", "a", "--api-key-file", str(keys), "--max-queue", "3", "--drain-timeout", "2.5",
      "--max-body-bytes", "1000", "--num-scheduler-steps", "4")
  own = {"host": "0.0.0.0", "tokens": ("a", "b", "c", "d")}
  assert settings == server.Settings(
      model_name="mine", http=http_server.Options(port=0, max_body_bytes=1000, **own),
      grpc=grpc_server.Options(port=77, max_message_bytes=1000, **own),
      max_queue=3, steps_per_turn=4, drain_timeout=2.5, policy=Policy(max_outputs_per_client=1))
  assert served("--no-http")[1].http is None
  assert served("--no-grpc")[1].grpc is None


@pytest.mark.parametrize("flags, config", [
  (["--spec-method", "suffix"], {"method": "suffix"}),
  (["--spec-method", "draft_model", "--spec-model", "org/draft", "--spec-tokens", "3"],
   {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 3}),
  (["--speculative-config", '{"method": "ngram", "prompt-lookup-max": 3}', "--spec-tokens", "5"],
   {"method": "ngram", "prompt-lookup-max": 3, "num_speculative_tokens": 5}),
  (["--speculative-disable-by-batch-size", "4"], {"method": "ngram", "disable_by_batch_size": 4}),
  (["--no-speculation"], None),
])
def test_shortcuts_are_keys_of_the_speculative_config(served, flags, config):
  assert served(*flags)[0]["speculative_config"] == config


def test_older_speculation_flags_work_as_in_generate(served):
  llm, _ = served("--speculative-model", "[ngram]", "--num-speculative-tokens", "4")
  assert llm == {"model": cli_flags.DEFAULT_MODEL, "speculative_config": None,
                 "speculative_model": "[ngram]", "num_speculative_tokens": 4}


def test_the_model_may_come_without_a_flag_and_its_folder_is_not_told(served, tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "config.json").write_text("{}")
  llm, settings = served(str(tmp_path / "folder"))
  assert llm["model"] == str(tmp_path / "folder")
  assert settings.model_name == "folder"


def test_the_largest_turn_is_the_engines():
  assert command.MAX_STEPS == loop.MAX_STEPS


@pytest.mark.parametrize("flags, words", [
  (["--no-http", "--no-grpc"], "leave nothing to serve"),
  (["--ssl-ca-certs", "x", "--no-grpc"], "--ssl-ca-certs is about gRPC clients"),
  (["--port", "65536"], "--port must be in 0..65535, got 65536"),
  (["--grpc-port", "-1"], "--grpc-port must be in 0..65535, got -1"),
  (["--port", "9", "--grpc-port", "9"], "are both 9: they must differ"),
  (["--max-queue", "0"], "--max-queue must be >= 1, got 0"),
  (["--max-num-batched-tokens", "0"], "must be >= 1, got 0"),
  (["--num-scheduler-steps", "17"], "must be in 1..16, got 17"),
  (["--drain-timeout", "nan"], "--drain-timeout must be in 0..1000000, got nan"),
  (["--max-body-bytes", "0"], "--max-body-bytes must be in 1..2147483647, got 0"),
  (["--max-num-seqs", "0"], "--max-num-seqs must be >= 1, got 0"),
  (["--served-model-name", " "], "--served-model-name must not be empty"),
  (["a", "--model", "b"], "the model is given twice: 'a' and --model 'b'"),
  (["--api-key", ""], "--api-key holds a key that is empty"),
  (["--api-key", "schlüssel"], "--api-key holds a key that is empty or has characters other"),
  (["--api-key-file", "no-such-file"], "can't read no-such-file: No such file"),
  (["--log-level", "loud"], "invalid choice: 'loud'"),
  (["--spec-tokens", "3", "--speculative-config", '{"num-speculative-tokens": 2}'],
   "--spec-tokens and the key num_speculative_tokens of --speculative-config are the same"),
  (["--spec-tokens", "3", "--num-speculative-tokens", "2"], "is given twice"),
  (["--spec-method", "eagle9"], "'eagle9' is unknown"),
  (["--no-speculation", "--spec-tokens", "3"], "--no-speculation contradicts"),
  (["--no-speculation", "--dynamic-speculation"], "--no-speculation contradicts"),
  (["--speculative-disable-by-batch-size", "1"], "must be >= 2, got 1"),
  (["--block-size", "16"], "--block-size is vLLM's and has no meaning here: use --page-size"),
  (["--nonsense"], "unrecognized arguments: --nonsense (see jspec serve --help)"),
])
def test_bad_flags_are_one_sentence_and_load_nothing(monkeypatch, capsys, flags, words):
  monkeypatch.setattr(cli_flags, "load_llm", lambda *_, **__: pytest.fail("loaded a model"))
  assert words in refused(capsys, *flags)


def test_an_empty_key_does_not_open_the_server(monkeypatch, capsys, tmp_path):
  monkeypatch.setenv(command.KEY_VARIABLE, "")
  assert "JSPEC_API_KEY holds a key that is empty" in refused(capsys)
  monkeypatch.delenv(command.KEY_VARIABLE)
  (tmp_path / "keys").write_text(" \n")
  assert "holds no key" in refused(capsys, "--api-key-file", str(tmp_path / "keys"))
  (tmp_path / "keys").write_bytes(b"\xff")
  assert "is not a text file" in refused(capsys, "--api-key-file", str(tmp_path / "keys"))
  (tmp_path / "keys").write_text("se cret")
  assert "se cret" not in refused(capsys, "--api-key-file", str(tmp_path / "keys"))


def test_bad_certificates_are_refused_before_the_model_is_loaded(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(cli_flags, "load_llm", lambda *_, **__: pytest.fail("loaded a model"))
  for name in ("cert", "key"):
    (tmp_path / name).write_text("not PEM")
  cert, key = ["--ssl-certfile", str(tmp_path / "cert")], ["--ssl-keyfile", str(tmp_path / "key")]
  free = ["--port", "0", "--grpc-port", "0"]
  for flags, words in ((cert, "go together"), ([*cert, *key], "PEM"),
                       ([*cert[:1], "no-such-file", *key], "No such file"),
                       (["--ssl-ca-certs", str(tmp_path / "cert")], "needs ssl_certfile")):
    assert words in refused(capsys, *free, *flags)


@pytest.mark.parametrize("flag, others", [("--port", ["--grpc-port", "0"]),
                                          ("--grpc-port", ["--port", "0"])])
def test_a_port_in_use_is_refused_before_the_model_is_loaded(monkeypatch, capsys, flag, others):
  monkeypatch.setattr(cli_flags, "load_llm", lambda *_, **__: pytest.fail("loaded a model"))
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    assert f"can't listen on port {port} of 127.0.0.1: Address already in use" in refused(
        capsys, flag, str(port), *others)
  assert "--host 'no.such.host.invalid' is not an address" in refused(
      capsys, "--host", "no.such.host.invalid", flag, "0", *others)


def test_a_missing_package_is_named(monkeypatch, capsys):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec",
                      lambda name: None if name in ("grpc", "fastapi") else find(name))
  assert "needs grpcio, fastapi, which jspec-jax's extra 'serve' brings" in refused(capsys)


def test_flags_and_help_need_no_package_of_the_extra():
  code = ("import sys\nfrom jspec.cli import main\nmain.build_parser(['serve'])\n"
          "names = 'grpc', 'fastapi', 'uvicorn', 'prometheus_client', 'jax'\n"
          "print(*(name for name in names if name in sys.modules))")
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and done.stdout.strip() == "", done


def test_the_statistics_line_is_about_what_happened_since_the_last():
  def stats(scale, **now):
    return EngineStats(prompt_tokens=100 * scale, generation_tokens=40 * scale,
                       prefix_queries=10 * scale, prefix_hits=3 * scale**2, num_pages=8,
                       speculation=SpeculativeStats(num_drafts=5 * scale,
                                                    num_draft_tokens=20 * scale,
                                                    num_accepted_tokens=3 * scale**2), **now)

  found = server.statistics(stats(1), stats(2, num_running=2, num_waiting=1, num_free_pages=6), 4.0)
  assert found == {
      "prompt_tokens_per_s": 25.0, "generation_tokens_per_s": 10.0, "running": 2, "waiting": 1,
      "kv_cache_usage": 0.25, "prefix_hit_rate": 0.9, "preemptions": 0, "acceptance_rate": 9 / 20,
      "mean_acceptance_length": 1 + 9 / 5}
  idle = server.statistics(stats(1), stats(1), 4.0)
  assert idle["acceptance_rate"] == idle["prefix_hit_rate"] == 0
  assert idle["mean_acceptance_length"] == 1


def test_log_fields_can_be_told_apart():
  assert fields(a=1, b="x y", c="", d=0.5) == 'a=1 b="x y" c="" d=0.500'


@dataclasses.dataclass
class FakeEngine:
  """An AsyncLLM whose requests end after so many seconds."""

  seconds: float
  is_healthy: bool = True
  num_requests: int = 2

  async def drain(self, timeout):
    await asyncio.sleep(min(self.seconds, timeout))
    self.num_requests = 0 if self.seconds <= timeout else 1
    return not self.num_requests

  async def shutdown(self):
    self.num_requests = 0

  async def generate(self, prompt):
    raise EngineDead("the engine stopped: no memory")
    yield


class FakeDoor:
  port = 0

  def __init__(self, complete=True):
    self.complete = complete

  async def drain(self, grace):
    return self.complete and grace > 0


@pytest.mark.parametrize("engine, door, timeout, code, words", [
  (FakeEngine(0.0), FakeDoor(), 9.0, server.CLEAN, "drained answered=2 aborted=0"),
  (FakeEngine(9.0), FakeDoor(), 0.01, server.FAILED, "drained answered=1 aborted=1"),
  (FakeEngine(0.0), FakeDoor(False), 9.0, server.FAILED, "clients were cut off"),
  (FakeEngine(0.0, False), FakeDoor(), 9.0, server.FAILED, "the engine stopped: no memory"),
])
def test_only_a_complete_drain_is_a_success(caplog, engine, door, timeout, code, words):
  caplog.set_level("INFO", "jspec.serving")
  assert asyncio.run(server.drain(engine, [door], timeout)) == code
  assert words in caplog.text
  assert engine.num_requests == 0 or not engine.is_healthy


def test_the_second_signal_ends_the_process_on_the_spot(monkeypatch):
  ended = []
  monkeypatch.setattr(server, "end_now", ended.append)

  async def run():
    stop = server.on_signal()
    for number, expected in ((signal.SIGINT, []), (signal.SIGTERM, [128 + signal.SIGTERM])):
      os.kill(os.getpid(), number)
      await asyncio.sleep(0.01)
      assert stop.is_set() and ended == expected

  asyncio.run(run())


# -------------------------------------------------------------------- processes


def start(*flags: str) -> ServerProcess:
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", command.KEY_VARIABLE: "secret",
                 "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
                 "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                 "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
  return ServerProcess(["serve", *flags], command=(sys.executable, "-c", SCRIPT),
                       environment=environment, timeout=240)


def status(url: str, path: str, body: dict | None = None, key: str = "secret") -> int:
  """The HTTP status of a request."""
  request = urllib.request.Request(
      url + path, None if body is None else json.dumps(body).encode(),
      {"authorization": f"Bearer {key}", "content-type": "application/json"})
  try:
    with urllib.request.urlopen(request, timeout=30) as response:
      response.read()
      return response.status
  except urllib.error.HTTPError as error:
    return error.code


def begin_draining(process: ServerProcess, client: Client) -> None:
  process.signal(signal.SIGTERM)
  while client.health():
    pass
  assert status(process.url, "/health") == 503


def test_a_killed_server_can_be_started_again_and_answers_the_same():
  with start("--port", "0", "--grpc-port", "0") as process:
    with Client(process.grpc, token="secret", retries=0) as client:
      text = client.generate_unary("the end", SHORT).text
      stream = client.generate("the end", LONG)
      next(stream)
      process.signal(signal.SIGKILL)
      with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        list(stream)
    assert process.wait() == -signal.SIGKILL
    ports = [address.rsplit(":", 1)[1] for address in (process.url, process.grpc)]
  with start("--port", ports[0], "--grpc-port", ports[1], "--served-model-name", "mine") as again:
    assert (again.url, again.grpc) == (process.url, process.grpc)
    with Client(again.grpc, token="secret") as client:
      assert client.generate_unary("the end", SHORT).text == text
      check_doors(again, client)
      check_drain(again, client)
    assert again.wait() == 0


def check_doors(process: ServerProcess, client: Client) -> None:
  body = {"model": "mine", "prompt": "the end", **SHORT}
  assert status(process.url, "/health") == status(process.url, "/v1/completions", body) == 200
  assert status(process.url, "/v1/completions", body, key="wrong") == 401
  assert client.health() and client.model_info().model_name == "mine"


def check_drain(process: ServerProcess, client: Client) -> None:
  """What runs when SIGTERM comes goes on to its end; nothing else begins."""
  counts, finished = collections.Counter(), {}
  for i, chunk in enumerate(client.generate("the end", LONG)):
    for out in chunk.outputs:
      counts[out.index] += len(out.token_ids)
      finished[out.index] = out.finish_reason
    if i == 0:
      process.signal(signal.SIGTERM)
      while client.health():
        pass
      body = {"model": "mine", "prompt": "the end", **SHORT}
      assert status(process.url, "/health") == status(process.url, "/v1/completions", body) == 503
      with pytest.raises(grpc.RpcError, match="UNAVAILABLE"), Client(
          process.grpc, token="secret", retries=0) as late:
        late.generate_unary("the end", SHORT)
      assert sum(counts.values()) < 4 * LONG["max_tokens"]
  assert counts == dict.fromkeys(range(4), LONG["max_tokens"])
  assert finished == dict.fromkeys(range(4), "length")
