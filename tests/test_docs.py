"""README and docs/ say what is so: code runs, flags and links exist, every public name is there."""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import inspect
import io
import pathlib
import re
import runpy
import shlex
import sys
import textwrap
import tokenize
from typing import Any, NamedTuple

import pytest
import tiny_llm

import jspec
from jspec.cli import main
from jspec.config.speculative_parse import parse_speculative

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
         *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:<!-- (needs [^>]*) -->\n\n?)?^```(\w*)\n(.*?)^```$", re.M | re.S)
MAX_LINES, MAX_COLUMNS = 120, 100
FOLDERS = ("jspec", "serving", "training", "tests", "scripts", "docs")
# Named like files of the repository, or lying where its files lie: of models, and what is made.
OF_OTHERS = {"convert_hf_to_gguf.py"}  # llama.cpp's
ELSEWHERE = {"config.json", "generation_config.json", "tokenizer.json", "result.json", "site/",
             "report.json", "build/"}
PATH = re.compile(r"[\w./-]*\w\.(?:py|md|toml|json|yaml|yml|tf|proto|png|txt|cff)|[\w./-]+/")


class Block(NamedTuple):
  where: str
  needs: str  # what a test has not got, "" where it runs
  language: str
  text: str


class Parsed(BaseException):
  """The real parser took the command, which then need not run."""


def blocks(language: str, text: str | None = None) -> list[Block]:
  pages = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
  return [Block(f"{name}:{source[:match.start(3)].count(chr(10)) + 1}", match[1] or "", match[2],
                match[3])
          for name, source in (pages if text is None else {"text": text}).items()
          for match in FENCE.finditer(source) if match[2] == language]


