"""The command line: what it prints, what it refuses and with which exit code."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import head_checkpoints as hc
import jax
import numpy as np
import pytest
from fake_llm import FakeLLM
from tiny_llm import tiny_llm

from jspec import SamplingParams
from jspec.checkpoints import hub, load_head
from jspec.cli import endings, main, terminal
from jspec.cli import flags as cli_flags
from jspec.config.methods.ngram import NgramOptions

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "smollm2.json"


@pytest.fixture
def fake(monkeypatch):
  """FakeLLM in place of LLM; a subclass per test, so that tests may change its reply."""
  llm = type("Fake", (FakeLLM,), {"made": []})
  monkeypatch.setattr(cli_flags, "load_llm", llm)
  return llm


def stdin(monkeypatch, content: bytes):
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def refused(capsys, argv: list[str]) -> str:
  """The one sentence that bad input gets."""
  assert main.main(argv) == 2
  out, err = capsys.readouterr()
  told = [line for line in err.splitlines() if not line.startswith("[")]  # [loading ...]
  assert out == "" and len(told) == 1 and told[0].startswith("jspec: error: "), err
  return err


@pytest.mark.parametrize("argv, words", [
  (["generate", ""], "the prompt is empty"),
  (["generate", "  \n"], "the prompt is empty"),
  (["generate", "hi", "--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
  (["generate", "hi", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
  (["generate", "hi", "--temperature", "-1"], "temperature must be >= 0"),
  (["generate", "hi", "--top-p", "0"], "top_p must be > 0"),
  (["generate", "hi", "--seed", "-2"], "seed must be >= 0"),
  (["generate", "hi", "--stop", ""], "stop must hold non-empty strings"),
  (["generate", "hi", "--file", "x"], "not both"),
  (["generate", "--file", "no-such-file"], "can't read no-such-file: No such file"),
  (["generate", "hi", "--raw", "--system", "s"], "--system needs the chat template"),
  (["generate", "hi", "--speculative-config", "{"], "not valid JSON"),
  (["generate", "hi", "--speculative-config", "[1]"], "must be a JSON object"),
  (["generate", "hi", "--speculative-config", '{"metod": "ngram"}'], "unknown key"),
  (["generate", "hi", "--speculative-config", '{"method": "eagle"}'], "needs a model"),
  (["generate", "hi", "--num-speculative-tokens", "0"], ">= 1, got 0"),
  (["generate", "hi", "--no-speculation", "--num-speculative-tokens", "3"], "contradicts"),
  (["generate", "hi", "--page-size", "0"], "--page-size must be >= 1, got 0"),
  (["generate", "hi", "--dtype", "int8"], "invalid choice: 'int8'"),
  (["generate", "hi", "--nonsense"], "unrecognized arguments: --nonsense"),
  (["chat", "--temperature", "nan"], "must be a finite number"),
  (["nonsense"], "invalid choice: 'nonsense'"),
  ([], "required: command"),
  (["bench", "--repeats", "0"], "--repeats must be >= 1, got 0"),
  (["bench", "--batch-size", "0"], "--batch-size must be >= 1, got 0"),
  (["bench", "--no-speculation"], "drop --no-speculation"),
  (["bench", "--dataset", "no-such-file"], "can't read no-such-file"),
  (["bench", "--task", "juggling"], "no prompt has task 'juggling'"),
  (["bench", "--json", "no-such-folder/x.json"], "its folder doesn't exist"),
  (["bench", "--max-num-seqs", "2", "--batch-size", "4"], "must not be less"),
])
def test_bad_input_is_one_sentence_and_loads_nothing(monkeypatch, capsys, argv, words):
  monkeypatch.setattr(cli_flags, "load_llm", lambda *_, **__: pytest.fail("loaded a model"))
  assert words in refused(capsys, argv)


def test_bad_files_and_stdin_are_refused(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(cli_flags, "load_llm", lambda *_, **__: pytest.fail("loaded a model"))
  file = tmp_path / "latin.txt"
  file.write_bytes("naïve".encode("latin-1"))
  assert "is not UTF-8 text: invalid byte at offset 2" in refused(
    capsys, ["generate", "--file", str(file)])
  assert "is not UTF-8" in refused(capsys, ["bench", "--dataset", str(file)])
  file.write_bytes(b"\n")
  assert f"{file} is empty" in refused(capsys, ["generate", "--file", str(file)])
  stdin(monkeypatch, b"\xff")
  assert "stdin is not UTF-8" in refused(capsys, ["generate", "-"])
  stdin(monkeypatch, b"")
  assert "stdin is empty" in refused(capsys, ["generate"])


def test_the_engine_refuses_before_any_work(capsys, smollm2, monkeypatch):
  assert refused(capsys, ["generate", "hi", "--model", "no-such-model"]).startswith(
    "jspec: error: model 'no-such-model' is unknown")
  monkeypatch.setattr(terminal, "warm_up", lambda *_: pytest.fail("ran the model"))
  argv = ["generate", "word " * 200, "--max-model-len", "64"]
  assert "max_model_len=64 allows at most 63" in refused(capsys, argv)


def test_real_model_writes_the_golden_text(smollm2):
  """As a user runs it: a process of its own, without the flags of conftest.py."""
  golden = json.loads(GOLDENS.read_text(encoding="utf-8"))["greedy"][0]
  new = golden["greedy"]
  done = subprocess.run(
      [sys.executable, "-m", "jspec", "generate", golden["prompt"], "--max-tokens", str(len(new)),
       "--show-drafts", "--color", "always"], capture_output=True, text=True, encoding="utf-8",
      env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"})
  assert done.returncode == 0, done.stderr
  plain = done.stdout.replace(terminal.GREEN, "").replace(terminal.RESET, "")
  assert plain == smollm2.tokenizer.decode(new) + "\n"
  assert f"[{len(new)} tokens in" in done.stderr and "tokens per step" in done.stderr


def test_streams_the_text_and_sums_up_on_stderr(fake, capsys):
  assert main.main(["generate", "hi"]) == 0
  out, err = capsys.readouterr()
  assert out == "Hé, 👍!\n"
  assert err.startswith("[loading smollm2-135m-instruct]\n[compiling]\n[")
  assert "[11 tokens in 2.00 s: 5.5 tokens/s, first token after 0.50 s" in err
  assert "acceptance rate 50%, mean acceptance length 2.00" in err
  assert "tokens per step: 1.83 over all 6 steps, 2.00 over the 5 that drafted" in err
  assert fake.made[0].tokenizer.decode(fake.made[0].prompts[-1]) == "u:hi\na:"


@pytest.mark.parametrize("argv, expected", [
  (["--raw"], "hi"), ([], "u:hi\na:"), (["--system", "be brief"], "s:be brief\nu:hi\na:")])
def test_the_chat_template_is_applied_unless_raw(fake, capsys, argv, expected):
  assert main.main(["generate", "hi", *argv]) == 0
  assert fake.made[0].tokenizer.decode(fake.made[0].prompts[-1]) == expected


def test_base_models_complete_the_bare_prompt(fake, capsys):
  fake.template = None
  assert main.main(["generate", "hi"]) == 0
  assert fake.made[0].tokenizer.decode(fake.made[0].prompts[-1]) == "hi"
  capsys.readouterr()
  assert "no chat template" in refused(capsys, ["generate", "hi", "--system", "x"])
  assert "no chat template" in refused(capsys, ["chat"])


def test_prompts_come_from_files_and_stdin(fake, capsys, monkeypatch, tmp_path):
  file = tmp_path / "prompt.txt"
  file.write_bytes("größe\n".encode())
  stdin(monkeypatch, b"a\nb\r\n")
  for argv in (["--file", str(file)], ["-"]):
    assert main.main(["generate", "--raw", *argv]) == 0
  texts = [llm.tokenizer.decode(llm.prompts[-1]) for llm in fake.made]
  assert texts == ["größe", "a\nb"]


def test_accepted_drafts_are_green_and_characters_stay_whole(fake, capsys, monkeypatch):
  green = lambda text: f"{terminal.GREEN}{text}{terminal.RESET}"
  assert main.main(["generate", "hi", "--show-drafts", "--color", "always"]) == 0
  out = capsys.readouterr().out
  assert out.replace(terminal.GREEN, "").replace(terminal.RESET, "") == "Hé, 👍!\n"
  # Bytes 1, 3, 5, ... are drafts; the last byte of a character decides: é is bytes 1-2.
  assert out == f"Hé{green(',')} 👍{green('!')}\n"
  monkeypatch.setenv("NO_COLOR", "1")
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
  assert main.main(["generate", "hi", "--show-drafts"]) == 0
  out, err = capsys.readouterr()
  assert out == "Hé, 👍!\n" and "--color always" in err


@pytest.mark.parametrize("argv, method, tokens, lookups", [
  ([], "ngram", 7, (4, 2)),
  (["--no-speculation"], "none", 0, None),
  (["--num-speculative-tokens", "3"], "ngram", 3, (4, 2)),
  (["--ngram-prompt-lookup-max", "3"], "ngram", 7, (3, 1)),
  (["--speculative-model", "[ngram]"], "ngram", 7, (4, 2)),
  (["--speculative-model", "m", "--num-speculative-tokens", "3"], "draft_model", 3, None),
  (["--speculative-config", '{"prompt-lookup-max": 5}'], "ngram", 7, (5, 5)),
  (["--speculative-config", '{"model": "m", "num_speculative_tokens": 2}'], "draft_model", 2,
   None),
])
def test_speculation_flags_reach_the_engine(fake, capsys, argv, method, tokens, lookups):
  assert main.main(["generate", "hi", *argv]) == 0
  spec = fake.made[0].speculative
  assert (spec.method, spec.num_speculative_tokens) == (method, tokens)
  options = spec.options[0]
  assert isinstance(options, NgramOptions) == (lookups is not None)
  assert not lookups or (options.prompt_lookup_max, options.prompt_lookup_min) == lookups


def test_every_sampling_flag_reaches_the_parameters():
  argv = ["generate", "hi", "--max-tokens", "9", "--min-tokens", "1", "--temperature", "0.5",
          "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--seed", "3", "--stop", "a",
          "--stop", "b", "--stop-token-id", "5", "--repetition-penalty", "1.1",
          "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--bad-word", "w",
          "--logit-bias", '{"7": -1}', "--ignore-eos"]
  params = cli_flags.sampling_params(main.build_parser().parse_args(argv))
  assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p, params.top_k,
          params.min_p, params.seed, params.stop, params.stop_token_ids) == (
    9, 1, 0.5, 0.9, 40, 0.1, 3, ("a", "b"), (5,))
  assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
          params.bad_words, params.logit_bias, params.ignore_eos) == (
    1.1, 0.2, 0.3, ("w",), {7: -1.0}, True)


def converse(monkeypatch, said: list) -> None:
  """`input` that returns these texts, raises these exceptions, then ends."""
  lines = iter(said)

  def read(prompt):
    line = next(lines, EOFError)
    if isinstance(line, str):
      return line
    raise line

  monkeypatch.setattr("builtins.input", read)


def prompt_texts(llm) -> list[str]:
  return [llm.tokenizer.decode(ids) for ids in llm.prompts]


def test_chat_keeps_history_until_reset(fake, capsys, monkeypatch):
  fake.reply = "yes"
  converse(monkeypatch, ["one", "", "two", "/reset", "three", "/what", "/exit", "never"])
  assert main.main(["chat", "--system", "S"]) == 0
  out, err = capsys.readouterr()
  assert out == "yes\nyes\nyes\n" and "unknown command /what" in err
  assert prompt_texts(fake.made[0]) == [
    "s:S\nu:one\na:", "s:S\nu:one\na:yes\nu:two\na:", "s:S\nu:three\na:"]


def test_chat_survives_ctrl_c(fake, capsys, monkeypatch):
  fake.interrupt_after = 3
  fake.reply = "abcdef"
  converse(monkeypatch, [KeyboardInterrupt, "one", "two"])
  assert main.main(["chat"]) == 0
  assert "[stopped]" in capsys.readouterr().err
  assert prompt_texts(fake.made[0])[1] == "u:one\na:ab\nu:two\na:"


def test_chat_drops_the_oldest_turns_when_the_context_is_full(fake, capsys, monkeypatch):
  fake.reply = "yes"
  converse(monkeypatch, ["one" * 8, "two", "three" * 20, "four"])
  assert main.main(["chat", "--max-model-len", "48", "--max-tokens", "8"]) == 0
  err = capsys.readouterr().err
  assert "the context of 48 tokens is full: the oldest turn was dropped" in err
  assert "leaves no room" in err  # for three alone, which is forgotten again
  assert prompt_texts(fake.made[0])[1:] == ["u:two\na:", "u:two\na:yes\nu:four\na:"]


def test_ctrl_c_ends_generate_with_130(fake, capsys):
  fake.interrupt_after = 2
  assert main.main(["generate", "hi"]) == 130
  assert "interrupted" in capsys.readouterr().err


def test_models_are_listed(capsys, tmp_path):
  assert main.main(["models", "--cache-dir", str(tmp_path)]) == 0
  assert re.search(r"smollm2-135m-instruct +not fetched yet", capsys.readouterr().out)
  assert main.main(["models", "--json", "--cache-dir", str(tmp_path)]) == 0
  rows = json.loads(capsys.readouterr().out)
  assert rows[0]["name"] == cli_flags.DEFAULT_MODEL and rows[0]["present"] is False


def inspected(capsys, argv: list[str]) -> dict:
  assert main.main(["models", "inspect", *argv, "--json"]) == 0
  return json.loads(capsys.readouterr().out)


def small_target(folder: pathlib.Path, **changes) -> str:
  """A model's folder that has nothing but a config."""
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps({
    "model_type": "llama", "vocab_size": hc.V, "hidden_size": hc.E, "num_hidden_layers": hc.L,
    "num_attention_heads": 4, "intermediate_size": 24, **changes}))
  return str(folder)


