"""Checkpoints of training: exact, whole or not at all, and plain about what does not fit."""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import random
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspec.training.checkpoints import About, CheckpointError, Checkpoints, check_same_run

CONFIG = {"method": "eagle3", "optimizer": {"learning_rate": 1e-3, "betas": (0.9, 0.95)},
          "log": {"every": 10}}
ABOUT = About(CONFIG, "tiny", "f00d", position=7)
STEPS = 8  # of the training that is killed
WEIGHTS = (256, 1024)  # 3 MB with Adam's moments: writing them takes a while


class State(NamedTuple):
  params: dict
  optimizer: optax.OptState
  key: jax.Array  # key[2]
  step: jax.Array  # i32[]
  ema: dict


def make_state(seed: int) -> State:
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = {"fc": {"w": jax.device_put(normal(8, 6), split)},
            "layers": [{"scale": jax.device_put(normal(5), whole).astype(jnp.bfloat16)}],
            "none": jnp.zeros((0, 3)), "flag": jnp.array([True, False])}
  optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
  return State(params, optimizer, jax.random.split(jax.random.key(seed), 2), jnp.int32(seed),
               {"q": jnp.array([[np.nan, -0.0]]), "i": jnp.array([-3, 4], jnp.int8)})


def assert_identical(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype and x.sharding.is_equivalent_to(y.sharding, x.ndim)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def saved(tmp_path):
  """Steps 10, 20 and 30, the last two kept; still open."""
  with Checkpoints(tmp_path, keep=2, every=10) as checkpoints:
    for step in (10, 20, 30):
      assert checkpoints.save(step, make_state(step), ABOUT)
    checkpoints.wait()
    yield checkpoints


def test_what_is_restored_is_what_was_saved_bit_for_bit_and_where_it_lay(saved):
  state, about = saved.restore(None, make_state(0))
  assert_identical(state, make_state(30))
  assert about.position == 7 and about.config["optimizer"]["betas"] == [0.9, 0.95]
  assert_identical(saved.restore(20, make_state(0))[0], make_state(20))


def test_a_state_is_restored_onto_other_devices(saved):
  """Shapes alone ask for the first device."""
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_state(0))
  state, _ = saved.restore(30, like)
  w = state.params["fc"]["w"]
  assert w.devices() == {jax.devices()[0]}
  assert (np.asarray(w) == np.asarray(make_state(30).params["fc"]["w"])).all()
  assert (jax.random.bits(state.key[1]) == jax.random.bits(make_state(30).key[1]))


def test_the_newest_are_kept_and_only_every_so_many_steps_are_saved(saved):
  assert saved.steps() == [20, 30] and saved.latest() == 30
  assert not saved.save(35, make_state(1), ABOUT)
  assert saved.save(35, make_state(1), ABOUT, force=True)
  saved.wait()
  assert saved.steps() == [30, 35]
  assert not saved.save(35, make_state(1), ABOUT, force=True)


def test_an_older_step_is_saved_after_a_rewind_only(saved):
  with pytest.raises(CheckpointError, match="cannot save step 20 .* step 30 is there; rewind"):
    saved.save(20, make_state(1), ABOUT)
  saved.rewind(19)
  assert saved.latest() is None
  assert saved.save(20, make_state(1), ABOUT)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
  update = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
  noise = np.random.default_rng(0).normal(size=(1024, 2048)).astype(np.float32)
  x, expected = jnp.asarray(noise), noise
  with Checkpoints(tmp_path) as checkpoints:
    for step in (1, 2):
      expected = np.array(x)
      checkpoints.save(step, x, ABOUT)
      for _ in range(5):
        x = update(x)
    x.block_until_ready()
    assert (np.asarray(checkpoints.restore(2, x)[0]) == expected).all()


def test_a_reader_disturbs_nothing(saved):
  unfinished = saved.folder / "40.orbax-checkpoint-tmp"
  unfinished.mkdir()
  with Checkpoints(saved.folder, read_only=True) as reader:
    assert reader.steps() == [20, 30] and reader.about().target == "tiny"
  assert unfinished.is_dir()


