"""The configuration of a training run, and the optimiser made from it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspec.training import config as training_config
from jspec.training.config import DataConfig, OptimizerConfig, TrainConfig, from_dict, load, to_dict
from jspec.training.optimizer import make_optimizer, make_schedule

TOML = """
target = "smollm2-135m-instruct"
method = "eagle3"
output = "out"
epochs = 2
draft_vocab_size = 8192
options = {num_steps = 5, decay = 0.8}

[data]
shards = ["a", "b"]
features = "stored"

[optimizer]
learning_rate = 1e-3
betas = [0.9, 0.99]
rates = {fc = 2}
"""
PY = """
from jspec.training.config import *

config = TrainConfig(
    target="smollm2-135m-instruct", method="eagle3", output="out", epochs=2,
    draft_vocab_size=8192, options={"num_steps": 5, "decay": 0.8},
    data=DataConfig(shards=("a", "b"), features="stored"),
    optimizer=OptimizerConfig(learning_rate=1e-3, betas=(0.9, 0.99), rates={"fc": 2}))
"""
SMALL = {"target": "t", "method": "medusa", "output": "o", "steps": 9,
         "data": {"conversations": ["c.jsonl"]}}


@dataclasses.dataclass(frozen=True)
class Options:
  num_steps: int = 7
  decay: float = 1.0
  layers: tuple[int, ...] | None = None


@pytest.fixture
def toml(tmp_path):
  (tmp_path / "run.toml").write_text(TOML)
  return tmp_path / "run.toml"


def test_toml_python_and_a_dict_say_the_same(toml, tmp_path):
  config = load(toml)
  (tmp_path / "run.py").write_text(PY)
  assert load(tmp_path / "run.py") == config
  (tmp_path / "dict.py").write_text(f"import tomllib\nconfig = tomllib.loads('''{TOML}''')")
  assert load(tmp_path / "dict.py") == config
  assert config.data == DataConfig(shards=("a", "b"), features="stored")
  assert config.optimizer.betas == (0.9, 0.99) and config.optimizer.rates == {"fc": 2.0}
  assert config.epochs == 2.0 and config.steps is None and hash(config) == hash(load(toml))


def test_a_configuration_survives_json(toml):
  config = load(toml, ["log.tensorboard=true", "init_from=head"])
  assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_overrides_have_the_syntax_of_toml_values_and_bare_words_are_strings(toml):
  config = load(toml, ["optimizer.learning_rate=3e-4", "target=some-model", 'output="a b"',
                       "data.shards=['c']", "epochs=none", "steps = 100", "options.decay=0.5",
                       "options.layers=[1, 2]", "devices.data_parallel=2", "log.stdout=false"])
  assert config.optimizer.learning_rate == 3e-4 and config.optimizer.betas == (0.9, 0.99)
  assert (config.target, config.output, config.data.shards) == ("some-model", "a b", ("c",))
  assert config.steps == 100 and config.epochs is None and not config.log.stdout
  assert config.options == {"num_steps": 5, "decay": 0.5, "layers": [1, 2]}
  assert config.devices.data_parallel == 2


@pytest.mark.parametrize("override, message", [
  ("optimizer.lerning_rate=1", "unknown key optimizer.lerning_rate: did you mean "
                               "optimizer.learning_rate"),
  ("zzz=1", "unknown key zzz: known: target, method, output, data, options"),
  ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number, got 'fast'"),
  ("optimizer.betas=[0.9]", r"optimizer.betas must be a list of 2, each a number, got \[0.9\]"),
  ("optimizer.betas=[0.9, 'x']", r"optimizer.betas\[1\] must be a number, got 'x'"),
  ("data.rows=1.5", "data.rows must be an integer, got 1.5"),
  ("data.rows=true", "data.rows must be an integer, got True"),
  ("log.stdout=1", "log.stdout must be true or false, got 1"),
  ("data.shards=a", "data.shards must be a list, each a string, got 'a'"),
  ("optimizer.rates.fc=x", "optimizer.rates.fc must be a number, got 'x'"),
  ("optimizer=3", "optimizer must have keys of its own, got 3"),
  ("target.name=x", "override 'target.name=x': target has no keys of its own"),
  ("steps", "an override is key=value or key.sub=value, got 'steps'"),
  ("steps=5", "one of steps and epochs must be given, got steps=5 epochs=2.0"),
  ("epochs=none", "one of steps and epochs must be given, got steps=None epochs=None"),
  ("epochs=0", "epochs must be > 0, got 0.0"),
  ("method=eagle9", "method must be one of eagle3, eagle, medusa, .*, got 'eagle9'"),
  ("dtype=float16", "dtype must be one of float32, bfloat16, got 'float16'"),
  ("data.layout=loose", "data.layout must be one of packed, padded, got 'loose'"),
  ("data.learn=some", "data.learn must be one of answers, all, got 'some'"),
  ("data.validation=2", "data.validation must lie in 0..1, got 2.0"),
  ("data.max_length=0", "data.max_length must be >= 1, got 0"),
  ("data.row_length=5", "data.row_length=5 must be 0 or >= data.max_length=2048"),
  ("data.conversations=['c']", "data needs shards or conversations, one of the two"),
  ("devices.data_parallel=3", "devices.data_parallel=3 must divide data.rows=4"),
  ("optimizer.learning_rate=nan", "learning_rate and eps must be > 0, got nan"),
  ("optimizer.schedule=step", "optimizer.schedule must be one of cosine, linear, constant"),
  ("ema=1", "ema must lie in 0..1, 1 excluded, got 1.0"),
  ("target=", "target must not be empty"),
])
def test_a_bad_value_is_refused_in_one_sentence(toml, override, message):
  with pytest.raises(ValueError, match=message) as error:
    load(toml, [override])
  assert "\n" not in str(error.value)


def test_values_that_exclude_each_other_are_refused():
  with pytest.raises(ValueError, match="warmup_share and warmup_steps exclude each other"):
    OptimizerConfig(warmup_share=0.1, warmup_steps=3)
  with pytest.raises(ValueError, match="clip_norm and clip_value exclude each other"):
    OptimizerConfig(clip_norm=1, clip_value=0.5)
  with pytest.raises(ValueError, match="features='stored' needs data.shards"):
    DataConfig(conversations=("c",), features="stored")


def test_what_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match="^data must be given"):
    from_dict({k: v for k, v in SMALL.items() if k != "data"})
  with pytest.raises(ValueError, match="there is no configuration file .*gone.toml"):
    load(tmp_path / "gone.toml")
  for name, text, message in (("a.yaml", "", "is a .py or .toml file, got .*a.yaml"),
                              ("a.py", "x = 1", "a.py must define config"),
                              ("b.py", "from jspec.training.config import *\nTrainConfig(lr=1)",
                               "b.py: .*unexpected keyword argument 'lr'"),
                              ("a.toml", "x = = 1", "a.toml is no TOML")):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
      load(tmp_path / name)


def test_options_become_the_dataclass_of_the_method(toml):
  assert load(toml).method_options(Options) == Options(5, 0.8)
  assert load(toml, ["options.layers=[1, 2]"]).method_options(Options).layers == (1, 2)
  with pytest.raises(ValueError, match="unknown key options.depth: known: num_steps, decay, lay"):
    load(toml, ["options.depth=1"]).method_options(Options)
  with pytest.raises(ValueError, match="options.num_steps must be an integer, got 0.5"):
    load(toml, ["options.num_steps=0.5"]).method_options(Options)


def test_epochs_count_updates_not_batches(toml):
  assert load(toml).num_steps(50) == 100
  assert load(toml, ["optimizer.accumulate=4"]).num_steps(50) == 25
  assert load(toml, ["epochs=none", "steps=7", "optimizer.accumulate=4"]).num_steps(50) == 7
  assert load(toml, ["epochs=0.001"]).num_steps(50) == 1


def test_the_configuration_needs_no_jax():
  code = f"import sys, runpy; runpy.run_path({training_config.__file__!r}); assert 'jax' not in " \
         "sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)


def test_the_learning_rate_rises_to_the_peak_and_falls_to_the_final_share():
  rates = lambda n, **fields: [float(make_schedule(OptimizerConfig(learning_rate=2.0, **fields),
                                                   n)(i)) for i in range(n)]
  np.testing.assert_allclose(rates(6, schedule="linear", warmup_steps=2, final_share=0.25),
                             [2 / 3, 4 / 3, 2.0, 1.5, 1.0, 0.5], rtol=1e-6)
  np.testing.assert_allclose(rates(5, schedule="constant", warmup_share=0.2),
                             [1.0, 2.0, 2.0, 2.0, 2.0], rtol=1e-6)
  cosine = [1 + math.cos(math.pi * i / 4) for i in range(5)]
  np.testing.assert_allclose(rates(5), cosine, atol=1e-6)
  assert rates(1) == [2.0]
  with pytest.raises(ValueError, match="warmup_steps=5 must be less than the 5 steps"):
    rates(5, warmup_steps=5)


def by_hand(params, gradients, *, rates, decay, clip_norm, clip_value, rate_of):
  """AdamW in float64, from Loshchilov and Hutter (2019), with decay of matrices only."""
  first = {k: 0.0 for k in params}
  second = dict(first)
  for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
    norm = math.sqrt(sum((g ** 2).sum() for g in gradient.values()))
    for k, g in gradient.items():
      g = g * min(1, clip_norm / norm) if clip_norm else g
      g = np.clip(g, -clip_value, clip_value) if clip_value else g
      first[k] = 0.9 * first[k] + 0.1 * g
      second[k] = 0.95 * second[k] + 0.05 * g ** 2
      step = first[k] / (1 - 0.9 ** t) / (np.sqrt(second[k] / (1 - 0.95 ** t)) + 1e-8)
      step = step + (decay * params[k] if params[k].ndim >= 2 else 0)
      params = {**params, k: params[k] - rate * rate_of.get(k, 1.0) * step}
  return params


@pytest.mark.parametrize("fields", [
  {}, {"clip_norm": 1.0}, {"clip_value": 0.3}, {"weight_decay": 0.1},
  {"weight_decay": 0.1, "clip_norm": 0.5, "rates": {"w": 4.0, "b": 0.0}}])
def test_updates_are_those_computed_by_hand(fields):
  config = OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=1, **fields)
  optimizer = make_optimizer(config, 4)
  rng = np.random.default_rng(0)
  draw = lambda: {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=3), "s": rng.normal(size=(1,))}
  start, gradients = draw(), [draw() for _ in range(4)]
  single = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
  params, state = single(start), optimizer.init(single(start))
  for gradient in gradients:
    updates, state = optimizer.update(single(gradient), state, params)
    params = optax.apply_updates(params, updates)
  expected = by_hand(start, gradients, rates=[0.05, 0.1, 0.05, 0.0],
                     decay=config.weight_decay, clip_norm=config.clip_norm,
                     clip_value=config.clip_value, rate_of=config.rates)
  for k in start:
    np.testing.assert_allclose(params[k], expected[k], rtol=1e-5, atol=1e-6)


def test_relative_rates_of_unknown_parts_are_refused():
  optimizer = make_optimizer(OptimizerConfig(rates={"heads": 4.0}), 4)
  with pytest.raises(ValueError, match="optimizer.rates names heads; the params have fc"):
    optimizer.init({"fc": jnp.ones(2)})


def test_a_configuration_may_be_built_from_plain_values():
  config = TrainConfig(**SMALL)
  assert config.data.conversations == ("c.jsonl",)
  assert config.checkpoint_folder == "o/checkpoints"
