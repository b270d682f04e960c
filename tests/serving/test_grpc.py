"""The gRPC door on a real engine: its answers are the LLM's, and whoever leaves leaves nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import grpc
import pytest
import served
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
  ProtoReflectionDescriptorDatabase,
)
from served import NAME, until
from tiny_llm import EOS, is_idle, with_tokenizer
from tiny_tokenizers import TOKENIZERS, continuation

import jspec
from jspec import AsyncLLM, SamplingParams
from jspec.serving.rpc.client import AsyncClient, Client
from jspec.serving.rpc.server import SERVICE

PROMPT = "ab é日🎉 ab é日🎉"
CHAT = [{"role": "user", "content": "an inn"}, {"role": "assistant", "content": "the"},
        {"role": "user", "content": "and then"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

@pytest.fixture(scope="module", params=TOKENIZERS)
def llm(request):
  with with_tokenizer(request.param, "ngram") as llm:
    yield llm


@pytest.fixture
def slow(llm, monkeypatch):
  """Makes each step take that many seconds: there is time to leave in the middle."""
  step = llm.engine.step

  def make_slow(seconds):
    monkeypatch.setattr(llm.engine, "step", lambda *args: time.sleep(seconds) or step(*args))

  return make_slow


def serve(llm, scenario, **engine):
  """Runs `scenario(address, service)` beside a server; then no slot and no page is taken."""
  async def left_clean(address, service, server):
    result = await scenario(address, service)
    await until(lambda: not service.engine.num_requests and is_idle(llm))
    return result

  return served.serve(lambda: AsyncLLM(llm, **engine), left_clean, close=AsyncLLM.shutdown)


async def chunks_of(address, *args, **options):
  async with AsyncClient(address) as client:
    return [chunk async for chunk in client.generate(*args, **options)]


def joined(chunks, index=0):
  """(text, token ids, logprobs, finish_reason, stop_reason) of one of the outputs."""
  outputs = [out for chunk in chunks for out in chunk.outputs if out.index == index]
  assert [out.finish_reason for out in outputs[:-1]] == [None] * (len(outputs) - 1)
  return ("".join(out.text for out in outputs), sum((out.token_ids for out in outputs), ()),
          [as_numbers(row) for out in outputs for row in out.logprobs],
          outputs[-1].finish_reason, outputs[-1].stop_reason)


def expected(out):
  return (out.text, out.token_ids, [as_numbers(row) for row in out.logprobs or ()],
          out.finish_reason, out.stop_reason)


def as_numbers(row):
  """Of one token; log-probabilities as exact as a batch of another size leaves them."""
  return [(token, pytest.approx(entry.logprob, abs=1e-4), entry.rank, entry.decoded_token)
          for token, entry in row.items()]


CASES = {
  "greedy": (PROMPT, GREEDY),
  "seeded": (PROMPT, SamplingParams(seed=5, max_tokens=30, top_k=8, repetition_penalty=1.2)),
  "two outputs": (PROMPT, SamplingParams(n=2, seed=7, max_tokens=20, ignore_eos=True)),
  "logprobs": (PROMPT, dataclasses.replace(GREEDY, logprobs=3, max_tokens=12)),
  "token ids, to the end": ([5, 6, 7, 5, 6], SamplingParams(temperature=0, max_tokens=None)),
  "stop token": (PROMPT, dataclasses.replace(GREEDY, stop_token_ids=tuple(range(25, 64)))),
  "chat": (CHAT, GREEDY),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_the_one_that_the_llm_gives(llm, name):
  prompt, params = CASES[name]
  whole = (llm.chat if prompt is CHAT else llm.generate)(prompt, params)[0]

  async def scenario(address, service):
    chunks = await chunks_of(address, prompt, params)
    async with AsyncClient(address) as client:
      return chunks, await client.generate_unary(prompt, params)

  chunks, unary = serve(llm, scenario)
  for out in whole.outputs:
    assert joined(chunks, out.index) == joined([unary], out.index) == expected(out)
  assert [c.statistics is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
  for last in (chunks[-1], unary):
    stats = last.statistics
    assert stats.prompt_tokens == len(whole.prompt_token_ids)
    assert stats.generated_tokens == sum(len(out.token_ids) for out in whole.outputs)
    assert 0 < stats.time_to_first_token <= stats.total_time
  if params.temperature == 0:  # alone in the engine, drafts are the same, too
    for name, value in vars(whole.speculation).items():
      assert getattr(chunks[-1].statistics.speculation, name) == value, name
    rate = chunks[-1].statistics.speculation.acceptance_rate
    assert rate == pytest.approx(whole.speculation.acceptance_rate)


def test_the_waiting_client_gets_the_same(llm):
  whole = llm.generate(PROMPT, GREEDY)[0]

  def calls(address):
    with Client(address) as client:
      return list(client.generate(PROMPT, GREEDY)), client.generate_unary(PROMPT, GREEDY)

  chunks, unary = serve(llm, lambda address, _: asyncio.to_thread(calls, address))
  assert "".join(chunk.text for chunk in chunks) == unary.text == whole.text
  assert joined(chunks) == joined([unary]) == expected(whole.outputs[0])


def test_characters_come_whole(llm, slow):
  """Random halves of é and the first byte of 日: many make no character, and some do."""
  slow(0.01)
  halves = continuation(llm.tokenizer, "é日")[:3]
  params = SamplingParams(seed=12, max_tokens=40, temperature=100.0, allowed_token_ids=halves)
  chunks = serve(llm, lambda address, _: chunks_of(address, PROMPT, params))
  ids = joined(chunks)[1]
  assert "".join(chunk.text for chunk in chunks) == llm.tokenizer.decode(ids)
  assert any(ord(c) > 127 and c != "\ufffd" for c in llm.tokenizer.decode(ids))
  held = [out for chunk in chunks for out in chunk.outputs if out.token_ids and not out.text]
  assert held  # tokens whose character was not complete yet


def middle_of_a_run(llm):
  """(output, i): a greedy one whose tokens i - 1, i and i + 1 were accepted in one step."""
  out = llm.generate(PROMPT, GREEDY)[0].outputs[0]
  # A step ends with a token that was not drafted, so drafted neighbours came from one step.
  return out, [i for i in range(1, 39) if all(out.drafted[i - 1:i + 2])]


def test_a_stop_string_inside_an_accepted_run_ends_text_and_tokens_there(llm):
  out, middles = middle_of_a_run(llm)
  decode = llm.tokenizer.decode
  ends = {i: decode(out.token_ids[:i + 1]) for i in middles}
  i, stop = next((i, end[-n:]) for i, end in ends.items() for n in range(1, 40)
                 if out.text.find(end[-n:]) == len(end) - n)
  params = dataclasses.replace(GREEDY, stop=[stop])
  text, ids, _, finish, reason = joined(
      serve(llm, lambda address, _: chunks_of(address, PROMPT, params)))
  assert text == ends[i][:-len(stop)]
  assert ids == out.token_ids[:i + 1]
  assert (finish, reason) == ("stop", stop)


def test_max_tokens_inside_an_accepted_run_ends_text_and_tokens_there(llm):
  out, middles = middle_of_a_run(llm)
  params = dataclasses.replace(GREEDY, max_tokens=middles[0] + 1)
  text, ids, _, finish, _ = joined(
      serve(llm, lambda address, _: chunks_of(address, PROMPT, params)))
  assert ids == out.token_ids[:middles[0] + 1] and text == llm.tokenizer.decode(ids)
  assert finish == "length"


def test_parameters_reach_the_engine(llm):
  """Each changes the text, or keeps something out of it."""
  async def scenario(address, service):
    async with AsyncClient(address) as client:
      ask = lambda **fields: client.generate_unary(PROMPT, dict(vars(GREEDY), **fields))
      plain = await ask()
      banned = await ask(logit_bias={plain.outputs[0].token_ids[0]: -100})
      special = await ask(logit_bias={EOS: 100}, skip_special_tokens=False, max_tokens=2)
      ended = await ask(logit_bias={EOS: 100}, ignore_eos=False, min_tokens=3)
      undrafted = await ask(num_speculative_tokens=0)
      return plain, banned, special, ended, undrafted

  plain, banned, special, ended, undrafted = serve(llm, scenario)
  assert plain.outputs[0].token_ids[0] not in banned.outputs[0].token_ids
  assert special.text == "<|end|><|end|>"
  assert len(ended.outputs[0].token_ids) == 4 and ended.outputs[0].finish_reason == "stop"
  assert undrafted.text == plain.text
  assert undrafted.statistics.speculation.num_drafts == 0 < plain.statistics.speculation.num_drafts


def test_a_request_id_is_its_own_while_it_runs(llm, slow):
  slow(0.03)
  async def scenario(address, service):
    async with AsyncClient(address) as client:
      first = client.generate(PROMPT, LONG, request_id="mine")
      chunk = await anext(first)
      with pytest.raises(grpc.aio.AioRpcError, match="request_id 'mine' is already") as caught:
        await client.generate_unary(PROMPT, GREEDY, request_id="mine")
      others = [await client.generate_unary("a", {"max_tokens": 1}) for _ in range(2)]
      await first.aclose()
      return chunk, caught.value, others

  chunk, error, others = serve(llm, scenario)
  assert chunk.request_id == "mine"
  assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
  assert error.details().startswith("request_id: ")
  assert len({other.request_id for other in others} - {"", "mine"}) == 2


# --------------------------------------------------------------- coming, going


LONG = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, num_speculative_tokens=0)


@pytest.mark.parametrize("how", ["leaves", "vanishes", "deadline", "unary deadline"])
def test_who_leaves_gives_slot_and_pages_back(llm, slow, how):
  """Else 70 steps of 0.1 s would be done to the end, and no request counted as aborted."""
  slow(0.1)

  async def scenario(address, service):
    aborted = lambda: dict(service.engine.stats().finished).get("abort", 0)
    before = aborted()
    async with AsyncClient(address) as client:
      if "deadline" in how:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
          if how == "unary deadline":
            await client.generate_unary(PROMPT, LONG, timeout=1.5)
          [chunk async for chunk in client.generate(PROMPT, LONG, timeout=1.5)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
      else:
        stream = client.generate(PROMPT, LONG)
        await anext(stream)
        await (stream.aclose() if how == "leaves" else client.close())
    await until(lambda: aborted() == before + 1)

  serve(llm, scenario)


def test_a_full_queue_refuses_and_takes_again(llm, slow):
  """One waits beside the four that have slots."""
  slow(0.03)
  async def scenario(address, service):
    async with AsyncClient(address, retries=0) as client:
      streams = [client.generate(PROMPT, LONG) for _ in range(5)]
      firsts = {stream: asyncio.ensure_future(anext(stream)) for stream in streams}
      await until(lambda: service.engine.num_requests == 5)
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate_unary(PROMPT, GREEDY)
      await until(lambda: sum(first.done() for first in firsts.values()) >= 2)
      for stream in [s for s, first in firsts.items() if first.done()][:2]:
        await stream.aclose()
      await until(lambda: service.engine.num_requests <= 3)
      again = await client.generate_unary(PROMPT, GREEDY)
      await asyncio.gather(*firsts.values())
      for stream in streams:
        await stream.aclose()
      return caught.value, again

  error, again = serve(llm, scenario, max_waiting=1)
  assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
  assert "1 requests are waiting" in error.details()
  assert again.statistics.generated_tokens == 40


# ---------------------------------------------------------------- other calls


def test_tokenize_and_detokenize_are_the_tokenizers(llm):
  tokenizer = llm.tokenizer

  async def scenario(address, service):
    async with AsyncClient(address) as client:
      ids = await client.tokenize(PROMPT)
      with pytest.raises(grpc.aio.AioRpcError, match="token_ids: token 64 is not") as caught:
        await client.detokenize([64])
      with pytest.raises(grpc.aio.AioRpcError, match="add_special_tokens: is of text only"):
        await client.tokenize(CHAT, add_special_tokens=True)
      return (ids, await client.tokenize(CHAT), await client.detokenize(ids),
              await client.detokenize([EOS, 3]),
              await client.detokenize([EOS, 3], skip_special_tokens=False), caught.value)

  ids, chat, text, skipped, kept, error = serve(llm, scenario)
  assert ids == tokenizer.encode(PROMPT) and text == PROMPT
  assert chat == tokenizer.apply_chat_template(CHAT)
  assert (skipped, kept) == ("a", "<|end|>a")
  assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_model_and_statistics_are_told(llm):
  async def scenario(address, service):
    async with AsyncClient(address) as client:
      await client.generate_unary(PROMPT, GREEDY)
      await until(lambda: is_idle(llm))
      return await client.model_info(), await client.stats(), service.engine.stats()

  model, told, stats = serve(llm, scenario)
  assert dataclasses.asdict(model) == {
    "model_name": NAME, "vocab_size": 64, "max_model_len": 96, "max_num_seqs": 4,
    "speculative_method": "ngram", "num_speculative_tokens": 4,
    "jspec_version": jspec.__version__}
  told, stats = dataclasses.asdict(told), dataclasses.asdict(stats)
  rate = told["speculation"].pop("acceptance_rate")
  assert told == {**stats, "finished": dict(stats["finished"])}
  assert 0 < rate < 1 and told["generation_tokens"] >= 40


def test_a_stock_client_finds_the_interface_by_reflection(llm):
  """As grpcurl does: without generated code, from what the server says of itself."""
  def call(address):
    with grpc.insecure_channel(address) as channel:
      database = ProtoReflectionDescriptorDatabase(channel)
      assert SERVICE in database.get_services()
      service = descriptor_pool.DescriptorPool(database).FindServiceByName(SERVICE)
      method = service.methods_by_name["Generate"]
      request, reply = map(message_factory.GetMessageClass,
                           (method.input_type, method.output_type))
      generate = channel.unary_stream(
          f"/{service.full_name}/{method.name}", request_serializer=request.SerializeToString,
          response_deserializer=reply.FromString)
      message = request(text=PROMPT)
      message.params.temperature, message.params.ignore_eos = 0, True
      message.params.max_tokens = 40
      return "".join(out.text for answer in generate(message) for out in answer.outputs)

  text = serve(llm, lambda address, _: asyncio.to_thread(call, address))
  assert text == llm.generate(PROMPT, GREEDY)[0].text
