"""Checkpoints of a training run: written in the background, whole or not at all, a few kept."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import jspec

FILES = "files.json"  # in each checkpoint: size and CRC-32 of every file of its items


class CheckpointError(ValueError):
  """A checkpoint that isn't there, can't be read, or belongs to another run."""


@dataclasses.dataclass(frozen=True)
class About:
  """What a checkpoint says of its run. All of it JSON."""

  config: Mapping[str, Any]  # TrainConfig.to_dict()
  target: str  # its name
  fingerprint: str  # of the target's configuration and weights
  position: Any  # in the data, of the step to come
  version: str = jspec.__version__  # of the code that wrote it


class Checkpoints:
  """The checkpoints in a folder. One writer at a time; any number of readers, read_only."""

  def __init__(self, folder: str | os.PathLike, keep: int = 3, every: int = 1,
               read_only: bool = False):
    if keep < 1 or every < 1:
      raise ValueError(f"checkpoints: keep and every must be >= 1, got {keep=} {every=}")
    self.folder = pathlib.Path(folder).absolute()
    self._every = every
    self._saving = -1  # the step now being written, for _seal
    if read_only and not self.folder.is_dir():
      raise CheckpointError(f"there is no checkpoint folder {self.folder}")
    # What a killed writer left is removed here, by a writer only: a reader may come while one runs.
    self._manager = ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, read_only=read_only, create=not read_only,
        cleanup_tmp_directories=not read_only,
        async_options=ocp.AsyncOptions(post_finalization_callback=self._seal)))

  def steps(self) -> list[int]:
    """The checkpoints that are there, oldest first."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    return max(self.steps(), default=None)

  def save(self, step: int, state: Any, about: About, force: bool = False) -> bool:
    """Begins to write `state` as of `step` steps; False if it is not time yet.

    The state may be donated as soon as this returns. An error of the write before is raised here.
    """
    if not force and step % self._every:
      return False
    self.wait()
    latest = self.latest()
    if latest is not None and step <= latest:
      if step == latest:
        return False  # a last, forced one on top of a regular one
      raise CheckpointError(f"cannot save step {step} in {self.folder}: step {latest} is there; "
                            f"rewind to a step before {step} first")
    arrays = _named(state)
    for name, leaf in arrays.items():
      if not isinstance(leaf, jax.Array):
        raise TypeError(f"checkpoint: {name} must be a jax array, got {type(leaf).__name__}")
    text = {**dataclasses.asdict(about), "arrays": _signature(arrays),
            "keys": {k: str(jax.random.key_impl(x)) for k, x in arrays.items() if _is_key(x)}}
    stored = {k: jax.random.key_data(x) if _is_key(x) else x
              for k, x in arrays.items() if x.size}
    self._saving = step
    self._manager.save(step, force=True, args=ocp.args.Composite(
        state=ocp.args.StandardSave(stored), about=ocp.args.JsonSave(text)))
    return True

  def about(self, step: int | None = None) -> About:
    """What the checkpoint of a step, by default the latest, says of its run."""
    text = self._text(self._present(step))
    return About(**{f.name: text[f.name] for f in dataclasses.fields(About)})

  def restore(self, step: int | None, like: Any, expected: About | None = None,
              free: Sequence[str] = ()) -> tuple[Any, About]:
    """The state after `step` steps, None for the latest, and what the checkpoint says of its run.

    Args:
      like: arrays or ShapeDtypeStructs; where they have a sharding, the state gets it.
      expected: refuse a checkpoint of another target or configuration.
      free: keys of the configuration, "a" or "a.b", that may differ.
    """
    step = self._present(step)
    self._check_files(step)
    text = self._text(step)
    about = About(**{f.name: text[f.name] for f in dataclasses.fields(About)})
    if expected is not None:
      check_same_run(f"checkpoint {step} in {self.folder}", about, expected, free)
    wanted = _named(like)
    _check_shapes(f"checkpoint {step} in {self.folder}", text["arrays"], _signature(wanted))
    abstract = {k: _stored_as(x) for k, x in wanted.items() if x.size}
    arrays = self._read(step, state=ocp.args.StandardRestore(abstract))["state"]
    leaves = []
    for name, leaf in wanted.items():
      if not leaf.size:
        leaves.append(jnp.zeros(leaf.shape, leaf.dtype))
      elif name in text["keys"]:
        leaves.append(jax.random.wrap_key_data(arrays[name], impl=text["keys"][name]))
      else:
        leaves.append(arrays[name])
    return jax.tree.unflatten(jax.tree.structure(like), leaves), about

  def rewind(self, step: int) -> None:
    """Deletes what is newer than `step`, to go on from there."""
    self.wait()
    for newer in self.steps():
      if newer > step:
        self._manager.delete(newer)

  def wait(self) -> None:
    """Until the last checkpoint is written; raises what went wrong."""
    self._manager.wait_until_finished()
    self._manager.check_for_errors()

  def close(self) -> None:
    self.wait()
    self._manager.close()

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _seal(self) -> None:
    """Lists the files of the checkpoint being written, before it gets its final name.

    Runs in the thread that writes it. The temporary name is "STEP.something".
    """
    if jax.process_index():
      return
    for folder in self.folder.glob(f"{self._saving}.*"):
      sums = {str(path.relative_to(folder)): _size_and_sum(path)
              for path in sorted(folder.glob("*/**/*")) if path.is_file()}
      (folder / FILES).write_text(json.dumps(sums))

  def _check_files(self, step: int) -> None:
    folder = self.folder / str(step)
    if not (folder / FILES).is_file():
      return  # orbax wrote it under another temporary name
    for name, expected in json.loads((folder / FILES).read_text()).items():
      path = folder / name
      if not path.is_file():
        raise self._damaged(step, f"{path} is missing")
      found = _size_and_sum(path)
      if found[0] != expected[0]:
        raise self._damaged(step, f"{path} has {found[0]} bytes, not {expected[0]}")
      if found != expected:
        raise self._damaged(step, f"the contents of {path} have changed")

  def _damaged(self, step: int, what: str) -> CheckpointError:
    older = [s for s in self.steps() if s < step]
    return CheckpointError(f"checkpoint {step} is damaged: {what}; "
                           f"older ones: {', '.join(map(str, older)) or 'none'}")

  def _text(self, step: int) -> dict[str, Any]:
    return self._read(step, about=ocp.args.JsonRestore())["about"]

  def _read(self, step: int, **items: Any) -> Mapping[str, Any]:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # of several libraries, each with its own kinds
      raise self._damaged(step, f"{type(error).__name__}: {error}") from error

  def _present(self, step: int | None) -> int:
    steps = self.steps()
    if not steps:
      raise CheckpointError(f"there is no checkpoint in {self.folder}")
    if step is not None and step not in steps:
      raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder}; there are: "
                            f"{', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def check_same_run(what: str, saved: About, now: About, free: Sequence[str] = ()) -> None:
  """Raises CheckpointError, naming what differs, unless both are of one target and configuration.

  Args:
    free: keys of the configuration, "a" or "a.b", that may differ.
  """
  if saved.fingerprint != now.fingerprint:
    raise CheckpointError(
        f"{what} is of another target: of {saved.target} ({saved.fingerprint}), "
        f"not {now.target} ({now.fingerprint})")
  old, new = (_flat(json.loads(json.dumps(about.config))) for about in (saved, now))
  show = lambda flat, key: repr(flat[key]) if key in flat else "absent"
  differences = [f"{key} was {show(old, key)}, now {show(new, key)}"
                 for key in dict.fromkeys((*old, *new)) if show(old, key) != show(new, key)
                 and not any(key == f or key.startswith(f + ".") for f in free)]
  if differences:
    raise CheckpointError(f"{what} is of another configuration: {'; '.join(differences)}")


