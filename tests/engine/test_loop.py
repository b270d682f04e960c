"""The engine: one trace, pages updated in place, slots that do not disturb each other."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llm import AS_SHIPPED, OPTIONS, SPECULATION, greedy, is_idle, tiny_llm

from jspec.sampling_params import SamplingParams

METHODS = tuple(SPECULATION)
K = 4  # of the ngram engine
MAX_LEN = OPTIONS["max_model_len"]
HLO_NAMES = {"float32": "f32", "bfloat16": "bf16", "uint16": "u16"}

MIXED = [  # prompt, params
  ("the cat and the hat", dict(temperature=0.0)),
  ("abc abc abc abc", dict(temperature=1.0, seed=5)),
  ("he ran and ran and ran", dict(temperature=2.0, top_p=0.7, seed=6)),
  ("on the one", dict(temperature=0.0, repetition_penalty=1.5, num_speculative_tokens=0)),
  ("the the the " * 4, dict(temperature=0.7, top_k=5, seed=7, num_speculative_tokens=1)),
  ("in", dict(temperature=1.0, min_p=0.1, seed=8, logprobs=3)),
  ("er er er er", dict(temperature=0.0, frequency_penalty=0.5, stop="qq")),
]


def mixed_for(method):
  """MIXED; a request to an engine without drafts cannot ask for some."""
  for prompt, fields in MIXED:
    if method == "none":
      fields = {**fields, "num_speculative_tokens": 0}
    yield prompt, SamplingParams(max_tokens=20, ignore_eos=True, **fields)


def tokens(llm, prompts, params):
  return [list(out.token_ids) for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("method", METHODS)
def test_everything_runs_through_one_trace(method):
  """Prompt lengths, temperatures, draft lengths and every kind of parameter, in one program."""
  llm = tiny_llm(method)
  prompts, params = zip(*mixed_for(method), strict=True)
  llm.generate(list(prompts), list(params))
  llm.generate("a b c d e f g h i j k l m n o p", greedy(max_tokens=3))
  stream = llm.stream("the", greedy(max_tokens=30))
  next(stream)
  stream.close()
  assert llm.engine.traces["step"] == 1
  assert set(llm.engine.traces) >= {"admit", "release", "prefill16", "prefill32", "step"}
  assert set(llm.engine.traces.values()) == {1}


# ------------------------------------------------------------------ the compiled program


def results_like(array: jax.Array, text: str) -> set[str]:
  """Opcodes in HLO text whose result has the array's dtype and shape."""
  shape = re.escape(f"{HLO_NAMES[str(array.dtype)]}[{','.join(map(str, array.shape))}]")
  return set(re.findall(rf"= \(?{shape}\S* ([a-z-]+)\(", text))


COPIES = {"copy", "copy-start", "concatenate", "select", "pad", "broadcast", "convert"}


@pytest.mark.parametrize("method, dtype", [*((m, "float32") for m in METHODS),
                                           ("ngram", "bfloat16")])
def test_pages_are_updated_in_place(method, dtype):
  llm = tiny_llm(method, dtype=dtype)
  step = llm.engine.compiled_step(AS_SHIPPED)
  pages = llm.engine.device.state.pages.k[0]
  models = 2 if method == "draft_model" else 1
  pool = models * 2 * llm.config.num_layers * pages.nbytes
  memory = step.memory_analysis()
  assert memory.alias_size_in_bytes >= pool
  assert memory.temp_size_in_bytes < pool / 8
  found = results_like(pages, step.as_text())
  assert pages.itemsize == jnp.dtype(dtype).itemsize and "scatter" in found and not found & COPIES


def test_a_copy_of_the_pages_would_be_seen():
  """What the test above looks for, in a program that has it: nothing was donated."""
  x = jnp.zeros((64, 8, 16))
  program = jax.jit(lambda x: x.at[3].set(1.0)).lower(x).compile()
  assert results_like(x, program.as_text()) & COPIES
  assert program.memory_analysis().alias_size_in_bytes == 0


def test_no_whole_weight_is_converted_to_float32_in_bfloat16():
  """A conversion fused into the lookup of a few rows is fine; one that is a result is not."""
  llm = tiny_llm("ngram", dtype="bfloat16")
  shapes = {w.shape for w in jax.tree.leaves(llm.loaded.params) if w.ndim == 2}
  text = llm.engine.compiled_step(AS_SHIPPED).as_text()
  converted = re.findall(r"ROOT \S+ = f32\[(\d+),(\d+)\]\S* convert\(", text)
  assert not shapes & {tuple(map(int, shape)) for shape in converted}


def test_the_state_is_donated():
  llm = tiny_llm("ngram")
  before = llm.engine.device.state
  llm.generate("abc", greedy(max_tokens=3))
  assert all(x.is_deleted() for x in jax.tree.leaves(before.pages))


# ------------------------------------------------------------------------ slots and pages


@pytest.mark.parametrize("method", METHODS)
def test_a_mixed_batch_equals_solo_runs(method):
  """Greedy, T=1, T=2 with top_p and the rest, more requests than slots, forwards and backwards."""
  llm = tiny_llm(method)
  pairs = list(mixed_for(method))
  alone = [tokens(llm, [prompt], [params])[0] for prompt, params in pairs]
  assert all(len(t) == 20 for t in alone)
  for order in (pairs, pairs[::-1], pairs + pairs):
    together = tokens(llm, *map(list, zip(*order, strict=True)))
    assert together == [alone[pairs.index(pair)] for pair in order]
  assert is_idle(llm)


