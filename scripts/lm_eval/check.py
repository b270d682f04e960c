"""lm-evaluation-harness against a running server, and its scores beside transformers' own.

  python -m venv harness && harness/bin/pip install "lm-eval[api,hf]" torch
  jspec serve --max-model-len 512 --max-num-seqs 4 --no-grpc          # in another terminal
  harness/bin/python scripts/lm_eval/check.py --folder MODEL_FOLDER   # from the repository's root

MODEL_FOLDER holds what the server serves, as transformers reads it: of the embedded model it is
smollm2-135m-instruct in jspec's cache folder, once the server has run. Three runs: a
multiple-choice task by log-likelihood (completions with echo), once by the server and once by
transformers; a generative one through completions; and the same through chat completions.

GuideLLM, a load generator, in an environment of its own (`pip install guidellm`; FORMAT is
/v1/completions, /v1/chat/completions or /v1/responses):

  guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,request_format=FORMAT \\
    --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=16 \\
    --data kind=synthetic_text,prompt_tokens=48,output_tokens=16 \\
    --tokenizer kind=hf_auto,model=MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
TOLERANCE = 1e-3  # of a log-likelihood: the two add up float32 in other orders


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--folder", required=True, help="the model, as transformers reads it")
  parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
  parser.add_argument("--name", default="smollm2-135m-instruct", help="what the server calls it")
  arguments = parser.parse_args()
  server = f"model={arguments.name},base_url={arguments.url}/v1/"
  asked = f"tokenizer={arguments.folder},tokenizer_backend=huggingface,num_concurrent=4"
  ours = run("jspec_choice", "local-completions", f"{server}completions,{asked}")
  theirs = run("jspec_choice", "hf", f"pretrained={arguments.folder},dtype=float32",
               "--device", "cpu")
  compare(ours, theirs)
  run("jspec_copy", "local-completions", f"{server}completions,{asked}")
  run("jspec_copy", "local-chat-completions", f"{server}chat/completions,num_concurrent=4",
      "--apply_chat_template")


def run(task: str, model: str, arguments: str, *flags: str) -> dict:
  """The harness's results, with its samples."""
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run([
        sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments,
        "--tasks", task, "--include_path", str(HERE), "--batch_size", "1", "--log_samples",
        "--output_path", folder, *flags], check=True)
    [results] = pathlib.Path(folder).rglob("results_*.json")
    [samples] = pathlib.Path(folder).rglob("samples_*.jsonl")
    scores = json.loads(results.read_text())["results"][task]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
  numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
  print(f"{task} by {model}: {numbers}", flush=True)
  return {"scores": scores, "samples": sorted(rows, key=lambda row: row["doc_id"])}


def compare(ours: dict, theirs: dict) -> None:
  """Exits where a log-likelihood or a score differs."""
  worst = 0.0
  for a, b in zip(ours["samples"], theirs["samples"], strict=True):
    for (mine, greedy), (other, also) in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
      worst = max(worst, abs(float(mine) - float(other)))
      if str(greedy) != str(also):
        sys.exit(f"document {a['doc_id']}: the likeliest text is another one")
  same = all(ours["scores"][name] == theirs["scores"][name] for name in ("acc,none",
                                                                         "acc_norm,none"))
  print(f"log-likelihoods differ by {worst:.2g} at most, scores are "
        f"{'equal' if same else 'NOT equal'}", flush=True)
  if worst > TOLERANCE or not same:
    sys.exit(1)


if __name__ == "__main__":
  main()
