"""Self-generation through the public engine: what is written, restarts, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import types

import numpy as np
import pytest
from tiny_llm import NAME, byte_tokenizer, tiny_model

from jspec.cli.main import main
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.sampling_params import SamplingParams
from jspec.training import generate as module
from jspec.training.data.conversations import Conversation
from jspec.training.data.shards import read_shards, shard_files
from jspec.training.generate import Options, generate

WORDS = ["the cat", "on the hat", "abc abc", "he", "in", "and on", "er er er", "th", "an ant",
         "no one", "at", "i am here"]
LAYERS = (2, 0)  # the final hidden state of two layers, and the embedding
OPTIONS = Options(max_tokens=10, temperature=0.9, greedy_share=0.5, max_prompt_tokens=22,
                  features=LAYERS, batch_size=4, shard_size=5, dtype="float32")
COMMAND = ["--target", NAME, "--max-tokens", "4", "--max-prompt-tokens", "28",
           "--batch-size", "4", "--dtype", "float32"]


def ask(word, **said):
  return Conversation("words", ({"role": "user", "content": word},
                                *({"role": "assistant", "content": x} for x in said.values())))


ASKED = [ask(word) for word in WORDS]


@functools.cache
def made(speculation, keywords):
  return LLM(tiny_model(), speculative_config=json.loads(speculation), **dict(keywords))


def shared_llm(target, speculative_config, progress=False, **keywords):
  """For LLM: one for all runs alike, so that its programs are compiled once; as good as new."""
  llm = made(json.dumps(speculative_config), tuple(sorted(keywords.items())))
  llm._names = itertools.count()
  return llm


def extracting_llm():
  return shared_llm(NAME, {"method": "extract_hidden_states", "hidden_state_layers": list(LAYERS)},
                    dtype="float32", max_model_len=OPTIONS.room, max_num_seqs=4)


def plain_llm():
  return shared_llm(NAME, None, dtype="float32", max_model_len=OPTIONS.room, max_num_seqs=4)


@pytest.fixture(autouse=True, scope="module")
def one_llm():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, "LLM", shared_llm)
    yield


def run(folder, asked=ASKED, **changes):
  return generate(NAME, asked, folder, Options(**(vars(OPTIONS) | changes)), progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A folder that was written in one go."""
  folder = tmp_path_factory.mktemp("whole")
  done = run(folder)
  assert done.answered == len(WORDS) and done.before == 0
  return folder


def test_answers_are_those_of_plain_decoding(whole):
  """Greedy ones and sampled ones with the same seed, by an engine without a drafter."""
  read, plain, tokenizer = read_shards(whole), plain_llm(), byte_tokenizer()
  temperatures = set()
  for i, word in enumerate(WORDS):
    params = OPTIONS.sampling(i)
    temperatures.add(params.temperature)
    assert (params.seed, params.max_tokens) == (i, 10)
    [out] = plain.generate([f"<|user|>{word}<|end|><|bot|>"], params)
    prompt = tokenizer.encode(f"<|user|>{word}<|end|><|bot|>")
    own = read.span(i)
    assert read.token[own].tolist() == [*prompt, *out.token_ids]
    assert (~read.loss[own]).sum() == len(prompt) and read.loss[own][len(prompt):].all()
    assert read.key[i] == ASKED[i].key and read.source[i] == "words"
  assert temperatures == {0.0, 0.9}
  assert len(shard_files(whole)) == 3  # of 5, 5 and 2


def test_hidden_states_are_those_of_the_tokens_beside_them(whole):
  """Layer 0 is the embedding; layer 2 with the lm_head says what a greedy answer goes on with."""
  read, model = read_shards(whole), tiny_model()
  assert read.origin.layers == LAYERS and read.origin.target == NAME and read.width == 32
  embed, head = (np.asarray(x, np.float32) for x in (
      model.params["embed"], model.params["head"]["w"]))
  greedy = 0
  for i in range(len(WORDS)):
    token = read.token[read.span(i)]
    feature = read.feature(i, len(token)).astype(np.float32)
    assert not feature[-1].any()
    np.testing.assert_allclose(feature[:-1, 32:], embed[token[:-1]], rtol=2**-8)
    if OPTIONS.sampling(i).temperature == 0.0:
      first = int(read.loss[read.span(i)].argmax())
      logits = feature[first - 1:-1, :32] @ head
      chosen = logits[np.arange(len(logits)), token[first:]]
      assert (chosen > logits.max(-1) - 0.1).all()  # bfloat16 may turn near-ties
      greedy += len(logits)
  assert greedy >= 20


