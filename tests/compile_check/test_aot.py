"""compile-check with the real compilers, of TPU and GPU programs: run with `make aot`."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import pytest

from jspec.cli import main
from jspec.compile_check import case as case_lib
from jspec.compile_check import check as check_lib
from jspec.compile_check import chips, models, program
from jspec.compile_check.case import Case


def compiler_for(chip: str) -> None:
  missing = case_lib.missing_compiler(chips.find(chip).platform)
  if missing:
    pytest.skip(missing)
  program.prepare()


AOT_CASES = [Case("llama-3.1-8b", "v5e"), Case("llama-3.1-8b", "v5e", tp=4),
             Case("llama-3.1-8b", "H200"), Case("llama-3.1-8b", "H200", tp=2)]


@pytest.mark.aot
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: f"{case.chip}-tp{case.tp}")
def test_the_step_compiles_with_its_kernel_in_place_and_as_the_baseline_has_it(case):
  compiler_for(case.chip)
  found = check_lib.run(case)
  hopper = "mosaic_gpu" if jax.__version_info__ >= (0, 12) else "triton"
  expected = {"v5e": "tpu", "H200": hopper}[case.chip]
  widths = len(program.widths(case))
  for depth, compiled in found["compiled"].items():
    assert compiled["kernels"] == {expected: int(depth) * widths}
    assert compiled["pool_copies"] == 0
    # Every byte of the state is updated in place; a TPU pads some of it.
    assert compiled["state_bytes"] <= compiled["alias_bytes"] <= 1.03 * compiled["state_bytes"]
    assert compiled["output_bytes"] - compiled["alias_bytes"] < 1e6
    if case.tp > 1:  # sums of 8 rows and what is left of the vocabulary: never whole logits
      assert compiled["largest_collective"]["bytes"] < 1e6, compiled["largest_collective"]
  sums = {"all-reduce": 2.0} if case.tp > 1 else {}
  assert {k: n for k, n in found["per_layer"]["collectives"].items() if n} == sums
  # A copy of a layer's keys, kept until the end, would be this much. The TPU compiler of jax 0.10
  # lays some weights out anew before the loop, more than that: there only pool_copies tells.
  if case.tp == 1 or case.chip != "v5e" or jax.__version_info__ >= (0, 12):
    assert found["per_layer"]["temp_bytes"] < 65 * 128 * 1024 * 2 // case.tp
  before = check_lib.baseline_of(found, check_lib.read_results(check_lib.BASELINE))
  if before is not None:  # there is one for each JAX of constraints.txt
    assert check_lib.differences(found, before) == []


@pytest.mark.aot
def test_a_pool_too_large_for_vmem_is_not_moved_there():
  compiler_for("v5e")
  case = Case("llama-3.1-8b", "v5e", batch=8)
  found = check_lib.run(case, (1,))["compiled"]["1"]
  pool = math.prod((8 * 65, 128, 1024)) * 2
  assert pool > chips.find("v5e").vmem
  assert found["pool_copies"] == found["pool_stagings"] == 0 and found["temp_bytes"] < pool


@pytest.mark.aot
def test_extrapolation_gives_what_all_layers_give():
  compiler_for("H200")
  config = dataclasses.replace(models.with_depth(models.find("llama-3.1-8b"), 4), width=512,
                               mlp_dim=1024, vocab_size=4096)
  case = Case("llama-3.1-8b", "H200", context=1024)
  devices = program.devices_of(chips.find("H200"), 1)
  compiled = {n: program.compile_step(program.build(case, models.with_depth(config, n), devices))
              for n in (*check_lib.DEPTHS, config.num_layers)}
  whole = compiled.pop(config.num_layers)
  guess = check_lib._whole(compiled, config.num_layers)
  for name in check_lib.EXACT:
    assert guess[name] == whole[name], name
  assert guess["temp_bytes"] == pytest.approx(whole["temp_bytes"], rel=0.3)


@pytest.mark.aot
def test_the_command_writes_json_and_tells_a_difference(tmp_path, capsys, monkeypatch):
  compiler_for("v5e")
  file = tmp_path / "result.json"
  argv = ["compile-check", "--chip", "v5e", "--model", "smollm2-135m", "--context", "512",
          "--layers", "1", "--json", str(file)]
  assert main.main(argv) == 0
  out, err = capsys.readouterr()
  assert "compiled, not run" in out and "1 layers: lowered in" in out and "nothing is run" in err
  written = json.loads(file.read_text(encoding="utf-8"))["results"][0]
  assert written["compiled"]["1"]["argument_bytes"] > 2 * 49152 * 576
  monkeypatch.setattr(check_lib, "BASELINE", file)
  assert main.main([*argv, "--baseline"]) == 0
  written["compiled"]["1"]["argument_bytes"] += 1
  check_lib.write_results([written], file)
  assert main.main([*argv[:-2], "--baseline"]) == 1
  assert "argument_bytes is" in capsys.readouterr().err
