"""Who may import whom (DESIGN.md, section 2), and how large a file or a function may grow."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys

import pytest

import jspec

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jspec"
CORE = {"types", "config", "checks"}
ALLOWED = {  # module: the jspec modules it may import
  "types": set(),
  "checks": set(),
  "config": {"checks"},
  "tree": CORE | {"medusa_choices"},
  "sampling": CORE | {"tree"},
  "verify": CORE | {"tree", "sampling", "control"},
  "verify_lossy": CORE | {"sampling"},
  "judge": CORE | {"sampling", "verify", "verify_lossy"},
  "control": set(),
  "plan": CORE | {"tree", "attention", "pallas.reference"},
  "step_output": CORE | {"tree", "sampling", "control", "drafters.base"},
  "cache": CORE,
  "attention": CORE,  # kernels by name, when they are needed
  "model": CORE | {"attention", "cache", "pallas.reference", "pallas.tree_bits", "pallas"},
  "sharding": CORE | {"weights"},
  "placement": CORE | {"attention", "cache", "sharding", "weights"},
  "step": CORE | {"model", "judge", "cache", "sampling", "tree", "control", "plan", "step_output",
                  "drafters.base"},
  "head_config": CORE,
  "head_init": CORE | {"model", "head_config"},
  "drafting": CORE | {"sampling", "cache", "tree"},
  "medusa_choices": set(),
  "suffix_store": CORE,
  "pages": CORE,
  "sampling_params": CORE,
  "chat_template": set(),
  "control_tokens": {"chat_template"},
  "spec_config": CORE,
  "spec_keys": set(),
  "shipped": set(),
  "model_names": {"shipped"},
  "spec_parse": CORE | {"spec_config", "spec_keys", "medusa_choices"},
  "outputs": CORE,
  "goodput": set(),
  "results": CORE | {"outputs", "request", "scheduler"},
  "page_table": {"cache"},
  "prompt": {"sampling_params"},
  "vllm_arguments": set(),
  "flags": {"vllm_arguments"},
  "endings": set(),
  "metrics": {"outputs"},
  "slot_request": CORE | {"request", "scheduler", "slot_sampling"},
  "limits": CORE | {"sampling_params", "tokenizer"},
  "device": CORE | {"step", "cache", "plan", "placement", "slot_sampling", "sampling_params",
                    "drafters.base"},
}
# Halves of drafters.
HEAD_MODULES = {"head_config", "eagle_head", "medusa_head", "suffix_store", "medusa_choices"}
DRAFTER = CORE | HEAD_MODULES | {
    "model", "tree", "sampling", "cache", "control", "spec_config", "drafters.base", "drafting",
    "attention", "pallas.reference"}
THIRD_PARTY = {  # module: what it may import from outside jspec and the standard library
  "types": {"jax", "flax"}, "config": set(), "checks": set(), "attention": {"jax"}, "tree": {"jax"},
  "sharding": {"jax", "numpy"}, "placement": {"jax"},
  "sampling": {"jax", "flax"}, "verify": {"jax"}, "cache": {"jax"}, "model": {"jax", "numpy"},
  "step": {"jax"}, "control": {"jax"}, "plan": {"jax", "numpy"}, "step_output": {"jax"},
  "pages": {"numpy"}, "scheduler": {"numpy"}, "outputs": {"numpy"}, "request": {"numpy"},
  "shipped": set(), "sampling_params": set(), "chat_template": {"jinja2"},
  "control_tokens": {"tokenizers"},
  "spec_config": set(), "spec_parse": {"numpy"}, "head_config": set(), "suffix_store": {"numpy"},
  "medusa_choices": {"numpy"}, "judge": {"jax"}, "verify_lossy": {"jax"},
  "drafting": {"jax", "flax"}, "goodput": {"numpy"}, "device": {"jax", "numpy"},
}
NO_JAX = ("checks", "pages", "scheduler", "goodput", "limits", "request", "outputs",
          "sampling_params", "prompt", "metrics", "vllm_arguments", "flags", "model_names",
          "endings", "spec_config", "spec_parse", "config", "head_config", "medusa_choices",
          "suffix_store", "control_tokens")
MAX_LINES, MAX_FUNCTION = 400, 60


def name_of(path: pathlib.Path) -> str:
  parts = path.relative_to(PACKAGE).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


GENERATED = ("jspec_pb2.py", "jspec_pb2_grpc.py")
BESIDE = {str(path.relative_to(ROOT)): path for folder in ("training", "serving")
          for path in sorted((ROOT / folder).rglob("*.py")) if path.name not in GENERATED}
SERVING = [name for name in BESIDE if name.startswith("serving/")]
MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
DRAFTERS = sorted(m for m in MODULES if m.startswith("drafters."))
KERNELS = sorted(m for m in MODULES if m.startswith("pallas"))
IMPLEMENTED = [m for m in ALLOWED if m in MODULES]


@functools.cache
def parsed(module: str) -> ast.Module:
  return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str, lazy: bool = True) -> tuple[set[str], set[str]]:
  """(jspec modules, top-level names of other packages) that a module imports.

  lazy: also those inside functions.
  """
  own, others = set(), set()
  nodes = list(ast.walk(parsed(module))) if lazy else parsed(module).body
  for node in nodes:
    if isinstance(node, ast.Import):
      names = [(alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{module} has a relative import"
      names = [(node.module, alias.name) for alias in node.names]
    else:
      continue
    for base, name in names:
      top, _, rest = base.partition(".")
      if top != "jspec":
        others.add(top)
        continue
      deeper = f"{rest}.{name}" if rest else str(name)
      own.add(deeper if deeper in MODULES else rest)
  return own, others


def third_party(module: str) -> set[str]:
  return imports(module)[1] - set(sys.stdlib_module_names) - {"__future__"}


def reachable(module: str) -> set[str]:
  """The module, its package and all jspec modules that importing it imports."""
  seen, todo = set(), ["", module]
  while todo:
    current = todo.pop()
    if current not in seen:
      seen.add(current)
      todo += imports(current, lazy=False)[0]
  return seen


def test_the_parser_sees_the_imports_that_are_there():
  assert {"sampling", "types"} <= imports("verify")[0]
  assert {"pallas.reference", "attention", "cache"} <= imports("model")[0]
  assert third_party("types") == {"jax", "flax"}
  assert "gguf" in imports("hub")[0] and "gguf" not in imports("hub", lazy=False)[0]
  assert {"drafters.base", "types"} <= reachable("step")


@pytest.mark.parametrize("module", IMPLEMENTED)
def test_a_core_module_imports_only_what_lies_below_it(module):
  assert not imports(module)[0] - ALLOWED[module]


@pytest.mark.parametrize("module", [m for m in THIRD_PARTY if m in MODULES])
def test_a_core_module_uses_only_its_own_libraries(module):
  assert not third_party(module) - THIRD_PARTY[module]


@pytest.mark.parametrize("module", KERNELS)
def test_kernels_import_jax_only(module):
  assert not {m for m in imports(module)[0] if not m.startswith("pallas")}
  assert not third_party(module) - {"jax", "numpy"}


@pytest.mark.parametrize("module", DRAFTERS)
def test_a_drafter_knows_neither_the_step_nor_other_drafters(module):
  own = imports(module)[0]
  assert not own - DRAFTER, module
  assert not third_party(module) - {"jax", "flax", "numpy"}


def test_a_drafter_is_named_by_the_registry_alone():
  """No other module imports a concrete drafter."""
  concrete = set(DRAFTERS) - {"drafters.base"}
  users = {m for m in MODULES if imports(m)[0] & concrete}
  assert users == {"drafters"}


@pytest.mark.parametrize("module", NO_JAX)
def test_host_side_modules_never_reach_jax(module):
  for reached in reachable(module):
    assert not third_party(reached) & {"jax", "jaxlib", "flax"}, reached
  assert not imports(module)[1] & {"jax", "jaxlib", "flax"}


def test_no_file_is_too_long():
  long = {m: n for m, path in (MODULES | BESIDE).items()
          if (n := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
          and m not in KERNELS}
  assert not long


def test_no_function_is_too_long():
  """Nested functions count on their own: a closure-building function is measured without them."""
  long = {}
  trees = {m: parsed(m) for m in set(MODULES) - set(KERNELS)} | {
      m: ast.parse(path.read_text(encoding="utf-8")) for m, path in BESIDE.items()}
  for module, tree in trees.items():
    for node in ast.walk(tree):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        inner = [f for f in node.body if isinstance(f, ast.FunctionDef)]
        size = lines(node) - sum(map(lines, inner))
        if size > MAX_FUNCTION:
          long[f"{module}.{node.name}"] = size
  assert not long


@pytest.mark.parametrize("name", SERVING)
def test_serving_imports_public_names_of_jspec_and_never_jax(name):
  for node in ast.walk(ast.parse(BESIDE[name].read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      assert not {a.name.partition(".")[0] for a in node.names} & {"jax", "jaxlib", "flax", "jspec"}
    elif isinstance(node, ast.ImportFrom):
      top, _, deeper = str(node.module).partition(".")
      assert top not in ("jax", "jaxlib", "flax") and not (top == "jspec" and deeper), node.module
      if top == "jspec":
        public = {*jspec.__all__, "cli", "__version__"}
        assert {a.name for a in node.names} <= public, name


def test_inference_does_without_training():
  assert not [m for m in MODULES if imports(m)[1] & {"training", "optax", "orbax"}]
  # The command line alone knows that there is a server, and of it the flags alone.
  assert {m for m in MODULES if "serving" in imports(m)[1]} == {"cli"}
  named = [node.module for node in ast.walk(parsed("cli")) if isinstance(node, ast.ImportFrom)]
  assert [name for name in named if name.startswith("serving")] == ["serving.command"]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  return node.end_lineno - node.lineno + 1


def test_no_file_is_a_copy_or_a_drawer_for_odds_and_ends():
  bad = ("utils", "helpers", "common", "misc", "_v2", "_new", "_old", "_legacy", "_copy")
  names = [p.stem for folder in ("jspec", "training", "serving", "scripts", "tests")
           for p in (ROOT / folder).rglob("*.py")]
  assert names and not [n for n in names if n in bad or n.endswith(bad)]