def test_a_resumed_run_writes_what_an_uninterrupted_one_does(whole, tmp_path):
  llm = extracting_llm()

  def stops(prompts, params):
    for i, output in enumerate(LLM.as_completed(llm, prompts, params)):
      if i == 7:
        raise KeyboardInterrupt
      yield output

  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(llm, "as_completed", stops, raising=False)
    run(tmp_path)
  assert len(read_shards(tmp_path)) == 7  # a whole shard, and what Ctrl-C leaves
  shard_files(tmp_path)[-1].rename(tmp_path / "part-00001.tmp")  # killed in the midst of writing
  done = run(tmp_path)
  assert (done.answered, done.before) == (7, 5)
  a, b = read_shards(whole), read_shards(tmp_path)
  assert b.index.tolist() == list(range(len(WORDS))) == a.index.tolist()
  assert a.token.tolist() == b.token.tolist() and a.loss.tolist() == b.loss.tolist()
  assert (a.key, a.source, a.origin) == (b.key, b.source, b.origin)
  for i in range(len(a)):
    x, y = (s.feature(i, int(s.length[i])).astype(np.float32) for s in (a, b))
    np.testing.assert_allclose(x, y, rtol=2**-7, atol=1e-6)
  assert run(tmp_path)[:3] == (0, 12, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_answered(number, tmp_path, monkeypatch, capsys):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text("\n".join(json.dumps({"prompt": w}) for w in WORDS[:3]))
  answered = LLM.as_completed

  def killed(llm, *given):
    for output in answered(llm, *given):
      yield output
      os.kill(os.getpid(), number)

  monkeypatch.setattr(LLM, "as_completed", killed)
  before = signal.signal(number, signal.SIG_IGN)
  try:
    assert main(["train-data", *COMMAND, "--prompts", str(prompts),
                 "--output", str(tmp_path / "out")]) == 130
    assert signal.getsignal(number) == signal.SIG_IGN
  finally:
    signal.signal(number, before)
  assert "the same command goes on" in capsys.readouterr().err
  assert len(read_shards(tmp_path / "out")) == 1


def test_more_prompts_and_a_higher_limit_go_on_from_what_is_there(tmp_path):
  some = dict(features=(), max_tokens=3, max_model_len=OPTIONS.room)
  run(tmp_path, ASKED[:6], limit=3, **some)
  first = read_shards(tmp_path)
  assert len(first) == 3 and not first.files
  assert run(tmp_path, ASKED[:6], **some)[:2] == (3, 3)
  assert run(tmp_path, ASKED, **some)[:2] == (6, 6)
  last = read_shards(tmp_path)
  for i, index in enumerate(first.index):
    assert last.token[last.span(index)].tolist() == first.token[first.span(i)].tolist()


@pytest.mark.parametrize("changes, message", [
  (dict(temperature=0.5), "was begun with temperature=0.9, this run has temperature=0.5"),
  (dict(max_tokens=9), "was begun with .*max_tokens=10, this run has max_tokens=9"),
  (dict(seed=1), "was begun with seed=0, this run has seed=1"),
  (dict(features=(2,)), r"was begun with features=\[2, 0\], this run has features=\[2\]"),
  (dict(asked=[*ASKED[:3], ask("h at"), *ASKED[4:]]), "begun with other prompts: number 3 differs"),
])
def test_a_folder_of_other_settings_is_refused(whole, changes, message):
  with pytest.raises(ValueError, match=message):
    run(whole, **(dict(max_model_len=OPTIONS.room) | changes))
  assert len(shard_files(whole)) == 3


def test_only_prompts_that_fit_are_answered(capsys):
  """Trailing answers are taken off; plain text goes on as it is; a template may refuse others."""
  def fails(messages):
    raise ValueError("refused")

  llm = plain_llm()
  bot_first = Conversation("x", ({"role": "assistant", "content": "he"},))
  asked = [ask("the", a="on"), ask("a" * 30), bot_first, Conversation("y", text="he he")]
  found = {p.index: p.token for p in module.find_prompts(asked, llm, OPTIONS)}
  encode = llm.tokenizer.encode
  assert found == {0: tuple(encode("<|user|>the<|end|><|bot|>")), 3: tuple(encode("he he"))}
  llm_without = types.SimpleNamespace(tokenizer=llm.tokenizer, encode_chat=fails)
  with pytest.raises(ValueError, match="refused"):
    module.find_prompts(asked, llm_without, OPTIONS)
  skipping = dataclasses.replace(OPTIONS, skip_faulty_rows=True)
  assert [p.index for p in module.find_prompts(asked, llm_without, skipping)] == [3]
  assert "left out 2 faulty rows; the first: refused" in capsys.readouterr().err
  with pytest.raises(ValueError, match="none of 2 conversations is a prompt to answer: 1 have more "
                     "than max_prompt_tokens=22 tokens"):
    module.find_prompts(asked[1:3], llm, OPTIONS)


def test_outputs_come_as_they_are_finished_and_the_engine_keeps_no_hidden_states():
  llm = extracting_llm()
  lengths = [9, 2, 5, 3, 4, 7]
  params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
  order = []
  for output in llm.as_completed(WORDS[:6], params):
    order.append(int(output.request_id))
    assert output.prompt == WORDS[order[-1]] and len(output.token_ids) == lengths[order[-1]]
    assert output.outputs[0].hidden_states.shape == (
        len(output.prompt_token_ids) + lengths[order[-1]] - 1, 64)
    assert not [r for r in gc.get_objects() if isinstance(r, Request)
                and r.request_id == output.request_id and r.hidden_states is not None]
  assert sorted(order) == list(range(6)) and order.index(1) < order.index(0)
  with pytest.raises(ValueError, match="2 prompts, but 1 SamplingParams"):
    llm.as_completed(WORDS[:2], params[:1])  # before anything is asked for


@pytest.mark.parametrize("changes, message", [
  (dict(max_tokens=0), "max_tokens must be >= 1, got 0"), (dict(limit=0), "limit must be >= 1"),
  (dict(greedy_share=1.5), r"greedy_share must lie in \[0, 1\], got 1.5"),
  (dict(seed=-1), "seed must lie in 0"), (dict(temperature=-1.0), "temperature must be >= 0"),
  (dict(max_model_len=22), "max_model_len=22 leaves no room"),
  (dict(shard_size=0), "shard_size must be >= 1"),
])
def test_options_that_make_no_sense_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Options(**(vars(OPTIONS) | changes))


def test_the_greedy_share_is_kept():
  """Binomial(2000, 0.4) has a standard deviation of 21.9; five of them."""
  options = Options(greedy_share=0.4)
  greedy = sum(options.sampling(i).temperature == 0.0 for i in range(2000))
  assert abs(greedy - 800) < 110
  for share, expected in ((0.0, {0.7}), (1.0, {0.0})):
    options = Options(greedy_share=share)
    assert {options.sampling(i).temperature for i in range(50)} == expected


def test_the_command_answers_a_file_and_says_so(tmp_path, capsys):
  prompts = tmp_path / "prompts.jsonl"
  rows = [{"prompt": WORDS[0]}, {"prompt": 3}, *({"prompt": w} for w in WORDS[1:3]),
          {"prompt": "x" * 40}]
  prompts.write_text("\n".join(map(json.dumps, rows)))
  command = [*COMMAND, "--prompts", str(prompts), "--output", str(tmp_path / "out")]
  assert main(["train-data", *command]) == 2
  assert f"{prompts}:2: a prompt must be text" in capsys.readouterr().err
  command.append("--skip-faulty-rows")
  for answered, before in ((3, 0), (0, 3)):
    assert main(["train-data", *command]) == 0
    said, told = capsys.readouterr()
    assert f"{answered} answers of " in said and f"{before} were there already" in said
    assert f"4 conversations; left out 1 faulty row; the first: {prompts}:2: " in told
    assert "left out 1 prompts of more than 28 tokens (max_prompt_tokens)" in told
  assert len(read_shards(tmp_path / "out")) == 3
  assert main(["train-data", *command, "--seed", "7"]) == 2
  assert capsys.readouterr().err.startswith("jspec train-data: ")
  assert main(["train-data", "--prompts", str(tmp_path / "none"), "--output", "x"]) == 2
  assert "none does not exist" in capsys.readouterr().err
