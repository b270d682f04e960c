"""Finds the draft tree that suits a model, its Medusa heads and your prompts.

The model answers the prompts greedily; along its answers we count how often the true token is the
r-th likeliest of each head. Prints these accuracies as a table, and as the last line the tree as
JSON, for speculative_config's "medusa_choices".
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

from jspec import LLM, SamplingParams
from jspec.bench.datasets import load_prompts
from jspec.checkpoints.load_head import load_head
from jspec.heads import calibration, tree_search
from jspec.heads.medusa import head_params


def read_prompts(llm: LLM, files: list[pathlib.Path], limit: int | None) -> list[list[int]]:
  """Token ids. Each line of a .txt file is a prompt; other files are as for `jspec bench`."""
  texts = [file for file in files if file.suffix == ".txt"]
  others = [file for file in files if file.suffix != ".txt"]
  lines = [line for file in texts for line in file.read_text(encoding="utf-8").splitlines()
           if line.strip()][:limit]
  chats = load_prompts(others, limit) if others or not files else []
  return ([list(llm.tokenizer.encode(line)) for line in lines]
          + [llm.encode_chat(list(chat.messages)) for chat in chats])


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("head", help="folder or Hugging Face repo id of the Medusa heads")
  parser.add_argument("files", nargs="*", type=pathlib.Path,
                      help="prompts: .txt, or what jspec bench reads; else its built-in ones")
  parser.add_argument("--model", default="smollm2-135m-instruct", help="the target")
  parser.add_argument("--limit-per-task", type=int, help="prompts of each task, and lines of .txt")
  parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
  parser.add_argument("--max-model-len", type=int, default=1024)
  parser.add_argument("--num-nodes", type=int, default=63, help="draft tokens in the tree")
  parser.add_argument("--num-ranks", type=int, default=10, help="tokens looked at of each head")
  parser.add_argument("--dtype", default="auto")
  args = parser.parse_args(arguments)
  llm = LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len)
  params = llm.loaded.params
  config, head = load_head(args.head, llm.config, method="medusa",
                           dtype=params["embed"].dtype.name)
  heads = head_params(head, config, params)
  prompts = [p for p in read_prompts(llm, args.files, args.limit_per_task)
             if len(p) + args.max_tokens <= args.max_model_len]
  if not prompts:
    parser.error(f"no prompt leaves room for {args.max_tokens} tokens in {args.max_model_len}")
  outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=args.max_tokens),
                         use_tqdm=sys.stderr.isatty())
  likeliest = jax.jit(lambda params, heads, token: calibration.likeliest(
      heads, config, llm.config, calibration.hidden_states(params, llm.config, token),
      args.num_ranks))
  top, true = [], []
  for prompt, output in zip(prompts, outputs, strict=True):
    text = [*prompt, *output.token_ids]
    padded = np.zeros(args.max_model_len, np.int32)
    padded[:len(text)] = text
    top.append(np.asarray(likeliest(params, heads, padded)))
    true.append(calibration.predicted(text, config.num_heads, len(prompt) - 1, len(padded)))
  accuracy = tree_search.measure(np.concatenate(top), np.concatenate(true))
  print("head", *(f"rank {r:<2}" for r in range(args.num_ranks)))
  for i, row in enumerate(accuracy):
    print(f"{i:4}", *(f"{x:7.4f}" for x in row))
  paths = tree_search.search(accuracy, args.num_nodes)
  print(f"{len(paths)} nodes, {tree_search.expected_length(accuracy, paths):.2f} draft tokens "
        "accepted per step if heads were independent")
  print(json.dumps(paths))
  return 0


if __name__ == "__main__":
  sys.exit(main())
