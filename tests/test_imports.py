"""Who may import whom (the house is BELOW), and how large a file or a function may grow."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys

import pytest

import jspec

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jspec"
# The house, from the ground up: package, or module of jspec/ itself -> what of jspec it may import.
BELOW: dict[str, set[str]] = {
  "pallas": set(),
  "config": set(),
  "types": set(),
  "sampling_params": {"config"},
  "outputs": {"config"},
  "text": {"config", "sampling_params"},
  "model": {"config", "types", "pallas"},
  "heads": {"config", "types", "model", "pallas"},
  "speculation": {"config", "types", "model", "pallas", "heads"},
  "drafters": {"config", "types", "model", "pallas", "heads", "speculation"},
  "checkpoints": {"config", "sampling_params", "text", "model", "heads"},
  "engine": {"config", "types", "text", "outputs", "sampling_params", "model", "speculation"},
  "build": {"config", "model", "heads", "speculation", "drafters", "engine", "checkpoints"},
  "llm": {"build", "engine", "checkpoints", "config", "text", "outputs", "sampling_params"},
  "async_llm": {"config", "llm", "engine", "text", "outputs", "sampling_params"},
  "compile_check": {"build", "config", "types", "model", "heads", "speculation", "drafters",
                    "engine", "sampling_params"},
  "cli": {"llm", "checkpoints", "config", "text", "outputs", "sampling_params"},
  "bench": {"cli", "checkpoints", "config", "text", "outputs", "sampling_params"},
  "": {"async_llm", "llm", "outputs", "sampling_params", "config"},
  "__main__": {"cli"},
}
FACES = {"", "config", "config.methods", "drafters", "checkpoints.families"}  # with something in it
OTHERS: dict[str, set[str]] = {  # package or module -> other libraries it may import
  "pallas": {"jax", "numpy"}, "config": {"numpy"}, "types": {"jax", "flax"},
  "sampling_params": set(), "outputs": {"numpy"}, "text": {"jinja2", "tokenizers", "transformers"},
  "model": {"jax", "numpy"}, "heads": {"jax", "numpy"}, "speculation": {"jax", "flax", "numpy"},
  "drafters": {"jax", "flax", "numpy"}, "engine": {"jax", "numpy"}, "build": {"jax"},
}
NO_JAX = ("config", "text", "outputs", "sampling_params", "cli", "heads.config",
          "heads.tree_search", "drafters.suffix_store", "checkpoints.model_names",
          "checkpoints.shipped", "checkpoints.families", "engine.scheduler", "engine.pages",
          "engine.request", "engine.goodput", "engine.limits", "engine.metrics")
MAX_MODULES, MAX_FILES, MAX_LINES, MAX_FUNCTION = 8, 15, 400, 60


def name_of(path: pathlib.Path) -> str:
  parts = path.relative_to(PACKAGE).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


GENERATED = ("jspec_pb2.py", "jspec_pb2_grpc.py")
BESIDE = {str(path.relative_to(ROOT)): path for folder in ("training", "serving")
          for path in sorted((ROOT / folder).rglob("*.py")) if path.name not in GENERATED}
MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
KERNELS = sorted(m for m in MODULES if m.startswith("pallas"))


def package_of(module: str) -> str:
  return module.partition(".")[0]


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


# The folders beside jspec/, which it has links to; what of jspec and of each other they may import.
BESIDE_BELOW = {
  "training": {"config", "text", "model", "heads", "checkpoints", "speculation", "types",
               "outputs", "sampling_params", "cli", "llm", ""},
  "serving": {"cli", ""},
}


def packages(module: str) -> set[str]:
  """What a module imports of jspec, but for its own package."""
  return {package_of(other) for other in imports(module)[0]} - {package_of(module)}


def test_the_parser_sees_the_imports_that_are_there():
  assert {"speculation.sampling", "types"} <= imports("speculation.verify")[0]
  assert {"pallas.reference", "model.execution", "model.cache"} <= imports("model.transformer")[0]
  assert third_party("types") == {"jax", "flax"}
  hub = "checkpoints.hub"
  assert "checkpoints.gguf" in imports(hub)[0] - imports(hub, lazy=False)[0]
  assert {"speculation.drafter", "types"} <= reachable("speculation.step")
  assert packages("engine.loop") >= {"config", "speculation"}


def test_every_package_has_its_place():
  """A module or package without a row fails here; so does a row for what is not there."""
  assert {package_of(module) for module in MODULES} == set(BELOW)
  assert len([m for m in MODULES if (PACKAGE / f"{m or '__init__'}.py").is_file()]) <= MAX_MODULES


def test_there_is_no_circle():
  """The table's own order proves it: a row names only rows above it."""
  seen: set[str] = set()
  for package, below in BELOW.items():
    assert not below - seen, package
    seen.add(package)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module):
  assert not packages(module) - BELOW[package_of(module)]


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m) in OTHERS])
def test_a_module_uses_only_the_libraries_of_its_package(module):
  assert not third_party(module) - OTHERS[package_of(module)]


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m) == "drafters"])
def test_a_drafter_knows_neither_the_step_nor_other_drafters(module):
  tools = {"drafters.draft_laws", "drafters.text_pages", "drafters.suffix_store"}
  step = {m for m in MODULES if m.startswith("speculation.")} - {
      "speculation.drafter", "speculation.sampling", "speculation.tree"}
  own = imports(module)[0]
  assert not own & step
  if module != "drafters":
    assert not {m for m in own if m.startswith("drafters")} - tools


