"""From a configuration to a trained, exported and measured head.

  jspec train --config training/configs/eagle3_smollm2.py optimizer.learning_rate=2e-4

Run again with the same configuration, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import hub
from jspec.cli.endings import ended
from jspec.config import ModelConfig
from jspec.training import config as configuration
from jspec.training import evaluate, start, state
from jspec.training.checkpoints import About, Checkpoints
from jspec.training.config import TrainConfig
from jspec.training.data import conversations, shards
from jspec.training.data.batches import Batches
from jspec.training.data.shards import Sequences
from jspec.training.export.formats import STYLES, format_of, sayable
from jspec.training.export.write import check_place, export, without_copies
from jspec.training.log import metrics
from jspec.training.methods import METHODS, make_method
from jspec.training.optimizer import make_optimizer, make_schedule
from jspec.training.stop_signals import stop_signals
from jspec.training.types import Batch, Method, Metrics, Params

ENGINE_PROMPTS, ENGINE_TOKENS = 16, 64  # of the final measurement in the engine
TEXT_PROMPT = 32  # tokens that a plain text's continuation is asked after
# What may differ when a run goes on.
FREE = ("log", "eval", "checkpoint", "output", "export_style", "devices")


def train(config: TrainConfig, loaded: hub.LoadedModel | None = None) -> dict[str, Any]:
  """Runs or resumes; returns what result.json holds.

  loaded: config.target, where it is at hand.
  """
  if loaded is None:
    _say(config, f"loading the target {config.target}")
    loaded = hub.load_model(config.target, dtype=config.dtype)
  run = _Run(config, loaded)
  run.loop()
  return run.finish()


class _Run:
  """One training run: what stays the same, and the state that changes."""

  def __init__(self, config: TrainConfig, loaded: hub.LoadedModel):
    self.config, self.loaded = config, loaded
    self.output = pathlib.Path(config.output)
    recipe = METHODS[config.method]
    options = config.method_options(recipe.options)
    fingerprint = shards.fingerprint(loaded.config, loaded.params)
    training, self.validation = _sequences(config, loaded, fingerprint).split(
        config.data.validation, config.seed)
    begin = start.start_from(config, loaded)
    target_id = start.vocabulary(config, training, loaded.config.vocab_size, begin)
    if config.data.learn == "all":
      training = training.all_learnt()
    _say(config, f"{len(training)} sequences of {len(training.token)} tokens, "
         f"{int(training.loss.sum())} of them to learn; {len(self.validation)} held out")
    self.method = make_method(config.method, options, loaded.config, target_id)
    self._check_end()
    self.batches = _batches(config, self.method, loaded, training)
    self.held_out = _batches(config, self.method, loaded, self.validation) if len(
        self.validation) else None
    accumulate = config.optimizer.accumulate
    self.num_steps = config.num_steps(self.batches.epoch_steps)
    optimizer = make_optimizer(config.optimizer, self.num_steps)
    self.schedule = make_schedule(config.optimizer, self.num_steps)
    self.about = About(configuration.to_dict(config), loaded.name, fingerprint, {
        "batches_per_step": accumulate, "text": _digest(training.token, training.loss),
        "draft_vocabulary": "" if target_id is None else _digest(target_id)})
    params = None
    if begin is not None:
      start.check_same_head(config, self.method, begin[0])
      params = start.like(self.method.init(jax.random.key(config.seed), loaded.params), begin[1],
                          config.init_from)
    _say(config, f"training {config.method} for {self.num_steps} steps; the first one compiles")
    self._place(optimizer, params)
    self.checkpoints = Checkpoints(config.checkpoint_folder, config.checkpoint.keep,
                                   config.checkpoint.every)
    resumed = self._resume()
    self.log = metrics.Log(self.output, stdout=config.log.stdout, jsonl=config.log.jsonl,
                           tensorboard=config.log.tensorboard, resumed=resumed,
                           num_steps=self.num_steps)

  def _place(self, optimizer, params: Params | None) -> None:
    """Compiles nothing yet; puts the state and the target on their devices."""
    config, devices = self.config, self.config.devices
    make = lambda target_params: state.init_state(
        config.seed, self.method, optimizer, target_params, config.ema, params)
    update = state.make_update(self.method, optimizer, self.loaded.config,
                               dtype=jnp.dtype(config.dtype), ema_decay=config.ema)
    self.judge = jax.jit(evaluate.make_evaluate(self.method, self.loaded.config))
    self.target_params = self.loaded.params
    self.put: Callable[[Batch], Batch] = jax.device_put
    if devices.data_parallel * devices.tensor_parallel == 1:
      self.state = make(self.target_params)
      self.update = jax.jit(update, donate_argnums=0)
      return
    mesh = state.make_mesh(devices.data_parallel, devices.tensor_parallel)
    self.target_params = jax.device_put(self.target_params,
                                        state.shardings(mesh, self.target_params))
    where = state.shardings(mesh, jax.eval_shape(make, self.target_params))
    self.state = jax.device_put(make(self.loaded.params), where)
    self.put = lambda batch: jax.device_put(batch, state.batch_sharding(mesh))
    self.update = jax.jit(update, donate_argnums=0, out_shardings=(where, None))

  def _resume(self) -> int | None:
    """The step to go on from, if there is a checkpoint."""
    if self.checkpoints.latest() is None:
      return None
    self.state, about = self.checkpoints.restore(None, self.state, self.about, FREE)
    if about.position != self.about.position:
      raise ValueError(f"the checkpoint in {self.checkpoints.folder} was trained on other data: it "
                       f"says {about.position}, now there is {self.about.position}")
    step = int(self.state.step)
    _say(self.config, f"going on from step {step} of {self.num_steps}, the last checkpoint in "
         f"{self.checkpoints.folder}")
    return step

  def _check_end(self) -> None:
    """Refuses before training what could not be exported, drawn or measured after it."""
    config, method, loaded = self.config, self.method, self.loaded
    kind = METHODS[config.method].speculative_method
    style = config.export_style or STYLES[kind][0]
    if style not in STYLES[kind]:
      raise ValueError(f"export_style={style!r} is not one of {', '.join(STYLES[kind])}, the "
                       f"styles of method {kind!r}")
    format_of(sayable(method.config), loaded.config, loaded.name, style, "bfloat16",
              method.target_id)
    check_place(self.output / "head", overwrite=True)
    if method.tuned is not None:
      format_of(sayable(loaded.config), loaded.config, loaded.name, STYLES["draft_model"][0],
                config.dtype, None)
      check_place(self.output / "target", overwrite=True)
    if config.log.plot and importlib.util.find_spec("matplotlib") is None:
      raise ValueError("log.plot needs matplotlib, which jspec-jax's extra 'bench' brings")
    if not len(self.validation):
      _say(config, "no prompt is held out of the few there are (data.validation="
           f"{config.data.validation}): nothing will be evaluated")

  # -------------------------------------------------------------- the loop

  def loop(self) -> None:
    """Until the last step; SIGINT or SIGTERM save the state after the step they come in."""
    came: list[int] = []  # an update must not be torn from the state it donates
    with stop_signals(lambda number, frame: came.append(number)):
      self._loop(came)

  def _loop(self, came: list[int]) -> None:
    config, step = self.config, int(self.state.step)
    stream = _stacked(self.batches.stream(step * config.optimizer.accumulate),
                      config.optimizer.accumulate)
    began, tokens = time.perf_counter(), 0
    try:
      while step < self.num_steps:
        batch = next(stream)
        tokens += int((batch.segment > 0).sum())
        self.state, found = self.update(self.state, self.target_params, self.put(batch))
        step += 1
        if step % config.log.every == 0 or step == self.num_steps:
          _check_finite(found, step, self.checkpoints.latest())
          rate = tokens / (time.perf_counter() - began)
          self.log.write(step, found | {"learning_rate": float(self.schedule(step - 1)),
                                        "tokens_per_second": rate})
          began, tokens = time.perf_counter(), 0
        if config.eval.every and step % config.eval.every == 0 and step < self.num_steps:
          self.log.write(step, self.evaluate(), kind="eval")
          began, tokens = time.perf_counter(), 0
        stop = bool(came)
        if stop or step == self.num_steps or step % config.checkpoint.every == 0:
          _check_finite(found, step, self.checkpoints.latest())
          self.checkpoints.save(step, self.state, self.about, force=True)
        if stop:
          raise KeyboardInterrupt
    finally:
      stream.close()
      self.checkpoints.wait()

  def evaluate(self) -> dict[str, float]:
    """On the validation batches, of the averaged parameters if there are any."""
    if self.held_out is None:
      return {}
    count = min(self.config.eval.batches, self.held_out.epoch_steps)
    return evaluate.summary(jax.device_get(self.judge(
        self.state.best, self.target_params, self.held_out.batch(i))) for i in range(count))

  def finish(self) -> dict[str, Any]:
    """Evaluates, exports, measures in the engine, writes result.json."""
    config, method = self.config, self.method
    found = self.evaluate()
    self.log.write(self.num_steps, found, kind="eval")
    folder = self.output / "head"
    params = jax.device_get(method.export(self.state.best, self.target_params))
    loaded = self._trained_target()
    name = loaded.name if method.tuned is None else str(self.output / "target")
    head, params = _shared(method, params, loaded, config.export_style)
    if isinstance(head, ModelConfig):
      self._export_model(folder, head, params)
    else:
      export(folder, head, params, loaded.config, name, config.export_style or None,
             "int8" if config.export_style == "compact" else "bfloat16", overwrite=True)
    _say(config, f"exported to {folder}")
    result: dict[str, Any] = {"steps": self.num_steps, "validation": found}
    self._write(result)
    prompts = _prompts(self.validation, loaded.config.max_positions - ENGINE_TOKENS)
    if prompts:
      kind = METHODS[config.method].speculative_method
      _say(config, f"measuring it in the engine on {len(prompts)} prompts")
      measured = evaluate.in_engine(loaded, str(folder), kind, prompts, method.depth,
                                    ENGINE_TOKENS)
      _say(config, f"in the engine, {measured.describe()}")
      result["engine"] = dataclasses.asdict(measured)
      self._write(result)
    if config.log.plot:
      metrics.plot(self.output / "metrics.jsonl", self.output / "curves.png")
    self.log.close()
    self.checkpoints.close()
    return result

  def _write(self, result: dict[str, Any]) -> None:
    (self.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")

  def _trained_target(self) -> hub.LoadedModel:
    """The target; where the method trains it too, as it came out, exported to its own folder."""
    if self.method.tuned is None:
      return self.loaded
    params = self.method.tuned(self.state.best, self.target_params)
    self._export_model(self.output / "target", self.loaded.config, jax.device_get(params))
    put = lambda x, like: jnp.asarray(x, like.dtype)
    return self.loaded._replace(params=jax.tree.map(put, params, self.loaded.params))

  def _export_model(self, folder: pathlib.Path, config: ModelConfig, params: Params) -> None:
    """A whole model, with the target's tokenizer."""
    with tempfile.TemporaryDirectory() as tokenizer:
      self.loaded.tokenizer.save(tokenizer)
      export(folder, config, params, self.loaded.config, self.loaded.name, dtype=self.config.dtype,
             tokenizer=tokenizer, overwrite=True)


