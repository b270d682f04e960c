"""jspec train-data: the target answers prompts; text (and hidden states) to train on."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jspec.checkpoints.hub import LoadedModel
from jspec.cli.endings import ended
from jspec.config import DTYPES
from jspec.llm import LLM
from jspec.outputs import raise_failure
from jspec.sampling_params import SamplingParams
from jspec.training.data import conversations
from jspec.training.data.conversations import Conversation
from jspec.training.data.shards import (
  Origin,
  Row,
  fingerprint,
  read_shards,
  shard_files,
  write_shard,
)
from jspec.training.stop_signals import stop_signals

DEFAULT_TARGET = "smollm2-135m-instruct"


@dataclasses.dataclass(frozen=True)
class Options:
  """How to generate. Of the same folder, `settings` must stay as they were."""

  max_tokens: int = 256  # of an answer
  temperature: float = 0.7
  top_p: float = 1.0
  greedy_share: float = 0.4  # of the prompts, answered at temperature 0
  seed: int = 0
  max_prompt_tokens: int = 512  # longer prompts are left out
  max_model_len: int = 0  # 0: room for the longest prompt and answer
  limit: int | None = None  # prompts, drawn at random; None: all
  features: tuple[int, ...] = ()  # the layers whose hidden states are kept
  batch_size: int = 64  # requests side by side
  shard_size: int = 256  # sequences per file
  skip_faulty_rows: bool = False  # they are counted and left out, not refused
  dtype: str = "auto"

  def __post_init__(self):
    for name in ("max_tokens", "max_prompt_tokens", "batch_size", "shard_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
    if self.limit is not None and self.limit < 1:
      raise ValueError(f"limit must be >= 1, got {self.limit}")
    if not 0 <= self.seed < 2**31:
      raise ValueError(f"seed must lie in 0..{2**31 - 1}, got {self.seed}")
    if not 0 <= self.greedy_share <= 1:
      raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
    if self.max_model_len and self.max_model_len <= self.max_prompt_tokens:
      raise ValueError(f"max_model_len={self.max_model_len} leaves no room for an answer to a "
                       f"prompt of max_prompt_tokens={self.max_prompt_tokens}")
    SamplingParams(temperature=self.temperature, top_p=self.top_p)  # refuses what cannot be

  def settings(self, dtype: str) -> dict[str, Any]:
    """What decides the answer to a prompt, beside the target."""
    names = ("max_tokens", "temperature", "top_p", "greedy_share", "seed")
    return {**{name: getattr(self, name) for name in names}, "dtype": dtype,
            "max_model_len": self.room}

  @property
  def room(self) -> int:
    return self.max_model_len or self.max_prompt_tokens + self.max_tokens

  def sampling(self, index: int) -> SamplingParams:
    """By the prompt's index alone, so an answer depends neither on its batch nor on restarts."""
    is_greedy = _draw(self.seed, index, "greedy") < self.greedy_share
    return SamplingParams(temperature=0.0 if is_greedy else self.temperature, top_p=self.top_p,
                          max_tokens=self.max_tokens, seed=self.seed * 2**32 + index)


@dataclasses.dataclass(frozen=True)
class Prompt:
  index: int  # among all conversations given
  key: str
  source: str
  token: tuple[int, ...]


class Summary(NamedTuple):
  """What a run did."""

  answered: int
  before: int  # answered by earlier runs
  tokens: int  # of the answers of this run
  seconds: float


def generate(target: str | LoadedModel, asked: Sequence[Conversation],
             folder: str | pathlib.Path, options: Options,
             progress: bool | None = None) -> Summary:
  """Answers what the folder has no answer to yet, and writes a shard whenever one is full."""
  speculation = ({"method": "extract_hidden_states", "hidden_state_layers": list(options.features)}
                 if options.features else None)
  llm = LLM(target, speculative_config=speculation, dtype=options.dtype,
            max_model_len=options.room, max_num_seqs=options.batch_size, progress=progress)
  origin = Origin(llm.loaded.name, fingerprint(llm.config, llm.loaded.params), options.features,
                  options.settings(str(llm.loaded.params["embed"].dtype)))
  prompts = find_prompts(asked, llm, options)
  done = _answered(folder, origin, prompts)
  todo = [prompt for prompt in prompts if prompt.index not in done]
  tokens, rows = 0, []
  began = time.perf_counter()
  disable = None if progress is None else not progress
  try:
    with tqdm(total=len(prompts), initial=len(prompts) - len(todo), unit="prompt",
              disable=disable) as bar:
      for output in llm.as_completed([p.token for p in todo],
                                     [options.sampling(p.index) for p in todo]):
        raise_failure(output)
        # The LLM is new: its request ids count the prompts.
        rows.append(_row(todo[int(output.request_id)], output.outputs[0]))
        tokens += len(output.token_ids)
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", False)
        bar.update()
        if len(rows) == options.shard_size:
          _write(folder, rows, origin)
          rows = []
  finally:  # also of what an interruption leaves
    if rows:
      _write(folder, rows, origin)
  return Summary(len(todo), len(prompts) - len(todo), tokens, time.perf_counter() - began)


