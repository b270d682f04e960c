"""What the gRPC interface carries, and how it refuses: nothing is ignored, nothing is lost."""

from __future__ import annotations

import pathlib

import grpc
import pytest
from google.protobuf import descriptor_pb2, message_factory
from grpc_tools import protoc
from served import serve
from tiny_llm import tiny_llm

from jspec import AsyncLLM, SamplingParams
from jspec.serving.rpc import jspec_pb2 as pb
from jspec.serving.rpc import jspec_pb2_grpc as pb_grpc
from jspec.serving.rpc.client import AsyncClient
from jspec.serving.rpc.client_messages import sampling_message
from jspec.serving.rpc.messages import conversation, sampling_params
from jspec.serving.rpc.server import SERVICE
from jspec.serving.service import Conversation

ROOT = pathlib.Path(__file__).parents[2]
METHODS = pb.DESCRIPTOR.services_by_name["Jspec"].methods
NOT_THE_DEFAULT = {
  "n": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**63 - 2,
  "repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.25,
  "logit_bias": {0: -1e18, 7: 0.1}, "bad_words": ("é", "an inn"), "min_tokens": 3,
  "allowed_token_ids": (9, 0),
  "max_tokens": None, "stop": ("日", "\n"), "stop_token_ids": (5, 0),
  "include_stop_str_in_output": True, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0,
  "num_speculative_tokens": 0, "skip_special_tokens": False,
  "truncate_prompt_tokens": -1}


def test_the_generated_code_is_that_of_the_interface(tmp_path):
  compiled = tmp_path / "descriptors"
  assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={compiled}",
                      "jspec/serving/rpc/jspec.proto"]) == 0
  file, = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
  generated = descriptor_pb2.FileDescriptorProto()
  pb.DESCRIPTOR.CopyToProto(generated)
  for message in file.message_type:  # names that protoc derives and writes only here
    for field in message.field:
      field.ClearField("json_name")
    for nested in message.nested_type:
      for field in nested.field:
        field.ClearField("json_name")
  assert generated == file


def test_every_sampling_parameter_travels():
  defaults = vars(SamplingParams())
  assert defaults.keys() == NOT_THE_DEFAULT.keys()
  for name, value in NOT_THE_DEFAULT.items():
    params = SamplingParams(**{name: value})
    assert getattr(params, name) != defaults[name]
    assert sampling_params(sampling_message(params), {}) == params
    assert sampling_params(sampling_message({name: value}), {}) == params  # alone on the wire


def test_what_is_unset_has_the_default():
  assert sampling_params(pb.SamplingParams(), {}) == SamplingParams()
  assert sampling_params(pb.SamplingParams(as_many_as_fit=False), {}) == SamplingParams()


