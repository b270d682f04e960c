"""What a drafting head is worth: acceptance and wall-clock time against plain decoding, in turn.

  python scripts/head_report.py --prompts question.jsonl --per-category 6 --tokens 2 3 --lookup none

Greedy, one request at a time. Every prompt is answered plainly and with every setting one after
the other in one process; a pair counts where the text does not loop (no 16-gram of its last 64
tokens comes twice), as a loop is drafted too easily.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from jspec import LLM, SamplingParams
from jspec.outputs import SpeculativeStats
from training.conversations import read

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
        "qa", "math_reasoning", "translation")


def loops(tokens, span: int = 64, size: int = 16) -> bool:
  tail = tokens[-span:]
  grams = [tuple(tail[i:i + size]) for i in range(len(tail) - size + 1)]
  return len(set(grams)) < len(grams)


def answer(llm, ids, max_tokens):
  began = time.perf_counter()
  out = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=max_tokens))[0]
  spent = time.perf_counter() - began - out.timing.first_token  # prefill is the same for all
  return out, spent


def settings(args, head):
  for tokens in args.tokens:
    for lookup in args.lookup:
      method = args.method if lookup == "none" else f"{lookup}+{args.method}"
      for threshold in args.confidence:
        for adaptive in (True, False) if args.both else (not args.whole,):
          name = f"{method} K={tokens} stop<{threshold:g} {'planned' if adaptive else 'whole'}"
          yield name, {"method": method, "model": head, "num_speculative_tokens": tokens,
                       "draft_confidence_threshold": threshold, "adaptive_draft_length": adaptive}


def chosen(args, llm):
  by_category: dict[str, list] = {}
  for conversation in read(args.prompts):
    ids = llm.encode_chat(list(conversation.prompt))
    own = by_category.setdefault(conversation.source, [])
    if len(own) < args.per_category and len(ids) <= args.max_prompt:
      own.append(ids)
  return [(name, ids) for name, own in by_category.items() for ids in own]


def table(rows, names):
  """By category: pairs that count, and per setting tokens per step and the ratio of times."""
  for category in [*dict.fromkeys(row["category"] for row in rows), "chat", "all"]:
    own = [row for row in rows if category == "all" or row["category"] == category
           or category == "chat" and row["category"] in CHAT]
    kept = [row for row in own if not row["loops"]]
    if not kept:
      continue
    print(f"{category}: {len(kept)} of {len(own)} do not loop")
    for name in names:
      stats = sum((row[name]["stats"] for row in kept), SpeculativeStats())
      plain, drafted = (sum(row[k]["seconds"] for row in kept) for k in ("plain", name))
      ratios = [row["plain"]["seconds"] / row[name]["seconds"] for row in kept]
      depths = " ".join(f"{x:.2f}" for x in stats.acceptance_per_position)
      print(f"  {name}: {stats.tokens_per_step:.3f} tokens per step, accepted by depth [{depths}], "
            f"{plain / drafted:.3f} x plain (median {statistics.median(ratios):.3f})")


def main():
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--prompts", nargs="+", required=True)
  parser.add_argument("--target", default="smollm2-135m-instruct")
  parser.add_argument("--head", default=None, help="default: the head that comes with the target")
  parser.add_argument("--method", default="eagle3")
  parser.add_argument("--tokens", type=int, nargs="+", default=[2, 3])
  parser.add_argument("--lookup", nargs="+", default=["none"], help="none, ngram, suffix")
  parser.add_argument("--confidence", type=float, nargs="+", default=[0.0])
  parser.add_argument("--whole", action="store_true", help="verify every draft whole")
  parser.add_argument("--both", action="store_true", help="both whole and planned")
  parser.add_argument("--per-category", type=int, default=4)
  parser.add_argument("--max-prompt", type=int, default=900)
  parser.add_argument("--max-tokens", type=int, default=96)
  parser.add_argument("--output", default=None, help="JSON lines, one per prompt")
  args = parser.parse_args()
  fields = {"max_num_seqs": 1, "max_model_len": args.max_prompt + args.max_tokens + 16}
  plain = LLM(args.target, **fields)
  engines = {"plain": plain} | {
      name: LLM(plain.loaded, speculative_config=speculation, **fields)
      for name, speculation in settings(args, args.head)}
  prompts = chosen(args, plain)
  for llm in engines.values():  # compile every prefill size and the step
    for _, ids in prompts:
      llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=2))
  rows = []
  for category, ids in prompts:
    row = {"category": category}
    for name, llm in engines.items():
      out, seconds = answer(llm, ids, args.max_tokens)
      row[name] = {"seconds": seconds, "stats": out.speculation}
      if name == "plain":
        row["loops"], text = loops(out.token_ids), out.token_ids
      row["same"] = row.get("same", True) and out.token_ids == text
    rows.append(row)
    if args.output:
      with open(args.output, "a") as file:
        file.write(json.dumps(row, default=vars) + "\n")
  print(f"{sum(row['same'] for row in rows)} of {len(rows)} answers are plain decoding's")
  table(rows, [name for name in engines if name != "plain"])


if __name__ == "__main__":
  main()