def test_inspect_says_what_a_head_is_and_whether_it_fits(capsys, tmp_path, monkeypatch):
  monkeypatch.setattr(load_head, "_read", lambda *_: pytest.fail("read weights"))
  folder = str(hc.write(hc.eagle3(np.float16), tmp_path / "head", "pytorch_model.bin"))
  target = small_target(tmp_path / "target")
  report = inspected(capsys, [folder, "--target", target])
  assert (report["kind"], report["method"], report["format"]) == ("head", "eagle3", "EAGLE-3")
  assert report["taps"] == [2, 4, 5] and report["draft_vocab_size"] == hc.VD
  assert report["config"]["layer.width"] == hc.E and report["dtypes"] == ["float16"]
  numbers = (48 * 16 + 32 * (32 + 16 + 16) + 16 * 32 + 3 * 16 * 24 + 4 * 16 + 12 * 16)
  assert (report["parameters"], report["bytes"]) == (numbers, 2 * numbers)
  assert report["shared_with_target"] == ["embedding"]
  assert report["fits"] is True and report["misfit"] is None
  other = small_target(tmp_path / "other", hidden_size=32)
  report = inspected(capsys, [folder, "--target", other])
  assert report["fits"] is False
  misfit = ("tensor fc.weight has shape (16, 48), for targets of width 16: this target has 32 and "
            "needs (16, 96)")
  assert report["misfit"] == misfit
  assert main.main(["models", "inspect", folder, "--target", other]) == 0
  out = capsys.readouterr().out
  assert f"{folder}: a head for method 'eagle3', format EAGLE-3\n" in out
  assert f"{other}: {misfit}" in out


