"""Tokenizers, chat prompts and incremental detokenization."""

from __future__ import annotations

import json
import pathlib
import threading
import time

import numpy as np
import pytest
import tokenizers
from tiny_llm import byte_tokenizer

from jspec.text.chat_template import render_chat
from jspec.text.tokenizer import Detokenizer, Tokenizer
from jspec.text.tokenizer_files import gguf_tokenizer, load_tokenizer

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
TEXTS = ["Hello, world! It's 2026.", "\n\n1. One\n\n2. Two 12345", "日本語のテキスト、漢字。",
         "👩‍👩‍👧‍👦 family 🎉🏳️‍🌈", "Ça va? Ωμέγα שלום", "def f(x):\n    return x**2\t# ok\r\n",
         " lead", "\ufffd kept", ""]


def sentencepiece_metadata(**changes):
  """A tiny SentencePiece vocabulary: controls, the 256 bytes, a few pieces."""
  pieces = ["▁", "l", "o", "w", "e", "r", "▁l", "lo", "▁lo", "▁low", "er", "日", "▁▁"]
  tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
  types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
  scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
  return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
          "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores,
          "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
          "tokenizer.ggml.unknown_token_id": 0, "general.architecture": "llama", **changes}


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
  return gguf_tokenizer(sentencepiece_metadata())


def test_digits_stand_alone_and_line_breaks_stay_together(smollm2):
  """What transformers' GGUF tokenizer gets wrong; ids as llama.cpp's."""
  tokenizer = smollm2.tokenizer

  def texts(text):
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]

  assert texts("\n\n1.") == ["\n\n", "1", "."]
  assert texts("in 2026") == ["in", " ", "2", "0", "2", "6"]


def test_special_tokens_are_single_ids_and_left_out_of_text(smollm2):
  tokenizer = smollm2.tokenizer
  ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
  assert ids[0] == tokenizer.bos_id == 1 and ids[-1] == 2
  assert tokenizer.eos_ids == (2,) and 0 not in tokenizer.eos_ids
  assert tokenizer.decode(ids) == "user\nHi"
  assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_end|>")
  assert tokenizer.token_text(2) == "<|im_end|>"
  assert tokenizer.vocab_size == 49152 == smollm2.config.vocab_size


def test_encode_adds_nothing_unless_the_model_wants_it(smollm2, sentencepiece):
  assert smollm2.tokenizer.encode("Hi") == smollm2.tokenizer.encode("Hi", add_special_tokens=False)
  assert sentencepiece.encode("low")[0] == 1
  assert sentencepiece.encode("low", add_special_tokens=False)[0] != 1


def test_chat_ids_equal_transformers(smollm2):
  rows = json.loads((GOLDENS / "smollm2.json").read_text(encoding="utf-8"))
  for row in rows["chats"]:
    messages = [{"role": role, "content": content} for role, content in row["turns"]]
    ids = smollm2.tokenizer.apply_chat_template(messages, row["generation_prompt"])
    assert ids == row["ids"]
  for row in rows["greedy"]:
    message = {"role": "user", "content": row["prompt"]}
    assert smollm2.tokenizer.apply_chat_template([message]) == row["ids"]


def test_templates_have_what_transformers_gives_them():
  messages = [{"role": "user", "content": "<é>"}]
  template = ("{{ bos_token }}{% for m in messages %}{% if loop.first %}{{ m | tojson }}{% endif %}"
              "{% generation %}x{% endgeneration %}{% break %}{% endfor %}"
              "{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}")
  out = render_chat(template, messages, special_tokens={"bos_token": "<s>"})
  assert out == '<s>{"role": "user", "content": "<é>"}x4True'


def test_invalid_messages_are_refused(smollm2):
  chat = smollm2.tokenizer.apply_chat_template
  for messages, message in (([], "non-empty list"), ("Hi", "non-empty list"), (["Hi"], "message 0"),
                            ([{"role": "user"}], "'content' must be a string or a list of text "
                                                     "parts, got None"),
                            ([{"role": "user", "content": 3}], "'content' must be a string")):
    with pytest.raises(ValueError, match=message):
      chat(messages)
  refusing = "{{ raise_exception('unknown role ' + messages[0]['role']) }}"
  with pytest.raises(ValueError, match="refused these messages: unknown role judge"):
    render_chat(refusing, [{"role": "judge", "content": ""}])
  with pytest.raises(ValueError, match="refused"):  # the sandbox
    render_chat("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
                [{"role": "user", "content": ""}])


