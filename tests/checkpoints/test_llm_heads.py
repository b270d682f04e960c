"""From a head's checkpoint on disk to text through LLM, for every method that loads one."""

from __future__ import annotations

import functools

import head_checkpoints
import jax
import pytest
import tiny_llm

from jspec import LLM, SamplingParams, build
from jspec.checkpoints.hub import LoadedModel
from jspec.model.params import init_params
from jspec.speculation.plan import CostModel

PROMPTS = ["the hand on the hand", "a and then", "in the end in the end in the"]


@functools.cache
def target() -> LoadedModel:
  config = tiny_llm.tiny_config(width=16, num_layers=3, mlp_dim=24)
  params = init_params(jax.random.key(4), config)
  params["head"]["w"] = params["head"]["w"] * 3
  return LoadedModel(config, params, tiny_llm.byte_tokenizer(), "target")


def llm(speculative_config, **options) -> LLM:
  return LLM(target(), speculative_config=speculative_config, page_size=8, max_model_len=96,
             dtype="float32", progress=False, **{"max_num_seqs": 1, **options})


@functools.cache
def plain(temperature: float):
  params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True)
  return [out.outputs[0].token_ids for out in llm(None).generate(PROMPTS, params)]


@pytest.fixture(autouse=True)
def set_up(monkeypatch):
  """Checkpoints for the tokenizer's 64 tokens; rows cost nothing, so that random heads draft."""
  monkeypatch.setattr(head_checkpoints, "V", target().config.vocab_size)
  monkeypatch.setattr(build, "cpu_cost", lambda config, single_rows: CostModel(1e9))


CONFIGS = {  # what is written, and what the user asks for beside the folder
    "eagle3, detected": (head_checkpoints.eagle3, {}),
    "eagle3 dynamic": (head_checkpoints.speculators, {
        "method": "eagle3", "tree_top_k": 2, "tree_total_tokens": 8,
        "num_speculative_tokens": 3}),
    "eagle tree": (head_checkpoints.eagle, {
        "method": "eagle", "speculative_token_tree": "[(0,), (1,), (0, 0)]"}),
    "medusa tree": (head_checkpoints.medusa, {
        "method": "medusa", "medusa_choices": [[0], [1], [0, 0], [0, 0, 0]]}),
    "mlp_speculator candidates": (head_checkpoints.mlp_speculator, {"n_candidates": 3}),
    "suffix+eagle3": (head_checkpoints.eagle3, {
        "method": "suffix+eagle3", "num_lookup_tokens": 5, "draft_confidence_threshold": 0.1}),
}

QUICK = ("eagle3, detected", "medusa tree", "suffix+eagle3")


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS])
def test_a_head_from_disk_drafts_and_changes_no_text(name, tmp_path):
  make, keys = CONFIGS[name]
  folder = head_checkpoints.write(make(), tmp_path / "head")
  engine = llm({"model": str(folder), **keys})
  assert engine.speculative.model == str(folder) and engine.engine.drafter.max_depth > 0
  drafted = 0
  for temperature in (0.0, 0.8):
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True)
    outputs = engine.generate(PROMPTS, params)
    assert [out.outputs[0].token_ids for out in outputs] == plain(temperature)
    drafted += sum(out.speculation.num_draft_tokens for out in outputs)
  assert drafted > 0
  assert engine.engine.traces["step"] == 1


def test_a_head_is_whole_on_each_of_two_devices_that_share_the_target(tmp_path):
  """It shares the target's embedding and lm_head, of which each device has half."""
  folder = head_checkpoints.write(head_checkpoints.eagle(), tmp_path / "head")
  engine = llm({"model": str(folder), "tree_widths": [2, 1]}, tensor_parallel_size=2)
  params = SamplingParams(temperature=0, seed=1, max_tokens=20, ignore_eos=True)
  assert [out.outputs[0].token_ids for out in engine.generate(PROMPTS, params)] == plain(0.0)


def test_past_outputs_are_drafted_again():
  """The suffix store learns from finished requests: the second time all is known."""
  engine = llm({"method": "suffix", "num_speculative_tokens": 8})
  params = SamplingParams(temperature=0.9, seed=3, max_tokens=64, ignore_eos=True)
  first, second = (engine.generate(PROMPTS[:1], params)[0] for _ in range(2))
  assert first.outputs[0].token_ids == second.outputs[0].token_ids
  assert second.speculation.num_steps < 0.6 * first.speculation.num_steps


@pytest.mark.slow
def test_joined_methods_of_different_depths_on_two_replicas(tmp_path):
  """The lookup's drafts are deeper than the head's tree; each replica has both."""
  folder = head_checkpoints.write(head_checkpoints.medusa(), tmp_path / "head")
  engine = llm({"method": "ngram+medusa", "model": str(folder), "num_lookup_tokens": 6,
                "prompt_lookup_min": 1, "medusa_choices": [[0], [1], [0, 0]]},
               data_parallel_size=2, max_num_seqs=2)
  assert engine.engine.drafter.max_depth == 6
  params = SamplingParams(temperature=0, seed=1, max_tokens=20, ignore_eos=True)
  assert [out.outputs[0].token_ids for out in engine.generate(PROMPTS, params)] == plain(0.0)


def test_synthetic_acceptance_is_what_was_asked_for(monkeypatch):
  """With the real costs, which would have given up on such drafts."""
  monkeypatch.undo()
  engine = llm({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
                "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0})
  params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
  stats = engine.generate([[5] * 20], params)[0].speculation
  assert stats.num_drafts > 5
  assert stats.num_accepted_tokens >= 2 * (stats.num_drafts - 1)


@pytest.mark.parametrize("make, keys, words", [
    (head_checkpoints.mlp_speculator, {"num_speculative_tokens": 4}, "=4 exceeds the 3 tokens"),
    (head_checkpoints.medusa, {"num_speculative_tokens": 7}, "=7 exceeds the 3 heads of"),
    (head_checkpoints.medusa, {"method": "eagle3"}, "head for method 'medusa', not 'eagle3'"),
    (head_checkpoints.eagle, {"tree_top_k": 2, "tree_total_tokens": 99}, "total_tokens=99"),
    (head_checkpoints.eagle3, {"speculative_token_tree": "[(0,), (12,)]"}, "rank 12"),
    (head_checkpoints.medusa, {"speculative_token_tree": "[(0,), (1, 0)]"}, "no parent"),
    (lambda: head_checkpoints.eagle3(target_width=24), {},
     r"tensor fc.weight has shape \(16, 72\), the config needs"),
    (lambda: head_checkpoints.speculators(target_width=24), {}, "width 24: this target has 16 and"),
    (head_checkpoints.eagle3, {"method": "ngram+eagle3", "num_speculative_tokens": 3,
                               "rejection_sample_method": "block",
                               "draft_sample_method": "probabilistic"}, "one method"),
    (head_checkpoints.medusa, {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2,
                               "synthetic_acceptance_rates": [0.5]}, "list of num_speculative"),
])
def test_what_does_not_fit_is_refused_in_a_sentence(make, keys, words, tmp_path):
  folder = head_checkpoints.write(make(), tmp_path / "head")
  with pytest.raises(ValueError, match=words):
    llm({"model": str(folder), **keys})


def test_a_damaged_head_names_the_tensor(tmp_path):
  checkpoint = head_checkpoints.eagle3()
  del checkpoint.tensors["fc.weight"]
  with pytest.raises(ValueError, match="missing tensor fc.weight"):
    llm({"method": "eagle3", "model": str(head_checkpoints.write(checkpoint, tmp_path / "head"))})
