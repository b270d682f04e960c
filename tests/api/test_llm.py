"""The public API: shapes and order of results, streaming, statistics, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_llm import (
  EOS,
  NAME,
  OPTIONS,
  SPECULATION,
  byte_tokenizer,
  greedy,
  is_idle,
  tiny_llm,
  tiny_model,
)

from jspec.checkpoints import hub
from jspec.llm import LLM
from jspec.outputs import SpeculativeStats
from jspec.sampling_params import SamplingParams

MAX_LEN = OPTIONS["max_model_len"]
K = SPECULATION["ngram"]["num_speculative_tokens"]
LONG = greedy(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
  return tiny_llm("ngram")


def ids(outputs):
  return [list(out.token_ids) for out in outputs]


def test_results_come_in_the_order_of_the_prompts_with_their_own_params(llm):
  prompts = ["the cat", "abc abc", "he", "in the hat", "on", "er"]
  params = [greedy(max_tokens=m, ignore_eos=True) for m in (20, 1, 7, 3, 12, 2)]
  outs = llm.generate(prompts, params)
  assert [out.prompt for out in outs] == prompts
  assert [len(out.token_ids) for out in outs] == [20, 1, 7, 3, 12, 2]
  assert len({out.request_id for out in outs}) == 6
  for out, prompt, own in zip(outs, prompts, params, strict=True):
    assert out.finished and out.finish_reason == "length"
    assert out.prompt_token_ids == tuple(llm.tokenizer.encode(prompt))
    assert out.text == llm.tokenizer.decode(out.token_ids)
    assert llm.generate(prompt, own)[0].token_ids == out.token_ids
    assert 0 < out.timing.first_token <= out.timing.finished


def test_a_prompt_is_text_or_token_ids(llm):
  expected = llm.generate("the cat", LONG)[0]
  prompt = llm.tokenizer.encode("the cat")
  for given in (prompt, tuple(prompt), np.array(prompt), [prompt], [tuple(prompt)]):
    [out] = llm.generate(given, LONG)
    assert out.token_ids == expected.token_ids and out.prompt is None
  mixed = llm.generate(["the cat", prompt], LONG)
  assert ids(mixed) == [list(expected.token_ids)] * 2
  assert llm.generate([], LONG) == []
  assert len(llm.generate("the cat")[0].token_ids) <= 16  # SamplingParams' own default


def test_n_outputs_use_seed_plus_index(llm):
  params = SamplingParams(n=3, seed=20, max_tokens=12, ignore_eos=True)
  [out] = llm.generate("the cat", params)
  assert [o.index for o in out.outputs] == [0, 1, 2]
  for i, o in enumerate(out.outputs):
    one = SamplingParams(seed=20 + i, max_tokens=12, ignore_eos=True)
    assert o.token_ids == llm.generate("the cat", one)[0].token_ids
  assert out.speculation == sum((o.speculation for o in out.outputs), SpeculativeStats())


def test_seeds_count_on_from_zero_beyond_the_largest(llm):
  fields = dict(temperature=2.0, max_tokens=12, ignore_eos=True)
  [out] = llm.generate("the cat", SamplingParams(n=2, seed=2**63 - 1, **fields))
  alone = llm.generate(["the cat"] * 2, [SamplingParams(seed=s, **fields) for s in (2**63 - 1, 0)])
  assert [o.token_ids for o in out.outputs] == [o.token_ids for o in alone]
  assert alone[0].token_ids != alone[1].token_ids


def test_chat_goes_through_the_template(llm):
  messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "hat"},
              {"role": "user", "content": "and"}]
  text = "<|user|>the cat<|end|><|bot|>hat<|end|><|user|>and<|end|><|bot|>"
  expected = llm.tokenizer.encode(text)
  [out] = llm.chat(messages, LONG)
  assert list(out.prompt_token_ids) == expected == llm.encode_chat(messages)
  assert ids([out]) == ids(llm.generate([expected], LONG))
  two = llm.chat([messages, messages[:1]], LONG)
  assert [len(o.prompt_token_ids) for o in two] == [len(expected), len(llm.encode_chat(
      messages[:1]))]
  with pytest.raises(ValueError, match="content"):
    llm.chat([{"role": "user"}], LONG)


def test_chat_has_the_arguments_of_vllms(llm):
  """Each of them changes the prompt as it says."""
  messages = [{"role": "user", "content": "the<|end|>"}, {"role": "assistant", "content": "hat"}]
  user, bot, end = map(llm.tokenizer.backend.token_to_id, ("<|user|>", "<|bot|>", "<|end|>"))
  hat = llm.encode("hat")
  for fields, has, tail in (
      ({}, 2, [*hat, end, bot]),
      ({"plain_content": False}, 3, [*hat, end, bot]),
      ({"add_generation_prompt": False}, 2, [*hat, end]),
      ({"add_generation_prompt": False, "continue_final_message": True}, 1, [bot, *hat]),
      ({"chat_template": "<|user|>{{ more }}", "chat_template_kwargs": {"more": "hat"}}, 0,
       [user, *hat]),
      ({"chat_template": "{{ tools[0].name }}", "tools": [{"name": "hat"}]}, 0, hat)):
    [out] = llm.chat(messages, SamplingParams(max_tokens=1), **fields)
    assert list(out.prompt_token_ids) == llm.encode_chat(messages, **fields)
    assert out.prompt_token_ids[-len(tail):] == tuple(tail)
    assert out.prompt_token_ids.count(end) == has


@pytest.mark.parametrize("method", SPECULATION)
def test_streamed_snapshots_grow_into_the_final_output(method):
  llm = tiny_llm(method)
  params = [LONG, SamplingParams(seed=4, max_tokens=30, ignore_eos=True, n=2, logprobs=1),
            greedy(max_tokens=30, ignore_eos=True, stop="zz")]
  prompts = ["the cat", "abc abc", "he he he"]
  streams = {}
  for out in llm.stream(prompts, params):
    streams.setdefault(out.prompt, []).append(out)
  final = llm.generate(prompts, params)
  for expected in final:
    snapshots = streams[expected.prompt]
    assert [s.finished for s in snapshots] == [False] * (len(snapshots) - 1) + [True]
    for i, o in enumerate(expected.outputs):
      for before, after in zip(snapshots, snapshots[1:], strict=False):
        a, b = before.outputs[i], after.outputs[i]
        assert b.text.startswith(a.text) and b.token_ids[:len(a.token_ids)] == a.token_ids
      last = snapshots[-1].outputs[i]
      assert (last.text, last.token_ids, last.finish_reason) == (
          o.text, o.token_ids, o.finish_reason)
  assert len(streams["the cat"]) > 5


def test_two_streams_side_by_side_both_reach_their_end(llm):
  """Each turn of the engine serves both; neither loses what the other's turn brought."""
  expected = ids(llm.generate(["the cat", "abc abc"], LONG))
  a, b = llm.stream("the cat", LONG), llm.stream("abc abc", LONG)
  next(a)
  ends = [list(b)[-1], llm.generate("abc abc", LONG)[0], list(a)[-1]]
  assert ids(ends) == [expected[1], expected[1], expected[0]]
  assert all(out.finished for out in ends) and is_idle(llm)


