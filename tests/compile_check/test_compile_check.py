"""compile-check: its arithmetic and its refusals; real programs are compile_check/test_aot.py's."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jspec.cli import main
from jspec.compile_check import case as case_lib
from jspec.compile_check import check as check_lib
from jspec.compile_check import chips, command, hlo, models, program, report, roofline
from jspec.compile_check.case import Case
from jspec.config import ModelConfig

# ------------------------------------------------------------------ tables


def test_models_have_the_parameters_their_names_promise():
  counts = {"llama-3.1-8b": 8.03e9, "llama-3.3-70b": 70.6e9, "qwen3-8b": 8.19e9,
            "smollm2-135m": 134.5e6, "llama-3.2-1b": 1.24e9, "qwen3-0.6b": 0.596e9}
  for name, config in {**models.MODELS, **models.DRAFT_MODELS}.items():
    layers, head = roofline.matrix_weights(config)
    total = layers + head * (1 if config.tie_embeddings else 2)
    assert total == pytest.approx(counts.pop(name), rel=0.005), name
  assert not counts


def test_draft_models_share_their_targets_vocabulary():
  for target in models.DRAFT_MODEL_OF:
    assert models.draft_model_of(target).vocab_size == models.find(target).vocab_size


def test_the_embedded_models_shape_is_the_tables(smollm2):
  known = models.find("smollm2-135m")
  for field in ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                "mlp_dim", "rope_theta", "tie_embeddings"):
    assert getattr(known, field) == getattr(smollm2.config, field), field


def test_every_chip_is_plausible():
  """Orders of magnitude: a figure in the wrong unit is off by a thousand."""
  for chip in chips.CHIPS.values():
    assert 10e9 < chip.memory < 200e9 and 0.5e12 < chip.bandwidth < 8e12
    assert 100 < chip.flops / chip.bandwidth < 700  # operations per byte
    assert 4 < chip.bandwidth / chip.link < 20 and chip.source
    assert (chip.vmem is None) == (chip.platform == "gpu")
    sizes = [size for size, _ in chip.topologies]
    assert sizes == sorted(sizes) and (chip.platform == "gpu" or sizes[-1] == chips.MAX_DEVICES)
  h100, h200 = chips.CHIPS["H100"], chips.CHIPS["H200"]
  assert (h100.flops, h100.link) == (h200.flops, h200.link)  # the same chip, other memory


def test_a_gpus_target_config_names_its_memory_and_capability():
  text = chips.target_config(chips.find("h200"))
  assert "major: 9 minor: 0" in text and "memory_bandwidth: 4800000000000" in text
  assert "device_memory_size: 141000000000" in text and "{{" not in text
  assert "major: 8 minor: 0" in chips.target_config(chips.find("A100"))


# ------------------------------------------------------------------ roofline

# Two layers: attention 4*(2*2*(2+1)) = 48, MLP 3*4*8 = 96; head 4*16.
TINY = ModelConfig("llama", vocab_size=16, width=4, num_layers=2, num_heads=2, num_kv_heads=1,
                   head_dim=2, mlp_dim=8, max_positions=64)
SLOW = dataclasses.replace(chips.CHIPS["v5e"], bandwidth=100.0, flops=1000.0, link=10.0)


def test_forward_cost_by_hand():
  assert roofline.matrix_weights(TINY) == (2 * (48 + 96), 64)
  cost = roofline.forward_cost(TINY, tp=1, batch=3, queries=2, context=10, weight_bytes=2,
                               kv_bytes=2)
  rows = 6
  assert cost.flops == 2 * rows * (288 + 64) + 4 * rows * 12 * 2 * 2 * 2
  assert cost.bytes == 2 * (288 + 64) + 3 * 12 * (2 * 2 * 1 * 2 * 2) + 2 * 4 * rows * 16
  assert cost.sums == 0


def test_devices_share_the_work_and_add_it_up():
  one = roofline.forward_cost(TINY, 1, 1, 1, 10, 2, 2)
  two = roofline.forward_cost(TINY, 2, 1, 1, 10, 2, 2)
  assert two.flops == one.flops / 2 and two.sums == 2 * 2 + 1
  assert two.bytes_summed == 4 * 4  # float32
  # The single kv head is held by both.
  assert two.bytes == (one.bytes - 11 * 16) / 2 + 11 * 16


def test_pages_of_8_bits_bring_a_scale_per_head_and_token():
  wide = roofline.forward_cost(TINY, 1, 1, 1, 10, 2, 2)
  narrow = roofline.forward_cost(TINY, 1, 1, 1, 10, 2, 1)
  assert wide.bytes - narrow.bytes == 11 * 2 * 2 * ((2 * 2) - (2 * 1 + 4))


def test_seconds_by_hand():
  cost = roofline.Cost(flops=5000.0, bytes=200.0, sums=3, bytes_summed=40.0)
  assert roofline.seconds(cost, SLOW, 1) == 5.0
  assert roofline.seconds(cost, SLOW, 1, overlapped=False) == 7.0
  ring = 3 * 6 * (40.0 / 4 / 10.0 + roofline.HOP_SECONDS)
  assert roofline.seconds(cost, SLOW, 4) == pytest.approx(5.0 + ring)


def test_verification_is_bound_by_memory_until_arithmetic_takes_longer():
  chip = dataclasses.replace(SLOW, bandwidth=100.0, flops=400.0)
  rows = roofline.verification(TINY, chip, 1, 1, 10, 2, 2)
  kinds = [row["bound_by"] for row in rows]
  assert kinds[0] == "memory" and kinds[-1] == "arithmetic" and kinds == sorted(kinds, reverse=True)
  assert rows[0]["ratio"] == rows[0]["serial_ratio"] == 1
  assert [row["queries"] for row in rows] == list(roofline.QUERIES)


@pytest.mark.parametrize("chip", list(chips.CHIPS))
@pytest.mark.parametrize("tp", [1, 8])
def test_verifying_eight_tokens_of_8b_costs_less_than_a_tenth_more(chip, tp):
  rows = {row["queries"]: row for row in roofline.verification(
    models.find("llama-3.1-8b"), chips.find(chip), tp, 1, 8192, 2, 2)}
  assert rows[8]["ratio"] < 1.1 and rows[8]["serial_ratio"] < 1.1


def test_8b_in_bfloat16_takes_its_weights_over_the_bandwidth():
  """15.0 GB of matrices and 1.07 GB of pages at 4.8 TB/s."""
  rows = roofline.verification(models.find("llama-3.1-8b"), chips.find("H200"), 1, 1, 8192, 2, 2)
  assert rows[0]["seconds"] == pytest.approx((15.01e9 + 1.074e9) / 4.8e12, rel=0.002)


def test_break_even_counts_the_drafting():
  ngram = check_lib.prediction(Case("llama-3.1-8b", "v5p"), models.find("llama-3.1-8b"),
                               chips.find("v5p"))
  draft = check_lib.prediction(Case("llama-3.1-8b", "v5p", "draft_model"),
                               models.find("llama-3.1-8b"), chips.find("v5p"))
  assert ngram["draft_seconds"] == 0 and 1 < ngram["break_even_tokens"] < 1.1
  # Seven passes of 1.24e9 bfloat16 weights (and pages) next to one of 7.5e9.
  assert 7 * 1.24 / 7.5 < draft["break_even_tokens"] - 1 < 7 * 1.5 / 7.5


# ------------------------------------------------------------------ program text

TEXT = """
HloModule jit_run
%fused.1 (p: bf16[9,8,64]) -> bf16[64,9,8] {
  %p = bf16[9,8,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %t = bf16[64,9,8]{2,1,0} transpose(%p), dimensions={2,0,1}
}
ENTRY %main {
  %all-reduce.1 = bf16[4,4096]{1,0:T(4,128)(2,1)} all-reduce(%x), to_apply=%add
  %ar.2 = (f32[2]{0}, s32[3]{0}) all-reduce(%a, %b), metadata={op_name="jit(run)/verify/max"}
  %ars = ((f32[8,16]{1,0}), f32[8,16]{1,0}) all-reduce-start(%c), to_apply=%add
  %ard = f32[8,16]{1,0} all-reduce-done(%ars)
  %ars.2 = f32[8,16]{1,0} all-reduce-start(%c), to_apply=%add
  %ags = (bf16[128,2]{1,0}, bf16[256,2]{1,0}) all-gather-start(%e), metadata={op_name="jit/embed"}
  %agd = bf16[256,2]{1,0} all-gather-done(%ags)
  %cps = (f32[1,6]{1,0}, f32[1,6]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%f)
  %k.1 = bf16[1,8,32]{2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
  %k.2 = bf16[1,8,32]{2,1,0} custom-call(%q), custom_call_target="TopK"
  %copy.7 = bf16[9,8,64]{1,2,0} copy(%pages)
  %copy.8 = bf16[9,8,63]{1,2,0} copy(%others)
  %cs = (bf16[9,8,64]{2,1,0:T(8,128)S(1)}, bf16[9,8,64]{2,1,0}, u32[]{:S(2)}) copy-start(%pages.2)
  ROOT %r = (bf16[9,8,64]{2,1,0}) tuple(%copy.7)
}
"""


def test_collectives_are_counted_once_and_by_their_results():
  assert hlo.collectives(TEXT) == {
    "all-gather": {"count": 1, "bytes": 256 * 2 * 2},
    "all-reduce": {"count": 4, "bytes": 4 * 4096 * 2 + (2 + 3) * 4 + 2 * 8 * 16 * 4},
    "collective-permute": {"count": 1, "bytes": 6 * 4}}
  assert hlo.collectives("") == {}


def test_the_largest_collective_says_where_it_is_from():
  assert hlo.largest_collective(TEXT)["bytes"] == 4 * 4096 * 2
  without = TEXT.replace("bf16[4,4096]", "bf16[4,1]")
  assert hlo.largest_collective(without) == {"kind": "all-gather", "bytes": 1024,
                                             "where": "jit/embed"}
  assert hlo.largest_collective("") is None


def test_kernels_are_told_from_other_custom_calls():
  assert hlo.kernels(TEXT) == {"tpu": 1}


def test_copies_of_a_pool_are_found_in_any_order_and_place():
  """The transpose inside a fusion and the copy; not the smaller copy, nor the one into VMEM."""
  found = hlo.copies_of(TEXT, (9, 8, 64))
  assert [line.split(" = ")[0] for line in found] == ["ROOT %t", "%copy.7"]
  assert [line.split(" = ")[0] for line in hlo.staged(TEXT, (9, 8, 64))] == ["%cs"]
  assert hlo.copies_of(TEXT, (9, 8, 62)) == []


@pytest.mark.parametrize("dtype, size", [("bf16", 2), ("f32", 4), ("pred", 1), ("u8", 1),
                                         ("f8e4m3fn", 1), ("s64", 8)])
def test_bytes_of_a_dtype(dtype, size):
  assert hlo.num_bytes(dtype, (3, 5)) == 15 * size


# ------------------------------------------------------------------ results


def figures(**changes):
  return {"lower_seconds": 1.0, "compile_seconds": 2.0, "argument_bytes": 1000, "output_bytes": 50,
          "alias_bytes": 40, "temp_bytes": 100, "code_bytes": 0, "state_bytes": 40, "flops": 7.0,
          "bytes_accessed": 9.0, "pool_copies": 0, "pool_stagings": 0, "largest_collective": None,
          "collectives": {"all-reduce": {"count": 10, "bytes": 100}}, "kernels": {"tpu": 4},
          **changes}


def test_a_model_is_extrapolated_in_a_straight_line():
  deeper = figures(argument_bytes=1300, temp_bytes=110, kernels={"tpu": 6},
                   collectives={"all-reduce": {"count": 14, "bytes": 180},
                                "all-gather": {"count": 1, "bytes": 8}})
  whole = check_lib._whole({2: figures(), 3: deeper}, 32)
  assert whole["argument_bytes"] == 1000 + 30 * 300 and whole["temp_bytes"] == 100 + 30 * 10
  assert whole["kernels"] == {"tpu": 4 + 30 * 2}
  assert whole["collectives"] == {"all-reduce": {"count": 10 + 30 * 4, "bytes": 100 + 30 * 80},
                                  "all-gather": {"count": 30, "bytes": 240}}
  per_layer = check_lib._per_layer({2: figures(), 3: deeper}, num_widths=2)
  assert per_layer["collectives"] == {"all-gather": 0.5, "all-reduce": 2.0}
  assert per_layer["kernels"] == 1.0 and per_layer["temp_bytes"] == 10
  assert check_lib._whole({2: figures()}, 32) is None
  assert check_lib._whole({32: figures()}, 32) == figures()


def test_memory_counts_donated_arguments_once():
  chip = dataclasses.replace(chips.CHIPS["v5e"], memory=1110)
  assert check_lib.memory(figures(), chip) == {"used_bytes": 1110, "memory_bytes": 1110,
                                               "fits": True}
  assert not check_lib.memory(figures(code_bytes=1), chip)["fits"]


def result(**changes):
  case = Case("llama-3.1-8b", "H200", tp=2)
  whole = {**figures(), "layers": 32, "from": "extrapolated from 1 and 2 layers",
           **check_lib.memory(figures(), chips.find("H200"))}
  return {"case": case.name, "versions": {"jax": "1"}, "compiled": {"2": figures()},
          "whole": whole, "per_layer": {"collectives": {"all-reduce": 2.0}, "kernels": 1.0,
                                        "temp_bytes": 0},
          "prediction": check_lib.prediction(case, models.find(case.model), chips.find("H200")),
          **changes}


def test_a_result_equals_itself_and_each_change_is_named(tmp_path):
  check_lib.write_results([result()], tmp_path / "b.json")
  before = check_lib.baseline_of(result(), check_lib.read_results(tmp_path / "b.json"))
  assert check_lib.differences(result(), before) == []
  for name, value in (("argument_bytes", 1001), ("pool_copies", 1), ("kernels", {}),
                      ("temp_bytes", 120), ("flops", None), ("bytes_accessed", 10.0),
                      ("collectives", {"all-reduce": {"count": 11, "bytes": 100}})):
    found = check_lib.differences(result(compiled={"2": figures(**{name: value})}), before)
    assert len(found) == 1 and name in found[0], name
  noise = result(compiled={"2": figures(temp_bytes=105, compile_seconds=99.0)})
  assert check_lib.differences(noise, before) == []


def test_results_are_added_to_those_in_the_file(tmp_path):
  file = tmp_path / "b.json"
  other, another_jax = result(case="another"), result(versions={"jax": "2"})
  check_lib.write_results([other, result(per_layer=None)], file)
  check_lib.write_results([another_jax, result()], file)
  rows = check_lib.read_results(file)
  assert len(rows) == 3 and all(row in rows for row in (other, another_jax, result()))


def test_the_baseline_of_another_jax_is_not_compared_with():
  rows = [result(versions={"jax": "2"}), result(case="another"), result()]
  assert check_lib.baseline_of(result(), rows) is rows[2]
  assert check_lib.baseline_of(result(), rows[:2]) is None


def test_reports_say_what_matters():
  text = report.one(result())
  assert "compiled, not run" in text and "page-pool copies: 0" in text and "4 tpu" in text
  assert "extrapolated from 1 and 2 layers" in text and "fits" in text
  assert "10 all-reduce (100 B)" in text and "v(T)/v(1)" in text
  whole = {**result()["whole"], "fits": False}
  assert "DOES NOT FIT" in report.one(result(whole=whole))
  unknown = figures(flops=None, bytes_accessed=None, kernels={})
  text = report.one(result(compiled={"2": unknown}, whole=None, per_layer=None))
  assert "gives no FLOPs" in text and "none (XLA)" in text
  head, rule, row = report.table([result()]).splitlines()
  assert head.count("|") == rule.count("|") == row.count("|")
  assert "| H200 | 2 | 1.11 kB of 141 GB | yes |" in row


@pytest.mark.parametrize("number, text", [(0, "0 B"), (999, "999 B"), (15.01e9, "15 GB"),
                                          (1_234_567, "1.23 MB")])
def test_sizes(number, text):
  assert report.size(number) == text


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("argv, words", [
  (["--model", "gpt-5"], "model 'gpt-5' is unknown; known: llama-3.1-8b, llama-3.3-70b"),
  (["--chip", "v9"], "chip 'v9' is unknown; known: v5e, v5p, v6e, tpu7x, A100, H100, H200"),
  (["--drafter", "beagle"], "drafter 'beagle' is unknown; known: none, ngram, suffix, draft"),
  (["--drafter", "draft_model", "--model", "smollm2-135m"], "no draft model is known for 'smollm2"),
  (["--drafter", "none", "--nodes", "4"], "nodes=4 does not suit drafter 'none'"),
  (["--nodes", "1"], "nodes=1 does not suit drafter 'ngram'"),
  (["--tp", "3"], "tp=3 is not one of (1, 2, 4, 8)"),
  (["--tp", "2", "--model", "smollm2-135m"], "num_heads=9 is not divisible by tp=2"),
  (["--batch", "0"], "batch must be >= 1, got 0"),
  (["--context", "999999"], "context=999999 exceeds llama-3.1-8b's 131072 positions"),
  (["--dtype", "float16"], "dtype 'float16' is not one of"),
  (["--kv-cache-dtype", "int4"], "kv_cache_dtype 'int4' is not one of"),
  (["--layers", "2,3,4"], "--layers must be one or two numbers"),
  (["--layers", "some"], "--layers must be one or two numbers"),
  (["--json", "no-such-folder/x.json"], "its folder doesn't exist"),
])
def test_bad_input_is_one_sentence_before_anything_is_compiled(monkeypatch, capsys, argv, words):
  monkeypatch.setattr(program, "compile_step", lambda _: pytest.fail("compiled"))
  assert main.main(["compile-check", *argv]) == 2
  out, err = capsys.readouterr()
  assert words in err and out == "" and err.count("\n") == 1, err


def test_a_vocabulary_that_does_not_divide_is_refused(monkeypatch):
  odd = dataclasses.replace(models.find("llama-3.1-8b"), vocab_size=128257)
  monkeypatch.setitem(models.MODELS, "odd", odd)
  with pytest.raises(ValueError, match="odd: vocab_size=128257 is not divisible by tp=2"):
    Case("odd", "v5e", tp=2)


def test_a_kv_dtype_that_the_chip_lacks_is_refused(monkeypatch, capsys):
  older = dataclasses.replace(chips.CHIPS["A100"], lacks=("fp8", "fp8_e4m3"))
  monkeypatch.setitem(chips.CHIPS, "A100", older)
  monkeypatch.setattr(program, "compile_step", lambda _: pytest.fail("compiled"))
  assert main.main(["compile-check", "--chip", "A100", "--kv-cache-dtype", "fp8"]) == 2
  assert ("chip A100 lacks kv_cache_dtype 'fp8'; it has auto, int8, fp8_e5m2"
          in capsys.readouterr().err)


@pytest.mark.parametrize("chip, wheel", [("v5e", "libtpu"), ("H200", "jax-cuda13-plugin")])
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, capsys, chip, wheel):
  monkeypatch.setattr(case_lib, "_importable", lambda module: False)
  monkeypatch.setattr(program, "compile_step", lambda _: pytest.fail("compiled"))
  assert main.main(["compile-check", "--chip", chip]) == 2
  err = capsys.readouterr().err
  assert f"needs {wheel}" in err and "extra 'aot'" in err


TOO_OLD = "jax 0.1[01][.0-9]*: Mosaic GPU of 0.12"  # what an older JAX hears first


@pytest.mark.parametrize("chip, attention, page_size, head_dim, words", [
  ("v5e", "kernel", 12, 128, "page_size=12: a multiple of"),
  ("H200", "mosaic_gpu", 12, 128, f"page_size=12: must be a power of two|{TOO_OLD}"),
  ("H200", "mosaic_gpu", 128, 96, f"head_dim=96: must be 64, 128 or 256|{TOO_OLD}"),
  ("H200", "kernel", 128, 320, "head size 320 > 256"),
])
def test_what_the_chips_kernel_cannot_do_is_refused_before_compiling(
    monkeypatch, chip, attention, page_size, head_dim, words):
  """Of shapes alone: no compiler is needed to say so."""
  monkeypatch.setattr(program, "compile_step", lambda _: pytest.fail("compiled"))
  monkeypatch.setattr(program, "devices_of", lambda *_: jax.devices()[:1])
  monkeypatch.setitem(models.MODELS, "odd", dataclasses.replace(
    models.find("llama-3.1-8b"), head_dim=head_dim))
  case = Case("odd", chip, context=64, page_size=page_size, attention=attention)
  with pytest.raises(ValueError, match=words):
    check_lib.run(case, (1,))


def test_the_table_holds_what_the_issue_asks_for():
  names = {case.name for case in command.all_cases()}
  assert len(names) == len(command.all_cases())
  for chip in ("v5e", "v6e", "v5p", "H200"):
    for tp in (1, 2, 4, 8):
      assert Case("llama-3.1-8b", chip, tp=tp).name in names
    assert Case("llama-3.3-70b", chip, tp=8).name in names


def test_the_baseline_copies_no_pool_and_fits_where_it_must():
  baseline = check_lib.read_results(check_lib.BASELINE)
  fits = {row["case"] for row in baseline if row["whole"]["fits"]}
  assert {case.name for case in (
    Case("llama-3.1-8b", "H200"), Case("llama-3.1-8b", "v5p"),
    Case("llama-3.3-70b", "H200", tp=8), Case("llama-3.3-70b", "v5p", tp=8))} <= fits
  for row in baseline:
    for compiled in row["compiled"].values():
      assert compiled["pool_copies"] == 0, row["case"]
      assert compiled["alias_bytes"] >= compiled["state_bytes"], row["case"]
  assert {case.name for case in command.all_cases()} <= {row["case"] for row in baseline}