def test_a_drafter_is_named_by_the_registry_alone():
  """No module of another package imports a concrete drafter."""
  users = {m for m in MODULES if package_of(m) != "drafters"
           and any(name.startswith("drafters.") for name in imports(m)[0])}
  assert not users


def test_a_family_is_named_by_the_registry_alone():
  """Outside there are only the registry and the readers of keys; inside, only configurations."""
  readers = {f"checkpoints.families{name}" for name in ("", ".family", ".hf_keys", ".gguf_keys")}
  families = {m for m in MODULES if m.startswith("checkpoints.families.")} - readers
  for module in MODULES:
    own = imports(module)[0]
    if module.startswith("checkpoints.families"):
      assert packages(module) <= {"config"}
      assert not {m for m in own if m.startswith("checkpoints.")} - families - readers, module
    else:
      assert not own & families, module
  branches = [m for m, path in (MODULES | BESIDE).items() if m not in families
              and "family ==" in path.read_text(encoding="utf-8")]
  assert families and not branches


@pytest.mark.parametrize("module", [m for m in MODULES
                                    if any(m == n or m.startswith(n + ".") for n in NO_JAX)])
def test_host_side_modules_never_reach_jax(module):
  for reached in reachable(module):
    assert not {lib for lib in imports(reached, lazy=False)[1]} & {"jax", "jaxlib", "flax"}, reached
  if package_of(module) != "cli":  # which imports it when a command needs it
    assert not imports(module)[1] & {"jax", "jaxlib", "flax"}


def test_faces_are_empty_but_for_the_public_ones():
  full = {m for m, path in MODULES.items() if path.name == "__init__.py"
          and path.read_text(encoding="utf-8").strip()}
  assert {m for m in full if len(parsed(m).body) > 1} == FACES


def test_no_package_is_a_heap():
  for folder in {path.parent for path in MODULES.values()}:
    assert len(list(folder.glob("*.py"))) <= MAX_FILES, folder


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


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_jspec_imports_what_it_may(name):
  """`jspec` itself stands for its public names."""
  folder = name.partition("/")[0]
  for node in ast.walk(ast.parse(BESIDE[name].read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      tops = {alias.name.partition(".")[0] for alias in node.names}
      assert not {alias.name for alias in node.names if alias.name.startswith("jspec.")}
    elif isinstance(node, ast.ImportFrom):
      tops = {str(node.module).partition(".")[0]}
      package = str(node.module).removeprefix("jspec").lstrip(".").partition(".")[0]
      names = {alias.name for alias in node.names}
      if tops == {"jspec"} and package != folder and not (not package and names <= {folder}):
        assert package in BESIDE_BELOW[folder], node.module
        assert package or names <= {*jspec.__all__, "__version__", *BESIDE_BELOW[folder]}, names
    else:
      continue
    assert folder != "serving" or not tops & {"jax", "jaxlib", "flax"}
    assert not tops & {"serving", "training"}, "by one name: jspec.serving, jspec.training"


def test_inference_does_without_training():
  """The command line alone knows, by name, that there are a server and a trainer."""
  assert not [m for m in MODULES if imports(m)[1] & {"training", "serving", "optax", "orbax"}]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  return node.end_lineno - node.lineno + 1


def test_no_file_is_a_copy_or_a_drawer_for_odds_and_ends():
  bad = ("utils", "helpers", "common", "misc", "_v2", "_new", "_old", "_legacy", "_copy")
  names = [p.stem for folder in ("jspec", "training", "serving", "scripts", "tests")
           for p in (ROOT / folder).rglob("*.py")]
  assert names and not [n for n in names if n in bad or n.endswith(bad)]