def test_the_models_defaults_are_those_of_fields_that_are_unset():
  defaults = dict(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
  assert sampling_params(pb.SamplingParams(), defaults) == SamplingParams(**defaults)
  neutral = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
  assert sampling_params(pb.SamplingParams(**neutral), defaults) == SamplingParams()


@pytest.mark.parametrize("given, seed", [(7, 7), (-1, None), (-2, 2**63 - 2), (-2**63, 0)])
def test_any_64_bit_number_is_a_seed(given, seed):
  assert sampling_params(pb.SamplingParams(seed=given), {}).seed == seed


def test_how_a_template_is_to_write_a_conversation():
  messages = [{"role": "user", "content": "a"}]
  for fields, told in (
      ({}, {}), ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
      ({"continue_final_message": True},
       {"add_generation_prompt": False, "continue_final_message": True}),
      ({"chat_template_kwargs": '{"enable_thinking": false}'},
       {"chat_template_kwargs": {"enable_thinking": False}})):
    assert conversation(pb.Chat(messages=messages, **fields)) == Conversation(messages, **told)


def request(**params):
  return pb.GenerateRequest(text="a", params=params)


REFUSED = {  # how the refusal begins -> the request
  "params.temperature: temperature must be": request(temperature=-1),
  "params.top_p: top_p must be > 0": request(top_p=0),
  "params.n: n must be": request(n=0),
  "params.max_tokens: max_tokens must be >= 0": request(max_tokens=-1),
  "params.temperature: temperature must be a finite": request(temperature=float("inf")),
  "params.logit_bias: logit_bias must be within": request(logit_bias={5: float("nan")}),
  "params.stop: stop must hold non-empty": request(stop=[""]),
  "params.logprobs: logprobs must be in 0..20": request(logprobs=21),
  "params.logit_bias: logit_bias names token 64": request(logit_bias={64: 1.0}),
  "params.stop_token_ids: stop_token_ids must": request(stop_token_ids=[-1]),
  "params.num_speculative_tokens: num_spec": request(num_speculative_tokens=5),
  "params.min_tokens: min_tokens=96 does not": request(min_tokens=96, as_many_as_fit=True),
  "params.bad_words: a bad word is": request(bad_words=["abcdefghijk"]),
  "cache_salt: must not be empty": pb.GenerateRequest(text="a", cache_salt=""),
  "chat: add_generation_prompt and continue": pb.GenerateRequest(chat={
      "messages": [{"role": "user"}], "add_generation_prompt": True,
      "continue_final_message": True}),
  "chat: chat_template_kwargs must be a JSON object": pb.GenerateRequest(chat={
      "messages": [{"role": "user"}], "chat_template_kwargs": "[]"}),
  "request_id: must not be empty": pb.GenerateRequest(text="a", request_id=""),
  "prompt: one of text, token_ids": pb.GenerateRequest(),
  "text: the prompt is empty": pb.GenerateRequest(text=""),
  "text: the prompt has 200 tokens": pb.GenerateRequest(text="b" * 200),
  "token_ids: prompt token 64 is not": pb.GenerateRequest(token_ids={"ids": [1, 64]}),
  "token_ids: prompt token -1 is not": pb.GenerateRequest(token_ids={"ids": [-1]}),
  "chat: messages must be a non-empty": pb.GenerateRequest(chat={}),
  "chat: message 0 has no role": pb.GenerateRequest(chat={"messages": [{"content": "a"}]}),
  "GenerateRequest: this server knows no field 15": b"\x0a\x01a" b"\x7a\x01b",
  "params: this server knows no field 30": b"\x0a\x01a" b"\x22\x03\xf0\x01\x01",
  "4 bytes are not a jspec.v1.GenerateRequest": b"\xff\xff\xff\xff",
  "5 bytes are not a jspec.v1.GenerateRequest": b"\x0a\x03\xff\xfea",  # no UTF-8
}


def ask(scenario):
  """Beside a server whose engine never gets anything to do."""
  return serve(lambda: AsyncLLM(tiny_llm("ngram")), scenario, close=AsyncLLM.shutdown)


async def error_of(call):
  """What a call, of one answer or of many, ends with."""
  try:
    if isinstance(call, grpc.aio.UnaryUnaryCall):
      return await call
    return [reply async for reply in call]
  except grpc.aio.AioRpcError as error:
    return error


def test_what_cannot_be_served_is_refused_with_the_name_of_its_field():
  async def scenario(address, service, server):
    async with grpc.aio.insecure_channel(address) as channel:
      calls = (channel.unary_unary(f"/{SERVICE}/GenerateUnary"),
               channel.unary_stream(f"/{SERVICE}/Generate"))
      for begins, message in REFUSED.items():
        data = message if isinstance(message, bytes) else message.SerializeToString()
        for call in calls:
          error = await error_of(call(data))
          assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, begins
          assert error.details().startswith(begins)
    assert service.engine.num_requests == 0

  ask(scenario)


def test_a_message_beyond_the_limit_is_refused_and_the_server_goes_on():
  async def scenario(address, service, server):
    async with AsyncClient(address) as client:
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate_unary("b" * 10_000_000)
      assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
      return await client.tokenize("b" * 700)

  assert len(ask(scenario)) == 700


def test_a_long_complaint_arrives():
  """Errors travel in a header, which may have 8 KiB."""
  async def scenario(address, service, server):
    async with AsyncClient(address) as client:
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate_unary("a", {"stop": ["é" * 10_000, ""]})
      return caught.value

  error = ask(scenario)
  assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
  assert error.details().startswith("params.stop: stop must hold")


def test_the_server_has_every_method_of_the_generated_stub():
  async def scenario(address, service, server):
    codes = {}
    async with grpc.aio.insecure_channel(address) as channel:
      stub = pb_grpc.JspecStub(channel)
      for method in METHODS:
        empty = message_factory.GetMessageClass(method.input_type)()
        outcome = await error_of(getattr(stub, method.name)(empty))
        codes[method.name] = (outcome.code() if isinstance(outcome, grpc.aio.AioRpcError)
                              else "answered")
    return codes

  refused = grpc.StatusCode.INVALID_ARGUMENT
  assert ask(scenario) == {
    "Generate": refused, "GenerateUnary": refused, "Tokenize": refused,
    "Detokenize": "answered", "ModelInfo": "answered", "Stats": "answered"}
