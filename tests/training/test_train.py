"""The update, on one device and on eight, and whole training runs of tiny heads."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eagle3_batches import TAPS, TARGET_ID, packed_batch
from tiny_cases import TARGET, target_params
from tiny_llm import tiny_model

from jspec.checkpoints.load_head import load_head
from jspec.cli.main import main
from jspec.training import config as configuration
from jspec.training import evaluate, state, train
from jspec.training.checkpoints import Checkpoints
from jspec.training.config import DataConfig, TrainConfig
from jspec.training.methods import METHODS, make_method
from jspec.training.methods.eagle3 import Eagle3Options
from jspec.training.types import Batch, Method

OPTIONS = Eagle3Options(steps=2, feature_layers=TAPS, train_head=True)


def method():
  return make_method("eagle3", OPTIONS, TARGET, TARGET_ID)


def micro_batches(count: int):
  """[count, 4, T], no two rows alike."""
  one = packed_batch()
  rows = jax.tree.map(lambda x: jnp.concatenate([x, jnp.flip(x, 0)]), one)
  shift = lambda i: rows.replace(token=(rows.token + i) % TARGET.vocab_size)
  return jax.tree.map(lambda *xs: jnp.stack(xs), *[shift(i) for i in range(count)])


def run(update, began, batch, steps=2):
  losses = []
  for _ in range(steps):
    began, metrics = update(began, target_params(), batch)
    losses.append(float(metrics["loss_1"]))
  return losses, began


def test_hidden_states_on_the_fly_are_those_that_were_stored():
  batch, optimizer = micro_batches(1), optax.sgd(0.1)
  bare = batch.replace(hidden=None, feature=None)
  update = jax.jit(state.make_update(method(), optimizer, TARGET))
  start = state.init_state(0, method(), optimizer, target_params())
  # The batch's own states are of packed_batch's tokens, which shift(0) leaves alone.
  np.testing.assert_allclose(run(update, start, bare)[0], run(update, start, batch)[0], rtol=1e-5)


@pytest.mark.parametrize("dp, tp", [
    (4, 2), pytest.param(1, 8, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_losses_on_several_devices_are_those_of_one(dp, tp):
  batch, optimizer = micro_batches(2), optax.adam(1e-2)
  start = state.init_state(0, method(), optimizer, target_params(), ema_decay=0.9)
  update = state.make_update(method(), optimizer, TARGET, ema_decay=0.9)
  want, after = run(jax.jit(update), start, batch)
  mesh = state.make_mesh(dp, tp)
  where = state.shardings(mesh, start)
  held = jax.device_put(start, where)
  if tp > 1:  # split by inference's own table, and Adam's moments with it
    q = held.params["layers"][0]["q"]["w"]
    assert q.addressable_shards[0].data.shape[1] == q.shape[1] // tp
    moment = held.optimizer[0].mu["layers"][0]["q"]["w"]
    assert moment.sharding == q.sharding
  placed = jax.device_put(batch, state.batch_sharding(mesh))
  assert placed.token.addressable_shards[0].data.shape[1] == 4 // dp
  target = jax.device_put(target_params(), state.shardings(mesh, target_params()))
  split = jax.jit(update, out_shardings=(where, None))
  losses = []
  for _ in range(2):
    held, metrics = split(held, target, placed)
    losses.append(float(metrics["loss_1"]))
  np.testing.assert_allclose(losses, want, rtol=1e-5)
  np.testing.assert_allclose(jax.device_get(held.average["fc"]["w"]), after.average["fc"]["w"],
                             atol=1e-5)


def test_the_average_follows_the_parameters_and_is_what_counts():
  optimizer = optax.sgd(1.0)
  start = state.init_state(0, method(), optimizer, target_params(), ema_decay=0.9)
  update = jax.jit(state.make_update(method(), optimizer, TARGET, ema_decay=0.9))
  average = start.params
  now = start
  for step in range(3):
    now, _ = update(now, target_params(), micro_batches(1))
    decay = min(0.9, (1 + step) / (10 + step))
    average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, now.params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), now.best, average)


def test_too_many_devices_are_refused():
  with pytest.raises(ValueError, match="data_parallel=4 times tensor_parallel=4 needs 16 devices"):
    state.make_mesh(4, 4)


# ------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """Conversations whose answers can be learned."""
  path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
  rows = [{"prompt": f"the {a}", "response": f"an {a} and the {b}, an {a} and the {b}."}
          for a in "abcdefgh" for b in "stuvw"]
  path.write_text("\n".join(map(json.dumps, rows)))
  return str(path)


def config_of(texts, folder, name="medusa", **fields):
  options = {"eagle3": {"steps": 2, "feature_layers": [1, 2]}, "eagle": {"num_draft": 2},
             "medusa": {"num_heads": 2}, "medusa2": {"num_heads": 2, "rank": 2},
             "mlp_speculator": {"n_predict": 2, "inner_dim": 16},
             "draft_model": {"num_layers": 1, "num_draft": 2}}[name]
  tree = dict(target="tiny", method=name, output=str(folder), options=options, steps=6,
              data={"conversations": [texts], "validation": 0.2, "max_length": 64, "rows": 2},
              optimizer={"learning_rate": 1e-2, "clip_norm": 1.0},
              checkpoint={"every": 2, "keep": 2}, log={"every": 2}, eval={"every": 4, "batches": 2})
  return configuration.from_dict(tree | fields)


@pytest.fixture
def unmeasured(monkeypatch):
  """Heads are not tried in the engine: its compilation takes longer than all else."""
  monkeypatch.setattr(train, "_prompts", lambda *_: [])


@pytest.mark.parametrize("name", [  # a compilation of the engine each
    pytest.param(name, marks=pytest.mark.slow) if name in ("eagle", "medusa") else name
    for name in METHODS])
def test_every_method_trains_exports_and_drafts(name, texts, tmp_path):
  result = train.train(config_of(texts, tmp_path, name), tiny_model())
  assert result["engine"]["identical"] == result["engine"]["prompts"] > 0
  assert json.loads((tmp_path / "result.json").read_text())["steps"] == 6
  rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [r["step"] for r in rows if r["kind"] == "train"] == [2, 4, 6]
  assert [r["step"] for r in rows if r["kind"] == "eval"] == [4, 6]
  assert 0 <= rows[-1]["top1_1"] <= rows[-1]["top5_1"] <= 1


@pytest.mark.parametrize("learn", ["answers", "all"])
def test_prompts_are_learnt_on_request_and_never_judged(learn, texts, tmp_path):
  data = {"conversations": [texts], "validation": 0.2, "max_length": 64, "rows": 2, "learn": learn}
  run = train._Run(config_of(texts, tmp_path, data=data), tiny_model())
  for batches, prompts_count in ((run.batches, learn == "all"), (run.held_out, False)):
    batch = batches.batch(0)
    text = batch.segment > 0
    assert batch.loss.any() and not batch.loss[~text].any()
    assert (batch.loss == text).all() == prompts_count


def test_an_interrupted_run_goes_on_to_the_same_head(texts, tmp_path, monkeypatch, capsys):
  fields = dict(draft_vocab_size=32, ema=0.5, checkpoint={"every": 5})
  with monkeypatch.context() as patch:  # `resumed` is measured in the engine
    patch.setattr(train, "_prompts", lambda *_: [])
    whole = train.train(config_of(texts, tmp_path / "a", "eagle3", **fields), tiny_model())
  config = config_of(texts, tmp_path / "b", "eagle3", **fields)
  monkeypatch.setattr(train.metrics.Log, "write", _killing_at(4))
  with pytest.raises(KeyboardInterrupt):
    train.train(config, tiny_model())
  monkeypatch.undo()
  assert Checkpoints(config.checkpoint_folder, read_only=True).latest() == 4
  assert "going on" not in capsys.readouterr().out
  resumed = train.train(config, tiny_model())
  assert resumed["validation"] == whole["validation"]
  said = capsys.readouterr().out.splitlines()
  counts = re.fullmatch(r"(\d+) sequences of \d+ tokens, \d+ of them to learn; (\d+) held out",
                        said[1])
  assert counts is not None and sum(map(int, counts.groups())) == 40
  expected = (f"reading {texts}", "training eagle3 for 6 steps; the first one ",
              f"going on from step 4 of 6, the last checkpoint in {config.checkpoint_folder}",
              f"exported to {tmp_path / 'b' / 'head'}", "measuring it in the engine on ")
  told = [line for line in said if line.startswith(expected)]
  assert len(told) == len(expected) and all(map(str.startswith, told, expected))
  heads = [load_head(tmp_path / name / "head", tiny_model().config)[1] for name in "ab"]
  jax.tree.map(np.testing.assert_array_equal, *heads)


def _killing_at(step):
  """A SIGTERM in the middle of that step: what it has begun is finished and saved."""
  write = train.metrics.Log.write

  def killing(self, at, *args, kind="train"):
    if at == step and kind == "eval":
      os.kill(os.getpid(), signal.SIGTERM)
    return write(self, at, *args, kind=kind)

  return killing


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(texts, tmp_path):
  config = config_of(texts, tmp_path, steps=30, optimizer={
      "learning_rate": 1e30, "warmup_steps": 3, "schedule": "constant"})
  with pytest.raises(FloatingPointError, match="is not finite"):
    train.train(config, tiny_model())
  assert Checkpoints(config.checkpoint_folder, read_only=True).latest() in (None, 2)


def test_a_head_can_start_from_an_exported_one(texts, tmp_path, unmeasured):
  config = config_of(texts, tmp_path / "a", "eagle3", draft_vocab_size=32)
  train.train(config, tiny_model())
  more = dataclasses.replace(config, output=str(tmp_path / "b"), steps=1,
                             init_from=str(tmp_path / "a" / "head"))
  train.train(more, tiny_model())
  first, second = (load_head(tmp_path / n / "head", tiny_model().config)[1] for n in "ab")
  np.testing.assert_array_equal(first["target_id"], second["target_id"])
  # One small step from where the first run ended, far from another random head.
  assert np.abs(first["fc"]["w"] - second["fc"]["w"]).max() < 0.05


@pytest.mark.parametrize("change, message", [
    ({"options": {"number": 3}}, "unknown key options.number"),
    ({"options": {"steps": 2, "feature_layers": [0, 1]}}, "0 is the embedding"),
    ({"export_style": "ibm"}, "export_style='ibm' is not one of specforge, speculators, compact"),
    ({"options": {"steps": 2, "feature_layers": [1, 9]}}, "must lie in 0..2"),
    ({"data": {"conversations": ["texts"], "max_length": 8, "row_length": 64}}, "longer than 8"),
    ({"draft_vocab_size": 999}, "draft vocabulary of 999 tokens: must lie in"),
    ({"data": {"conversations": ["nowhere.jsonl"], "max_length": 64}}, "nowhere.jsonl"),
])
def test_bad_configurations_are_refused_before_training(change, message, texts, tmp_path):
  if change.get("data", {}).get("conversations") == ["texts"]:
    change = {"data": change["data"] | {"conversations": [texts]}}
  with pytest.raises(ValueError, match=message):
    train.train(config_of(texts, tmp_path, "eagle3", **change), tiny_model())


def test_a_head_that_computes_something_else_is_no_start(texts, tmp_path, unmeasured):
  config = config_of(texts, tmp_path / "a", "eagle3", draft_vocab_size=32, steps=1)
  train.train(config, tiny_model())
  other = lambda **fields: dataclasses.replace(
      config, output=str(tmp_path / "b"), init_from=str(tmp_path / "a" / "head"), **fields)
  options = {"steps": 2, "feature_layers": [1, 2]}
  for changed, said in ((other(options=options | {"feature_layers": [2, 1]}), "feature_layers"),
                        (other(options=options | {"norm_output": True}), "norm_output"),
                        (other(draft_vocab_size=16), "drafts from 32 tokens")):
    with pytest.raises(ValueError, match=said):
      train.train(changed, tiny_model())


def test_acceptance_counts_only_drafts_that_a_chain_would_make():
  """By hand: two roots that were emitted, the second of them with a wrong first draft."""
  token = jnp.array([[5, 1, 2, 3, 4]])
  batch = Batch(token, jnp.ones_like(token), jnp.arange(5)[None],
                jnp.array([[False, True, True, True, True]]), jnp.zeros((1, 5, 1)))
  guess = lambda *tokens: jax.nn.one_hot(jnp.array([tokens]), 8)
  fake = Method("fake", None, None, None, lambda *_: (
      guess(2, 3, 0, 0, 0), guess(3, 4, 0, 0, 0)), None, 2)
  found = evaluate.summary([evaluate.make_evaluate(fake, TARGET)({}, {}, batch)])
  # Depth 1 is drafted for tokens 2, 3, 4, right for 2 and 3; depth 2 for 3 and 4, both right.
  assert found["acceptance_1"] == pytest.approx(2 / 3) and found["acceptance_2"] == 1.0
  assert found["tokens_per_step_2"] == pytest.approx(1 + 2 / 3 + 2 / 3)


def test_every_method_has_a_row_in_both_tables():
  assert configuration.METHODS == tuple(METHODS)


def test_a_checkpoint_of_another_target_or_other_data_is_refused(texts, tmp_path, unmeasured):
  config = config_of(texts, tmp_path, steps=2)
  train.train(config, tiny_model())
  with pytest.raises(ValueError, match="target"):
    train.train(config, tiny_model(key=1))
  other = tmp_path / "fewer.jsonl"
  other.write_text("\n".join(open(texts).read().splitlines()[:20]))
  with pytest.raises(ValueError, match="data"):
    train.train(dataclasses.replace(config, data=DataConfig(
        conversations=(str(other),), validation=0.2, max_length=64, rows=2)), tiny_model())


def test_text_without_answers_is_refused(tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "the"}')
  with pytest.raises(ValueError, match="no assistant turns in"):
    train.train(config_of(str(path), tmp_path), tiny_model())


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
  assert main(["train", "--config", str(tmp_path / "none.toml")]) == 2
  assert capsys.readouterr().err.count("\n") == 1
  path = tmp_path / "bad.toml"
  path.write_text('target = "x"\nmethod = "eagle3"\noutput = "y"\nsteps = 1\nstep = 2\n'
                  '[data]\nconversations = ["z"]\n')
  assert main(["train", "--config", str(path)]) == 2
  assert "unknown key step" in capsys.readouterr().err


def test_a_config_file_is_a_python_file_too(tmp_path):
  path = tmp_path / "c.py"
  path.write_text("from jspec.training.config import *\nconfig = TrainConfig(target='a', "
                  "method='medusa', output='b', data=DataConfig(conversations=('c',)), steps=1)\n")
  assert isinstance(configuration.load(path, ["steps=3"]), TrainConfig)
