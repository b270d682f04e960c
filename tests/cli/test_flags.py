"""How flags may be spelled, what is said of unknown ones, and what becomes of vLLM's."""

from __future__ import annotations

import argparse

import pytest
from tiny_llm import tiny_model

from jspec.cli import flags as cli_flags
from jspec.cli import main, parser
from jspec.llm import LLM
from jspec.serving import server

# Of vLLM's documentation: `vllm serve` 0.4 to 0.21, those that scripts and recipes use most.
VLLM_FLAGS = """
  --all2all-backend 1 --allow-credentials --allowed-headers ["*"] --allowed-local-media-path /x
  --allowed-methods ["*"] --allowed-origins ["*"] --api-key k --api-server-count 1
  --async-scheduling --block-size 16 --calculate-kv-scales --chat-template f
  --chat-template-content-format auto
  --code-revision r --compilation-config 3 --config-format auto --config f --cpu-offload-gb 0
  --data-parallel-size 1 --data-parallel-backend mp --device auto --disable-cascade-attn
  --disable-custom-all-reduce --disable-fastapi-docs --disable-frontend-multiprocessing
  --disable-log-requests --disable-log-stats --disable-sliding-window
  --disable-uvicorn-access-log --distributed-executor-backend mp --download-dir /x --dtype auto
  --enable-auto-tool-choice --enable-chunked-prefill --no-enable-chunked-prefill
  --enable-expert-parallel --enable-force-include-usage --enable-log-requests --enable-lora
  --enable-prefix-caching --no-enable-prefix-caching --enable-prompt-tokens-details
  --enable-reasoning --enable-server-load-tracking --enable-sleep-mode --enforce-eager
  --generation-config auto --gpu-memory-utilization 0.9 --guided-decoding-backend auto --headless
  --hf-overrides {} --hf-token t --host h --kv-cache-dtype auto --kv-cache-memory-bytes 9
  --kv-transfer-config {} --limit-mm-per-prompt {} --load-format auto --logits-processor-pattern p
  --long-prefill-token-threshold 9 --lora-modules a=b --max-log-len 9 --max-logprobs 20
  --max-loras 2 --max-model-len 9 --max-num-batched-tokens 9 --max-num-partial-prefills 2
  --max-num-seqs 9 --max-parallel-loading-workers 2 --max-seq-len-to-capture 9 --middleware m
  --mm-processor-kwargs {} --model m --model-impl auto --model-loader-extra-config {} --nnodes 1
  --node-rank 0 --num-gpu-blocks-override 9 --num-lookahead-slots 1 --num-scheduler-steps 1
  --otlp-traces-endpoint e --override-generation-config {} --pipeline-parallel-size 1 --port 1
  --preemption-mode recompute --quantization q --ray-workers-use-nsight --reasoning-parser p
  --response-role assistant --revision r
  --return-tokens-as-token-ids --root-path / --rope-scaling {}
  --rope-theta 1 --runner generate --scheduler-delay-factor 0 --seed 1 --served-model-name a b
  --skip-tokenizer-init --speculative-config {} --ssl-ca-certs f --ssl-cert-reqs 0
  --ssl-certfile f --ssl-keyfile f --structured-outputs-config {} --swap-space 4 --task generate
  --tensor-parallel-size 1 --tokenizer t --tokenizer-mode auto --tokenizer-pool-size 0
  --tokenizer-revision r --tool-call-parser p --trust-remote-code --use-v2-block-manager
  --uvicorn-log-level info --worker-cls auto -tp 1 -dp 1 -pp 1 -q awq -O3 -cc 3 -sc {}
""".split()


def parse(*words: str) -> argparse.Namespace:
  return main.build_parser().parse_args(words)


def test_underscores_are_dashes_in_names_and_stay_in_values():
  given = parse("generate", "a_b", "--max_tokens", "9", "--top_p=0.5", "--cache_dir=a_b",
                "--stop", "c_d", "--speculative-config", '{"prompt_lookup_max": 3}')
  assert (given.prompt, given.max_tokens, given.top_p, given.cache_dir, given.stop) == (
      "a_b", 9, 0.5, "a_b", ["c_d"])
  assert given.speculative_config == {"prompt_lookup_max": 3}
  assert parse("generate", "--", "--a_b").prompt == "--a_b"


def test_short_forms_are_vllms():
  given = parse("serve", "-tp", "2", "-dp=4", "-sc", '{"method": "suffix"}')
  assert (given.tensor_parallel_size, given.data_parallel_size) == (2, 4)
  assert given.speculative_config == {"method": "suffix"}