@pytest.mark.parametrize("method", METHODS)
def test_methods_agree_on_a_mixed_batch(method):
  prompts, params = map(list, zip(*mixed_for("none"), strict=True))
  expected = tokens(tiny_llm("none"), prompts, params)
  if method != "none":
    params = [p for _, p in mixed_for(method)]
  assert tokens(tiny_llm(method), prompts, params) == expected


@pytest.mark.parametrize("options", [dict(max_num_seqs=1), dict(max_num_seqs=2, num_pages=9)],
                         ids=["one slot", "tiny pool"])
def test_requests_queue_for_slots_and_pages(options):
  """Nine pages hold one long request, or two short ones: everybody gets the same text."""
  llm = tiny_llm("ngram", **options)
  prompts, params = map(list, zip(*mixed_for("ngram"), strict=True))
  assert tokens(llm, prompts, params) == tokens(tiny_llm("ngram"), prompts, params)
  assert is_idle(llm)
  if "num_pages" in options:
    with pytest.raises(ValueError, match="needs .* pages"):
      llm.generate("abc", greedy(max_tokens=None))
    assert is_idle(llm)


def test_abort_in_the_middle_frees_slot_and_pages():
  llm = tiny_llm("ngram")
  expected = tokens(llm, ["the cat"], greedy(max_tokens=30, ignore_eos=True))
  scheduler = llm.engine.scheduler
  stream = llm.stream(["abc abc", "the hat", "in", "on", "waiting"],
                      greedy(max_tokens=60, ignore_eos=True))
  for _ in range(9):
    next(stream)
  assert len(scheduler.running) == 4 and len(scheduler.waiting) == 1
  stream.close()
  assert is_idle(llm) and not np.asarray(llm.engine.device.state.active).any()
  assert tokens(llm, ["the cat"], greedy(max_tokens=30, ignore_eos=True)) == expected


@pytest.mark.parametrize("method, draft", [*(("ngram", k) for k in range(K + 1)),
                                           *(("draft_model", k) for k in range(4)), ("none", 0)])
def test_max_model_len_is_reached_exactly(method, draft, monkeypatch):
  """Drafts never pass the end: a neighbour's text and pages nobody was given stay as they were."""
  llm = tiny_llm(method)
  neighbour = greedy(max_tokens=40, ignore_eos=True)
  expected = tokens(llm, ["the cat and"], neighbour)[0]

  def pools():
    state = llm.engine.device.state
    return jax.tree.leaves((state.pages, state.draft.pages if method == "draft_model" else ()))

  before, given = [np.array(pool) for pool in pools()], []
  allocator = llm.engine.scheduler.allocator
  allocate = allocator.allocate
  monkeypatch.setattr(allocator, "allocate", lambda n: given.append(allocate(n)) or given[-1])
  for left in (1, 2, 3, K + 1, 20):
    prompt = ([5, 6, 7] * MAX_LEN)[:MAX_LEN - left]
    params = greedy(max_tokens=None, ignore_eos=True, num_speculative_tokens=draft)
    out, beside = llm.generate([prompt, "the cat and"], [params, neighbour])
    assert len(out.token_ids) == left and out.finish_reason == "length"
    assert list(beside.token_ids) == expected
    if draft == 0:
      assert out.speculation.num_draft_tokens == 0
  others = np.setdiff1d(np.arange(allocator.num_pages), np.concatenate(given))
  assert 0 < len(others) < allocator.num_pages
  for old, pool in zip(before, pools(), strict=True):
    np.testing.assert_array_equal(np.asarray(pool)[others], old[others])


def test_a_draft_model_equal_to_the_target_has_every_draft_accepted():
  """For a request alone among empty slots, beside others, and in pages that others have left."""
  llm = tiny_llm("draft_model")
  params = greedy(max_tokens=41, ignore_eos=True)  # the first token, then ten steps of 3 + 1
  prompts = ["the cat and the hat", "abc", "one in the hand and", "he"]
  for batch in (prompts[:1], prompts, prompts[2:], prompts[:1]):
    for out in llm.generate(batch, params):
      assert out.speculation.acceptance_rate == 1
      assert out.speculation.tokens_per_step > 3


# --------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("method", METHODS)
def test_a_seeded_request_is_the_same_alone_in_a_batch_and_after_others(method):
  llm = tiny_llm(method)
  seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
  other = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
  alone = tokens(llm, ["the cat"], seeded)[0]
  batch = tokens(llm, ["abc", "the cat", "hat hat", "the cat", "in"],
                 [other, seeded, other, seeded, other])
  assert batch[1] == batch[3] == alone
  assert tokens(llm, ["the cat"], seeded)[0] == alone
  assert tokens(llm, ["the cat"], SamplingParams(temperature=1.0, seed=12, max_tokens=24,
                                                 ignore_eos=True))[0] != alone


def test_unseeded_requests_differ_from_one_another():
  llm = tiny_llm("ngram")
  params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, n=2)
  outs = llm.generate(["the cat"] * 3, params) + llm.generate(["the cat"], params)
  texts = [out.token_ids for request in outs for out in request.outputs]
  assert len(set(texts)) == len(texts) == 8


def test_large_seeds_are_told_apart():
  llm = tiny_llm("none")
  seeds = [1, 1 + 2**32, 2**32, 2**63 - 1]
  texts = [tokens(llm, ["the"], SamplingParams(seed=s, max_tokens=12, ignore_eos=True))[0]
           for s in seeds]
  assert len({tuple(t) for t in texts}) == len(seeds)
