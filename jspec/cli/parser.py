"""How the command line's flags may be spelled, and what is said of those that it does not know."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from jspec.config import vllm_arguments
from jspec.config.vllm_arguments import Argument

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
             "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DOTTED = re.compile(r"(--[\w-]+)\.([\w.-]+)(?:=(.*))?", re.DOTALL)
_GIVEN, _NOTES = "vllm_flags", "notes"  # attributes of a parsed command line
ALIKE = 0.75  # of difflib, from which on a flag may have been meant


class Parser(argparse.ArgumentParser):
  """Errors are exceptions, so that every kind of bad input is reported by the same line.

  Flags may be spelled with underscores, and one key of a JSON flag as --flag.key VALUE. All flags
  that nobody knows are named at once, with what may have been meant. What is said of vLLM's that
  change nothing is in `notes` of what parse_args returns.
  """

  def __init__(self, **keywords: Any):
    super().__init__(**{"allow_abbrev": False, **keywords})

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message} (see {self.prog} --help)")

  def parse_args(self, args=None, namespace=None):
    return super().parse_args(spelled(sys.argv[1:] if args is None else args), namespace)

  def parse_known_args(self, args=None, namespace=None):
    """argparse's: subcommands are parsed by this one, too."""
    words = list(sys.argv[1:] if args is None else args)
    try:
      found, unknown = super().parse_known_args(words, namespace)
    except _Unknown:  # a subcommand has said what there is to say
      raise
    except ValueError:  # maybe for the sake of the value of a flag that nobody knows
      words = words[:words.index("--")] if "--" in words else words
      known = options(self, all_of_them=True)
      unknown = [word for word in words if word.startswith("--")
                 and word.partition("=")[0] not in known]
      if not unknown:
        raise
      raise _Unknown(f"{self._unrecognized(unknown)} (see {self.prog} --help)") from None
    refused, note = vllm_arguments.judge_flags(getattr(found, _GIVEN, ()))
    setattr(found, _GIVEN, ())
    if note is not None:
      setattr(found, _NOTES, [*getattr(found, _NOTES, ()), note])
    problems = [self._unrecognized(unknown)] if unknown else []
    if refused is not None:
      problems.append(refused)
    if problems:
      raise _Unknown(f"{'; '.join(problems)} (see {self.prog} --help)")
    return found, unknown

  def _unrecognized(self, unknown: list[str]) -> str:
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-") and word != "-"]
    known = options(self)
    shown = []
    for flag in dict.fromkeys(flags):
      meant = ([option for option in known if option.startswith(flag)]
               or difflib.get_close_matches(flag, known, 1, ALIKE))
      shown.append(f"{flag} (did you mean {meant[0]}?)" if meant else flag)
    # Where flags are wrong, what lies loose was their value.
    return f"unrecognized arguments: {', '.join(shown or unknown)}"


class _Unknown(ValueError):
  """What the parser of a command says of flags."""


def options(parser: argparse.ArgumentParser, all_of_them: bool = False) -> list[str]:
  """The flags that a parser's help shows; all_of_them: those too that it hides, or commands have.
  """
  found: list[str] = []
  for action in parser._actions:
    if all_of_them or action.help != argparse.SUPPRESS:
      found += action.option_strings
    if all_of_them and isinstance(action, argparse._SubParsersAction):
      for command in action.choices.values():
        found += options(command, all_of_them)
  return found


def spelled(words: Iterable[str]) -> list[str]:
  """A command line with dashes in its flags, and one JSON object of the keys given one by one."""
  out: list[str] = []
  objects: dict[str, dict[str, Any]] = {}
  rest = iter(words)
  for word in rest:
    if word == "--":  # what follows are no flags
      out += _as_json(objects, out)
      return [*out, word, *rest]
    if dotted := _DOTTED.fullmatch(word):
      flag, key, value = dotted.groups()
      _put(objects.setdefault(_dashes(flag), {}), key.split("."),
           next(rest, "") if value is None else value)
    else:
      out.append(_dashes(word))
  return out + _as_json(objects, out)


def _dashes(word: str) -> str:
  flag, equals, value = word.partition("=")
  return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _put(tree: dict[str, Any], keys: list[str], value: str) -> None:
  *parents, last = keys
  for key in parents:
    tree = tree.setdefault(key, {})
    if not isinstance(tree, dict):
      raise ValueError(f"the key {key!r} of a JSON flag has a value and keys of its own")
  try:
    tree[last] = json.loads(value)
  except ValueError:
    tree[last] = value


def _as_json(objects: Mapping[str, dict[str, Any]], words: list[str]) -> list[str]:
  for flag in objects:
    if any(word == flag or word.startswith(f"{flag}=") for word in words):
      raise ValueError(f"{flag} is given whole and by its keys: give one of them")
  return [word for flag, value in objects.items() for word in (flag, json.dumps(value))]


def add_vllm_flags(parser: argparse.ArgumentParser, arguments: Mapping[str, Argument]) -> None:
  """Those of vLLM's flags that the parser has not: refused with a hint, or passed over."""
  own = set(parser._option_string_actions)
  short: dict[str, list[str]] = {}
  for letters, flag in vllm_arguments.SHORT.items():
    short.setdefault(flag, []).append(letters)
  for name, argument in arguments.items():
    flag = vllm_arguments.flag_of(name)
    if flag in own:
      continue
    if argument.values:
      parser.add_argument(flag, *short.get(flag, ()), action=_Vllm, name=name,
                          nargs=None if argument.values == "1" else argument.values)
    else:
      parser.add_argument(flag, *short.get(flag, ()), action=_Vllm, name=name, nargs=0)
      parser.add_argument(f"--no-{flag[2:]}", action=_Vllm, name=name, nargs=0)


class _Vllm(argparse.Action):
  """Notes that a flag of vLLM's was given, with which value."""

  def __init__(self, option_strings, dest, *, name: str, nargs=None):
    super().__init__(option_strings, _GIVEN, nargs=nargs, default=argparse.SUPPRESS,
                     help=argparse.SUPPRESS)
    self._name = name

  def __call__(self, parser, namespace, values, option_string=None):
    if self.nargs == 0:
      values = not str(option_string).startswith("--no-")
    setattr(namespace, _GIVEN, [*vars(namespace).get(_GIVEN, ()),
                                (option_string, self._name, values)])


def whole_number(text: str) -> int:
  """As vLLM reads them: 1k is 1000, 1.5k 1500, 4K 4096, 2M 2**21."""
  match = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kKmMgGtT]?)", text.strip())
  if match is None:
    raise argparse.ArgumentTypeError(f"invalid int value: {text!r}; 4096, 4K (4096), 4k (4000) and "
                                     "1.5k are fine")
  whole, decimals, suffix = match.groups()
  if not decimals:
    return int(whole) * _SUFFIXES.get(suffix, 1)
  if not suffix.islower():
    raise argparse.ArgumentTypeError(
        f"decimals go with k, m, g and t, which count in thousands, got {text!r}")
  number = int(whole + decimals[1:]) * _SUFFIXES[suffix]
  places = 10 ** (len(decimals) - 1)
  if number % places:
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
  return number // places


def length(text: str) -> int | str:
  """A whole number, or "auto" (vLLM: also -1)."""
  return "auto" if text.strip().lower() in ("auto", "-1") else whole_number(text)