# -------------------------------------------------------------------- pieces


def _sequences(config: TrainConfig, loaded: hub.LoadedModel, fingerprint: str) -> Sequences:
  data = config.data
  if data.shards:
    _say(config, f"reading {', '.join(data.shards)}")
    return shards.join([shards.read_shards(folder, fingerprint) for folder in data.shards])
  _say(config, f"reading {', '.join(data.conversations)}")
  faults: list[str] | None = [] if data.faulty_rows == "skip" else None
  read = conversations.read(data.conversations, faults)
  sequences = conversations.encode_all(read, loaded.tokenizer, faults)
  if faults:
    _say(config, conversations.told(faults))
  return sequences


def _batches(config: TrainConfig, method: Method, loaded: hub.LoadedModel,
             sequences: Sequences) -> Batches:
  data, stored = config.data, config.data.features == "stored"
  return Batches(sequences, data.rows, data.row_length or data.max_length, config.seed, data.layout,
                 layers=method.feature_layers if stored else (),
                 hidden=loaded.config.num_layers if stored else None, limit=data.max_length,
                 cut=data.cut)


def _shared(method: Method, params: Params, loaded: hub.LoadedModel, style: str):
  """(config, params) to export: the compact style leaves out what the target has anyway."""
  if style != "compact" or isinstance(method.config, ModelConfig):
    return method.config, params
  return without_copies(method.config, params, loaded.config, loaded.params)


