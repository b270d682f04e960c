"""The Python clients against a server that does what a script says, and without jax."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys

import grpc
import pytest

from jspec import EngineStats, SamplingParams, SpeculativeStats
from jspec.serving.rpc import client_messages
from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.rpc import jspec_pb2_grpc as pb_grpc
from jspec.serving.rpc.client import TLS, AsyncClient, Client, Connection
from jspec.serving.rpc.client_messages import sampling_message
from jspec.serving.rpc.server import SERVICE

ANSWER = pb.GenerateReply(request_id="7", outputs=[{"text": "hi", "token_ids": [1, 2]}])
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Scripted(pb_grpc.JspecServicer):
  """Each attempt takes the next word of the script; when it has ended, attempts succeed."""

  def __init__(self, *script, answer=ANSWER):
    self.script, self.answer = list(script), answer
    self.attempts = []  # (request, metadata)
    self.left = asyncio.Event()  # a client went away

  async def _next(self, request, context) -> str:
    self.attempts.append((request, dict(context.invocation_metadata())))
    word = self.script.pop(0) if self.script else "answer"
    if word in grpc.StatusCode.__members__:
      await context.abort(grpc.StatusCode[word], "as the script says")
    return word

  async def GenerateUnary(self, request, context):
    if await self._next(request, context) == "hang":
      await self._hang()
    return self.answer

  async def Generate(self, request, context):
    word = await self._next(request, context)
    await context.write(self.answer)
    if word == "break off":
      await context.abort(UNAVAILABLE, "after the first message")
    if word == "hang":
      await self._hang()
    await context.write(self.answer)

  async def _hang(self):
    try:
      await asyncio.sleep(60)
    finally:
      self.left.set()


def run(servicer, scenario, kind):
  """What the scenario gets from a client of that kind; a client that waits has a thread."""
  async def main():
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    pb_grpc.add_JspecServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
      if kind is AsyncClient:
        return await asyncio.wait_for(scenario(address), 60)
      return await asyncio.wait_for(asyncio.to_thread(asyncio.run, scenario(address)), 60)
    finally:
      await server.stop(None)

  return asyncio.run(main())


class Either:
  """A Client or an AsyncClient, called alike."""

  def __init__(self, kind, *args, **options):
    self._client = kind(*args, **options)

  async def __aenter__(self):
    return self

  async def __aexit__(self, *_):
    closed = self._client.close()
    if closed is not None:
      await closed

  async def unary(self, *args, **options):
    answer = self._client.generate_unary(*args, **options)
    return answer if isinstance(answer, client_messages.Chunk) else await answer

  async def stream(self, *args, only=None, **options):
    """All chunks, or the first `only` ones, after which the iterator is left."""
    chunks = []
    stream = self._client.generate(*args, **options)
    if isinstance(self._client, Client):
      for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == only:
          break
      stream.close()
    else:
      async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == only:
          break
      await stream.aclose()
    return chunks


both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@both
@pytest.mark.parametrize("call, count", [("unary", 1), ("stream", 2)])
def test_an_unavailable_server_is_asked_again(kind, call, count):
  servicer = Scripted("UNAVAILABLE", "UNAVAILABLE")

  async def scenario(address):
    async with Either(kind, address, token="t") as client:
      return await getattr(client, call)("a" * 1_000_000, request_id="mine")

  answer = run(servicer, scenario, kind)
  assert "".join(c.text for c in (answer if call == "stream" else [answer])) == "hi" * count
  assert len(servicer.attempts) == 3
  for request, metadata in servicer.attempts:  # whole each time, also the large ones
    assert request.text == "a" * 1_000_000 and request.request_id == "mine"
    assert metadata["authorization"] == "Bearer t"


@both
@pytest.mark.parametrize("retries, script, attempts, code", [
  (3, ["UNAVAILABLE"] * 9, 4, UNAVAILABLE), (1, ["UNAVAILABLE"] * 9, 2, UNAVAILABLE),
  (0, ["UNAVAILABLE"] * 9, 1, UNAVAILABLE),
  (3, ["INVALID_ARGUMENT"], 1, grpc.StatusCode.INVALID_ARGUMENT),
  (3, ["RESOURCE_EXHAUSTED"], 1, grpc.StatusCode.RESOURCE_EXHAUSTED)])
def test_it_is_asked_so_often_and_for_nothing_else(kind, retries, script, attempts, code):
  servicer = Scripted(*script)

  async def scenario(address):
    async with Either(kind, address, retries=retries) as client:
      with pytest.raises(grpc.RpcError) as caught:
        await client.unary("a")
      return caught.value.code()

  assert run(servicer, scenario, kind) is code
  assert len(servicer.attempts) == attempts


@both
def test_a_stream_that_has_begun_is_never_asked_for_again(kind):
  """The text so far would come twice."""
  servicer = Scripted("UNAVAILABLE", "answer", "break off")

  async def scenario(address):
    chunks = []
    async with Either(kind, address) as client:
      with pytest.raises(grpc.RpcError) as caught:
        chunks += await client.stream("a", only=1)
        await client.stream("a")
    return chunks, caught.value

  chunks, error = run(servicer, scenario, kind)
  assert [chunk.text for chunk in chunks] == ["hi"]
  assert error.code() is UNAVAILABLE and error.details() == "after the first message"
  assert len(servicer.attempts) == 3


@both
@pytest.mark.parametrize("how", ["unary deadline", "stream deadline", "leaving"])
def test_deadline_and_leaving_reach_the_server(kind, how):
  servicer = Scripted("hang")

  async def scenario(address):
    async with Either(kind, address) as client:
      if how == "leaving":
        return await client.stream("a", only=1)
      with pytest.raises(grpc.RpcError) as caught:
        await getattr(client, how.split()[0])("a", timeout=0.3)
      return caught.value.code()

  async def and_seen(address):
    result = await scenario(address)
    for _ in range(500):  # the event belongs to the server's loop
      if servicer.left.is_set():
        return result
      await asyncio.sleep(0.01)
    raise AssertionError("the server never heard of it")

  result = run(servicer, and_seen, kind)
  if how == "leaving":
    assert [chunk.text for chunk in result] == ["hi"]
  else:
    assert result is grpc.StatusCode.DEADLINE_EXCEEDED
  assert len(servicer.attempts) == 1


def test_a_prompt_is_a_text_ids_or_messages():
  servicer = Scripted()
  messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]

  async def scenario(address):
    async with AsyncClient(address) as client:
      for prompt in ("text", [1, 2], (), messages):
        await client.generate_unary(prompt, priority=-3)
      with pytest.raises(ValueError, match="name"):
        await client.generate_unary([{"role": "user", "content": "a", "name": "b"}])

  run(servicer, scenario, AsyncClient)
  requests = [request for request, _ in servicer.attempts]
  assert [r.WhichOneof("prompt") for r in requests] == ["text", "token_ids", "token_ids", "chat"]
  assert requests[0].text == "text" and list(requests[1].token_ids.ids) == [1, 2]
  assert [{"role": m.role, "content": m.content} for m in requests[3].chat.messages] == messages
  assert {r.priority for r in requests} == {-3}
  assert not any(r.HasField("request_id") for r in requests)


def test_an_output_keeps_what_the_message_holds():
  out = pb.Output(index=1, text="é", token_ids=[5, 6], finish_reason="stop", stop_string="x",
                  logprobs=[{"logprobs": [
                    {"token_id": 5, "logprob": -0.1, "rank": 2, "decoded_token": "a"},
                    {"token_id": 9, "logprob": -0.05, "rank": 1, "decoded_token": "b"}]}])
  answer = pb.GenerateReply(outputs=[out, {"stop_token_id": 0, "finish_reason": "stop"}])

  async def scenario(address):
    async with AsyncClient(address) as client:
      return await client.generate_unary("a")

  chunk = run(Scripted(answer=answer), scenario, AsyncClient)
  first, second = chunk.outputs
  assert first == client_messages.Output(
      1, "é", (5, 6), ({5: client_messages.Logprob(-0.1, 2, "a"),
                        9: client_messages.Logprob(-0.05, 1, "b")},), "stop", "x")
  assert list(first.logprobs[0]) == [5, 9]
  assert second.stop_reason == 0 and second.logprobs == () and chunk.text == ""
  assert chunk.statistics is None


@pytest.mark.parametrize("params, message", [
  ({"temprature": 1}, "'temprature' is no sampling parameter; there are n, temperature"),
  ({"top_k": 2**40}, "top_k: "), ({"n": "two"}, "n: "), ({"logit_bias": 3}, "logit_bias: "),
  ({"allowed_token_ids": []}, "allowed_token_ids: must name"),
  ({"as_many_as_fit": True}, "is no sampling parameter")])
def test_a_parameter_that_is_none_is_refused_by_name(params, message):
  with pytest.raises(ValueError, match=message):
    sampling_message(params)


def test_none_asks_for_nothing_but_as_many_tokens_as_fit():
  assert sampling_message(None) == pb.SamplingParams()
  assert sampling_message({"seed": None, "stop": "é"}) == pb.SamplingParams(stop=["é"])
  for params in ({"max_tokens": None, "seed": None}, SamplingParams(max_tokens=None)):
    assert sampling_message(params).as_many_as_fit
  assert sampling_message(SamplingParams(max_tokens=5)).WhichOneof("length") == "max_tokens"


def test_statistics_have_the_fields_of_jspecs():
  names = lambda kind: {f.name for f in dataclasses.fields(kind)}
  assert names(client_messages.Stats) == names(EngineStats)
  assert names(client_messages.Speculation) == names(SpeculativeStats) | {"acceptance_rate"}
  for kind in (client_messages.Stats, client_messages.Speculation, client_messages.Statistics):
    message = pb.StatsReply if kind is client_messages.Stats else vars(pb)[kind.__name__]
    assert names(kind) == set(message.DESCRIPTOR.fields_by_name)
  assert names(client_messages.ModelInfo) == set(pb.ModelInfoReply.DESCRIPTOR.fields_by_name)


def test_a_connection_keeps_its_token_to_itself_and_its_limits():
  assert "hush" not in repr(Connection("localhost:1", token="hush"))
  with pytest.raises(ValueError, match="retries must be in 0..4, got 5"):
    Connection("localhost:1", retries=5)
  with pytest.raises(ValueError, match="certfile and keyfile go together"):
    TLS(certfile="a.pem").credentials()


def test_the_client_needs_neither_jax_nor_numpy():
  code = ("import sys; sys.modules.update(dict.fromkeys(('jax', 'numpy', 'fastapi')));"
          "from jspec.serving.rpc import client; print(client.SERVICE)")
  shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert shown.stdout.strip() == SERVICE
