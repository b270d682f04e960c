"""device_check.py itself, on CPU with interpreted kernels and tiny shapes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from tiny_llm import byte_tokenizer, tiny_config

from jspec.checkpoints import hub
from jspec.model.params import init_params
from jspec.pallas import paged_attention_triton
from scripts.device import kernels as device_kernels
from scripts.device import text as device_text
from scripts.device.part import Clock, Setup

ROOT = pathlib.Path(__file__).parents[2]
SETUP = Setup("gpu", smoke=True, quick=True, model="tiny", layers=2)


def run(platform: str, *arguments: str, path: pathlib.Path):
  """Exit status, output, and the JSON if there is one."""
  done = subprocess.run(
      [sys.executable, ROOT / "scripts/device_check.py", "--platform", platform, "--output", path,
       *arguments], text=True, capture_output=True, timeout=300, cwd=path.parent,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)})
  return done.returncode, done.stdout + done.stderr, (
      json.loads(path.read_text()) if path.exists() else None)


@pytest.mark.parametrize("platform, kernel", [
    ("gpu", "triton"), pytest.param("tpu", "tpu", marks=pytest.mark.slow)])
def test_a_smoke_run_fills_every_part_of_the_report(platform, kernel, tmp_path):
  status, output, report = run(platform, "--cpu-smoke", "--quick", "--model", "no-such-model",
                               path=tmp_path / "out.json")
  assert status == 0, output
  assert report["failures"] == report["dropped"] == []
  assert all(case[kernel]["largest_error"] < 0.02 for case in report["kernels"].values())
  assert len(report["kernels"]) == 2
  assert report["attention_bandwidth"]["copy_gb_per_s"] > 0
  assert {row["backend"] for row in report["attention_bandwidth"]["decode"]} == {kernel}
  assert all(row["share_of_copy"] > 0 for row in report["attention_bandwidth"]["decode"])
  assert set(report["verification_cost"][kernel]["over_one"]) == {"1", "4"}
  assert report["verification_cost"][kernel]["over_one"]["1"] == 1
  assert "'no-such-model' is not to be had" in report["speculation"]["skipped"]


def test_without_time_nothing_is_claimed(tmp_path):
  status, output, report = run("gpu", "--cpu-smoke", "--budget-seconds", "0", "--model",
                               "no-such-model", path=tmp_path / "out.json")
  assert status == 1
  assert "kernels: chain of 8" in report["dropped"]
  assert "verification_cost: triton" in report["dropped"]
  assert report["failures"] == ["no kernel was compared with the reference"], output


def test_without_the_device_it_says_so_and_stops(tmp_path):
  status, output, report = run("gpu", path=tmp_path / "out.json")
  assert status == 2 and report is None
  assert "this needs a gpu; jax has found only [" in output


def wrong(q, *_, **__):
  return q


def broken(*_, **__):
  raise RuntimeError("does not compile")


@pytest.mark.parametrize("kernel", [wrong, broken])
def test_a_kernel_that_disagrees_or_breaks_is_a_failure(monkeypatch, kernel):
  monkeypatch.setattr(paged_attention_triton, "paged_attention", kernel)
  report = {"failures": []}
  device_kernels.kernels(SETUP, Clock(60), {}, report)
  assert len(report["failures"]) == 2
  assert all("kernel triton" in failure for failure in report["failures"])


def test_a_kernel_that_refuses_is_not_a_failure_but_not_compared_either(monkeypatch):
  def refuses(*_, **__):
    raise NotImplementedError("not on Tuesdays")

  monkeypatch.setattr(paged_attention_triton, "paged_attention", refuses)
  report, found = {"failures": []}, {}
  device_kernels.kernels(SETUP, Clock(60), found, report)
  assert report["failures"] == []
  assert "not on Tuesdays" in found["chain of 8"]["triton"]["refused"]
  assert not device_kernels.compared(found)


def test_speculation_reports_speed_and_whether_the_texts_agree(monkeypatch):
  config = tiny_config(max_positions=2048)
  params = init_params(jax.random.key(0), config)
  loaded = hub.LoadedModel(config, params, byte_tokenizer(), "tiny")
  monkeypatch.setattr(hub, "load_model", lambda *_, **__: loaded)
  found = {}
  device_text.speculation(SETUP, Clock(60), found, {})
  assert found["batch 1, none"]["tokens_per_step"] == 1
  assert found["batch 1, ngram"]["tokens_per_s"] > 0
  assert found["batch 1, prompts with the same text"] == "2 of 2"
