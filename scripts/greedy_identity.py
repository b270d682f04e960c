"""Greedy speculative text against plain text, token by token, on real prompts.

Runs plain decoding, n-gram, a draft model (the target cut off after its first layers) and a draft
tree, at several batch sizes. Counts prompts that differ; a difference is a near-tie if the plain
run's two likeliest tokens are less than 1e-3 apart there. Exit status 1 on any other difference.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import safetensors.numpy

from jspec import LLM, SamplingParams
from jspec.bench.datasets import load_prompts
from jspec.bench.runner import cold
from jspec.checkpoints import hub

NEAR_TIE = 1e-3


def first_layers(folder: pathlib.Path, num_layers: int, out: pathlib.Path) -> pathlib.Path:
  """A copy of a Hugging Face folder with only its first layers: a draft model of sorts."""
  for file in folder.iterdir():
    if file.suffix in (".json", ".jinja") and file.name != "config.json":
      (out / file.name).write_bytes(file.read_bytes())
  config = json.loads((folder / "config.json").read_text())
  (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  keep = lambda name: ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]
                                                    ) < num_layers
  safetensors.numpy.save_file({k: v for k, v in tensors.items() if keep(k)},
                              out / "model.safetensors")
  return out


def differences(plain, other) -> tuple[int, int]:
  """(prompts that differ other than by a near-tie, prompts that differ by one)."""
  real = near = 0
  for a, b in zip(plain, other, strict=True):
    if a.token_ids == b.token_ids:
      continue
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    row = {} if at is None else a.logprobs[at]
    top = sorted((entry.logprob for entry in row.values()), reverse=True)
    if len(top) > 1 and top[0] - top[1] < NEAR_TIE:
      near += 1
    else:
      real += 1
  return real, near


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("files", nargs="*", type=pathlib.Path, help="prompt files, else built-in")
  parser.add_argument("--limit-per-task", type=int, default=3)
  parser.add_argument("--max-tokens", type=int, default=128)
  parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
  parser.add_argument("--draft-layers", type=int, default=27)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--numerics", default="fast")
  args = parser.parse_args()
  name = "smollm2-135m-instruct"
  loaded = hub.load_model(name, dtype=args.dtype)
  prompts = [loaded.tokenizer.apply_chat_template(list(p.messages))
             for p in load_prompts(args.files, args.limit_per_task)]
  prompts = [p for p in prompts if len(p) + args.max_tokens <= 1024]
  params = SamplingParams(temperature=0, max_tokens=args.max_tokens, logprobs=2)
  failed = 0
  with tempfile.TemporaryDirectory() as folder:
    draft = str(first_layers(hub.resolve(name).path, args.draft_layers, pathlib.Path(folder)))
    methods = {"ngram": {"method": "ngram"},
               "draft model": {"model": draft, "num_speculative_tokens": 4},
               "draft tree": {"model": draft, "tree_widths": [3, 2, 1]}}
    for batch_size in args.batch_sizes:
      run = lambda config, b=batch_size: LLM(
          loaded, dtype=args.dtype, max_model_len=1024, max_num_seqs=b, numerics=args.numerics,
          speculative_config=config).generate(cold(prompts), params, sys.stderr.isatty())
      plain = run(None)
      for method, config in methods.items():
        output = run(config)
        real, near = differences(plain, output)
        failed += real
        stats = sum((o.speculation for o in output[1:]), output[0].speculation)
        print(f"batch {batch_size}, {method}: {len(prompts) - real - near} of {len(prompts)} "
              f"prompts identical, {near} near-ties, {real} others; {args.dtype} {args.numerics}, "
              f"{stats.tokens_per_step:.2f} tokens/step, acceptance {stats.acceptance_rate:.2f}, "
              f"cached tokens {sum(o.num_cached_tokens for o in output)}",
              flush=True)
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