def test_a_missing_step_is_refused_with_those_that_are_there(saved, tmp_path):
  with pytest.raises(CheckpointError, match="no checkpoint of step 10 in .*; there are: 20, 30"):
    saved.restore(10, make_state(0))
  with Checkpoints(tmp_path / "empty") as empty:
    assert empty.latest() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*empty"):
      empty.restore(None, make_state(0))
  with pytest.raises(CheckpointError, match="no checkpoint folder .*nowhere"):
    Checkpoints(tmp_path / "nowhere", read_only=True)
  with pytest.raises(ValueError, match="must be >= 1, got keep=0 every=1"):
    Checkpoints(tmp_path, keep=0)


def test_another_target_or_configuration_is_refused_with_what_differs(saved):
  other = About(CONFIG, "large", "beef", 0)
  with pytest.raises(CheckpointError, match=r"another target: of tiny \(f00d\), not large \(beef"):
    saved.restore(None, make_state(0), other)
  config = {"method": "eagle3", "optimizer": {"learning_rate": 0.002, "betas": (0.9, 0.95)},
            "seed": 1, "log": {"every": 20}}
  now = About(config, "tiny", "f00d", 0)
  with pytest.raises(CheckpointError) as error:
    saved.restore(None, make_state(0), now)
  assert str(error.value).endswith("another configuration: optimizer.learning_rate was 0.001, now "
                                   "0.002; log.every was 10, now 20; seed was absent, now 1")
  free = ("log", "optimizer.learning_rate", "seed")
  state, _ = saved.restore(None, make_state(0), now, free)
  assert state.step == 30
  check_same_run("this", ABOUT, About(json.loads(json.dumps(CONFIG)), "renamed", "f00d", 0))


def test_a_state_of_other_shapes_is_refused_by_name(saved):
  like = make_state(0)
  like.params["fc"]["w"] = jnp.zeros((8, 7))
  like.params["layers"].append({"scale": jnp.zeros(5)})
  with pytest.raises(CheckpointError) as error:
    saved.restore(None, like)
  assert str(error.value).endswith("does not fit: params.fc.w is float32[8,6], expected "
                                   "float32[8,7]; params.layers.1.scale is absent, expected "
                                   "float32[5]")


def test_what_is_no_array_is_refused_by_name(saved):
  with pytest.raises(TypeError, match="params.lr must be a jax array, got float"):
    saved.save(40, {"params": {"lr": 0.1}}, ABOUT)
  with pytest.raises(ValueError, match="two arrays of the state have the same dotted path"):
    saved.save(40, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, ABOUT)


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
  def fail(path):
    raise OSError("disk full")

  checkpoints = Checkpoints(tmp_path)
  monkeypatch.setattr("jspec.training.checkpoints._size_and_sum", fail)
  checkpoints.save(1, make_state(1), ABOUT)
  with pytest.raises(OSError, match="disk full"):
    checkpoints.save(2, make_state(2), ABOUT)
  with Checkpoints(tmp_path, read_only=True) as reader:
    assert reader.steps() == []


def largest_file(folder: pathlib.Path) -> pathlib.Path:
  """The largest: it holds arrays."""
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_truncated_checkpoint_is_refused_with_the_file_and_the_older_ones(saved):
  path = largest_file(saved.folder / "30" / "state")
  whole = path.read_bytes()
  path.write_bytes(whole[:-7])
  size = len(whole)
  with pytest.raises(CheckpointError, match=f"30 is damaged: .*{path.name} has {size - 7} bytes, "
                                            f"not {size}; older ones: 20"):
    saved.restore(None, make_state(0))
  path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
  with pytest.raises(CheckpointError, match=f"the contents of .*{path.name} have changed"):
    saved.restore(None, make_state(0))
  path.unlink()
  with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
    saved.restore(None, make_state(0))
  assert_identical(saved.restore(20, make_state(0))[0], make_state(20))