def find_prompts(asked: Sequence[Conversation], llm: LLM, options: Options) -> list[Prompt]:
  """What ends with a user's turn, or plain text to go on with; in an order of its own.

  The order is random, but more conversations at the end change nothing in that of the others.
  """
  order = sorted(range(len(asked)), key=lambda i: _draw(options.seed, i, "order"))
  faults: list[str] | None = [] if options.skip_faulty_rows else None
  found, too_long = [], 0
  for index in order:
    one = asked[index]
    if not one.prompt and not one.text:
      continue
    token = None
    with conversations.kept(faults):
      token = llm.encode_chat(one.prompt) if one.prompt else llm.tokenizer.encode(one.text)
    if token is None:
      continue
    if len(token) > options.max_prompt_tokens:
      too_long += 1
      continue
    found.append(Prompt(index, one.key, one.source, tuple(token)))
    if len(found) == options.limit:
      break
  if faults:
    _say(conversations.told(faults))
  if too_long:
    _say(f"left out {too_long} prompts of more than {options.max_prompt_tokens} tokens "
         "(max_prompt_tokens)")
  if not found:
    raise ValueError(f"none of {len(asked)} conversations is a prompt to answer: {too_long} have "
                     f"more than max_prompt_tokens={options.max_prompt_tokens} tokens, the others "
                     "no user's turn")
  return found


def _say(what: str) -> None:
  print(f"jspec train-data: {what}", file=sys.stderr, flush=True)


def _row(prompt: Prompt, answer: Any) -> Row:
  token = np.array([*prompt.token, *answer.token_ids], np.int32)
  return Row(prompt.index, prompt.key, prompt.source, token,
             np.arange(len(token)) >= len(prompt.token), answer.hidden_states)


def _write(folder: str | pathlib.Path, rows: list[Row], origin: Origin) -> None:
  files = shard_files(folder)
  part = int(files[-1].stem.removeprefix("part-")) + 1 if files else 0
  write_shard(folder, part, rows, origin)


def _answered(folder: str | pathlib.Path, origin: Origin, prompts: Iterable[Prompt]) -> set[int]:
  """Indices of the prompts that the folder has answers to; ValueError if they were others."""
  if not shard_files(folder):
    return set()
  there = read_shards(folder, origin.fingerprint)
  given = {"features": list(origin.layers), **origin.settings}
  for name, value in {"features": list(there.origin.layers), **there.origin.settings}.items():
    if value != given.get(name):
      raise ValueError(f"{folder} was begun with {name}={value}, this run has {name}="
                       f"{given.get(name)}: use the same, or another folder")
  place = {int(index): i for i, index in enumerate(there.index)}
  for prompt in prompts:
    i = place.get(prompt.index)
    if i is not None:
      own = there.span(i)
      if tuple(there.token[own][~there.loss[own]].tolist()) != prompt.token:
        raise ValueError(f"{folder} was begun with other prompts: number {prompt.index} differs; "
                         "give the same files in the same order, or another folder")
  return set(place)


def _draw(seed: int, index: int, purpose: str) -> float:
  """A number in [0, 1) for each index."""
  digest = hashlib.sha256(f"{seed} {index} {purpose}".encode()).digest()
  return int.from_bytes(digest[:6], "big") / 2**48


def add_train_data_flags(parser: argparse.ArgumentParser) -> None:
  parser.description = ("Has the target answer prompts, to train heads on its own text. Begun "
                        "again on the same folder it goes on where it was.")
  add = parser.add_argument
  default = Options()
  add("--target", default=DEFAULT_TARGET, help="default: %(default)s")
  add("--prompts", nargs="+", required=True, metavar="FILE", help="files, globs or folders: "
      "ShareGPT JSON, messages or prompt JSON lines, plain text")
  add("--output", required=True, type=pathlib.Path, metavar="FOLDER")
  add("--max-tokens", type=int, default=default.max_tokens, help="default: %(default)s")
  add("--temperature", type=float, default=default.temperature, help="default: %(default)s")
  add("--top-p", type=float, default=default.top_p, help="default: %(default)s")
  add("--greedy-share", type=float, default=default.greedy_share,
      help="of the prompts, answered greedily (default: %(default)s)")
  add("--seed", type=int, default=default.seed, help="default: %(default)s")
  add("--max-prompt-tokens", type=int, default=default.max_prompt_tokens,
      help="longer prompts are left out (default: %(default)s)")
  add("--max-model-len", type=int, default=0, help="tokens of prompt and answer together "
      "(default: room for the longest)")
  add("--limit", type=int, help="answer this many prompts, drawn at random (default: all)")
  features = parser.add_mutually_exclusive_group()
  features.add_argument("--features", type=int, nargs="+", default=(), metavar="LAYER",
                        help="keep these hidden states of every token, such as 2 15 27 30 for an "
                        "EAGLE-3 head of a target with 30 layers; else text only")
  features.add_argument("--no-features", dest="features", action="store_const", const=())
  add("--batch-size", type=int, default=default.batch_size, help="default: %(default)s")
  add("--shard-size", type=int, default=default.shard_size,
      help="sequences per file (default: %(default)s)")
  add("--dtype", choices=("auto", *DTYPES), default=default.dtype)
  add("--skip-faulty-rows", action="store_true", help="rows that cannot be read, or that the chat "
      "template refuses, are counted and left out; else the first one ends the run")


def run_train_data(arguments: argparse.Namespace) -> int:
  names = {"target", "prompts", "output", *(field.name for field in dataclasses.fields(Options))}
  given = {name: value for name, value in vars(arguments).items() if name in names}
  target, files, folder = (given.pop(name) for name in ("target", "prompts", "output"))

  def run() -> int:
    options = Options(**{**given, "features": tuple(given["features"])})
    faults: list[str] | None = [] if options.skip_faulty_rows else None
    with stop_signals(signal.default_int_handler):
      asked = conversations.read(files, faults)
      _say(f"{len(asked)} conversations" + (f"; {conversations.told(faults)}" if faults else "")
           + f"; loading the target {target}")
      done = generate(target, asked, folder, options)
    print(f"{folder}: {done.answered} answers of {done.tokens} tokens in {done.seconds:.0f} s "
          f"({done.tokens / done.seconds:.0f} tokens/s), {done.before} were there already")
    return 0

  return ended("jspec train-data", run, f"interrupted; the same command goes on from {folder}")
