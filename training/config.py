"""What a training run is: one frozen configuration, from a .py or .toml file and overrides."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import runpy
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

METHODS = ("eagle3", "eagle", "medusa", "medusa2", "mlp_speculator", "draft_model")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class _Checked:
  """Values get the declared types when built: lists become tuples, mappings their dataclass."""

  section: ClassVar[str] = ""  # what precedes a field's name in messages

  def __post_init__(self):
    hints = typing.get_type_hints(type(self))
    for field in dataclasses.fields(self):
      name = self.section + field.name
      value = _typed(getattr(self, field.name), hints[field.name], name)
      object.__setattr__(self, field.name, value)
    self.check()

  def check(self) -> None:
    """Raises ValueError where values of the right type make no sense."""

  def at_least(self, low: float, *names: str) -> None:
    for name in names:
      value = getattr(self, name)
      if value is not None and not value >= low:
        raise ValueError(f"{self.section}{name} must be >= {low}, got {value}")

  def share(self, *names: str) -> None:
    for name in names:
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f"{self.section}{name} must lie in 0..1, got {getattr(self, name)}")

  def one_of(self, name: str, allowed: Sequence[str]) -> None:
    if getattr(self, name) not in allowed:
      raise ValueError(f"{self.section}{name} must be one of {', '.join(allowed)}, "
                       f"got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class DataConfig(_Checked):
  """Texts, and how they become batches."""

  section: ClassVar[str] = "data."
  shards: tuple[str, ...] = ()  # folders that `jspec train-data` wrote
  conversations: tuple[str, ...] = ()  # files or folders of texts
  validation: float = 0.05  # share of the prompts
  faulty_rows: str = "refuse"  # of conversations; "skip": they are counted and left out
  learn: str = "answers"  # "all": prompts, too; validation is on answers either way
  max_length: int = 2048  # tokens of a sequence
  cut: bool = False  # longer sequences are cut, not refused
  rows: int = 4  # of a batch
  row_length: int = 0  # tokens of a row; 0: max_length
  layout: str = "packed"
  features: str = "on_the_fly"  # "stored": as they lie in the shards

  def check(self) -> None:
    self.one_of("faulty_rows", ("refuse", "skip"))
    self.one_of("learn", ("answers", "all"))
    self.one_of("layout", ("packed", "padded"))
    self.one_of("features", ("stored", "on_the_fly"))
    self.at_least(1, "max_length", "rows")
    self.at_least(0, "row_length")
    self.share("validation")
    if bool(self.shards) == bool(self.conversations):
      raise ValueError(f"data needs shards or conversations, one of the two, "
                       f"got shards={self.shards} conversations={self.conversations}")
    if self.features == "stored" and not self.shards:
      raise ValueError("data.features='stored' needs data.shards")
    if self.row_length and self.row_length < self.max_length:
      raise ValueError(f"data.row_length={self.row_length} must be 0 or >= "
                       f"data.max_length={self.max_length}")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(_Checked):
  """AdamW and its schedule; steps are updates, of `accumulate` batches each."""

  section: ClassVar[str] = "optimizer."
  learning_rate: float = 1e-4
  # Relative learning rates of top-level parts of the params, such as {"heads": 4.0}.
  rates: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
  warmup_share: float = 0.0  # of all steps, linear from 0
  warmup_steps: int = 0  # instead of the share
  schedule: str = "cosine"  # after the warmup
  final_share: float = 0.0  # of learning_rate, at the last step
  betas: tuple[float, float] = (0.9, 0.95)
  eps: float = 1e-8
  weight_decay: float = 0.0  # of matrices
  clip_norm: float = 0.0  # of all gradients together; 0: off
  clip_value: float = 0.0  # of each gradient's elements; 0: off
  accumulate: int = 1  # batches that one update is made of, as if they were one

  def check(self) -> None:
    self.one_of("schedule", ("cosine", "linear", "constant"))
    self.share("warmup_share", "final_share")
    self.at_least(0, "warmup_steps", "weight_decay", "clip_norm", "clip_value")
    self.at_least(1, "accumulate")
    if not self.learning_rate > 0 or not self.eps > 0:
      raise ValueError(f"optimizer.learning_rate and eps must be > 0, "
                       f"got {self.learning_rate} and {self.eps}")
    if not all(0 <= beta < 1 for beta in self.betas):
      raise ValueError(f"optimizer.betas must lie in 0..1, 1 excluded, got {self.betas}")
    for one, other in (("warmup_share", "warmup_steps"), ("clip_norm", "clip_value")):
      if getattr(self, one) and getattr(self, other):
        raise ValueError(f"optimizer.{one} and {other} exclude each other, "
                         f"got {getattr(self, one)} and {getattr(self, other)}")
    if any(rate < 0 for rate in self.rates.values()):
      raise ValueError(f"optimizer.rates must be >= 0, got {dict(self.rates)}")


@dataclasses.dataclass(frozen=True)
class DevicesConfig(_Checked):
  """How many devices share a batch, and how many the weights."""

  section: ClassVar[str] = "devices."
  data_parallel: int = 1
  tensor_parallel: int = 1

  def check(self) -> None:
    self.at_least(1, "data_parallel", "tensor_parallel")


@dataclasses.dataclass(frozen=True)
class EvalConfig(_Checked):
  """Evaluation on the validation share."""

  section: ClassVar[str] = "eval."
  every: int = 500  # steps; 0: at the end only
  batches: int = 16  # at most

  def check(self) -> None:
    self.at_least(0, "every")
    self.at_least(1, "batches")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(_Checked):
  """Where a run can be taken up again."""

  section: ClassVar[str] = "checkpoint."
  folder: str = ""  # "": "checkpoints" in the output folder
  every: int = 500  # steps
  keep: int = 3

  def check(self) -> None:
    self.at_least(1, "every", "keep")


@dataclasses.dataclass(frozen=True)
class LogConfig(_Checked):
  """What is reported, and in which formats."""

  section: ClassVar[str] = "log."
  every: int = 10  # steps
  stdout: bool = True
  jsonl: bool = True
  tensorboard: bool = False
  plot: bool = False  # curves as a PNG at the end

  def check(self) -> None:
    self.at_least(1, "every")
    if self.plot and not self.jsonl:
      raise ValueError("log.plot draws what log.jsonl keeps: it needs log.jsonl=true")


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Checked):
  """One training run."""

  target: str  # a model's name or folder
  method: str
  output: str  # folder of the exported head, the logs and the checkpoints
  data: DataConfig
  # The method's own.
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  draft_vocab_size: int = 0  # 0: all of the target's
  steps: int | None = None  # updates; or
  epochs: float | None = None  # times through the data
  seed: int = 0
  dtype: str = "float32"  # of the computation; params, moments and sums are float32
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  ema: float = 0.0  # decay of the averaged params, which are then what is exported; 0: off
  devices: DevicesConfig = dataclasses.field(default_factory=DevicesConfig)
  eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  log: LogConfig = dataclasses.field(default_factory=LogConfig)
  init_from: str = ""  # an exported head to start from
  export_style: str = ""  # "": the method's usual one

  def check(self) -> None:
    self.one_of("method", METHODS)
    self.one_of("dtype", DTYPES)
    self.at_least(0, "draft_vocab_size", "seed")
    for name in ("target", "output"):
      if not getattr(self, name):
        raise ValueError(f"{name} must not be empty")
    if (self.steps is None) == (self.epochs is None):
      raise ValueError(f"one of steps and epochs must be given, "
                       f"got steps={self.steps} epochs={self.epochs}")
    self.at_least(1, "steps")
    if self.epochs is not None and not self.epochs > 0:
      raise ValueError(f"epochs must be > 0, got {self.epochs}")
    if not 0 <= self.ema < 1:
      raise ValueError(f"ema must lie in 0..1, 1 excluded, got {self.ema}")
    if self.data.rows % self.devices.data_parallel:
      raise ValueError(f"devices.data_parallel={self.devices.data_parallel} must divide "
                       f"data.rows={self.data.rows}")

  @property
  def checkpoint_folder(self) -> str:
    return self.checkpoint.folder or os.path.join(self.output, "checkpoints")

  def num_steps(self, epoch_batches: int) -> int:
    """Updates in all, where an epoch has that many batches."""
    if self.epochs is not None:
      return max(1, round(self.epochs * epoch_batches / self.optimizer.accumulate))
    assert self.steps is not None
    return self.steps

  def method_options(self, options_class: type) -> Any:
    """`options` as the method's own dataclass; unknown keys are refused."""
    _check_keys(self.options, options_class, "options.")
    hints = typing.get_type_hints(options_class)
    return options_class(**{key: _typed(value, hints[key], f"options.{key}")
                            for key, value in self.options.items()})