def test_a_checkpoint_without_its_list_of_files_is_refused_where_it_cannot_be_read(saved):
  (saved.folder / "20" / "files.json").unlink()
  assert_identical(saved.restore(20, make_state(0))[0], make_state(20))
  (saved.folder / "30" / "files.json").unlink()
  for path in (saved.folder / "30" / "state").rglob("d/*"):
    path.write_bytes(path.read_bytes()[:10])
  with pytest.raises(CheckpointError, match=r"30 is damaged: (.|\n)*; older ones: 20"):
    saved.restore(30, make_state(0))


def start():
  weights = jnp.asarray(np.random.default_rng(0).normal(size=WEIGHTS).astype(np.float32))
  optimizer = optax.adam(1e-2)
  return optimizer, (weights, optimizer.init(weights), jax.random.key(1))


def train(folder: pathlib.Path, curve: pathlib.Path) -> None:
  """A run that goes on where the last one was killed; losses are appended to `curve` in hex."""
  optimizer, state = start()

  def loss_of(weights, x, noise):
    return jnp.mean(jnp.square(jnp.tanh(x @ weights) - noise))

  def update(state, x):
    weights, moments, key = state
    key, now = jax.random.split(key)
    noise = jax.random.normal(now, (x.shape[0], WEIGHTS[1]))
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, noise)
    updates, moments = optimizer.update(gradient, moments)
    return (optax.apply_updates(weights, updates), moments, key), loss

  update = jax.jit(update, donate_argnums=0)
  with Checkpoints(folder, keep=2) as checkpoints:
    step = 0
    if checkpoints.latest() is not None:
      state, about = checkpoints.restore(None, state)
      step = about.position
    while step < STEPS:
      x = np.random.default_rng(step).normal(size=(4, WEIGHTS[0])).astype(np.float32)
      state, loss = update(state, x)
      with curve.open("a") as file:
        file.write(f"{step} {float(loss).hex()}\n")
      step += 1
      checkpoints.save(step, state, About({}, "tiny", "f00d", position=step))


def losses(curve: pathlib.Path) -> dict[int, set[str]]:
  """What was found at each step; a line may have been cut short by the kill."""
  found: dict[int, set[str]] = {}
  for line in curve.read_text().splitlines():
    step, loss = line.split()
    found.setdefault(int(step), set()).add(loss)
  return found


def unfinished(folder: pathlib.Path) -> set[str]:
  return {p.name for p in folder.glob("*tmp*")}


def kill_while_it_writes(process, folder: pathlib.Path, writes: int, patience: float) -> bool:
  """SIGKILL `patience` seconds into the given write; whether that was in the middle of it."""
  seen = unfinished(folder)  # of the process killed before
  for _ in range(writes):
    while not unfinished(folder) - seen and process.is_alive():
      time.sleep(0.001)
    old, seen = seen, seen | unfinished(folder)
  time.sleep(patience)
  process.kill()
  process.join()
  return bool(unfinished(folder) - old)


def test_a_run_killed_in_the_middle_of_writes_goes_on_to_the_same_losses(tmp_path):
  context = multiprocessing.get_context("forkserver")  # imports once, forks for every run
  context.set_forkserver_preload(["jax", "optax", "jspec.training.checkpoints"])
  folder, curve, rng = tmp_path / "killed", tmp_path / "killed.txt", random.Random(0)
  interrupted, latest = 0, 0
  while interrupted < 3 and latest < STEPS - 3:
    process = context.Process(target=train, args=(folder, curve))
    process.start()
    writes, patience = rng.choice((1, 2, 3)), rng.choice((0, 0.01, 0.03))
    interrupted += kill_while_it_writes(process, folder, writes, patience)
    with Checkpoints(folder, read_only=True) as checkpoints:
      assert latest <= (checkpoints.latest() or 0)
      latest = checkpoints.latest() or 0
      if latest:
        checkpoints.restore(None, start()[1])
  assert interrupted
  process = context.Process(target=train, args=(folder, curve))
  process.start()
  process.join()
  assert process.exitcode == 0 and not unfinished(folder)
  train(tmp_path / "whole", tmp_path / "whole.txt")
  whole = losses(tmp_path / "whole.txt")
  assert losses(curve) == whole and list(whole) == list(range(STEPS))
  assert all(len(found) == 1 for found in whole.values())
