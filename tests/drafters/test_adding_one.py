"""A drafter is added by its file, its options and a row for each: the steps of contributing.md."""

from __future__ import annotations

import importlib
import sys

import jax.numpy as jnp
import pytest
import tiny_llm

from jspec import LLM
from jspec.config.methods import OPTIONS
from jspec.config.speculative_parse import parse_speculative
from jspec.drafters import DRAFTERS

OPTIONS_FILE = '''
import dataclasses

from jspec.config.checks import check_int
from jspec.config.methods import {base}


@dataclasses.dataclass(frozen=True)
class ClimbOptions({base}):
  climb_stride: int = 1

  def __post_init__(self):
    check_int("climb_stride", self.climb_stride, 1)
'''
DRAFTER_FILE = '''
"""Drafts the ids that follow the root's, stride by stride."""

import jax.numpy as jnp

from climbing.options import ClimbOptions
from jspec.speculation.drafter import Drafter, DrafterSetup
from jspec.types import NO_PARENT, DraftTree


def climb(num_draft: int, stride: int, vocab_size: int) -> Drafter:
  def propose(params, state, root, slots):
    token = (root[:, None] + stride * jnp.arange(num_draft + 1)) % vocab_size
    parent = jnp.broadcast_to(jnp.arange(num_draft + 1) + NO_PARENT, token.shape)
    return DraftTree(token, parent, None), state

  return Drafter(lambda num_slots, num_pages: (), propose,
                 lambda params, state, slots, committed: state, num_draft + 1, num_draft)


def build(options: ClimbOptions, setup: DrafterSetup):
  return climb(setup.num_draft or 2, options.climb_stride, setup.target.vocab_size), ()
'''


def add(tmp_path, monkeypatch, base: str) -> None:
  """Two files in a package of their own, two rows."""
  package = tmp_path / "climbing"
  package.mkdir()
  (package / "__init__.py").write_text("")
  (package / "options.py").write_text(OPTIONS_FILE.format(base=base))
  (package / "drafter.py").write_text(DRAFTER_FILE)
  monkeypatch.syspath_prepend(tmp_path)
  for name in ("climbing", "climbing.options", "climbing.drafter"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  options = importlib.import_module("climbing.options").ClimbOptions
  monkeypatch.setitem(OPTIONS, "climb", options)
  monkeypatch.setitem(DRAFTERS, "climb", importlib.import_module("climbing.drafter").build)


def texts(llm: LLM) -> list[list[int]]:
  params = tiny_llm.greedy(max_tokens=12, ignore_eos=True)
  return [list(out.outputs[0].token_ids) for out in llm.generate([[5, 9, 3], [40, 41]], params)]


def speculating(**keys) -> LLM:
  return LLM(tiny_llm.tiny_model(), progress=False, speculative_config={
      "adaptive_draft_length": False, **keys}, **tiny_llm.OPTIONS)


def drafted(llm: LLM, root: int) -> list[int]:
  tree, _ = llm.engine.drafter.propose((), (), jnp.array([root]), None)
  return tree.token[0].tolist()


def test_a_new_drafter_runs_with_its_own_option_and_changes_no_text(tmp_path, monkeypatch):
  add(tmp_path, monkeypatch, "Options")
  llm = speculating(method="climb", climb_stride=3, num_speculative_tokens=4)
  assert drafted(llm, 7) == [7, 10, 13, 16, 19]
  assert texts(llm) == texts(tiny_llm.tiny_llm())
  assert llm.engine.stats().speculation.num_draft_tokens > 0


def test_a_new_drafters_option_is_its_own(tmp_path, monkeypatch):
  add(tmp_path, monkeypatch, "Options")
  with pytest.raises(ValueError, match="climb_stride must be >= 1, got 0"):
    parse_speculative({"method": "climb", "climb_stride": 0})
  with pytest.raises(ValueError, match="climb_stride=1 belongs to method 'climb', got method 'ng"):
    parse_speculative({"method": "ngram", "climb_stride": 1})
  with pytest.raises(ValueError, match="prompt_lookup_max=4 belongs to method 'ngram', got method"):
    parse_speculative({"method": "climb", "prompt_lookup_max": 4})
  with pytest.raises(ValueError, match="methods are 'none', .*'climb'"):
    parse_speculative({"method": "clime"})


def test_a_new_lookup_can_be_joined(tmp_path, monkeypatch):
  add(tmp_path, monkeypatch, "LookupOptions")
  spec = parse_speculative({"method": "climb+eagle3", "model": "m", "climb_stride": 2,
                            "num_lookup_tokens": 5})
  assert [type(options).__name__ for options in spec.options] == ["ClimbOptions", "EagleOptions"]
  assert spec.options[0].climb_stride == 2 and spec.model == "m"


def test_the_registries_have_the_same_methods():
  assert set(OPTIONS) == set(DRAFTERS)
