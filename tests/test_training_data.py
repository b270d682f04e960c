"""From files to batches: formats, masks, shards, packing, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llm import EOS, byte_tokenizer, tiny_model

from training import shards
from training.batches import Batches
from training.conversations import Conversation, encode, encode_all, read, split
from training.shards import Origin, Row, draft_vocabulary, fingerprint, read_shards, write_shard

USER, BOT = "user", "assistant"
LAYERS, WIDTH = (5, 1, 8), 4


def turn(role, content):
  return {"role": role, "content": content}


def write(folder, name, content):
  file = folder / name
  rows = content if isinstance(content, str) else "\n".join(map(json.dumps, content))
  file.write_text(rows, encoding="utf-8")
  return file


def test_formats_are_told_by_their_content(tmp_path):
  said = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"},
          {"from": "gpt", "value": "b"}]
  expected = (turn("system", "s"), turn(USER, "a"), turn(BOT, "b"))
  files = [
      write(tmp_path, "list.txt", json.dumps([{"conversations": said}, {"conversations": []}])),
      write(tmp_path, "lines.json", [
          {"messages": list(expected), "source": "own"}, {"prompt": "a"},
          {"prompt": "a", "response": "b"}, {"prompt": [turn(USER, "a")], "response": "b"},
          {"turns": ["a", "then c"], "category": "x"}, {"conversations": said}]),
      write(tmp_path, "book", "One\nparagraph [1].\n \n\n{Two}\n")]
  asked, answered = (turn(USER, "a"),), (turn(USER, "a"), turn(BOT, "b"))
  assert read(files) == [Conversation("list", expected), Conversation("own", expected), *(
      Conversation(source, m) for source, m in (
          ("lines", asked), ("lines", answered), ("lines", answered), ("x", asked),
          ("lines", expected))),
      Conversation("book", text="One\nparagraph [1]."), Conversation("book", text="{Two}")]


def test_folders_and_globs_are_expanded(tmp_path):
  (tmp_path / "deep").mkdir()
  for name in ("b.jsonl", "a.jsonl", "deep/c.txt"):
    write(tmp_path, name, [{"prompt": name}] if name != "deep/c.txt" else "text")
  write(tmp_path, "README.md", "not data")
  names = lambda *paths: [c.source for c in read(paths)]
  assert names(tmp_path) == ["a", "b", "c"]
  assert names(str(tmp_path / "*.jsonl"), tmp_path / "deep") == ["a", "b", "c"]


@pytest.mark.parametrize("name, content, message", [
  ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', "a.jsonl:2: not valid JSON"),
  ("a.json", '[{"prompt": "a"}, {"prompt": ]', "a.json is not valid JSON"),
  ("a.jsonl", "plain words", "a.jsonl:1: neither a JSON object nor a list"),
  ("a.txt", " \n", "a.txt is empty"),
  ("a.json", '[{"conversations": []}]', "a.json is empty"),
  ("a.jsonl", '{"prompt": "a"}\n[1]', "a.jsonl:2: expected an object"),
  ("a.jsonl", '{"question": "a"}', r"a.jsonl:1: keys \['question'\] are none of .*ShareGPT"),
  ("a.jsonl", '{"prompt": 3}', "a.jsonl:1: a prompt must be text"),
  ("a.jsonl", '{"prompt": "a", "response": 3}', "a.jsonl:1: 'response' must be a string"),
  ("a.jsonl", '{"messages": "a"}', "a.jsonl:1: a conversation must be a list"),
  ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl:1: a turn must be an object"),
  ("a.json", '[{"conversations": [{"from": "tool", "value": "x"}]}]',
   "a.json, entry 0: role 'tool' is not one of system, user"),
])
def test_a_bad_file_is_named_with_the_place(tmp_path, name, content, message):
  with pytest.raises(ValueError, match=message):
    read([write(tmp_path, name, content)])


def test_missing_data_is_refused(tmp_path):
  (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="no data"):
    read([])
  for name, message in (("none", "none does not exist"), ("*.jsonl", "matches no file"),
                        ("bytes.txt", "not UTF-8"), ("empty", "holds no .json")):
    with pytest.raises(ValueError, match=message):
      read([tmp_path / name])


def test_a_prompt_is_on_one_side_of_the_split_and_stays_there():
  ask = lambda i, *more: Conversation("x", (turn(USER, f"prompt {i}"), *more))
  data = [ask(i) for i in range(2000)] + [ask(i, turn(BOT, "yes")) for i in range(2000)]
  train, held = split(data, 0.1, seed=3)
  assert len(train) + len(held) == 4000 and not {c.key for c in train} & {c.key for c in held}
  # Binomial(2000, 0.1) has a standard deviation of 13.4; five of them.
  assert abs(len(held) / 2 - 200) < 67
  more = split([ask(i) for i in range(2000, 2500)] + data, 0.1, seed=3)[1]
  assert more[-len(held):] == held
  assert split(data, 0.1, seed=4)[1] != held and not split(data, 0.0, seed=3)[1]
  with pytest.raises(ValueError, match=r"validation=1.0 must be a share in \[0, 1\)"):
    split(data, 1.0, seed=3)


def test_only_the_assistants_words_and_its_end_of_turn_are_learnt():
  tokenizer = byte_tokenizer()
  talk = Conversation("x", (turn(USER, "the cat"), turn(BOT, "on the hat"), turn(USER, "and"),
                            turn(BOT, "in")))
  tokens, loss = encode(talk, tokenizer)
  text = "<|user|>the cat<|end|><|bot|>on the hat<|end|><|user|>and<|end|><|bot|>in<|end|>"
  assert tokens.tolist() == tokenizer.encode(text)
  assert tokenizer.decode(tokens[loss], False) == "on the hat<|end|>in<|end|>"
  assert (tokens[loss] == EOS).sum() == 2
  tokens, loss = encode(Conversation("x", text="the cat"), tokenizer)
  assert loss.all() and tokenizer.decode(tokens) == "the cat"


def test_the_mask_ends_with_the_turn_and_begins_where_tokens_part():
  """A template that writes behind the end of a turn, and an answer that joins its seam."""
  template = ("{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>t' }}"
              "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|bot|>t"
              "{% endif %}")
  tokenizer = dataclasses.replace(byte_tokenizer(), chat_template=template)
  tokens, loss = encode(Conversation("x", (turn(USER, "a"), turn(BOT, "he cat"))), tokenizer)
  assert tokenizer.decode(tokens, False).endswith("the cat<|end|>\n")
  assert tokenizer.decode(tokens[loss], False) == "the cat<|end|>"  # "the" is one token
  assert not encode(Conversation("x", (turn(BOT, "on"), turn(USER, "a"))), tokenizer)[1].any()


@pytest.mark.parametrize("prompt, count", [("", 3), ("<|bot|>", 2)])
def test_a_template_that_changes_earlier_text_is_refused(prompt, count):
  """It drops an answer when the talk goes on, or the generation prompt when it is answered."""
  template = ("{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else 'cut' }}"
              "<|end|>{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}")
  tokenizer = dataclasses.replace(byte_tokenizer(), chat_template=template)
  talk = (turn(USER, "a"), turn(BOT, "long"), turn(USER, "b"))
  with pytest.raises(ValueError, match="changes earlier text when more follows, at turn 1"):
    encode(Conversation("x", talk[:count]), tokenizer)


def test_data_without_answers_is_refused():
  tokenizer = byte_tokenizer()
  asked, answered = (turn(USER, "a"),), (turn(USER, "a"), turn(BOT, "b"))
  with pytest.raises(ValueError, match="no assistant turns in p, q: generate answers first with "
                     "python -m training.generate"):
    encode_all([Conversation("q", asked), Conversation("p", asked)], tokenizer)
  both = encode_all([Conversation("q", asked), Conversation("p", answered)], tokenizer)
  assert both.source == ("q", "p") and not both.loss[both.span(0)].any()
  assert both.key[0] == both.key[1]
  with pytest.raises(ValueError, match="no chat template"):
    encode(Conversation("q", asked), dataclasses.replace(tokenizer, chat_template=None))


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
