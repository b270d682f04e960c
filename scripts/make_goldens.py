"""Makes tests/goldens/: what transformers (torch, float32, CPU) computes for the same models.

  python scripts/make_goldens.py families
  python scripts/make_goldens.py smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --prompts DIR
  python scripts/make_goldens.py gemma --gguf gemma-3-270m-q4_k_m.gguf

DIR holds mt_bench.jsonl, edit_eval.jsonl and qmsum_test_60.jsonl. GGUF files are read by
transformers' own loader (it needs accelerate), so that jspec's is compared with an independent one.
"""

from __future__ import annotations

import argparse
import pathlib

import golden_models
import numpy as np
from golden_families import CASES, family_golden

GOLDENS = pathlib.Path(__file__).parent.parent / "tests" / "goldens"


def families() -> None:
  """One file for every family."""
  arrays = {f"{name}/{key}": value for seed, name in enumerate(CASES)
            for key, value in family_golden(name, seed).items()}
  np.savez_compressed(GOLDENS / "families.npz", **arrays)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", choices=("families", "smollm2", "gemma"))
  parser.add_argument("--gguf", type=pathlib.Path)
  parser.add_argument("--prompts", type=pathlib.Path)
  arguments = parser.parse_args()
  GOLDENS.mkdir(exist_ok=True)
  if arguments.what == "families":
    families()
  elif arguments.what == "smollm2":
    golden_models.smollm2(arguments.gguf, arguments.prompts, GOLDENS)
  else:
    golden_models.gemma(arguments.gguf, GOLDENS)


if __name__ == "__main__":
  main()
