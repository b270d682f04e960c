"""From files to tokens: formats, the split by prompt, masks, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny_llm import EOS, byte_tokenizer

from jspec.training.data.conversations import Conversation, encode, encode_all, read, split, told

USER, BOT = "user", "assistant"


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
          {"turns": ["a", "then c"], "category": "x"}, {"conversations": said},
          {"conversations": list(expected)}]),
      write(tmp_path, "book", "One\nparagraph [1].\n \n\n{Two}\n")]
  asked, answered = (turn(USER, "a"),), (turn(USER, "a"), turn(BOT, "b"))
  assert read(files) == [Conversation("list", expected), Conversation("own", expected), *(
      Conversation(source, m) for source, m in (
          ("lines", asked), ("lines", answered), ("lines", answered), ("x", asked),
          ("lines", expected), ("lines", expected))),
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
  (tokens, loss), = encode(talk, tokenizer)
  text = "<|user|>the cat<|end|><|bot|>on the hat<|end|><|user|>and<|end|><|bot|>in<|end|>"
  assert tokens.tolist() == tokenizer.encode(text)
  assert tokenizer.decode(tokens[loss], False) == "on the hat<|end|>in<|end|>"
  assert (tokens[loss] == EOS).sum() == 2
  (tokens, loss), = encode(Conversation("x", text="the cat"), tokenizer)
  assert loss.all() and tokenizer.decode(tokens) == "the cat"


def test_the_mask_ends_with_the_turn_and_begins_where_tokens_part():
  """A template that writes behind the end of a turn, and an answer that joins its seam."""
  template = ("{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>t' }}"
              "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|bot|>t"
              "{% endif %}")
  tokenizer = dataclasses.replace(byte_tokenizer(), chat_template=template)
  (tokens, loss), = encode(Conversation("x", (turn(USER, "a"), turn(BOT, "he cat"))), tokenizer)
  assert tokenizer.decode(tokens, False).endswith("the cat<|end|>\n")
  assert tokenizer.decode(tokens[loss], False) == "the cat<|end|>"  # "the" is one token
  (_, loss), = encode(Conversation("x", (turn(BOT, "on"), turn(USER, "a"))), tokenizer)
  assert not loss.any()


# As Qwen3's: of earlier answers the thinking is dropped, here all before a full stop.
FORGETFUL = (
    "{% set ns = namespace(past=false) %}"
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.past = m != last %}<|user|>"
    "{{ m.content }}{% else %}<|bot|>{{ m.content.split('.')[-1] if ns.past else m.content }}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}")


def test_an_answer_that_the_template_changes_later_is_learnt_in_its_own_context():
  tokenizer = dataclasses.replace(byte_tokenizer(), chat_template=FORGETFUL)
  talk = (turn(USER, "a"), turn(BOT, "one.on"), turn(USER, "b"), turn(BOT, "in"), turn(USER, "c"),
          turn(BOT, "two.he"), turn(USER, "the end"))
  found = [(tokenizer.decode(tokens, False), tokenizer.decode(tokens[loss], False))
           for tokens, loss in encode(Conversation("x", talk), tokenizer)]
  assert found == [
      ("<|user|>a<|end|><|bot|>one.on<|end|>", "one.on<|end|>"),
      # The second answer has no thinking: the third one's context appends to it.
      ("<|user|>a<|end|><|bot|>on<|end|><|user|>b<|end|><|bot|>in<|end|><|user|>c<|end|>"
       "<|bot|>two.he<|end|>", "in<|end|>two.he<|end|>")]
  # Where nothing is dropped the same template makes one sequence.
  assert len(encode(Conversation("x", talk[2:4] + talk[:1] + talk[3:4]), tokenizer)) == 1


def test_an_answer_that_does_not_continue_the_generation_prompt_is_refused_or_left_out():
  tokenizer = dataclasses.replace(byte_tokenizer(), chat_template=(
      "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
      "{% if add_generation_prompt %}<|bot|>{% endif %}"
      "{{ raise_exception('no c') if messages[0].content == 'c' else '' }}"))
  bad = Conversation("bad", (turn(USER, "a"), turn(BOT, "long")))
  refused = Conversation("refused", (turn(USER, "c"), turn(BOT, "long")))
  good = Conversation("good", text="the cat")
  with pytest.raises(ValueError, match="turn 1 of a conversation of 'bad' does not continue"):
    encode_all([good, bad], tokenizer)
  faults: list[str] = []
  kept = encode_all([bad, good, refused], tokenizer, faults)
  assert kept.source == ("good",) and [f"{'bad' in f} {'no c' in f}" for f in faults] == [
      "True False", "False True"]
  with pytest.raises(ValueError, match=r"no assistant turns in bad \(left out 1 faulty row; the "
                     "first: turn 1"):
    encode_all([bad], tokenizer, [])


def test_faulty_rows_are_counted_and_left_out_where_that_is_asked_for(tmp_path):
  deep = "[" * 100_000
  file = write(tmp_path, "a.jsonl", '{"prompt": "a"}\n{"prompt": \n{"messages": "b"}\n'
               '{"prompt": "c"}\n{"messages": [{"role": "x", "content": "y"}]}\n{"prompt": '
               f'{deep}')
  faults: list[str] = []
  assert [c.messages[0]["content"] for c in read([file], faults)] == ["a", "c"]
  assert [fault.removeprefix(str(tmp_path)).split(": ")[0] for fault in faults] == [
      "/a.jsonl:2", "/a.jsonl:3", "/a.jsonl:5", "/a.jsonl:6"]
  assert told(faults) == f"left out 4 faulty rows; the first: {faults[0]}"
  with pytest.raises(ValueError, match="b.jsonl holds 1 faulty rows and no other; the first: .*:1"):
    read([file, write(tmp_path, "b.jsonl", '{"prompt": 3}')], faults)


def test_data_without_answers_is_refused():
  tokenizer = byte_tokenizer()
  asked, answered = (turn(USER, "a"),), (turn(USER, "a"), turn(BOT, "b"))
  with pytest.raises(ValueError, match="no assistant turns in p, q: generate answers first with "
                     "jspec train-data"):
    encode_all([Conversation("q", asked), Conversation("p", asked)], tokenizer)
  both = encode_all([Conversation("q", asked), Conversation("p", answered)], tokenizer)
  assert both.source == ("q", "p") and not both.loss[both.span(0)].any()
  assert both.key[0] == both.key[1]
  with pytest.raises(ValueError, match="no chat template"):
    encode(Conversation("q", asked), dataclasses.replace(tokenizer, chat_template=None))
