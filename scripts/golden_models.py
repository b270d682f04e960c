"""SmolLM2 and Gemma 3, run by transformers: what make_goldens.py stores of them."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

CHATS = [
  [("user", "Hi")], [("system", "Answer in one word."), ("user", "What is 12 + 30?")],
  [("user", "Name a fruit."), ("assistant", "1. Apple\n\n2. Pear"), ("user", "Ça va? 日本 🎉")]]
GEMMA_TEXTS = ["The capital of France is", "def add(a, b):\n    return",
               "\n\n1. Hello  world   foo\t日本 🎉 <end_of_turn>\n\n\n    x", "a" * 40]


def load(gguf: pathlib.Path):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
  return model, transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def logits_golden(model, ids: list[int], some: np.ndarray) -> np.ndarray:
  """float32 logits at four positions, at the vocabulary ids `some`."""
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0]
  return logits[positions(ids)][:, torch.from_numpy(some)].numpy()


def positions(ids: list[int]) -> list[int]:
  return sorted({0, len(ids) // 3, 2 * len(ids) // 3, len(ids) - 1})


def greedy(model, ids: list[int], count: int, eos: int) -> tuple[list[int], float]:
  """The next tokens (eos included), and the smallest gap between the two best logits."""
  token, cache, out, gap = torch.tensor([ids]), None, [], float("inf")
  while len(out) < count and (not out or out[-1] != eos):
    with torch.no_grad():
      result = model(token, past_key_values=cache, use_cache=True)
    best = result.logits[0, -1].topk(2)
    gap, cache = min(gap, float(best.values[0] - best.values[1])), result.past_key_values
    token = best.indices[:1][None]
    out.append(int(token))
  return out, gap


def real_prompts(folder: pathlib.Path) -> list[str]:
  """Four chats, three code edits, three questions about a meeting."""
  def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).open(encoding="utf-8")][:40]

  chats = [row["turns"][0] for row in read("mt_bench.jsonl")]
  edits = [f"{row['instruction'].strip()}\n\n```python\n{row['input']}\n```"
           for row in read("edit_eval.jsonl")]
  meetings = [f"{row['context'][:700]}\n\n{row['query']}" for row in read("qmsum_test_60.jsonl")]
  return sorted(chats, key=len)[:4] + sorted(edits, key=len)[:3] + meetings[:3]


def smollm2(gguf: pathlib.Path, prompts: pathlib.Path, folder: pathlib.Path) -> None:
  model, tokenizer = load(gguf)
  # transformers forgets the digit split of this vocabulary (tokenizer.ggml.pre = smollm)
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])

  def chat(turns: list[tuple[str, str]], last: bool) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=last, return_dict=False)

  chats = [{"turns": turns, "generation_prompt": last, "ids": chat(turns, last)}
           for turns in CHATS for last in (True, False)]
  rows = []
  for prompt in real_prompts(prompts):
    ids = chat([("user", prompt)], True)
    out, gap = greedy(model, ids, 64, eos=2)
    rows.append({"prompt": prompt, "ids": ids, "greedy": out, "smallest_gap": round(gap, 5)})
  some = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 512, replace=False))
  write(folder / "smollm2", {"chats": chats, "greedy": rows}, model,
        [rows[i]["ids"] for i in (0, 1, 4, 7)], some)


def gemma(gguf: pathlib.Path, folder: pathlib.Path) -> None:
  model, tokenizer = load(gguf)
  some = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 512, replace=False))
  rows = [{"text": text, "ids": list(tokenizer(text).input_ids)} for text in GEMMA_TEXTS]
  write(folder / "gemma", {"texts": rows}, model, [row["ids"] for row in rows[:2]], some)


def write(stem: pathlib.Path, content: dict, model, prompts: list[list[int]],
          some: np.ndarray) -> None:
  """The tables as stem.json, the logits of `prompts` as stem.npz."""
  tables = [f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
            for key, rows in content.items()]  # a row per line, for readable diffs
  stem.with_suffix(".json").write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")
  arrays = {f"logits{i}": logits_golden(model, ids, some) for i, ids in enumerate(prompts)}
  arrays |= {f"ids{i}": np.array(ids, np.int32) for i, ids in enumerate(prompts)}
  arrays |= {f"positions{i}": np.array(positions(ids)) for i, ids in enumerate(prompts)}
  np.savez_compressed(stem.with_suffix(".npz"), some=some, **arrays)
