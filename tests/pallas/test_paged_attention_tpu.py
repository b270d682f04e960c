"""The TPU kernel in both interpreters against dense numpy, and seeded bugs that this must catch.

`pltpu.InterpretParams()` simulates copies and semaphores: memory starts as NaN, a copy is done when
it is waited for, a page from outside the pool is an error. `interpret=True` is plain XLA.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from attention_cases import assert_right
from attention_cases import case as any_case
from jax.experimental.pallas import tpu as pltpu

from jspec import pallas
from jspec.pallas import block_sizes, paged_attention_tpu, tpu_layout
from jspec.speculation import tree
from jspec.types import NO_PARENT

TREE = (NO_PARENT, 0, 0, 1, 1, 2)
LENGTHS = (0, 3, 8, 37)  # an exact page among them
case = functools.partial(any_case, lengths=LENGTHS, page_size=8)


def compiled(kernel, interpret):
  """Each program runs once: most of the time goes into compiling it, however little optimised."""
  def run(**arguments):
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    return jax.jit(functools.partial(kernel, interpret=interpret, **options),
                   compiler_options={"xla_backend_optimization_level": 0})(**arrays)
  return run


simulated = compiled(paged_attention_tpu.paged_attention, pltpu.InterpretParams())
interpreted = compiled(paged_attention_tpu.paged_attention, True)


@pytest.fixture(autouse=True)
def no_endless_wait():
  """A wrong copy makes the simulator wait for ever, out of reach of signals: end the process."""
  faulthandler.dump_traceback_later(240, exit=True, file=sys.__stderr__)
  yield
  faulthandler.cancel_dump_traceback_later()


def set_blocks(monkeypatch, pages_per_step=2, nodes=4, cores=1):
  monkeypatch.setattr(block_sizes, "tpu", lambda *_, num_nodes, **__: (
      pages_per_step, min(nodes, num_nodes), cores))


@pytest.fixture
def small_blocks(monkeypatch):
  """Several steps in each slot, several blocks of nodes."""
  set_blocks(monkeypatch)


@pytest.mark.parametrize("heads, parents", [
    ((2, 2), TREE), ((4, 2), tree.chain(3)), ((6, 2), TREE), ((4, 1), (NO_PARENT,)),
    ((8, 1), TREE)])
def test_every_gqa_ratio_and_tree(heads, parents, small_blocks):
  assert_right(simulated, case(*heads, parents), scale=0.3)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_default_block_sizes(heads):
  assert_right(simulated, case(*heads, TREE), scale=0.3)
  assert_right(interpreted, case(*heads, TREE), scale=0.3)


@pytest.mark.parametrize("num_heads, num_kv, head_dim", [
    (3, 3, 64),  # two heads to a tile, the last one alone
    (2, 2, 80), (4, 4, 96),  # heads across the border of two tiles
    (2, 1, 128), (2, 2, 192), (2, 1, 256)])
def test_every_head_size(num_heads, num_kv, head_dim, small_blocks):
  assert_right(simulated, case(num_heads, num_kv, TREE, head_dim=head_dim), scale=0.1)


OPTIONS = [
    {"soft_cap": 1.5}, {"window": 1}, {"window": 3}, {"window": 20, "soft_cap": 2.0},
    {"first_visible": 5}, {"first_visible": 12, "window": 7}]


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, small_blocks):
  assert_right(simulated, case(2, 1, TREE), scale=0.3, **options)
  assert_right(interpreted, case(2, 1, tree.chain(5)), scale=0.3, is_chain=True, **options)


@pytest.mark.parametrize("options", [{}, {"window": 6}])
def test_chains(options, small_blocks):
  assert_right(simulated, case(4, 2, tree.chain(6)), scale=0.3, is_chain=True, **options)
  assert_right(simulated, case(4, 2, tree.chain(6)), scale=0.3, **options)


def test_nodes_not_in_use_may_hold_anything(small_blocks):
  """Pruned leaves of a tree, the end of a chain, a whole block of nodes."""
  assert_right(simulated, case(4, 2, TREE, unused=(3, 5)), scale=0.3)
  chain = case(4, 2, tree.chain(5), unused=(2, 3, 4, 5))
  assert_right(simulated, chain, scale=0.3)
  assert_right(simulated, chain, scale=0.3, is_chain=True)


def test_slots_without_nodes_in_use_read_nothing(small_blocks):
  """First, between and last: the others' copies are started all the same."""
  arrays = dict(case(4, 2, TREE, lengths=(9, 20, 30, 5, 9)).arrays)
  whole = simulated(**arrays, scale=0.3)
  idle = jnp.array([0, 2, 4])
  arrays["ancestors"] = arrays["ancestors"].at[idle].set(0)
  arrays["page_table"] = arrays["page_table"].at[idle].set(jnp.iinfo(jnp.int32).max)
  some = simulated(**arrays, scale=0.3)
  assert (some[idle] == 0).all()
  assert (some[jnp.array([1, 3])] == whole[jnp.array([1, 3])]).all()