def test_model_without_template_says_so(sentencepiece):
  with pytest.raises(ValueError, match="no chat template"):
    sentencepiece.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_only_text_can_be_encoded(smollm2):
  with pytest.raises(ValueError, match="must be a string, got bytes"):
    smollm2.tokenizer.encode(b"Hi")
  with pytest.raises(ValueError, match="valid Unicode"):
    smollm2.tokenizer.encode("\ud800")


def test_vocab_hash_tells_other_vocabularies_apart(smollm2, sentencepiece):
  again = gguf_tokenizer(sentencepiece_metadata())
  assert again.vocab_hash() == sentencepiece.vocab_hash() != smollm2.tokenizer.vocab_hash()
  swapped = sentencepiece_metadata()
  tokens = swapped["tokenizer.ggml.tokens"]
  tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
  assert gguf_tokenizer(swapped).vocab_hash() != again.vocab_hash()


def test_sentencepiece_merges_follow_the_scores(sentencepiece):
  def names(text):
    return [sentencepiece.backend.id_to_token(i) for i in sentencepiece.encode(text)]

  assert names("lower") == ["<s>", "▁low", "er"]
  assert names("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
  assert sentencepiece.decode(sentencepiece.encode("lower 日 é")) == "lower 日 é"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_pre_tokenizers(pre):
  """"123" in one piece (GPT-2, Llama 3) or digit by digit (Qwen 2)."""
  tokens = list("123a") + ["12", "123"]
  tokenizer = gguf_tokenizer({
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.merges": ["1 2", "12 3"], "tokenizer.ggml.eos_token_id": 3})
  assert tokenizer.encode("123") == ([0, 1, 2] if pre == "qwen2" else [5])


def test_unsupported_gguf_tokenizers_are_named():
  with pytest.raises(ValueError, match="'bert' is not supported; supported: gpt2, llama"):
    gguf_tokenizer({"tokenizer.ggml.model": "bert"})
  with pytest.raises(ValueError, match="'tekken' is not supported; supported: gpt-2, smollm"):
    gguf_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken",
                    "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a a"]})
  with pytest.raises(ValueError, match="tokenizer.ggml.merges is missing"):
    gguf_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]})


def stream(tokenizer, ids, rng):
  """Deltas of ids pushed in random portions, then the flush."""
  detokenizer, deltas, at = Detokenizer(tokenizer), [], 0
  while at < len(ids):
    size = int(rng.integers(1, 4))
    deltas.append(detokenizer.push(ids[at:at + size]))
    at += size
  return deltas, detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_deltas_join_to_the_whole_text_for_any_ids(kind, smollm2, sentencepiece):
  """Random ids: invalid UTF-8, special tokens, ids beyond the vocabulary."""
  tokenizer = sentencepiece if kind == "sentencepiece" else smollm2.tokenizer
  rng = np.random.default_rng(0)
  pieces = [i for i in range(tokenizer.vocab_size) if len(tokenizer.backend.id_to_token(i)) < 3]
  for trial in range(400):
    pool = pieces if kind == "byte_level" and trial % 2 else range(tokenizer.vocab_size + 2)
    ids = rng.choice(pool, int(rng.integers(0, 30))).tolist()
    deltas, rest = stream(tokenizer, ids, rng)
    assert "".join(deltas) + rest == tokenizer.decode(ids)


