"""What drafting heads are worth: acceptance and time against plain decoding, in turn.

  python scripts/head_report.py --dataset question.jsonl --limit-per-task 6 --head HEAD --tokens 2 3

Greedy, one request at a time, every setting on every prompt in one process, prompts new to all of
them. A prompt counts where no text loops (see jspec/bench/runner.py): a loop is drafted too easily.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib

from jspec import LLM, SamplingParams
from jspec.bench import metrics
from jspec.bench.datasets import load_prompts
from jspec.bench.runner import Result, llm_engine, make_groups, run_interleaved
from jspec.training.data.conversations import Conversation
from jspec.training.data.shards import held_out

CHAT = ("mt_bench", "qa", "math_reasoning", "translation")  # tasks with little to copy


def settings(args):
  """(name, speculative_config) of each engine."""
  for head, tokens, lookup, stop in itertools.product(
      args.head, args.tokens, args.lookup, args.confidence):
    kind, _, path = head.rpartition("=")
    method = "+".join(filter(None, (lookup.replace("none", ""), kind or "eagle3")))
    name = f"{method} K={tokens}" + (f" stop<{stop:g}" if stop else "")
    yield name if len(args.head) == 1 else f"{pathlib.Path(path).parent.name}: {name}", {
        "method": method, "model": path, "num_speculative_tokens": tokens,
        "draft_confidence_threshold": stop, "adaptive_draft_length": not args.whole}


def chosen(args, llm) -> tuple[list[str], list[list[int]]]:
  tasks, encoded = [], []
  for prompt in load_prompts(args.dataset, args.limit_per_task, args.seed, args.task):
    ids = llm.encode_chat(prompt.messages)
    key = Conversation(prompt.task, prompt.messages).key
    if len(ids) <= args.max_prompt and not (
        args.held_out and not held_out(key, args.held_out, args.seed)):
      tasks.append(prompt.task)
      encoded.append(ids)
  return tasks, encoded


def lines(title: str, results: list[Result], max_tokens: int, ends):
  sound = [result for result in results if not any(result.loops)]
  yield f"{title}: {len(sound)} of {len(results)} do not loop"
  if sound:
    for name, found in metrics.block(sound, max_tokens, True, ends)["engines"].items():
      depths = " ".join(f"{x:.3f}" for x in found["acceptance_per_position"])
      yield (f"  {name}: {found['ratio']:.3f} x plain ({found['decode_ratio']:.3f} without "
             f"prefill), {found['tokens_per_step']:.3f} tokens per step, accepted by depth "
             f"[{depths}], identical {found['identical_to_plain']}, cached tokens "
             f"{found['cached_tokens']}")


def main():
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--dataset", type=pathlib.Path, nargs="+", required=True)
  add("--task", nargs="+", default=None)
  add("--target", default="smollm2-135m-instruct")
  add("--head", nargs="+", required=True, help="PATH, or METHOD=PATH where it is not eagle3")
  add("--tokens", type=int, nargs="+", default=[2, 3])
  add("--lookup", nargs="+", default=["none"], help="none, ngram, suffix")
  add("--confidence", type=float, nargs="+", default=[0.0])
  add("--whole", action="store_true", help="verify every draft whole")
  add("--limit-per-task", type=int, default=4)
  add("--held-out", type=float, default=0.0, metavar="SHARE",
      help="only prompts that a run with data.validation=SHARE did not train on")
  add("--seed", type=int, default=0)
  add("--max-prompt", type=int, default=900)
  add("--max-tokens", type=int, default=96)
  add("--repeats", type=int, default=1)
  add("--warm-prompts", action="store_true", help="as in jspec bench")
  add("--json", type=pathlib.Path)
  args = parser.parse_args()
  fields = {"max_num_seqs": 1, "max_model_len": args.max_prompt + args.max_tokens}
  greedy = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
  plain = LLM(args.target, **fields)
  engines = [llm_engine(metrics.PLAIN, plain, greedy, args.warm_prompts)] + [
      llm_engine(name, LLM(plain.loaded, speculative_config=speculation, **fields), greedy,
                 args.warm_prompts) for name, speculation in settings(args)]
  groups = make_groups(*chosen(args, plain), 1)
  results = run_interleaved(engines, groups, args.max_tokens, args.repeats)
  ends = frozenset(plain.tokenizer.eos_ids)
  for title, tasks in [*((group, (group,)) for group in dict.fromkeys(g.task for g in groups)),
                       ("chat-like", CHAT), ("all", [g.task for g in groups])]:
    own = [result for result in results if result.group.task in tasks]
    print(*lines(title, own, args.max_tokens, ends), sep="\n", flush=True)
  if args.json:
    args.json.write_text(json.dumps(metrics.summarise(
        results, args.max_tokens, True, ends), indent=2))


if __name__ == "__main__":
  main()