def from_dict(tree: Mapping[str, Any]) -> TrainConfig:
  return _typed(tree, TrainConfig, "")


def to_dict(config: TrainConfig) -> dict[str, Any]:
  """For JSON: dicts, and lists for tuples. from_dict brings it back."""
  return _plain(config)


def load(path: str | os.PathLike, overrides: Sequence[str] = ()) -> TrainConfig:
  """The configuration in a .py file that defines `config`, or a .toml file.

  Args:
    overrides: such as optimizer.learning_rate=3e-4 or target="a name", values as in TOML; what
      is no TOML value is a string; key=none clears steps or epochs.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"there is no configuration file {path}")
  if path.suffix == ".py":
    try:
      given = runpy.run_path(str(path)).get("config")
    except TypeError as error:  # an unknown or a missing keyword
      raise ValueError(f"{path}: {error}") from error
    if not isinstance(given, TrainConfig | Mapping):
      raise ValueError(f"{path} must define config = TrainConfig(...) or a dict")
    tree = to_dict(given) if isinstance(given, TrainConfig) else _plain(given)
  elif path.suffix == ".toml":
    try:
      tree = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
      raise ValueError(f"{path} is no TOML: {error}") from error
  else:
    raise ValueError(f"a configuration is a .py or .toml file, got {path}")
  for override in overrides:
    _override(tree, override)
  return from_dict(tree)


def _override(tree: dict[str, Any], text: str) -> None:
  dotted, equals, value = text.partition("=")
  *parents, key = dotted.strip().split(".")
  if not equals or not key or not all(parents):
    raise ValueError(f"an override is key=value or key.sub=value, got {text!r}")
  for parent in parents:
    tree = tree.setdefault(parent, {})
    if not isinstance(tree, dict):
      raise ValueError(f"override {text!r}: {parent} has no keys of its own")
  tree[key] = _toml_value(value.strip())


def _toml_value(text: str) -> Any:
  if text.lower() == "none":
    return None
  try:
    tree = tomllib.loads(f"value = {text}")
  except tomllib.TOMLDecodeError:
    return text  # a bare word: shells eat quotes
  return tree["value"] if len(tree) == 1 else text


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    return {k: _plain(v) for k, v in value.items()}
  return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _check_keys(tree: Mapping[str, Any], options_class: Any, prefix: str) -> None:
  known = [field.name for field in dataclasses.fields(options_class)]
  for key in tree:
    if key not in known:
      near = difflib.get_close_matches(str(key), known, n=1)
      meant = f"did you mean {prefix}{near[0]}? " if near else ""
      raise ValueError(f"unknown key {prefix}{key}: {meant}known: {', '.join(known)}")


def _typed(value: Any, hint: Any, name: str) -> Any:
  """`value` as the type that a field declares; ValueError where it is none."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (types.UnionType, typing.Union):
    if value is None and type(None) in inner:
      return None
    return _typed(value, next(kind for kind in inner if kind is not type(None)), name)
  if dataclasses.is_dataclass(hint):
    return _dataclass(value, hint, name)
  if hint is Any:
    return value
  if origin is tuple and isinstance(value, list | tuple):
    kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
    if len(kinds) == len(value):
      return tuple(_typed(v, k, f"{name}[{i}]")
                   for i, (v, k) in enumerate(zip(value, kinds, strict=True)))
  elif origin in (Mapping, dict) and isinstance(value, Mapping):
    return {str(k): _typed(v, inner[1], f"{name}.{k}") for k, v in value.items()}
  elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
    return float(value)
  elif hint in (int, bool, str) and type(value) is hint:
    return value
  raise ValueError(f"{name} must be {_kind(hint)}, got {value!r}")


def _dataclass(value: Any, cls: Any, name: str) -> Any:
  if isinstance(value, cls):
    return value
  if not isinstance(value, Mapping):
    raise ValueError(f"{name or 'a configuration'} must have keys of its own, got {value!r}")
  prefix = f"{name}." if name else ""
  _check_keys(value, cls, prefix)
  for field in dataclasses.fields(cls):
    if (field.name not in value and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING):
      raise ValueError(f"{prefix}{field.name} must be given")
  return cls(**value)


def _kind(hint: Any) -> str:
  simple = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
  if hint in simple:
    return simple[hint]
  inner = typing.get_args(hint)
  if typing.get_origin(hint) is tuple:
    kinds = f" of {len(inner)}" if inner[-1] is not Ellipsis else ""
    return f"a list{kinds}, each {_kind(inner[0])}"
  return "a table of keys and values" if inner else str(hint)