def _stacked(stream: Generator[Batch, None, None], count: int) -> Generator[Batch, None, None]:
  """[A, B, T]: the batches of each update. Of padded layouts, each as long as the longest."""
  try:
    while True:
      group = [next(stream) for _ in range(count)]
      length = max(batch.token.shape[1] for batch in group)
      pad = lambda x, length=length: np.pad(
          x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
      yield jax.tree.map(lambda *xs, pad=pad: np.stack([pad(x) for x in xs]), *group)
  finally:
    stream.close()  # its thread ends with it


def _prompts(sequences: Sequences, room: int) -> list[list[int]]:
  """The first prompts that fit: what precedes the first token to learn, of plain text its begin."""
  out = []
  for i in range(len(sequences)):
    own = sequences.span(i)
    size = int(sequences.loss[own].argmax()) or min(TEXT_PROMPT, own.stop - own.start)
    if size <= room:
      out.append(sequences.token[own][:size].tolist())
  return out[:ENGINE_PROMPTS]


def _say(config: TrainConfig, what: str) -> None:
  """On the terminal, where the run reports there."""
  if config.log.stdout:
    print(what, flush=True)


def _digest(*arrays: np.ndarray) -> str:
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()[:16]


def _check_finite(found: Metrics, step: int, latest: int | None) -> None:
  """Before anything is saved."""
  bad = [name for name, x in found.items() if not np.isfinite(x)]
  if bad:
    kept = "there is no checkpoint" if latest is None else f"the last checkpoint is step {latest}"
    raise FloatingPointError(f"step {step}: {', '.join(bad)} is not finite ({kept}): begin anew in "
                             "another output folder, with a lower learning rate or clip_norm")


def add_train_flags(parser: argparse.ArgumentParser) -> None:
  parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
  parser.add_argument("--config", required=True, help="a .py or .toml file, see training/configs")
  parser.add_argument("overrides", nargs="*", metavar="key=value",
                      help="such as steps=100 or optimizer.learning_rate=2e-4")


def run_train(given: argparse.Namespace) -> int:
  def run() -> int:
    train(configuration.load(given.config, given.overrides))
    return 0

  return ended("jspec train", run, "interrupted; the same command goes on from here",
               (ValueError, FloatingPointError))