def _check_shapes(what: str, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
  names = [n for n in dict.fromkeys((*saved, *wanted)) if saved.get(n) != wanted.get(n)]
  if names:
    listed = "; ".join(f"{n} is {saved.get(n, 'absent')}, expected {wanted.get(n, 'absent')}"
                       for n in names[:4])
    more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
    raise CheckpointError(f"{what} does not fit: {listed}{more}")


def _named(tree: Any) -> dict[str, Any]:
  """The leaves by their paths, such as params.fc.w, in the order of jax.tree.leaves."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
  if len(named) < len(leaves):
    raise ValueError("checkpoint: two arrays of the state have the same dotted path")
  return named


def _signature(arrays: Mapping[str, Any]) -> dict[str, str]:
  return {k: f"{x.dtype}[{','.join(map(str, x.shape))}]" for k, x in arrays.items()}


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stored_as(x: Any) -> jax.ShapeDtypeStruct:
  """With a sharding in any case: the one it was saved with may be of other devices."""
  sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if _is_key(x):
    x = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _size_and_sum(path: pathlib.Path) -> list[int]:
  size, total = 0, 0
  with path.open("rb") as file:
    while chunk := file.read(2**20):
      size, total = size + len(chunk), zlib.crc32(chunk, total)
  return [size, total]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    flat |= _flat(value, name + ".") if isinstance(value, Mapping) and value else {name: value}
  return flat