def test_a_reader_that_stops_early_frees_everything(llm):
  stream = llm.stream(["the cat"] * 6, LONG)
  for _ in range(4):
    next(stream)
  assert not is_idle(llm)
  stream.close()
  assert is_idle(llm)
  unread = llm.stream("the cat", LONG)
  del unread
  assert is_idle(llm)


# -------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("method", SPECULATION)
def test_statistics_are_consistent(method):
  llm = tiny_llm(method)
  text = llm.generate("the cat and the cat", LONG)[0].text
  params = [LONG, SamplingParams(seed=1, max_tokens=25), greedy(max_tokens=1),
            greedy(max_tokens=30, stop=text[8:11], ignore_eos=True),
            greedy(max_tokens=30, logit_bias={EOS: 5.0})]
  total = SpeculativeStats()
  for out in llm.generate(["the cat and the cat"] * len(params), params):
    s = out.speculation
    assert s.num_generated_tokens == len(out.token_ids) - 1
    assert s.num_accepted_tokens <= s.num_draft_tokens
    assert s.num_drafts <= s.num_steps <= s.num_generated_tokens
    assert s.num_drafts == sum(s.accepted_histogram) == sum(s.drafted_histogram[1:])
    assert s.num_steps == sum(s.drafted_histogram)
    weigh = lambda histogram: sum(i * count for i, count in enumerate(histogram))
    assert weigh(s.accepted_histogram) == s.num_accepted_tokens
    assert weigh(s.drafted_histogram) == s.num_draft_tokens
    assert sum(out.outputs[0].drafted) <= s.num_accepted_tokens
    if out.finish_reason == "length":
      assert sum(out.outputs[0].drafted) == s.num_accepted_tokens
    total += s
  assert (total.num_draft_tokens > 0) == (method != "none")
  if method == "draft_model":  # the target itself
    assert total.num_accepted_tokens > 0


def test_rates_follow_their_definitions():
  s = SpeculativeStats(num_steps=10, num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6,
                       num_generated_tokens=16, accepted_histogram=(1, 1, 1, 1),
                       drafted_histogram=(6, 0, 0, 4))
  assert s.acceptance_rate == 0.5 and s.mean_acceptance_length == 2.5 and s.tokens_per_step == 1.6
  assert s.acceptance_per_position == (0.75, 0.5, 0.25)
  none = SpeculativeStats()
  assert (none.acceptance_rate, none.mean_acceptance_length, none.tokens_per_step) == (0, 1, 0)
  assert (s + SpeculativeStats(accepted_histogram=(2,))).accepted_histogram == (3, 1, 1, 1)