@pytest.mark.parametrize("raw, text", [
  (b"\n\xc3", "\n\ufffd"),
  (b"\xc3\n", "\ufffd\n"),
  (b"\xe6\x97\xc3\xa9", "\ufffd\ufffdé"),
  (b"\xe6\x97\xa5\x97\xa5", "日\ufffd\ufffd"),
  (b"\xf0\x9f\x8eA", "\ufffd\ufffd\ufffdA"),
  (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate
  (b"\xc0\x80\xf5", "\ufffd\ufffd\ufffd"),
])
def test_an_invalid_byte_token_is_one_replacement_and_leaves_its_neighbours(sentencepiece, raw,
                                                                           text):
  """SentencePiece's own law; where nothing is valid transformers' too. Between other tokens."""
  low = sentencepiece.backend.token_to_id("▁low")
  ids = [low, *(3 + byte for byte in raw), low]
  assert sentencepiece.decode(ids) == "low" + text + " low"
  deltas, rest = stream(sentencepiece, ids, np.random.default_rng(0))
  assert "".join(deltas) + rest == "low" + text + " low"
  if set(text) == {"\ufffd"}:
    assert sentencepiece.backend.decode(ids) == "low" + text + " low"


def test_other_decoders_stream_as_they_decode():
  """Spaces between words, in front of pieces, and behind them."""
  made = tokenizers.decoders
  for decoder, words in ((None, ["a", "b"]), (made.WordPiece(), ["un", "##do", ".", "it"]),
                         (made.Metaspace(), ["▁a", "b", "▁"]),
                         (made.BPEDecoder(), ["a</w>", "b", "c</w>"])):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token=words[0]))
    if decoder is not None:
      backend.decoder = decoder
    tokenizer = Tokenizer(backend, ())
    rng = np.random.default_rng(0)
    for _ in range(50):
      ids = rng.integers(0, len(words), 8).tolist()
      deltas, rest = stream(tokenizer, ids, rng)
      assert "".join(deltas) + rest == backend.decode(ids)
      later = Detokenizer(tokenizer, prompt_ids=ids[:3])
      assert backend.decode(ids[:3]) + later.push(ids[3:]) + later.flush() == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_half_characters_in_any_delta(kind, text, smollm2, sentencepiece):
  tokenizer = sentencepiece if kind == "sentencepiece" else smollm2.tokenizer
  rng = np.random.default_rng(0)
  ids = tokenizer.encode(text)
  deltas, rest = stream(tokenizer, ids, rng)
  assert "".join(deltas) + rest == text
  assert "".join(deltas).count("\ufffd") <= text.count("\ufffd")
  assert rest == ""


def test_sentencepiece_deltas_decode_few_ids_each(sentencepiece, monkeypatch):
  """The work for 2000 tokens is at most 10 ids per token, not 2000."""
  decoded, join = [], Tokenizer.join
  monkeypatch.setattr(Tokenizer, "join",
                      lambda self, tokens: decoded.append(len(tokens)) or join(self, tokens))
  detokenizer = Detokenizer(sentencepiece)
  for token in sentencepiece.encode("low lower 日本 " * 200)[:2000]:
    detokenizer.push([token])
  assert sum(decoded) < 10 * 2000


def test_hugging_face_folder(tmp_path):
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "?": 3},
                                                             unk_token="?"))
  backend.enable_padding(length=9)
  backend.enable_truncation(1)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  backend.save(str(tmp_path / "tokenizer.json"))

  def write(name, content):
    (tmp_path / name).write_text(json.dumps(content))

  write("config.json", {"eos_token_id": 7, "bos_token_id": 1})
  write("tokenizer_config.json", {"eos_token": {"content": "</s>"}, "bos_token": "<s>",
                                  "chat_template": [{"name": "tools", "template": "no"},
                                                    {"name": "default", "template": "a a"}]})
  tokenizer = load_tokenizer(tmp_path)
  assert tokenizer.eos_ids == (7, 2) and tokenizer.bos_id == 1
  assert tokenizer.encode("a a") == [0, 0]  # neither padded nor truncated
  assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == [0, 0]
  write("generation_config.json", {"eos_token_id": [5, 2]})
  (tmp_path / "chat_template.jinja").write_text("a")
  tokenizer = load_tokenizer(tmp_path)
  assert tokenizer.eos_ids == (5, 2) and tokenizer.chat_template == "a"
  (tmp_path / "tokenizer.json").write_text("{")
  with pytest.raises(ValueError, match="tokenizer.json is damaged"):
    load_tokenizer(tmp_path)
  (tmp_path / "tokenizer.json").unlink()
  with pytest.raises(ValueError, match="no tokenizer.json"):
    load_tokenizer(tmp_path)


def test_a_tokenizer_is_saved_and_read_as_it_was(tmp_path):
  """From GGUF metadata to a Hugging Face folder: what a draft model gets of its target."""
  before = gguf_tokenizer(sentencepiece_metadata(**{
      "tokenizer.chat_template":
          "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"}))
  before.save(tmp_path)
  after = load_tokenizer(tmp_path)
  assert after.vocab_hash() == before.vocab_hash()
  assert (after.eos_ids, after.bos_id) == (before.eos_ids, before.bos_id)
  assert after.special_tokens == before.special_tokens
  messages = [{"role": "user", "content": "lower 日"}]
  assert after.apply_chat_template(messages) == before.apply_chat_template(messages)


def test_other_threads_run_while_a_long_text_is_tokenised():
  """A tokenizer that kept the interpreter's lock would let them run once or twice, at its ends."""
  turns, thread = 0, threading.Thread(
      target=byte_tokenizer().encode, args=("the cat and the hat " * 30_000,))
  thread.start()
  while thread.is_alive():
    turns += 1
    time.sleep(0.001)
  assert turns > 5