@pytest.mark.parametrize("num_nodes", [33, 65])
@pytest.mark.parametrize("options", [{}, {"window": 3}])
def test_masks_of_several_words(num_nodes, options, monkeypatch):
  set_blocks(monkeypatch, nodes=24)
  parents = [NO_PARENT, 0, 0] + [i // 2 for i in range(3, num_nodes)]
  assert_right(simulated, case(2, 1, parents, lengths=(0, 40)), scale=0.3, **options)


def test_a_prefill_chunk_of_256():
  c = case(2, 1, tree.chain(255), lengths=(0, 70), page_size=32)
  assert_right(interpreted, c, scale=0.3, is_chain=True)
  assert_right(interpreted, c, scale=0.3, is_chain=True, window=50)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_pages(kv_dtype, small_blocks):
  assert_right(simulated, case(4, 2, TREE, kv_dtype=kv_dtype), scale=0.3)


def test_eight_bit_pages_of_heads_with_a_tile_each(small_blocks):
  assert_right(interpreted, case(4, 2, TREE, kv_dtype="int8", head_dim=128), scale=0.1)


def test_bfloat16(small_blocks):
  assert_right(simulated, case(4, 2, TREE, dtype="bfloat16"), scale=0.3, atol=2e-2)
  assert_right(simulated, case(4, 2, TREE, dtype="bfloat16", kv_dtype="int8"), scale=0.3,
               atol=4e-2)


def test_slots_split_between_cores(monkeypatch):
  set_blocks(monkeypatch, cores=2)
  assert_right(simulated, case(4, 2, TREE), scale=0.3)


def test_scores_far_apart():
  """Whole steps that weigh nothing beside a later one, and the reverse."""
  assert_right(simulated, case(4, 2, TREE), scale=30.0, atol=1e-4)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jspec.pallas.paged_attention_tpu import paged_attention
from attention_cases import assert_right, case

mesh = Mesh(np.array(jax.devices()), ("tp",))

def kernel(**arrays):
  heads, lanes, all_of = P(None, None, "tp"), P(None, None, "tp"), P()
  arrays = [arrays[name] for name in
            ("q", "k_pages", "v_pages", "page_table", "length", "ancestors")]
  one = lambda *xs: paged_attention(*xs, scale=0.3, interpret=True)
  sharded = jax.shard_map(one, mesh=mesh, in_specs=(heads, lanes, lanes, all_of, all_of, all_of),
                          out_specs=heads, check_vma=False)
  turn = lambda carry: (carry[0] + 1, sharded(*arrays))
  start = (0, jnp.full_like(arrays[0], jnp.nan))
  return jax.lax.while_loop(lambda carry: carry[0] < 2, turn, start)[1]

assert len(jax.devices()) == 2
c = case(4, 2, (-1, 0, 0, 1), lengths=(0, 21), page_size=8)
assert_right(lambda scale, **arrays: jax.jit(kernel)(**arrays), c, scale=0.3)
"""


def test_inside_jit_while_and_shard_map():
  """Heads over two devices."""
  root = pathlib.Path(__file__).parents[2]
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                      "JAX_PLATFORMS": "cpu",
                      "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests/support")])}
  done = subprocess.run([sys.executable, "-c", SHARDED], env=env, cwd=root, timeout=200,
                        capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("changes, message", [
    ({"page_size": 4}, "page_size=4"),
    ({"dtype": "float16"}, "float16"),
    ({"dtype": "bfloat16", "kv_dtype": "float32"}, "float32"),
])
def test_refuses_what_it_cannot_do(changes, message):
  with pytest.raises(NotImplementedError, match=message):
    simulated(**case(4, 2, TREE, **changes).arrays, scale=0.3)


def test_refuses_what_does_not_fit():
  arrays = case(4, 2, TREE).arrays
  table = jnp.zeros((4, 1 << 18), jnp.int32)
  with pytest.raises(NotImplementedError, match="SMEM"):
    simulated(**{**arrays, "page_table": table}, scale=0.3)
  pages = jnp.zeros((2, 1 << 16, 16))
  with pytest.raises(NotImplementedError, match="smaller pages"):
    simulated(**{**arrays, "k_pages": pages, "v_pages": pages}, scale=0.3)


MUTANTS = {
    "nothing": ("", "", {}),
    "missing wait": ("lambda copy: copy.wait()", "lambda copy: None", {}),
    "no accumulator init": ("acc_ref[...] = jnp.zeros_like(acc_ref)", "pass", {}),
    "no total init": ("total_ref[...] = jnp.zeros_like(total_ref)", "pass", {}),
    "page index off by one": ("table_ref[table + i]", "table_ref[table + i + 1]", {}),
    "wrong slot's table": ("step // plan.num_blocks * plan.max_pages", "0", {}),
    "copies into one buffer only": ("pages.at[buffer, i]", "pages.at[0, i]", {}),
    "one page short": ("end = pl.cdiv(length[:, None] + columns, plan.page_size)",
                       "end = (length[:, None] + columns) // plan.page_size", {}),
    "mask word off by one": ("column >> 5 == i,", "column >> 5 == i + 1,", {}),
    "mask bit off by one": ("word >> (column & 31)", "word >> (column + 1 & 31)", {}),
    "no mask": ("jnp.where(visible, score, MASKED)", "score", {}),
    "prefix one short": ("seen = (column < 0) |", "seen = (column < -1) |", {}),
    "masked rows weigh": ("jnp.where(visible, weight, 0.0)", "weight", {"first_visible": 38}),
    "values not cleaned": ("clean(values, (plan.page_size, 1), 0)", "pass", {}),
    "buffers not cleared": ("_clear(buffers)\n", "pass\n", {}),
    "no shrink": ("shrink = jnp.exp(old - top)", "shrink = 1.0", {}),
    "window off by one": ("column > depth - plan.window)", "column >= depth - plan.window)",
                          {"window": 3}),
    "window starts a page late": ("first = jnp.minimum(oldest // plan.page_size, end)",
                                  "first = jnp.minimum(oldest // plan.page_size + 1, end)",
                                  {"window": 12}),
    "window forgotten in the prefix": ("(position >= plain_ref[step])", "True", {"window": 30}),
    "key scale ignored": ("score = score * _by_row", "score = score + 0 * _by_row",
                          {"kv_dtype": "int8"}),
    "value scale ignored": ("weight = weight * _by_row", "weight = weight + 0 * _by_row",
                            {"kv_dtype": "int8"}),
    "scales not cleaned": ("clean(pages, (1, plan.page_size), 1)", "pass", {"kv_dtype": "int8"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_seeded_bugs_are_caught(name, monkeypatch):
  """The same check as everywhere passes on the kernel as it is and fails on each mutant."""
  old, new, options = MUTANTS[name]
  options = dict(options)
  modules = (tpu_layout, paged_attention_tpu)
  sources = [pathlib.Path(module.__file__).read_text() for module in modules]
  assert name == "nothing" or "".join(sources).count(old) == 1
  for module, source in zip(modules, sources, strict=True):  # the second imports the first
    mutant = types.ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    monkeypatch.setattr(pallas, mutant.__name__.rpartition(".")[2], mutant)
    exec(compile(source.replace(old, new), mutant.__name__, "exec"), vars(mutant))
  set_blocks(monkeypatch)
  kernel = compiled(mutant.paged_attention, pltpu.InterpretParams())
  kv_dtype = options.pop("kv_dtype", None)
  check = functools.partial(assert_right, kernel, case(4, 2, TREE, kv_dtype=kv_dtype), scale=0.3,
                            **options)
  if name == "nothing":
    check()
  else:
    with pytest.raises(AssertionError, match="Not equal to tolerance|NaN from somewhere"):
      check()
