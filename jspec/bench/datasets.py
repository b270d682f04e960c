"""Benchmark prompts from files, one format per row, and from the package itself."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jspec.bench.prompts import BUILT_IN
from jspec.config.checks import parse_json

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem",
            "humanities")  # Spec-Bench keeps MT-bench's categories apart
ROW_FORMATS = ("{turns, category} (Spec-Bench, MT-bench), {conversations} (ShareGPT), "
               "{instruction, input} (EditEval), {messages, task} or {prompt, task}")


class Prompt(NamedTuple):
  task: str
  messages: tuple[Mapping[str, str], ...]  # ends with what the user says


def load_prompts(paths: Iterable[pathlib.Path], limit_per_task: int | None = None, seed: int = 0,
                 tasks: Iterable[str] | None = None) -> list[Prompt]:
  """The prompts of these files, or the built-in ones; ordered by task.

  Args:
    limit_per_task: keep this many of each task, drawn with the seed.
    tasks: keep only these.
  """
  prompts = [prompt for path in paths for prompt in read_dataset(path)]
  if not prompts:
    prompts = [_user(task, text) for task, text in BUILT_IN]
  by_task: dict[str, list[Prompt]] = {}
  for prompt in prompts:
    by_task.setdefault(prompt.task, []).append(prompt)
  if tasks is not None:
    wanted = list(tasks)
    for name in wanted:
      if name not in by_task:
        raise ValueError(f"no prompt has task {name!r}; there are {', '.join(by_task)}")
    by_task = {name: by_task[name] for name in wanted}
  kept = []
  for name, members in by_task.items():
    if limit_per_task is not None and len(members) > limit_per_task:
      drawn = random.Random(f"{seed} {name}").sample(range(len(members)), limit_per_task)
      members = [members[i] for i in sorted(drawn)]
    kept += members
  return kept


def read_dataset(path: pathlib.Path) -> list[Prompt]:
  """The prompts of a .jsonl file or of a JSON list; ValueError names the row that is wrong."""
  try:
    text = path.read_bytes().decode("utf-8")
  except OSError as error:
    raise ValueError(f"can't read {path}: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not UTF-8 text: invalid byte at offset {error.start}") from None
  prompts = []
  for place, row in _rows(path, text):
    prompt = _prompt(row, path.stem) if isinstance(row, Mapping) else None
    if prompt is None:
      raise ValueError(f"{path}, {place}: not a row of a known format: {ROW_FORMATS}")
    prompts.append(prompt)
  if not prompts:
    raise ValueError(f"{path} holds no prompts")
  return prompts


def _rows(path: pathlib.Path, text: str) -> Iterable[tuple[str, Any]]:
  if text.lstrip().startswith("["):
    try:
      rows = parse_json(text)
    except ValueError as error:
      raise ValueError(f"{path} is not valid JSON: {error}") from None
    # ShareGPT has empty conversations: there is nothing to answer in those.
    yield from ((f"entry {i}", row) for i, row in enumerate(rows)
                if not isinstance(row, Mapping) or row.get("conversations") != [])
    return
  for i, line in enumerate(text.split("\n"), start=1):
    if line.strip():
      try:
        yield f"line {i}", parse_json(line)
      except ValueError as error:
        raise ValueError(f"{path}, line {i}: not valid JSON: {error}") from None


def _prompt(row: Mapping[str, Any], file_task: str) -> Prompt | None:
  if _texts(row.get("turns")):
    category = str(row.get("category", "turns"))
    return _user("mt_bench" if category in MT_BENCH else category, row["turns"][0])
  if isinstance(row.get("conversations"), list):
    said = [turn.get("value") for turn in row["conversations"]
            if isinstance(turn, Mapping) and turn.get("from") in ("human", "user")]
    return _user("sharegpt", str(said[0])) if _texts(said) else None
  task = str(row.get("task", file_task))
  if isinstance(row.get("instruction"), str) and isinstance(row.get("input"), str):
    code = f"\n\n```python\n{row['input'].strip()}\n```" if row["input"].strip() else ""
    return _user("code_edit", row["instruction"].strip() + code)
  if isinstance(row.get("messages"), list):
    return _conversation(task, row["messages"])
  return _user(task, row["prompt"]) if isinstance(row.get("prompt"), str) else None


def _conversation(task: str, messages: list[Any]) -> Prompt | None:
  """The conversation up to what the user said last."""
  for message in messages:
    if not isinstance(message, Mapping) or not _texts([message.get("role"),
                                                       message.get("content")]):
      return None
  while messages and messages[-1]["role"] == "assistant":
    messages = messages[:-1]
  return Prompt(task, tuple(messages)) if messages else None


def _texts(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)


def _user(task: str, text: str) -> Prompt:
  return Prompt(task, ({"role": "user", "content": text},))
