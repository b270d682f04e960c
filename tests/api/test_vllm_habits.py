"""What vLLM's users write goes on working: arguments, prompts, parameters, what they read."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
from tiny_llm import greedy, tiny_llm, tiny_model

import jspec
from jspec import AsyncLLM, SamplingParams
from jspec.checkpoints import hub
from jspec.config import vllm_arguments
from jspec.engine.metrics import Counter, Vector, metrics_of
from jspec.llm import LLM
from jspec.outputs import EngineStats, SpeculativeStats
from jspec.sampling_params import shown
from jspec.text.prompt import Given, listed_prompts, read_prompt

SCRIPT = '''
from vllm import LLM, SamplingParams

prompts = [
    "hello, my name is",
    "the president of the",
    "the capital of",
    "the future of",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=12)


def main():
    llm = LLM(model="facebook/opt-125m", tensor_parallel_size=1, max_model_len=64, max_num_seqs=2,
              seed=0, trust_remote_code=False, enforce_eager=False, disable_log_stats=False,
              tokenizer_mode="auto", runner="generate", speculative_config={
                  "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")
    by_name = llm.generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False)

    tokenizer = llm.get_tokenizer()
    tokens = [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in prompts]
    from_tokens = llm.generate(tokens, sampling_params, False)
    from_texts = llm.generate(({"prompt": prompt} for prompt in prompts), sampling_params)

    conversation = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"},
                    {"role": "user", "content": "write an ode"}]
    changed = sampling_params.clone()
    [answer] = llm.chat(conversation, sampling_params=changed, use_tqdm=False)

    accepted = [0] * 3
    for metric in llm.get_metrics():
        if metric.name.endswith("spec_decode_num_drafts"):
            num_drafts = metric.value
        elif metric.name.endswith("spec_decode_num_accepted_tokens_per_pos"):
            for pos in range(len(metric.values)):
                accepted[pos] += metric.values[pos]
    return locals()
'''


def test_a_script_runs_but_for_its_import(monkeypatch, capsys):
  monkeypatch.setattr(hub, "load_model", lambda name, **options: tiny_model())
  names = {}
  exec(SCRIPT.replace("from vllm", "from jspec"), names)
  got = names["main"]()
  outputs, llm = got["outputs"], got["llm"]
  params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=12)
  expected = [tiny_llm("none").generate(prompt, params)[0] for prompt in names["prompts"]]
  for name in ("outputs", "by_name", "from_tokens", "from_texts"):
    assert [o.outputs[0].text for o in got[name]] == [o.outputs[0].text for o in expected]
  lines = capsys.readouterr().out.splitlines()
  assert lines == [f"Prompt: {p!r}, generated text: {o.outputs[0].text!r}"
                   for p, o in zip(names["prompts"], expected, strict=True)]
  assert [o.prompt for o in got["from_tokens"]] == [None] * 4
  assert [o.prompt for o in got["from_texts"]] == names["prompts"]
  assert got["answer"].outputs[0].token_ids == tiny_llm("none").chat(
      got["conversation"], params)[0].token_ids
  spec = llm.engine.stats().speculation
  assert (got["num_drafts"], sum(got["accepted"])) == (spec.num_drafts, spec.num_accepted_tokens)
  for out in outputs:  # what vLLM's users read
    assert out.prompt_logprobs is None and out.finished and out.outputs[0].finished()
    m = out.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert m.first_token_latency == out.timing.first_token and m.last_token_ts == m.finished_time


def test_metrics_are_what_was_counted():
  stats = EngineStats(generation_tokens=40, speculation=SpeculativeStats(
      num_drafts=10, num_accepted_tokens=12, accepted_histogram=(3, 2, 5)))
  found = {m.name: m for m in metrics_of(stats)}
  assert found["jspec:generation_tokens"].value == 40
  assert isinstance(found["jspec:spec_decode_num_drafts"], Counter)
  vector = found["jspec:spec_decode_num_accepted_tokens_per_pos"]
  assert isinstance(vector, Vector) and vector.values == [7, 5]


# ------------------------------------------------------------------------------ arguments of LLM


@pytest.mark.parametrize("argument, value, hint", [
  ("num_gpu_blocks_override", 9, "use num_pages"), ("block_size", 16, "use page_size"),
  ("quantization", "awq", "a GGUF file brings its own"), ("tokenizer", "other", "model's own"),
  ("pipeline_parallel_size", 2, "use tensor_parallel_size and data_parallel_size"),
  ("enable_lora", True, "merge them"), ("load_format", "dummy", "read from the files"),
])
def test_an_argument_that_cannot_be_met_says_what_to_use(argument, value, hint):
  with pytest.raises(ValueError, match=f"{argument}=.* vLLM's and has no meaning here: .*{hint}"):
    LLM(tiny_model(), **{argument: value})


def test_arguments_without_effect_pass_with_one_warning():
  given = {"gpu_memory_utilization": 0.9, "enforce_eager": True, "swap_space": 4, "mine": 1,
           "trust_remote_code": True, "enable_chunked_prefill": True, "load_format": "auto"}
  with pytest.warns(UserWarning) as warned:
    vllm_arguments.take(given)
  assert given == {"mine": 1} and len(warned) == 1
  assert str(warned[0].message) == (
      "without effect here: gpu_memory_utilization=0.9 (the KV cache has num_pages pages, or room "
      "for max_num_seqs requests of max_model_len tokens), enforce_eager=True (every step is "
      "compiled, by XLA), swap_space=4 (preempted requests are computed again, nothing is "
      "swapped), trust_remote_code=True (no code from model repositories is run)")


def test_every_argument_of_vllms_has_a_reason_and_values_that_ask_for_nothing():
  assert not set(vllm_arguments.ARGUMENTS) & set(vllm_arguments.SERVE)
  for name, argument in {**vllm_arguments.ARGUMENTS, **vllm_arguments.SERVE}.items():
    assert name.isidentifier() and argument.because and argument.neutral[0] is None
    with warnings.catch_warnings(action="error"):
      vllm_arguments.take({name: argument.neutral[-1]} if name in vllm_arguments.ARGUMENTS else {})


# -------------------------------------------------------------------------------------- prompts


def test_prompts_come_in_every_shape():
  assert read_prompt("a") == read_prompt({"prompt": "a"}) == Given("a", None)
  for ids in ([1, 2], (1, 2), np.array([1, 2])):
    assert read_prompt(ids) == read_prompt({"prompt_token_ids": ids}) == Given(None, (1, 2))
  both = {"prompt": "a", "prompt_token_ids": [1], "cache_salt": "s", "multi_modal_data": None}
  assert read_prompt(both) == Given("a", (1,), "s")
  assert listed_prompts(x for x in ("a", [1])) == ["a", [1]]
  assert listed_prompts([1, 2]) == [[1, 2]] and listed_prompts({"prompt": "a"}) == [{"prompt": "a"}]
  assert listed_prompts([]) == []


@pytest.mark.parametrize("prompt, message", [
  ({"text": "a"}, "a prompt's keys are prompt, prompt_token_ids, cache_salt, got 'text'"),
  ({}, "needs the key prompt or prompt_token_ids"), ({"prompt": 5}, "must be text, got 5"),
  ({"prompt": "a", "multi_modal_data": {"image": 1}}, "got 'multi_modal_data'"),
  ({"prompt_token_ids": "ab"}, "token ids"), (b"ab", "got b'ab'"), (None, "got None"), (7, "got 7"),
])
def test_what_is_no_prompt_is_refused(prompt, message):
  with pytest.raises(ValueError, match=message):
    read_prompt(prompt)
  with pytest.raises(ValueError):
    tiny_llm("ngram").generate(prompt)
  with pytest.raises(ValueError):
    tiny_llm("ngram").generate(["a", prompt])


def test_mistaken_arguments_say_what_was_expected():
  llm = tiny_llm("ngram")
  for params in ({"temperature": 0.5}, 0.5, [{"temperature": 0.5}]):
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams, got a"):
      llm.generate(["a"], params)
  with pytest.raises(ValueError, match="messages must be a list of .*, got a str; generate"):
    llm.chat("hello")
  with pytest.raises(ValueError, match="got a dict"):
    llm.chat({"role": "user", "content": "hello"})
  with pytest.raises(ValueError, match="must be SamplingParams, got a dict"):
    llm.prepare("a", {"temperature": 0})
  assert AsyncLLM.generate.__annotations__.keys() >= {"prompt", "sampling_params", "request_id"}


def test_the_bar_is_anybodys():
  seen = []

  class Bar:
    def __init__(self, total, disable, unit):
      seen.append(total)

    __enter__ = lambda self: self
    __exit__ = lambda self, *error: None
    update = lambda self: seen.append(1)

  tiny_llm("ngram").generate(["the", "cat"], greedy(max_tokens=2), use_tqdm=Bar)
  assert seen == [2, 1, 1]


@pytest.mark.parametrize("fields, kept", [
  (dict(truncate_prompt_tokens=3), 3), (dict(truncate_prompt_tokens=500), 20), (dict(), 20),
  (dict(truncate_prompt_tokens=-1), 20)])
def test_the_end_of_a_prompt_is_kept(fields, kept):
  ids = list(range(5, 25))
  for prompt in (ids, {"prompt_token_ids": ids}):
    group = tiny_llm("ngram").prepare(prompt, greedy(max_tokens=3, **fields))
    assert group.requests[0].prompt_ids == tuple(ids[-kept:])


def test_as_much_of_a_prompt_is_kept_as_leaves_room_for_an_answer():
  llm = tiny_llm("ngram")
  ids = [5, 6, 7] * 100
  for least in (0, 1, 10):
    params = greedy(truncate_prompt_tokens=-1, max_tokens=None, min_tokens=least)
    [request] = llm.prepare(ids, params).requests
    assert request.prompt_ids == tuple(ids[-(llm.max_model_len - max(1, least)):])
    assert request.limit == max(1, least)
  with pytest.raises(ValueError, match="the prompt has 300 tokens"):
    llm.prepare(ids, greedy(truncate_prompt_tokens=300))


# ------------------------------------------------------------------------------- SamplingParams


def test_sampling_params_are_cloned_and_changed():
  params = SamplingParams(temperature=0.5, stop="a", best_of=None, detokenize=True,
                          logits_processors=None, seed=-1)
  assert params.clone() == params and params.seed is None
  changed = params.clone(max_tokens=3)
  assert changed == dataclasses.replace(params, max_tokens=3)
  assert (changed.max_tokens, changed.temperature, changed.stop) == (3, 0.5, ("a",))
  with pytest.raises(ValueError, match="top_p must be"):
    params.clone(top_p=2.0)


@pytest.mark.parametrize("field, value", [
  ("best_of", 2), ("use_beam_search", True), ("length_penalty", 1.2), ("detokenize", False),
  ("logits_processors", [print]), ("structured_outputs", {"json": {}}), ("extra_args", {"a": 1}),
  ("guided_decoding", "x"), ("spaces_between_special_tokens", False)])
def test_what_is_not_done_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=f"{field} is not supported: leave it out"):
    SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_texts_are_bounded_before_they_are_tokenised(field):
  """Each of them, and all together: neither is a tokenizer asked."""
  SamplingParams(**{field: ["a" * 1024] * 16})
  for texts in (["a" * 1025], ["a" * 4_000_000], ["a" * 1000] * 33):
    with pytest.raises(ValueError, match=f"{field} may have 1024 characters each, and 32768 in"):
      SamplingParams(**{field: texts})


@pytest.mark.parametrize("fields", [
  dict(max_tokens=10**310), dict(min_tokens=2**63), dict(n=10**5000), dict(seed=10**5000),
  dict(temperature=10**400), dict(top_p=10**400), dict(logit_bias={1: 10**400}),
  dict(stop=[5] * 10**6), dict(bad_words=[5] * 10**6), dict(stop_token_ids=[-1] * 10**6),
  dict(logit_bias=[5] * 10**6), dict(top_k="a" * 10**6), dict(truncate_prompt_tokens=0)])
def test_numbers_and_messages_have_a_bound(fields):
  with pytest.raises(ValueError) as caught:
    SamplingParams(**fields)
  assert len(str(caught.value)) < 200


def test_what_a_message_quotes_is_short():
  assert shown(5) == "5" and shown("a") == "'a'" and len(shown("a" * 10**6)) < 60
  assert shown(-10**5000) == "a number of 16610 bits"
  assert jspec.RequestFailed.__name__ == "RequestFailed"