def commands() -> list[tuple[str, str]]:
  """(where, command line): of sh blocks, and of code in the text that begins with jspec.

  A command's mere name in the text is no command line.
  """
  found = []
  for block in blocks("sh"):
    lines = block.text.replace("\\\n", " ").splitlines()
    found += [(block.where, line) for line in lines if shlex.split(line, comments=True)]
  for page in PAGES:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for code in re.findall(r"`(jspec [^`]+)`", prose):
      if not ("..." in code or "--help" in code or code.removeprefix("jspec ") in main.COMMANDS):
        found.append((page.name, code))
  return found


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Gives a command to the parser that its program has; fails where that refuses it.

  `make` must have the target; commands that are no program of ours are not looked at.
  """
  words = shlex.split(command, comments=True)
  whole = argparse.ArgumentParser.parse_args

  def parse_args(self, args=None, namespace=None):
    whole(self, args, namespace)
    raise Parsed

  monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
  if words[0] == "make":
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert targets is not None and words[1] in targets[1].split(), f"no target: {command}"
  elif words[0] == "jspec":
    with pytest.raises(Parsed):
      code = main.main(words[1:])
      pytest.fail(f"exit code {code}: {command}")
  elif words[:2] == ["python", "-m"] and words[2] != "pip":
    monkeypatch.setattr(sys, "argv", words[2:])
    with pytest.raises(Parsed):
      runpy.run_module(words[2], run_name="__main__")
  elif words[0] == "python" and words[1].endswith(".py"):
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    with pytest.raises(Parsed):
      runpy.run_path(str(ROOT / words[1]), run_name="__main__")
  else:
    assert words[:3] == ["python", "-m", "pip"] or words[0] == "pytest", f"unknown: {command}"


def check_calls(source: str) -> int:
  """Binds each call of an imported name, or of a method of what it made, to its signature.

  Returns the number of calls that were looked at.
  """
  tree = ast.parse(source)
  names: dict[str, Any] = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      module = importlib.import_module(str(node.module))
      names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
  made: dict[str, Any] = {}
  for node in ast.walk(tree):
    pairs = []
    if isinstance(node, ast.Assign):
      pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.withitem):
      pairs = [(node.optional_vars, node.context_expr)]
    made |= {target.id: names[value.func.id] for target, value in pairs
             if isinstance(target, ast.Name) and isinstance(value, ast.Call)
             and isinstance(value.func, ast.Name) and value.func.id in names}
  count = 0
  for node in ast.walk(tree):
    if not isinstance(node, ast.Call):
      continue
    if isinstance(node.func, ast.Name) and node.func.id in names:
      function, own = names[node.func.id], 0
    elif (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
          and node.func.value.id in made):
      function, own = getattr(made[node.func.value.id], node.func.attr), 1
    else:
      continue
    count += 1
    signature = inspect.signature(function)
    given = {str(keyword.arg): keyword.value for keyword in node.keywords}
    signature.bind(*[None] * (own + len(node.args)), **given)
    if function is jspec.LLM:
      unknown = set(given) - set(signature.parameters)
      assert not unknown, f"LLM has no {unknown}"
      if "speculative_config" in given:
        parse_speculative(ast.literal_eval(given["speculative_config"]), {},
                          lambda name, revision: "draft_model")
  return count


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.where)
def test_a_python_block_runs_or_is_called_as_the_signatures_say(block, monkeypatch, capsys):
  assert check_calls(block.text) > 0, "nothing of jspec is called"
  if block.needs:
    return
  made = []

  def make(model, **arguments):
    made.append(model)
    return tiny_llm.tiny_llm("ngram")

  monkeypatch.setattr(jspec, "LLM", make, raising=False)
  exec(compile(block.text, block.where, "exec"), {"__name__": "example"})
  assert made and capsys.readouterr().out.strip(), "the example prints what it made"


def test_a_block_says_what_it_needs_in_one_way_only():
  assert {block.needs for block in blocks("python")} <= {
    "", "needs a server", "needs a hub", "needs a hub and four devices"}
  assert any(not block.needs and block.where.startswith("README") for block in blocks("python"))


@pytest.mark.parametrize("language", ["python", "sh", "text", ""])
def test_every_block_has_a_language(language):
  """`text` is output; a block without a language would be looked at by no test."""
  found = blocks(language)
  assert bool(found) == (language != ""), [block.where for block in found]


@pytest.mark.parametrize("where, command", commands(), ids=lambda text: text[:60])
def test_a_command_is_taken_by_the_parser(where, command, monkeypatch):
  parse(command, monkeypatch)


@pytest.mark.parametrize("wrong", [
  "jspec serve --max-num-sequences-of-all 16", "make nothing", "jspec models inspekt x",
  "jspec train --konfig x", "python scripts/head_report.py --dataset a --hed x"])
def test_a_wrong_command_is_found(wrong, monkeypatch):
  with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
    parse(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", [
  "LLM('x', tensor_parallel=4)", "SamplingParams(max_token=4)",
  "LLM('x', speculative_config={'method': 'ngram', 'k': 3})"])
def test_a_wrong_call_is_found(wrong):
  with pytest.raises((AssertionError, TypeError, ValueError)):
    check_calls(f"from jspec import LLM, SamplingParams\n{wrong}")


def test_the_reference_has_every_public_name():
  page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
  assert sorted(re.findall(r"^::: jspec\.(\w+)$", page, re.M)) == sorted(jspec.__all__)


def test_every_public_name_has_a_docstring():
  missing = [name for name in jspec.__all__ if not getattr(jspec, name).__doc__]
  assert not missing


def test_readme_is_short():
  lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
  assert len(lines) <= MAX_LINES
  assert not [line for line in lines if len(line) > MAX_COLUMNS]


def repository() -> dict[str, list[str]]:
  """Ends of paths -> the paths: a/b/c is also b/c and c. A folder ends in a slash."""
  found = collections.defaultdict(list)
  for folder in FOLDERS:
    for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
      if "__pycache__" not in path.parts:
        parts = path.relative_to(ROOT).parts
        for i in range(len(parts)):
          found["/".join(parts[i:]) + "/" * path.is_dir()].append("/".join(parts))
  for path in ROOT.iterdir():
    found[path.name] = [path.name]  # a name alone is the file at the top
  return found


def unknown_paths(text: str, folder: pathlib.Path, known: dict[str, list[str]]) -> list[str]:
  """Paths in a page's text that are not those of one file or folder.

  Code that is a path, and all that begins with a folder of the repository's, blocks included. A
  path may leave out what it begins with, but for the last folder, or begin at the page's own. NAME
  stands for what a reader adds.
  """
  codes = [code for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)) if PATH.fullmatch(code)]
  begun = re.findall(rf"(?<![\w./:-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text)
  return [path for path in [*codes, *begun]
          if not (path in ELSEWHERE or "NAME" in path or (folder / path).exists()
                  or (ROOT / path).exists() or "/" in path and len(known[path]) == 1)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "serving/deploy/README.md", *(
    ROOT / "jspec/checkpoints/shipped_heads").glob("*/README.md")], ids=lambda page: page.name)
def test_paths_are_those_of_files(page):
  assert not unknown_paths(page.read_text(encoding="utf-8"), page.parent, repository())


def test_a_path_of_no_file_is_found():
  known = repository()
  for wrong in ("`engine.py`", "`drafters/base.py`", "`jspec/model.py`", "`drafters/`",
                "```sh\npytest tests/test_laws.py\n```", "`pytest tests/test_laws.py`"):
    assert unknown_paths(wrong, ROOT / "docs", known), wrong
  for right in ("`jspec/engine/loop.py`", "`engine/loop.py`", "`serving/`", "`pyproject.toml`",
                "`jspec/drafters/NAME.py`", "`python x.py`"):
    assert not unknown_paths(right, ROOT / "docs", known), right


def comments(source: str) -> list[str]:
  """Docstrings and comments of a module."""
  nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  found = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(source)) if isinstance(n, nodes)]
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return found + [token.string for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("folder", FOLDERS[:-1])
def test_modules_that_comments_name_are_there(folder):
  known, seen, wrong = repository(), 0, []
  for path in sorted((ROOT / folder).rglob("*.py")):
    for text in comments(path.read_text(encoding="utf-8")):
      for name in re.findall(r"[\w./-]*\w\.py\b", text):
        seen += 1
        if not known[name] and name not in OF_OTHERS:
          wrong.append(f"{path.relative_to(ROOT)}: {name}")
  assert seen, folder
  assert not wrong


def test_the_walk_from_readme_to_a_step_and_from_a_command_to_a_token():
  """README links to the file that has `step`; design.md names at most seven files, each with the
  function to read."""
  readme = (ROOT / "README.md").read_text(encoding="utf-8")
  assert "def step(" in (ROOT / "jspec/speculation/step.py").read_text(encoding="utf-8")
  assert "](jspec/speculation/step.py)" in readme and "](docs/design.md)" in readme
  page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
  section = page.split("## From `jspec serve` to a token")[1].split("\n## ")[0]
  walk = re.findall(r"^\d\. `([\w/]+\.py)`, `(\w+)`:", section, re.M)
  assert 3 < len(walk) <= 7 and walk[0][1] == "run_serve" and walk[-1][1] == "step"
  for file, function in walk:
    assert re.search(rf"def {function}\(", (ROOT / file).read_text(encoding="utf-8")), file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short_but_for_tables_and_output(page):
  text = FENCE.sub(lambda block: "" if block[2] == "text" else block[0],
                   page.read_text(encoding="utf-8"))
  assert not [line for line in text.splitlines()
              if len(line) > MAX_COLUMNS and not line.startswith("|")]


def anchors(page: pathlib.Path) -> set[str]:
  headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
  return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
          for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
  text = FENCE.sub("", page.read_text(encoding="utf-8"))
  for link in re.findall(r"\]\(([^)\s]+)\)", text):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    assert target.exists(), f"{page.name}: {link}"
    if anchor:
      assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation():
  navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
  listed = re.findall(r"^  - (?:\w+: )?(\w+\.md)$", navigation, re.M)
  assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_types_travel_with_the_package():
  settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
  assert (ROOT / "jspec" / "py.typed").exists() and '"py.typed"' in settings


def test_there_is_one_version():
  assert f"\nversion: {jspec.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
  page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
  assert f"dist/jspec_jax-{jspec.__version__}-py3-none-any.whl" in page


def test_blocks_are_found_with_what_they_need():
  text = textwrap.dedent("""
    <!-- needs a hub -->

    ```python
    a
    ```

    ```python
    b
    ```
    """)
  assert [(block.needs, block.text) for block in blocks("python", text)] == [
    ("needs a hub", "a\n"), ("", "b\n")]
