"""From a configuration to a trained, exported and measured head.

  python -m training.train --config training/configs/eagle3_smollm2.py optimizer.learning_rate=2e-4

Run again with the same configuration, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import heads, hub
from jspec.config import ModelConfig
from jspec.weights import on_device
from training import config as configuration
from training import conversations, evaluate, metrics, shards, state
from training.batches import Batches
from training.checkpoints import About, Checkpoints
from training.config import TrainConfig
from training.export import export, without_copies
from training.export_formats import STYLES, format_of, sayable
from training.methods import METHODS, make_method
from training.optimizer import make_optimizer, make_schedule
from training.shards import Sequences
from training.types import Batch, Method, Params

ENGINE_PROMPTS, ENGINE_TOKENS = 16, 64  # of the final measurement in the engine
FREE = ("log", "eval", "checkpoint", "output", "export_style")  # may differ when a run goes on


def train(config: TrainConfig, loaded: hub.LoadedModel | None = None) -> dict[str, Any]:
  """Runs or resumes; returns what result.json holds.

  loaded: config.target, where it is at hand.
  """
  run = _Run(config, loaded or hub.load_model(config.target, dtype=config.dtype))
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
    start = _start_from(config, loaded)
    target_id = _vocabulary(config, training, loaded.config.vocab_size, start)
    self.method = make_method(config.method, options, loaded.config, target_id)
    _check_style(config, self.method, loaded)
    self.batches = _batches(config, self.method, loaded, training)
    self.held_out = _batches(config, self.method, loaded, self.validation) if len(
        self.validation) else None
    accumulate = config.optimizer.accumulate
    self.num_steps = config.num_steps(self.batches.epoch_steps)
    optimizer = make_optimizer(config.optimizer, self.num_steps)
    self.schedule = make_schedule(config.optimizer, self.num_steps)
    self.about = About(configuration.to_dict(config), loaded.name, fingerprint, {
        "batches_per_step": accumulate, "sequences": len(training),
        "draft_vocabulary": _digest(target_id)})
    self._place(optimizer, None if start is None else _like(
        self.method.init(jax.random.key(config.seed), loaded.params), start[1], config.init_from))
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
    judge = evaluate.make_evaluate(self.method, self.loaded.config)
    self.target_params = self.loaded.params
    self.put: Callable[[Batch], Batch] = jax.device_put
    if devices.data_parallel * devices.tensor_parallel == 1:
      self.state = make(self.target_params)
      self.update = jax.jit(update, donate_argnums=0)
      self.judge = jax.jit(judge)
      return
    mesh = state.make_mesh(devices.data_parallel, devices.tensor_parallel)
    self.target_params = jax.device_put(self.target_params,
                                        state.shardings(mesh, self.target_params))
    where = state.shardings(mesh, jax.eval_shape(make, self.target_params))
    self.state = jax.device_put(make(self.loaded.params), where)
    self.put = lambda batch: jax.device_put(batch, state.batch_sharding(mesh))
    self.update = jax.jit(update, donate_argnums=0, out_shardings=(where, None))
    self.judge = jax.jit(judge)

  def _resume(self) -> int | None:
    """The step to go on from, if there is a checkpoint."""
    if self.checkpoints.latest() is None:
      return None
    self.state, about = self.checkpoints.restore(None, self.state, self.about, FREE)
    if about.position != self.about.position:
      raise ValueError(f"the checkpoint in {self.checkpoints.folder} was trained on other data: it "
                       f"says {about.position}, now there is {self.about.position}")
    return int(self.state.step)

  # -------------------------------------------------------------- the loop

  def loop(self) -> None:
    """Until the last step; an interruption saves the state and is raised again."""
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
          found = {name: float(x) for name, x in found.items()}
          rate = tokens / (time.perf_counter() - began)
          _check_finite(found, step)
          self.log.write(step, found | {"learning_rate": float(self.schedule(step - 1)),
                                        "tokens_per_second": rate})
          began, tokens = time.perf_counter(), 0
        if config.eval.every and step % config.eval.every == 0 and step < self.num_steps:
          self.log.write(step, self.evaluate(), kind="eval")
          began, tokens = time.perf_counter(), 0
        self.checkpoints.save(step, self.state, self.about)
    finally:
      stream.close()
      if step:
        self.checkpoints.save(step, self.state, self.about, force=True)
      self.checkpoints.wait()

  def evaluate(self) -> dict[str, float]:
    """On the validation batches, of the averaged parameters if there are any."""
    if self.held_out is None:
      return {}
    count = min(self.config.eval.batches, self.held_out.epoch_steps)
    found = evaluate.summary(jax.device_get(self.judge(
        self.state.best, self.target_params, self.held_out.batch(i))) for i in range(count))
    return found

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
    result: dict[str, Any] = {"steps": self.num_steps, "validation": found}
    prompts = _prompts(self.validation, ENGINE_PROMPTS)
    if prompts:
      depth = getattr(method.config, "num_heads", getattr(method.config, "n_predict", 3))
      kind = METHODS[config.method].speculative_method
      measured = evaluate.in_engine(loaded, str(folder), kind, prompts, depth, ENGINE_TOKENS)
      print(f"in the engine, {measured.describe()}", flush=True)
      result["engine"] = dataclasses.asdict(measured)
    (self.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    if config.log.plot:
      metrics.plot(self.output / "metrics.jsonl", self.output / "curves.png")
    self.log.close()
    self.checkpoints.close()
    return result

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
    return shards.join([shards.read_shards(folder, fingerprint) for folder in data.shards])
  return conversations.encode_all(conversations.read(data.conversations), loaded.tokenizer)


def _batches(config: TrainConfig, method: Method, loaded: hub.LoadedModel,
             sequences: Sequences) -> Batches:
  data, stored = config.data, config.data.features == "stored"
  return Batches(sequences, data.rows, data.row_length or data.max_length, config.seed, data.layout,
                 layers=method.feature_layers if stored else (),
                 hidden=loaded.config.num_layers if stored else None, cut=data.cut)


def _start_from(config: TrainConfig, loaded: hub.LoadedModel) -> tuple[Any, Params] | None:
  """Configuration and parameters of the head to start from."""
  if not config.init_from:
    return None
  if config.method == "draft_model":
    draft = hub.load_model(config.init_from, dtype="float32")
    return draft.config, draft.params
  return heads.load_head(config.init_from, loaded.config, dtype="float32", progress=False,
                         put=on_device, method=METHODS[config.method].speculative_method)


def _vocabulary(config: TrainConfig, training: Sequences, vocab_size: int,
                start: tuple[Any, Params] | None) -> np.ndarray | None:
  """The draft vocabulary: that of the head to start from, or the most frequent tokens."""
  if not config.draft_vocab_size:
    return None
  if start is None:
    return shards.draft_vocabulary(training, config.draft_vocab_size, vocab_size)
  ids = np.asarray(start[1].get("target_id", np.arange(vocab_size)))
  if len(ids) != config.draft_vocab_size:
    raise ValueError(f"init_from={config.init_from!r} drafts from {len(ids)} tokens, but "
                     f"draft_vocab_size={config.draft_vocab_size}")
  return ids


def _like(template: Params, given: Params, name: str) -> Params:
  """What `template` has, from a tree that may have more."""
  def take(path, x):
    found = given
    for entry in path:
      key = getattr(entry, "key", getattr(entry, "idx", None))
      if isinstance(found, dict) and key not in found:
        raise ValueError(f"init_from={name!r} has no {jax.tree_util.keystr(path)}, which these "
                         "options train")
      found = found[key]
    if found.shape != x.shape:
      raise ValueError(f"init_from={name!r}: {jax.tree_util.keystr(path)} is {found.shape}, these "
                       f"options need {x.shape}")
    return found

  return jax.tree_util.tree_map_with_path(take, template)


def _check_style(config: TrainConfig, method: Method, loaded: hub.LoadedModel) -> None:
  """Refuses before training what could not be exported after it."""
  kind = METHODS[config.method].speculative_method
  style = config.export_style or STYLES[kind][0]
  if style not in STYLES[kind]:
    raise ValueError(f"export_style={style!r} is not one of {', '.join(STYLES[kind])}, the styles "
                     f"of method {kind!r}")
  format_of(sayable(method.config), loaded.config, loaded.name, style, "bfloat16",
            method.target_id)


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


def _prompts(sequences: Sequences, count: int) -> list[list[int]]:
  """The first prompts: what precedes the first token to learn."""
  out = []
  for i in range(min(count, len(sequences))):
    own = sequences.span(i)
    size = int(sequences.loss[own].argmax())
    if size:
      out.append(sequences.token[own][:size].tolist())
  return out


def _digest(target_id: np.ndarray | None) -> str:
  if target_id is None:
    return ""
  return hashlib.sha256(np.asarray(target_id, "<i4").tobytes()).hexdigest()[:16]


def _check_finite(found: dict[str, float], step: int) -> None:
  bad = [name for name, x in found.items() if not np.isfinite(x)]
  if bad:
    raise FloatingPointError(f"step {step}: {', '.join(bad)} is not finite: lower the learning "
                             "rate, or clip gradients")


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", required=True, help="a .py or .toml file, see training/configs")
  parser.add_argument("overrides", nargs="*", metavar="key=value",
                      help="such as steps=100 or optimizer.learning_rate=2e-4")
  given = parser.parse_args(arguments)
  try:
    train(configuration.load(given.config, given.overrides))
  except (ValueError, FloatingPointError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
