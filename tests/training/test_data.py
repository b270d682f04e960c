"""From sequences to batches: shards, packing, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import os

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llm import tiny_model

from jspec.training.data import shards
from jspec.training.data.batches import Batches
from jspec.training.data.shards import (
  Origin,
  Row,
  draft_vocabulary,
  fingerprint,
  read_shards,
  write_shard,
)

LAYERS, WIDTH = (5, 1, 8), 4


def state(index, position, layer):
  """A hidden state that says where it belongs; exact in bfloat16."""
  return np.array([index, position, layer, 1], np.float32)


def row(index, size, prompt=2, source="s", layers=LAYERS):
  token = (index * 37 + np.arange(size)).astype(np.int32) % 60
  feature = np.array([np.concatenate([state(index, t, k) for k in layers])
                      for t in range(size - 1)]) if layers else None
  return Row(index, f"key{index // 2}", source, token, np.arange(size) >= prompt,
             feature if feature is None else feature.astype(ml_dtypes.bfloat16))


ORIGIN = Origin("tiny", "abc", LAYERS, {"temperature": 0.7})


@pytest.fixture
def folder(tmp_path):
  sizes = {4: 5, 0: 9, 3: 4, 1: 6, 2: 7}
  rows = [row(i, n, source=f"s{i}") for i, n in sizes.items()]
  write_shard(tmp_path, 0, rows[:2], ORIGIN)
  write_shard(tmp_path, 1, rows[2:], ORIGIN)
  return tmp_path


def test_shards_give_back_each_sequence_by_its_index(folder):
  read = read_shards(folder, "abc")
  assert read.index.tolist() == [0, 1, 2, 3, 4] and read.length.tolist() == [9, 6, 7, 4, 5]
  assert read.origin == ORIGIN and read.width == WIDTH
  assert read.source == ("s0", "s1", "s2", "s3", "s4")
  assert read.key == ("key0", "key0", "key1", "key1", "key2")
  for i, size in enumerate(read.length):
    own = row(i, size)
    assert read.token[read.span(i)].tolist() == own.token.tolist()
    assert read.loss[read.span(i)].tolist() == own.loss.tolist()
    assert not read.feature(i, size)[-1].any() and read.feature(i, 2).shape == (2, 12)
    np.testing.assert_array_equal(read.feature(i, size)[:-1], own.feature)


def test_folders_are_joined_one_after_the_other(folder, tmp_path):
  one = read_shards(folder)
  assert shards.join([one]) is one
  both = shards.join([one, one.select([3, 1])])
  assert both.length.tolist() == [*one.length, 7 - 3, 6] and both.index.tolist() == list(range(7))
  assert both.source == (*one.source, "s3", "s1")
  for i, old in ((2, 2), (5, 3), (6, 1)):
    size = int(one.length[old])
    assert both.token[both.span(i)].tolist() == one.token[one.span(old)].tolist()
    np.testing.assert_array_equal(both.feature(i, size), one.feature(old, size))
  other = dataclasses.replace(one, origin=dataclasses.replace(ORIGIN, fingerprint="other"))
  with pytest.raises(ValueError, match="do not go with"):
    shards.join([one, other])


def test_a_prompt_of_shards_is_on_one_side_of_the_split(folder):
  whole = read_shards(folder)
  sides = whole.split(0.5, seed=1)
  assert sorted(map(len, sides)) == [1, 4] and not set(sides[0].key) & set(sides[1].key)
  for side in sides:
    for i, index in enumerate(side.index):
      assert side.token[side.span(i)].tolist() == whole.token[whole.span(index)].tolist()
      np.testing.assert_array_equal(side.feature(i, 3), whole.feature(index, 3))


def test_a_write_that_breaks_off_leaves_nothing_to_read(folder, monkeypatch):
  monkeypatch.setattr(os, "replace", None)
  with pytest.raises(TypeError):
    write_shard(folder, 2, [row(9, 5)], ORIGIN)
  assert len(list(folder.iterdir())) == 3 and len(read_shards(folder)) == 5


def test_shards_with_prompt_lengths_instead_of_flags_are_read(tmp_path):
  tensors = {"token": np.arange(9, dtype=np.int32), "length": np.array([4, 5], np.int32),
             "prompt_len": np.array([3, 1], np.int32), "index": np.array([8, 6], np.int32)}
  safetensors.numpy.save_file(tensors, tmp_path / "part-00000.safetensors",
                              {"sources": '["b", "a"]', "temperature": "[0.0, 0.7]"})
  read = read_shards(tmp_path)
  assert read.token.tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3] and read.index.tolist() == [6, 8]
  assert read.loss.tolist() == [False, *[True] * 4, *[False] * 3, True]
  assert len(set(read.key)) == 2 and read.source == ("a", "b")


def test_shards_of_another_target_are_refused(folder):
  with pytest.raises(ValueError, match="by target 'tiny' with fingerprint abc, but this target "
                     "has fingerprint xyz"):
    read_shards(folder, "xyz")
  write_shard(folder, 2, [row(9, 5)], dataclasses.replace(ORIGIN, fingerprint="other"))
  with pytest.raises(ValueError, match="part-00002.* was made with .*other.*abc"):
    read_shards(folder)


def test_what_is_not_a_whole_set_of_shards_is_refused(folder, tmp_path):
  write_shard(folder, 2, [row(3, 5)], ORIGIN)
  with pytest.raises(ValueError, match="holds prompt 3 more than once"):
    read_shards(folder)
  (folder / "part-00002.safetensors").write_bytes(b"12345678x")
  with pytest.raises(ValueError, match="part-00002.safetensors is damaged"):
    read_shards(folder)
  with pytest.raises(ValueError, match="holds no part-"):
    read_shards(tmp_path / "none")
  with pytest.raises(ValueError, match=r"must be \[4, 3 \* E\], got \(5, 12\)"):
    write_shard(folder, 3, [dataclasses.replace(row(3, 5), feature=row(3, 6).feature)], ORIGIN)


def test_the_fingerprint_tells_targets_apart_but_not_their_storage():
  config, params = tiny_model()[:2]
  own = fingerprint(config, params)
  assert own == fingerprint(config, jax.tree.map(lambda x: x.astype("bfloat16"), params))
  assert own == fingerprint(dataclasses.replace(config, vocab_parts=4, num_kv_heads=4), params)
  assert own != fingerprint(*tiny_model(key=1)[:2])  # other weights
  assert own != fingerprint(dataclasses.replace(config, rope_theta=5e5), params)
  tuned = params["layers"][-1] | {"down": {"w": params["layers"][-1]["down"]["w"] + 0.1}}
  assert own != fingerprint(config, params | {"layers": [*params["layers"][:-1], tuned]})


def test_the_draft_vocabulary_is_the_most_frequent_tokens_to_predict():
  rng = np.random.default_rng(0)
  token, loss = rng.integers(0, 30, 200), rng.random(200) < 0.4
  sequences = shards.in_memory([token], [loss], ["k"], ["s"])
  count = collections.Counter(token[loss].tolist())
  ranked = sorted(range(40), key=lambda t: (-count[t], t))
  for size in (1, 7, 35, 40):
    assert draft_vocabulary(sequences, size, 40).tolist() == sorted(ranked[:size])
  with pytest.raises(ValueError, match=r"must lie in 1..40"):
    draft_vocabulary(sequences, 41, 40)
  with pytest.raises(ValueError, match="the vocabulary only 20"):
    draft_vocabulary(sequences, 5, 20)


def sequences_of(sizes, prompt=2):
  rows = [row(i, n, prompt, layers=()) for i, n in enumerate(sizes)]
  return shards.in_memory([r.token for r in rows], [r.loss for r in rows],
                          [r.key for r in rows], [r.source for r in rows])


def segments(batch):
  """(tokens, loss flags) of every sequence of a batch, checking all that surrounds them."""
  found = []
  for token, segment, position, loss in zip(batch.token, batch.segment, batch.position,
                                            batch.loss, strict=True):
    numbers = [n for n in dict.fromkeys(segment.tolist()) if n]
    assert numbers == list(range(1, len(numbers) + 1))
    assert not (segment[1:][segment[:-1] == 0] > 0).any()  # padding comes last
    for n in numbers:
      at = np.flatnonzero(segment == n)
      assert (np.diff(at) == 1).all() and position[at].tolist() == list(range(len(at)))
      found.append((tuple(token[at].tolist()), tuple(loss[at].tolist())))
    assert not token[segment == 0].any() and not loss[segment == 0].any()
  return found


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(3, 16), min_size=1, max_size=40), rows=st.integers(1, 4),
       layout=st.sampled_from(("packed", "padded")), seed=st.integers(0, 3))
def test_an_epoch_has_every_sequence_once_and_whole(sizes, rows, layout, seed):
  data = sequences_of(sizes)
  batches = Batches(data, rows, 16, seed, layout)
  expected = sorted((tuple(data.token[data.span(i)].tolist()),
                     tuple(data.loss[data.span(i)].tolist())) for i in range(len(sizes)))
  for epoch in (0, 2):
    made = [batches.batch(epoch * batches.epoch_steps + i) for i in range(batches.epoch_steps)]
    assert sorted(s for batch in made for s in segments(batch)) == expected
  filled = sorted(n for batch in made for n in (batch.segment > 0).sum(1) if n)
  if layout == "packed" and len(filled) > 1:  # no two rows would fit into one
    assert filled[0] + filled[1] > 16


def equal(a, b):
  return all(np.array_equal(getattr(a, name), getattr(b, name))
             for name in ("token", "segment", "position", "loss"))


def test_a_batch_depends_on_seed_and_step_alone():
  data = sequences_of([3 + i % 9 for i in range(50)])
  make = lambda seed: Batches(data, 2, 16, seed)
  batches = make(5)
  seen = [batches.batch(step) for step in range(3 * batches.epoch_steps)]
  fresh = make(5)
  for step in (17, 2, 30, 0):  # in any order
    assert equal(fresh.batch(step), seen[step])
  for step, batch in zip(range(11, 20), make(5).stream(11), strict=False):  # resumed
    assert equal(batch, seen[step])
  epoch = batches.epoch_steps
  assert not all(equal(a, b) for a, b in zip(seen[:epoch], seen[epoch:], strict=False))
  assert not all(equal(a, make(6).batch(i)) for i, a in enumerate(seen[:epoch]))
  with pytest.raises(ValueError, match="step=-1 must be >= 0"):
    batches.batch(-1)


def test_padded_batches_have_the_least_length_that_holds_them():
  data = sequences_of([3, 4, 5, 8, 9, 15, 16, 4])
  batches = Batches(data, 2, 16, 0, "padded", buckets=(4, 8))
  lengths = collections.Counter()
  for step in range(batches.epoch_steps):
    batch = batches.batch(step)
    lengths[batch.token.shape[1]] += 1
    for tokens, _ in segments(batch):
      assert min(n for n in (4, 8, 16) if n >= len(tokens)) == batch.token.shape[1]
    assert (batch.segment <= 1).all()
  assert lengths == {4: 2, 8: 1, 16: 2}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_features_lie_beside_their_tokens(folder, layout):
  """Layers 8 and 5, in this order, and layer 1 as the final hidden state, stored as 5, 1, 8."""
  batches = Batches(read_shards(folder), 2, 16, 0, layout, layers=(8, 5), hidden=1)
  seen = 0
  for _, batch in zip(range(batches.epoch_steps), batches.stream(), strict=False):
    assert batch.feature.dtype == batch.hidden.dtype == ml_dtypes.bfloat16
    assert batch.feature.shape == (*batch.token.shape, 2 * WIDTH)
    for b, t in np.ndindex(batch.token.shape):
      same = batch.segment[b] == batch.segment[b, t]
      position, size = batch.position[b, t], same.sum()
      hidden, feature = np.zeros(WIDTH), np.zeros(2 * WIDTH)
      if batch.segment[b, t] and position < size - 1:
        [index] = [i for i, n in enumerate((9, 6, 7, 4, 5)) if n == size]
        hidden = state(index, position, 1)
        feature = np.concatenate([state(index, position, k) for k in (8, 5)])
        seen += 1
      np.testing.assert_array_equal(batch.hidden[b, t].astype(np.float32), hidden)
      np.testing.assert_array_equal(batch.feature[b, t].astype(np.float32), feature)
  assert seen == 9 + 6 + 7 + 4 + 5 - 5
  assert Batches(read_shards(folder), 2, 16, 0, layout).batch(0).feature is None


def test_too_long_sequences_are_refused_or_cut(folder):
  data = read_shards(folder)
  with pytest.raises(ValueError, match="2 of 5 sequences are longer than 6 tokens, the longest has "
                     "9 tokens: raise it, or cut them"):
    Batches(data, 2, 6, 0)
  batches = Batches(data, 1, 6, 0, layers=(5,), cut=True)
  cut = [s for step in range(batches.epoch_steps) for s in segments(batches.batch(step))]
  assert sorted(cut) == sorted((tuple(row(i, n).token[:6]), tuple(row(i, n).loss[:6]))
                               for i, n in enumerate((9, 6, 7, 4, 5)))


def test_what_has_no_token_to_learn_is_left_out():
  data = sequences_of([3, 8, 9], prompt=5)
  assert sorted(len(t) for t, _ in segments(Batches(data, 4, 16, 0).batch(0))) == [8, 9]
  with pytest.raises(ValueError, match="none of 3 sequences has a token to learn within 5 tokens"):
    Batches(data, 4, 5, 0, cut=True)


@pytest.mark.parametrize("arguments, message", [
  (dict(rows=0), "needs rows >= 1"), (dict(length=1), "length >= 2"),
  (dict(layout="tight"), "layout 'tight' is not one of"),
  (dict(buckets=(4,)), "belong to layout 'padded'"),
  (dict(buckets=(4, 17), layout="padded"), r"must lie in 2..length=16"),
  (dict(layers=(3,)), r"layer 3 are not with the sequences, which have those of \[5, 1, 8\]"),
  (dict(hidden=2), "layer 2 are not with the sequences"),
])
def test_a_batch_that_cannot_be_is_refused(folder, arguments, message):
  with pytest.raises(ValueError, match=message):
    Batches(read_shards(folder), **(dict(rows=2, length=16, seed=0) | arguments))
  with pytest.raises(ValueError, match="which have those of no layer"):
    Batches(sequences_of([5]), 1, 16, 0, layers=(2,))
