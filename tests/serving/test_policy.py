"""What a server's operator decides about requests and answers, and who may read those."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator

import httpx
import pytest
from http_running import COMPLETIONS, MODEL, Running, error_of, running
from served import serve
from tiny_llm import tiny_llm

from jspec import AsyncLLM
from jspec.checkpoints.hub import generation_defaults
from jspec.cli import endings, main
from jspec.serving import server
from jspec.serving.http import server as http_server
from jspec.serving.http.front import Cors
from jspec.serving.rpc.client import AsyncClient
from jspec.serving.service import Policy, Service

USER = [{"role": "user", "content": "the cat"}]
SITE = {"Origin": "https://chat.example.org"}
LONG = "the cat and the hat on the "  # several pages, so that the second asking finds them


@pytest.fixture(scope="module")
def door() -> Iterator[Running]:
  with running(tiny_llm("ngram")) as server:
    yield server


@contextlib.contextmanager
def policy(door: Running, **fields) -> Iterator[None]:
  before = door.service.policy
  door.service.policy = Policy(**fields)
  try:
    yield
  finally:
    door.service.policy = before


# --------------------------------------------------------------------------------------- the flags


def test_flags_reach_the_policy_and_the_door(monkeypatch, tmp_path):
  found = []
  monkeypatch.setattr(server, "run", lambda load, settings: found.append(settings) or 0)
  template = tmp_path / "template.jinja"
  template.write_text("{{ messages[0].content }}")
  assert main.main(["serve"]) == 0
  assert main.main([
      "serve", "--generation-config", "none", "--strict", "--chat-template", str(template),
      "--no-plain-message-content",
      "--enable-prompt-tokens-details", "--allowed-origins", '["https://a", "https://b"]',
      "--allow-credentials", "--allowed-methods", '["POST"]', "--allowed-headers", "x-a"]) == 0
  usual, told = found
  assert usual.policy == Policy() and usual.http.cors == Cors() and usual.generation_config
  assert not told.generation_config
  assert told.policy == Policy(strict=True, chat_template="{{ messages[0].content }}",
                               plain_message_content=False, show_cached_tokens=True)
  assert told.http.cors == Cors(("https://a", "https://b"), True, ("POST",), ("x-a",))


@pytest.mark.parametrize("flags, part", [
  (["--allowed-origins", "[5]"], "must be a JSON list of strings"),
  (["--allowed-origins", '["x"'], "must be a JSON list of strings"),
  (["--chat-template", "/nowhere"], "--chat-template: can't read /nowhere")])
def test_bad_flags_are_refused(capsys, flags, part):
  try:
    assert main.main(["serve", *flags]) == endings.BAD_INPUT
  except SystemExit as error:
    assert error.code == endings.BAD_INPUT
  assert part in capsys.readouterr().err


# ------------------------------------------------------------------------------- cached tokens


def test_cached_tokens_are_shown_where_the_operator_wants_it(door):
  """They tell a client whether others have asked the same."""
  def details(**fields) -> dict | None:
    answer = door.post(COMPLETIONS, prompt=LONG, max_tokens=2, temperature=0, **fields)
    if not fields:
      return answer.json()["usage"]["prompt_tokens_details"]
    [usage] = [line for line in answer.text.splitlines() if '"prompt_tokens":' in line]
    return "cached_tokens" in usage

  details()  # now it is in the cache
  assert details() is None
  stream = dict(stream=True, stream_options={"include_usage": True})
  assert details(**stream) is False
  assert door.post("/v1/responses", input=LONG, max_output_tokens=2).json()["usage"][
      "input_tokens_details"] == {"cached_tokens": 0}
  with policy(door, show_cached_tokens=True):
    assert details()["cached_tokens"] >= 8 and details(**stream) is True
    cached = door.post("/v1/responses", input=LONG, max_output_tokens=2).json()["usage"]
    assert cached["input_tokens_details"]["cached_tokens"] >= 8


def test_cached_tokens_over_grpc_too():
  async def scenario(address, service, _):
    async with AsyncClient(address) as client:
      found = []
      for shown in (False, False, True):
        service.policy = Policy(show_cached_tokens=shown)
        chunk = await client.generate_unary(LONG, {"max_tokens": 1})
        found.append(chunk.statistics.cached_tokens)
      return found

  *hidden, shown = serve(lambda: AsyncLLM(tiny_llm("ngram")), scenario, close=AsyncLLM.shutdown)
  assert hidden == [None, None] and shown >= 8


# ----------------------------------------------------------------------------------------- chats


def test_a_chat_template_gets_what_the_client_and_the_operator_say(door, monkeypatch):
  told = {}

  def encode_chat(messages, add_generation_prompt, **more):
    told.update(more, messages=messages, opening=add_generation_prompt)
    return [5]

  monkeypatch.setattr(door.service.engine.llm, "encode_chat", encode_chat)
  tools = [{"type": "function", "function": {"name": "f"}}]
  with policy(door, chat_template="{{ x }}", plain_message_content=False):
    answer = door.post("/v1/chat/completions", messages=USER, max_tokens=1, tools=tools,
                       tool_choice="none", continue_final_message=True,
                       chat_template_kwargs={"x": 1})
    assert answer.status_code == 200
    assert door.post("/tokenize", messages=USER, chat_template_kwargs={"x": 1},
                     continue_final_message=True, tools=tools).json()["tokens"] == [5]
  assert told == dict(
      messages=USER, opening=False, continue_final_message=True, chat_template="{{ x }}",
      chat_template_kwargs={"x": 1}, tools=tools, plain_content=False)


def test_what_a_template_cannot_write_is_the_requests_fault(door, monkeypatch):
  def encode_chat(*arguments, **more):
    raise RecursionError

  monkeypatch.setattr(door.service.engine.llm, "encode_chat", encode_chat)
  error = error_of(door.post("/v1/chat/completions", messages=USER), 400)
  assert error["param"] == "messages" and "nested so deeply" in error["message"]


# -------------------------------------------------------------------------------------- defaults


def test_the_models_defaults_apply_to_what_a_client_leaves_out(door):
  """With top_k=1 all draws are greedy."""
  def texts(**fields):
    answer = door.post(COMPLETIONS, prompt="the cat", max_tokens=12, n=3, **fields).json()
    return [choice["text"] for choice in answer["choices"]]

  greedy = texts(temperature=0)
  assert len({*greedy}) == 1 and len({*texts(seed=1)}) > 1
  with policy(door, defaults={"top_k": 1}):
    assert texts() == texts(seed=1) == greedy
    assert len({*texts(seed=1, top_k=0)}) > 1


@pytest.mark.parametrize("wanted", [True, False])
def test_a_server_applies_its_models_generation_config(monkeypatch, wanted):
  """As far as the policy that the doors are given."""
  llm = copy.copy(tiny_llm("ngram"))
  llm.loaded = llm.loaded._replace(generation_defaults={"temperature": 0.6, "top_k": 20})
  seen = []

  async def opened(service, *_):
    seen.append(service.policy)
    raise ValueError("enough")

  monkeypatch.setattr(server, "_open", opened)
  settings = server.Settings("m", None, None, policy=Policy(strict=True), generation_config=wanted)
  with pytest.raises(ValueError, match="enough"):
    asyncio.run(server._serve(llm, settings, {}))
  told = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
  assert seen == [Policy(strict=True, defaults=told if wanted else {})]


@pytest.mark.parametrize("content, found", [
  ({}, {}), ({"temperature": None, "eos_token_id": 1}, {}),
  ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
    "do_sample": True, "max_new_tokens": 9},
   {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05})])
def test_what_a_generation_config_says_of_sampling(tmp_path, content, found):
  (tmp_path / "generation_config.json").write_text(json.dumps(content))
  assert generation_defaults(tmp_path) == found
  assert generation_defaults(tmp_path / "none") == {}


@pytest.mark.parametrize("content", ["[]", "{", '{"temperature": "hot"}', '{"top_p": 2}'])
def test_a_damaged_generation_config_is_named(tmp_path, content):
  (tmp_path / "generation_config.json").write_text(content)
  with pytest.raises(ValueError, match="generation_config.json is damaged: "):
    generation_defaults(tmp_path)


# ------------------------------------------------------------------------------ paths and browsers


def test_a_slash_at_the_end_of_a_path_changes_nothing(door):
  with door.client() as client:
    for path in ("/v1/models", "/health", "/ping", f"/v1/models/{MODEL}", "/version"):
      assert client.get(f"{path}/").content == client.get(path).content
      assert client.get(f"{path}/").status_code == 200
    assert client.post("/ping").status_code == 200
    answer = client.post(f"{COMPLETIONS}/", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200 and not answer.history
  guarded = door.open(tokens=("sesame",))
  with httpx.Client(base_url=f"http://127.0.0.1:{guarded.port}", trust_env=False) as client:
    assert client.get("/ping/").status_code == 200
    error_of(client.get("/v1/models/"), 401)
  door.run(guarded.drain(0))


def test_browsers_of_allowed_sites_may_ask_and_read_even_refusals(door):
  asks = {**SITE, "Access-Control-Request-Method": "POST",
          "Access-Control-Request-Headers": "authorization,content-type"}
  for origins, told in (((), None), (("*",), "*"), ((SITE["Origin"],), SITE["Origin"]),
                        (("https://other.example",), None)):
    opened = door.open(tokens=("sesame",), cors=Cors(allowed_origins=origins))
    with httpx.Client(base_url=f"http://127.0.0.1:{opened.port}", trust_env=False) as client:
      before = client.options(COMPLETIONS, headers=asks)
      refused = client.get("/v1/models", headers=SITE)
      given = client.get("/v1/models", headers={**SITE, "Authorization": "Bearer sesame"})
    for response in (before, refused, given):
      assert response.headers.get("access-control-allow-origin") == told
    assert (refused.status_code, given.status_code) == (401, 200)
    assert (before.status_code == 200) == (told is not None)
    door.run(opened.drain(0))


def test_cookies_are_for_those_who_allow_them(door):
  for allowed in (False, True):
    opened = door.open(cors=Cors(allowed_origins=("*",), allow_credentials=allowed))
    with httpx.Client(base_url=f"http://127.0.0.1:{opened.port}", trust_env=False) as client:
      headers = client.get("/v1/models", headers=SITE).headers
    assert (headers.get("access-control-allow-credentials") == "true") == allowed
    door.run(opened.drain(0))


def test_an_open_door_lets_no_page_in_by_default():
  assert http_server.Options().cors.allowed_origins == ()
  assert dataclasses.asdict(Cors())["allow_credentials"] is False


def test_every_name_of_a_model_is_answered_and_the_first_one_named(door, monkeypatch):
  found = []
  monkeypatch.setattr(server, "run", lambda load, settings: found.append(settings) or 0)
  assert main.main(["serve", "--served-model-name", MODEL, "other", "a/third", "--port", "0"]) == 0
  assert (found[0].model_name, found[0].aliases) == (MODEL, ("other", "a/third"))
  service = Service(door.service.engine, MODEL, door.service.metrics, aliases=found[0].aliases)
  monkeypatch.setattr(door.service, "model_names", service.model_names)
  with door.client() as client:
    listed = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == [MODEL, "other", "a/third"]
    assert client.get("/v1/models/a/third").json()["id"] == "a/third"
    for name in (MODEL, "other", "a/third"):
      answer = client.post(COMPLETIONS, json={"model": name, "prompt": "the cat", "max_tokens": 1})
      assert answer.status_code == 200 and answer.json()["model"] == MODEL
    refused = client.post(COMPLETIONS, json={"model": "nobody", "prompt": "the cat"})
    assert "only 'tiny/ngram', 'other', 'a/third'" in error_of(refused, 404)["message"]