def test_keys_of_a_json_flag_may_come_one_by_one():
  given = parse("generate", "hi", "--speculative-config.method", "ngram", "--max-tokens", "3",
                "--speculative-config.num_speculative_tokens=4", "--logit_bias.7", "-1.5")
  assert given.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
  assert given.logit_bias == {"7": -1.5} and given.max_tokens == 3
  assert parser.spelled(["--a.b.c", "x", "--a.b.d=[1]", "--", "--a.b"]) == [
      "--a", '{"b": {"c": "x", "d": [1]}}', "--", "--a.b"]
  with pytest.raises(ValueError, match="--speculative-config is given whole and by its keys"):
    parse("generate", "hi", "--speculative-config", "{}", "--speculative-config.a", "1")


@pytest.mark.parametrize("words, named", [
  (["generate", "--nonsense", "3", "hi", "--max-modl-len", "4", "--max_token=3"],
   "--nonsense, --max-modl-len (did you mean --max-model-len?), --max-token (did you mean "
   "--max-tokens?) (see jspec generate --help)"),
  (["models", "--cache-dirr", "x"], "--cache-dirr (did you mean --cache-dir?) (see"),
  (["models", "inspect", "--jsn"], "--jsn (did you mean --json?) (see jspec models inspect"),
  (["generate", "hi", "--temp", "x"], "--temp (did you mean --temperature?) (see"),
  (["serve", "--dtype", "wrong", "--xyz"], "--xyz (see jspec serve --help)"),
  (["bench", "loose"], "loose (see jspec bench --help)"),
  (["--models"], "--models (see jspec --help)"),
])
def test_all_unknown_flags_are_named_at_once(words, named):
  with pytest.raises(ValueError) as refused:
    parse(*words)
  assert str(refused.value).startswith(f"unrecognized arguments: {named}")


def test_unknown_flags_and_vllms_are_refused_in_one_sentence():
  with pytest.raises(ValueError) as refused:
    parse("serve", "--block_size", "16", "--nonsense", "-q", "awq", "--enforce-eager")
  assert str(refused.value) == (
      "unrecognized arguments: --nonsense; --block-size is vLLM's and has no meaning here: use "
      "--page-size; -q is vLLM's and has no meaning here: a GGUF file brings its own; "
      "--kv-cache-dtype is the cache's (see jspec serve --help)")


def test_flags_that_change_nothing_pass_with_one_note(monkeypatch, capsys):
  """Those at their defaults without a word. A switch leaves the next word alone."""
  monkeypatch.setattr(cli_flags, "load_llm", lambda model, **given: {"model": model, **given})
  seen = []
  monkeypatch.setattr(server, "run", lambda load, settings: seen.append(load()) or 0)
  assert main.main(["serve", "--enforce-eager", "org/model", "-O3", "--enable-chunked-prefill",
                   "--load-format", "auto", "--gpu_memory_utilization=0.9", "--trust-remote-code",
                   "--no-enable-expert-parallel", "--cpu-offload-gb", "0"]) == 0
  assert seen == [{"model": "org/model", "speculative_config": {"method": "ngram"}}]
  assert capsys.readouterr().err == (
      "jspec: note: without effect here: --enforce-eager, -O (every step is compiled, by XLA), "
      "--gpu-memory-utilization (the KV cache has --num-pages pages, or room for --max-num-seqs "
      "requests of --max-model-len tokens), --trust-remote-code (no code from model repositories "
      "is run)\n")


def test_no_flag_of_vllms_is_unknown_to_serve():
  try:
    parse("serve", *VLLM_FLAGS)
  except ValueError as error:
    problems = str(error).split("; ")
    assert "unrecognized" not in str(error) and len(problems) > 20
  else:
    pytest.fail("some of them must be refused")


@pytest.mark.parametrize("text, number", [
  ("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("25.6k", 25600), ("2M", 2097152),
  ("0.5m", 500000), (" 7 ", 7), ("-3", -3), ("1g", 10**9), ("1T", 2**40)])
def test_whole_numbers_read_as_vllms(text, number):
  assert parser.whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "4kb", "0x10", "1.2345k", "one", "1e3"])
def test_what_is_no_whole_number_is_refused(text):
  with pytest.raises(argparse.ArgumentTypeError):
    parser.whole_number(text)


@pytest.mark.parametrize("text, given", [("auto", "auto"), ("AUTO", "auto"), ("-1", "auto"),
                                         ("4K", 4096), ("4k", 4000)])
def test_the_length_may_be_the_models(text, given):
  arguments = parse("serve", "--max-model-len", text)
  assert cli_flags.engine_arguments(arguments) == {"max_model_len": given}


@pytest.mark.parametrize("given", ["auto", None, -1])
def test_an_engine_takes_the_length_its_model_was_made_for(given):
  model = tiny_model()
  llm = LLM(model, max_model_len=given, max_num_seqs=1, page_size=32)
  assert llm.max_model_len == model.config.max_positions