@pytest.mark.parametrize("checkpoint, shared", [
  (hc.medusa(own_head=False), ["lm_head"]), (hc.medusa(), []), (hc.mlp_speculator(), []),
  (hc.eagle(), ["embedding", "lm_head"]), (hc.speculators(embed=True), [])])
def test_inspect_says_what_a_head_shares(capsys, tmp_path, checkpoint, shared):
  folder = str(hc.write(checkpoint, tmp_path / "head"))
  report = inspected(capsys, [folder, "--target", small_target(tmp_path / "target")])
  assert report["method"] == checkpoint.method and report["fits"]
  assert report["shared_with_target"] == shared


def test_inspect_knows_plain_models(capsys, smollm2):
  for name in (cli_flags.DEFAULT_MODEL, str(hub.resolve(cli_flags.DEFAULT_MODEL).path)):
    report = inspected(capsys, [name])
    assert (report["kind"], report["method"]) == ("model", None)
    assert report["config"]["width"] == smollm2.config.width
    assert report["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(smollm2.params))
    assert report["bytes"] == 4 * report["parameters"] and report["dtypes"] == ["float32"]
  report = inspected(capsys, [str(hub.cache_folder(None) / f"{cli_flags.DEFAULT_MODEL}.gguf")])
  assert report["format"] == "GGUF" and "Q4_1" in report["dtypes"]


def test_inspect_refuses_bad_paths_and_damage_in_one_sentence(capsys, tmp_path):
  inspect = ["models", "inspect"]
  assert "checkpoint 'no-such' is unknown" in refused(capsys, [*inspect, "no-such"])
  assert "has no .safetensors" in refused(capsys, [*inspect, str(tmp_path)])
  hc.write_torch(tmp_path / "x.pt", {"a": np.ones(2, np.float32)})
  assert "no drafting head that jspec knows" in refused(capsys, [*inspect, str(tmp_path / "x.pt")])
  folder = str(hc.write(hc.with_config(hc.eagle3(), fc_norm=True), tmp_path / "head"))
  argv = [*inspect, folder, "--target", small_target(tmp_path / "target")]
  assert "missing tensor fc_norm.0.weight" in refused(capsys, argv)
  assert "model 'nobody' is unknown" in refused(capsys, [*argv[:3], "--target", "nobody"])
  assert "required: path" in refused(capsys, inspect)


def test_version_and_notes(capsys, fake):
  with pytest.raises(SystemExit) as end:
    main.main(["--version"])
  assert end.value.code == 0 and capsys.readouterr().out.startswith("jspec ")


def test_a_command_without_its_extra_says_which_one_brings_what_it_needs():
  code = ("import sys\nsys.modules['optax'] = None\nfrom jspec.cli.main import main\n"
          "sys.exit(main(['train', '--config', 'x.toml']))")
  done = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parents[2],
                        capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr == (
      "jspec: error: jspec train needs optax, which jspec-jax's extra 'train' brings\n")


def test_a_closed_pipe_ends_quietly():
  process = subprocess.Popen([sys.executable, "-m", "jspec", "models"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, cwd=pathlib.Path(__file__).parents[2])
  process.stdout.close()
  assert process.wait(timeout=60) == endings.BROKEN_PIPE
  assert process.stderr.read() == b""
  process.stderr.close()


def test_only_new_prefill_programs_are_warmed_up(fake, monkeypatch):
  llm, warmed = fake("m"), []
  monkeypatch.setattr(llm, "generate", lambda prompts, params: warmed.append(
    [len(ids) for ids in prompts]))
  compiled: set[int] = set()
  for length in (10, 12, 600, 300):  # chunks of 16; 16; 256, 256, 32, 64; 256, 64
    terminal.warm_up(llm, [1] * length, compiled)
  assert warmed == [[10], [256, 32, 56]]
  # Where a page of 128 tokens is there still, 22 are read, in 32; else 32 and 118, in 128.
  compiled.clear()
  terminal.warm_up(llm, [1] * 150, compiled, before=[1] * 130)
  assert compiled == {32, 128}
  compiled.clear()
  terminal.warm_up(llm, [1] * 133, compiled, before=[1] * 132)  # 5 in 16; 16 and 117
  assert compiled == {16, 128}
  compiled.clear()
  terminal.warm_up(llm, [1] * 300, compiled, before=[1] * 200)  # 172 in 64 and 128; 256, 64
  assert compiled == {64, 128, 256}


def test_nothing_is_compiled_while_an_answer_is_timed():
  """The prompt is new to the prefix cache, so that it is read by the programs made for it."""
  llm = tiny_llm("ngram", max_num_seqs=1)
  prompt = [3 + i % 7 for i in range(40)]
  params = SamplingParams(temperature=0.0, max_tokens=4, seed=3)
  compiled: set[int] = set()
  terminal.warm_up(llm, prompt, compiled, params.seed)
  assert 16 not in compiled  # as the last 8 tokens would need, were the others there
  before = dict(llm.engine.device.traces)
  hits = llm.engine.stats().prefix_hits
  assert [out for out in llm.stream([prompt], params)][-1].finished
  after = dict(llm.engine.device.traces)
  after.pop("put_table", None)  # one scatter, for a text that grows into another page
  before.pop("put_table", None)
  assert after == before and llm.engine.stats().prefix_hits == hits
