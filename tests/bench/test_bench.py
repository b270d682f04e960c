"""The benchmark: datasets, order of runs, arithmetic of the metrics, report."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest
from fake_llm import FakeLLM
from tiny_llm import greedy, is_idle, tiny_llm

from jspec.bench import datasets, metrics, report
from jspec.bench.hf import check_hf
from jspec.bench.prompts import BUILT_IN
from jspec.bench.runner import (
  LOOP_NGRAM,
  LOOP_WINDOW,
  Engine,
  Group,
  Result,
  Run,
  Sample,
  is_loop,
  llm_engine,
  make_groups,
  run_interleaved,
)
from jspec.cli import flags as cli_flags
from jspec.cli import main
from jspec.outputs import SpeculativeStats
from jspec.sampling_params import SamplingParams
from jspec.speculation.drafter import Feed


def write(tmp_path: pathlib.Path, content: str, name: str = "set.jsonl") -> pathlib.Path:
  path = tmp_path / name
  path.write_text(content, encoding="utf-8")
  return path


@pytest.mark.parametrize("row, task, text", [
  ({"question_id": 1, "category": "writing", "turns": ["A", "B"]}, "mt_bench", "A"),
  ({"question_id": 2, "category": "translation", "turns": ["A"]}, "translation", "A"),
  ({"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "A"}]},
   "sharegpt", "A"),
  ({"instruction": "Do. ", "context": "", "input": "x = 1\n"}, "code_edit",
   "Do.\n\n```python\nx = 1\n```"),
  ({"instruction": "Do.", "input": ""}, "code_edit", "Do."),
  ({"prompt": "A"}, "set", "A"),
  ({"prompt": "A", "task": "t"}, "t", "A"),
])
def test_every_row_format_is_read(tmp_path, row, task, text):
  prompt = datasets.Prompt(task, ({"role": "user", "content": text},))
  assert datasets.read_dataset(write(tmp_path, json.dumps(row) + "\n\n")) == [prompt]
  assert datasets.read_dataset(write(tmp_path, json.dumps([row]))) == [prompt]


def test_conversations_end_with_the_user(tmp_path):
  said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
  row = {"messages": [*said, {"role": "assistant", "content": "a"}], "task": "t"}
  assert datasets.read_dataset(write(tmp_path, json.dumps(row))) == [
    datasets.Prompt("t", tuple(said))]


@pytest.mark.parametrize("content, words", [
  ("", "holds no prompts"),
  ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: not a row of a known format"),
  ('{"prompt": "a"}\nnot json\n', "line 2: not valid JSON"),
  ('["a"]', "entry 0: not a row"),
  ('[{"prompt": 1}]', "entry 0: not a row"),
  ('[{"prompt": ', "is not valid JSON"),
  ('{"messages": [{"role": "user"}]}', "not a row"),
  ('{"turns": [1]}', "not a row"),
])
def test_bad_datasets_name_the_row(tmp_path, content, words):
  with pytest.raises(ValueError, match=words):
    datasets.read_dataset(write(tmp_path, content))


def test_limits_and_tasks_draw_the_same_prompts_for_a_seed(tmp_path):
  rows = [{"prompt": f"{task}{i}", "task": task} for i in range(9) for task in "ab"]
  path = write(tmp_path, "\n".join(map(json.dumps, rows)))
  draw = lambda seed, **options: [
    p.messages[0]["content"] for p in datasets.load_prompts([path], 3, seed, **options)]
  assert draw(0) == draw(0) != draw(1)
  assert len(draw(0)) == 6 and all(text.startswith("b") for text in draw(0, tasks=["b"]))
  assert draw(0, tasks=["b"]) == draw(0)[3:]  # a filter doesn't change the draw


def test_built_in_prompts_cover_the_tasks():
  assert {task for task, _ in BUILT_IN} == {
    "chat", "summarise", "code_edit", "copy", "translate", "math"}
  assert len(datasets.load_prompts([])) == len(BUILT_IN) >= 12


def test_loops_are_repeated_16_grams_in_the_last_64_tokens():
  once = list(range(100))
  assert not is_loop(once) and not is_loop([]) and not is_loop([7] * LOOP_NGRAM)
  assert is_loop([7] * (LOOP_NGRAM + 1))
  assert is_loop(once[:20] + once[:16])
  assert not is_loop(once[:16] + once[:15])
  assert is_loop(once[:48] + once[:16])  # exactly the window
  assert not is_loop(once[:LOOP_WINDOW - 15] + once[:16])  # the first has left it


def test_groups_keep_tasks_together_and_pool_the_rest():
  tasks = ["a"] * 5 + ["b"] * 3
  prompts = [[i] for i in range(8)]
  assert make_groups(tasks, prompts, 2) == [
    Group("a", [[0], [1]]), Group("a", [[2], [3]]), Group("b", [[5], [6]]),
    Group("mixed", [[4], [7]])]
  assert [g.task for g in make_groups(tasks, prompts, 1)] == tasks


def test_runs_alternate_and_follow_a_warm_up():
  calls = []

  def engine(name):
    def generate(prompts, max_tokens):
      calls.append((name, prompts[0][0], max_tokens))
      return [Sample((1, 2), 0.0, 0.0)]
    return Engine(name, generate, lambda: calls.append((name, "forgets")))

  groups = [Group("t", [[0]]), Group("t", [[1]])]
  results = run_interleaved([engine("p"), engine("s")], groups, 128, 2)
  assert calls == [("p", 0, 8), ("s", 0, 8), ("p", 1, 8), ("s", 1, 8),
                   ("p", "forgets"), ("s", "forgets"),
                   ("p", 0, 128), ("s", 0, 128), ("s", 1, 128), ("p", 1, 128),
                   ("p", "forgets"), ("s", "forgets"),
                   ("s", 0, 128), ("p", 0, 128), ("p", 1, 128), ("s", 1, 128)]
  assert [len(result.runs["p"]) for result in results] == [2, 2]


@pytest.mark.parametrize("warm, cached", [(False, [0, 0]), (True, [16, 8])])
def test_prompts_are_new_to_an_engine_in_every_run_unless_it_is_to_be_warm(warm, cached):
  """One prompt has two full pages, the other one; they begin alike, and were read to warm up."""
  prompts = [[*range(5, 13), *range(20, 31)], [*range(5, 13), 40, 41]]
  llm = tiny_llm("ngram")
  assert llm.reset_prefix_cache()
  engine = llm_engine(metrics.PLAIN, llm, greedy(), warm)
  results = run_interleaved([engine], [Group("t", prompts)], 3, 2)
  runs = results[0].runs[metrics.PLAIN]
  assert [[s.cached_tokens for s in run.samples] for run in runs] == [cached] * 2
  assert runs[0].samples[0].token_ids == llm.generate(prompts, greedy(max_tokens=3))[0].token_ids
  numbers = metrics.summarise(results, 3, True)
  assert numbers["all"]["engines"][metrics.PLAIN]["cached_tokens"] == sum(cached)
  assert numbers["all"]["prompt_tokens"] == 29
  assert numbers["groups"][0]["engines"][metrics.PLAIN]["cached_tokens"] == cached


def test_what_an_llm_has_learned_of_earlier_prompts_it_forgets(monkeypatch):
  """Pages, and what drafters keep of outputs; not while a request runs."""
  llm, forgotten = tiny_llm("ngram"), []
  feed = Feed(lambda texts: llm.engine.inputs.draft, 1, lambda prompt, output: None,
              lambda: forgotten.append(True))
  monkeypatch.setattr(llm.engine.inputs, "feed", feed)
  prompt = [*range(30, 50)]
  cached = lambda: llm.generate([prompt], greedy(max_tokens=2))[0].num_cached_tokens
  cached()
  assert cached() == 16 and llm.reset_prefix_cache() and cached() == 0 and cached() == 16
  stream = llm.stream([prompt], greedy(max_tokens=9, ignore_eos=True))
  next(stream)
  assert not llm.reset_prefix_cache() and forgotten == [True]
  stream.close()
  assert cached() == 16 and is_idle(llm)


NOT_DRAFTED = SpeculativeStats()


def result(task, plain_s, spec_s, ids, other=None, stats=NOT_DRAFTED):
  """Three runs per engine; the middle one takes the given time."""
  runs = {name: [Run(seconds + extra, [Sample(tuple(tokens), 0.5, seconds, own)])
                 for extra in (0.2, 0.0, -0.1)]
          for name, seconds, tokens, own in (
            (metrics.PLAIN, plain_s, ids, NOT_DRAFTED),
            (metrics.SPECULATIVE, spec_s, other or ids, stats))}
  return Result(Group(task, [[0] * 7]), runs)


def test_metrics_are_those_of_the_median_runs():
  stats = SpeculativeStats(20, 10, 40, 20, 40, (2, 2, 2, 2, 2), (10, 0, 0, 0, 10))
  numbers = metrics.summarise(
    [result("a", 4.5, 2.5, range(41), stats=stats), result("b", 1.5, 1.5, [7] * 41)], 128, True)
  task = numbers["tasks"]["a"]["engines"]
  plain, spec = task["plain"], task["speculative"]
  assert plain["tokens_per_s"] == pytest.approx(41 / 4.5)
  assert plain["decode_tokens_per_s"] == pytest.approx(10.0)
  assert (spec["ratio"], spec["decode_ratio"]) == pytest.approx((4.5 / 2.5, 2.0))
  assert (plain["ttft_s"], plain["tpot_s"]) == pytest.approx((0.5, 0.1))
  assert plain["latency_s"] == pytest.approx(0.5 + 127 * 0.1)
  assert (spec["acceptance_rate"], spec["mean_acceptance_length"]) == (0.5, 3.0)
  assert (spec["tokens_per_step"], spec["drafting_share"]) == (2.0, 0.5)
  assert spec["identical_to_plain"] == 1
  assert numbers["all"]["looping_requests"] == 1 and numbers["all"]["requests"] == 2
  assert numbers["all"]["engines"]["speculative"]["ratio"] == pytest.approx(6.0 / 4.0)
  assert numbers["without_loops"]["engines"]["speculative"]["ratio"] == pytest.approx(1.8)
  assert list(numbers["tasks_without_loops"]) == ["a"]


def test_outputs_differ_unless_only_an_end_token_is_missing():
  same = metrics.block([result("a", 1, 1, [1, 2, 9], [1, 2])], 8, True, frozenset({9}))
  differs = metrics.block([result("a", 1, 1, [1, 2, 9], [1, 3, 9])], 8, True, frozenset({9}))
  sampled = metrics.block([result("a", 1, 1, [1], [2])], 8, False)
  of = lambda block: block["engines"]["speculative"].get("identical_to_plain")
  assert (of(same), of(differs), of(sampled)) == (1, 0, None)


def test_a_benchmark_of_loops_alone_says_so():
  looping = [result("a", 2.0, 1.0, [7] * 41)]
  numbers = {**metrics.summarise(looping, 64, True), "peak_memory_mib": 1.0,
             "settings": {"max_tokens": 64, "repeats": 3}}
  assert numbers["without_loops"] is None
  assert "looping texts included" in report.table(numbers)
  assert "Cached tokens: plain 0, speculative 0, of 7 prompt tokens." in report.table(numbers)


@pytest.fixture
def fake(monkeypatch):
  llm = type("Fake", (FakeLLM,), {"made": []})
  monkeypatch.setattr(cli_flags, "load_llm", llm)
  return llm


def test_bench_writes_table_and_json(fake, capsys, tmp_path):
  file = tmp_path / "out.json"
  assert main.main(["bench", "--json", str(file), "--repeats", "2", "--task", "chat"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("task") and "chat" in out and "Speculation makes this" in out
  numbers = json.loads(file.read_text(encoding="utf-8"))
  assert numbers["settings"]["max_tokens"] == 128 and numbers["settings"]["repeats"] == 2
  assert not numbers["settings"]["warm_prompts"]
  assert {"command", "date", "machine", "versions", "peak_memory_mib"} <= set(numbers)
  assert numbers["machine"]["cores"] >= 1 and numbers["versions"]["jax"]
  assert numbers["all"]["requests"] == 3 and len(numbers["groups"]) == 3
  assert numbers["all"]["engines"]["speculative"]["identical_to_plain"] == 3
  plain, speculative = fake.made
  assert speculative.model is plain.loaded  # the weights are shared
  assert (plain.speculative.method, speculative.speculative.method) == ("none", "ngram")


def test_bench_batches_and_leaves_out_what_is_too_long(fake, capsys, tmp_path):
  rows = [{"prompt": "x" * n} for n in (5, 6, 7, 100)]
  path = write(tmp_path, "\n".join(map(json.dumps, rows)))
  file = tmp_path / "out.json"
  argv = ["bench", "--dataset", str(path), "--max-model-len", "64", "--max-tokens", "16",
          "--batch-size", "2", "--json", str(file), "--raw"]
  assert main.main(argv) == 0
  assert "1 prompts were left out" in capsys.readouterr().err
  numbers = json.loads(file.read_text(encoding="utf-8"))
  assert [len(group["prompt_tokens"]) for group in numbers["groups"]] == [2, 1]
  assert fake.made[0].engine.config.max_num_seqs == 2
  assert main.main([*argv, "--max-tokens", "64"]) == 2


def test_bench_plots(fake, capsys, tmp_path):
  pytest.importorskip("matplotlib")
  file = tmp_path / "plot.png"
  assert main.main(["bench", "--plot", str(file), "--repeats", "1", "--task", "math"]) == 0
  assert file.read_bytes().startswith(b"\x89PNG")


def test_missing_extras_are_named_before_anything_runs(fake, capsys, monkeypatch, tmp_path):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert main.main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
  assert "--plot needs matplotlib" in capsys.readouterr().err
  assert main.main(["bench", "--compare", "hf"]) == 2
  assert "missing: torch, transformers" in capsys.readouterr().err
  assert not fake.made


def test_hf_comparison_refuses_what_transformers_would_do_otherwise(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
  check_hf(SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), 1)
  with pytest.raises(ValueError, match="--batch-size 1, got 8"):
    check_hf(SamplingParams(temperature=0.0), 8)
  with pytest.raises(ValueError, match="is greedy"):
    check_hf(SamplingParams(temperature=0.5), 1)