# ---------------------------------------------------------------------------- bad input

GOOD = "the cat"
REFUSED = [  # prompts, params, message
  ([GOOD, [5] * MAX_LEN], LONG, f"has {MAX_LEN} tokens, but max_model_len={MAX_LEN} allows"),
  ([GOOD, "q" * (9 * MAX_LEN)], LONG, "characters, more than any text of max_model_len"),
  ([GOOD, ""], LONG, "prompt is empty"),
  ([GOOD, []], LONG, "prompt is empty"),
  ([GOOD, [5, 64]], LONG, "prompt token 64 is not in the vocabulary of 64"),
  ([GOOD, [-1]], LONG, "prompt token -1"),
  ([GOOD, [1.5]], LONG, "prompt token 1.5"),
  ([GOOD, GOOD], [LONG], "2 prompts, but 1 SamplingParams"),
  ([GOOD, [5] * 90], greedy(min_tokens=7, max_tokens=None), "min_tokens=7 does not fit"),
  ([GOOD], greedy(num_speculative_tokens=K + 1), "num_speculative_tokens=5 exceeds the engine's 4"),
  ([GOOD], greedy(logit_bias={64: 1.0}), "logit_bias names token 64"),
  ([GOOD], greedy(logit_bias={-1: 1.0}), "logit_bias names token -1"),
  ([GOOD], greedy(stop_token_ids=[99]), "stop_token_ids names token 99"),
  ([GOOD], greedy(bad_words=["qwqwqwqwq"]), "bad word is 9 tokens long"),
  ([GOOD, "\ud800"], LONG, "valid Unicode"),
]


@pytest.mark.parametrize("prompts, params, message", REFUSED, ids=[r[2][:24] for r in REFUSED])
def test_a_bad_request_is_refused_before_any_work(llm, prompts, params, message):
  expected = ids(llm.generate(GOOD, LONG))
  steps = []
  step = llm.engine.step
  llm.engine.step = lambda *args: steps.append(1) or step(*args)
  try:
    for call in (llm.generate, llm.stream):
      with pytest.raises(ValueError, match=message):
        call(prompts, params)
      assert is_idle(llm) and not steps
  finally:
    del llm.engine.step
  assert ids(llm.generate(GOOD, LONG)) == expected


@pytest.mark.parametrize("options, message", [
  (dict(speculative_config={"method": "ngram", "lookup": 3}), "unknown key .* 'lookup'; known are"),
  (dict(speculative_tokens=3), "unknown argument: 'speculative_tokens'; known are"),
  (dict(max_model_len=257), "max_model_len=257 exceeds the model's 256"),
  (dict(max_model_len=0), "max_model_len must be"), (dict(page_size=1.5), "page_size must be"),
  (dict(max_num_seqs=0), "max_num_seqs must be"), (dict(num_pages=-1), "num_pages must be"),
  (dict(dtype="float64"), "dtype 'float64' is not one of"),
  (dict(dtype="bfloat16"), "but the loaded model is float32"),
  (dict(numerics="exact"), "numerics 'exact' is not one of"),
])
def test_an_engine_that_cannot_be_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    LLM(tiny_model(), progress=False, **(OPTIONS | options))


def test_a_draft_model_with_another_tokenizer_is_refused(monkeypatch):
  model = tiny_model()
  others = {
    "other": model._replace(tokenizer=byte_tokenizer("9876543210"), name="other"),
    "same": model._replace(name="same", tokenizer=byte_tokenizer()),
  }
  monkeypatch.setattr(hub, "load_model", lambda name, **options: others[name.rpartition("/")[2]])

  def build(name):
    return LLM(model, progress=False, **OPTIONS, speculative_config={
        "method": "draft_model", "model": f"org/{name}", "num_speculative_tokens": 2})

  with pytest.raises(ValueError, match="'org/other' has another tokenizer"):
    build("other")
  assert build("same").engine.drafter.max_depth == 2


def test_older_flags_mean_what_the_dict_means():
  llm = LLM(tiny_model(), progress=False, **OPTIONS, speculative_model="[ngram]",
            num_speculative_tokens=K, ngram_prompt_lookup_max=3, ngram_prompt_lookup_min=1)
  assert llm.speculative == tiny_llm("ngram").speculative
  assert tiny_llm("none").speculative.method == "none"
  draft = LLM(tiny_model(), progress=False, **OPTIONS, speculative_model=NAME,
              num_speculative_tokens=3)
  assert draft.speculative == tiny_llm("draft_model").speculative
