"""Several devices: what lies where, and that the text is a single device's, token for token.

Eight devices are simulated on the CPU (conftest.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llm
from prompt_oracle import assert_prompt_logprobs
from sharded import CONFIG, PROMPTS, SPECULATION, answers, model

from jspec.config import EngineConfig
from jspec.engine.placement import place
from jspec.engine.replicas import Replicas
from jspec.llm import LLM
from jspec.model import attention, sharding
from jspec.model.params import init_params
from jspec.sampling_params import SamplingParams


@functools.cache
def alone(method: str):
  return answers(method, 1)[0]


def assert_same(got, want):
  assert [a.token_ids for a in got] == [b.token_ids for b in want]
  for mine, theirs in zip(got[1].logprobs, want[1].logprobs, strict=True):
    assert mine.keys() == theirs.keys()
    for token in mine:
      assert abs(mine[token].logprob - theirs[token].logprob) < 1e-4


@pytest.mark.parametrize("method, tp, draft_tp", [
    pytest.param("ngram", 2, 1, marks=pytest.mark.slow), ("ngram", 8, 1), ("draft", 8, 8),
    pytest.param("draft", 4, 1, marks=pytest.mark.slow), ("tree", 2, 2)])
def test_tokens_are_a_single_devices(method, tp, draft_tp):
  """Also where kv heads (2) are fewer than devices; greedy, sampled, penalised and biased."""
  got, llm = answers(method, tp, draft_tp)
  assert_same(got, alone(method))
  assert sum(a.speculation.num_accepted_tokens for a in got) > 0
  for out in llm.generate(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=3)):
    assert_prompt_logprobs(out, model(), 3)
  (shard,) = {a.sharding.shard_shape(a.shape) for a in llm.engine.device.state.pages.k}
  assert shard == (128, 8, 8 * max(2, tp) // tp)


def test_replicas_share_the_requests():
  got, llm = answers("ngram", 1, data_parallel_size=2)
  assert_same(got, alone("ngram"))
  one, two = llm.engine.engines
  assert one.config.max_num_seqs == two.config.max_num_seqs == 2
  assert one.traces["step"] == two.traces["step"] == 1
  assert one.device.state.root.devices() != two.device.state.root.devices()
  assert not llm.engine.busy and not llm.engine._home
  # Without a seed no two of them draw alike.
  params = SamplingParams(n=4, temperature=1.0, max_tokens=20, ignore_eos=True)
  outputs = [out for request in llm.generate(PROMPTS[:1] * 2, params) for out in request.outputs]
  assert len({out.token_ids for out in outputs}) == 8


def test_eight_bit_pages_are_split_with_their_scales():
  got, llm = answers("ngram", 4, kv_cache_dtype="int8")
  assert_same(got, answers("ngram", 1, kv_cache_dtype="int8")[0])
  pages = llm.engine.device.state.pages
  assert pages.k[0].dtype == jnp.int8
  assert pages.k_scale[0].sharding.shard_shape(pages.k_scale[0].shape) == (128, 1, 8)


# ------------------------------------------------------------------ what XLA sends


COLLECTIVE = re.compile(
    r"= (\([^)]*\)|\S+) "
    r"(all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(-start)?\(")


@pytest.mark.parametrize("method", ["ngram", "tree"])
def test_no_logits_are_gathered(method):
  """Two sums per layer and one for the embedding; of the vocabulary only winners and sums travel.

  2000 tokens: a number that occurs as no other size, and that blocks of 512 do not divide.
  """
  vocab = 2000
  config = dataclasses.replace(CONFIG, vocab_size=vocab)
  loaded = model()._replace(config=config, params=init_params(jax.random.key(0), config))
  llm = LLM(loaded, speculative_config=SPECULATION[method], tensor_parallel_size=4, progress=False,
            **{**tiny_llm.OPTIONS, "num_pages": 128})
  program = llm.engine.compiled_step(tiny_llm.AS_SHIPPED).as_text()
  sent = [(m.group(2), array) for m in COLLECTIVE.finditer(program)  # XLA joins some into tuples
          for array in re.findall(r"\w+\[[\d,]*\]", m.group(1))]
  assert sent
  large = [s for s in sent if str(vocab) in s[1] or str(vocab // 4) in s[1]]
  assert not large
  sums = f",{config.width}]"
  kinds = collections.Counter(kind for kind, shape in sent if shape.endswith(sums))
  least = 3 * (2 * config.num_layers + 1)  # in each width's program
  assert set(kinds) == {"all-reduce"} and kinds["all-reduce"] >= least


# ------------------------------------------------------------------ what lies where


def test_every_parameter_is_where_the_table_says():
  mesh = sharding.make_mesh(jax.devices()[:4])
  held, put = place(EngineConfig(tensor_parallel_size=4), "cpu")[0].target(CONFIG)
  assert held.num_kv_heads == 4
  params = sharding.place_params(model().params, put)
  layer = params["layers"][0]
  shard = lambda x: x.sharding.shard_shape(x.shape)
  heads, width = CONFIG.num_heads * CONFIG.head_dim, CONFIG.width
  assert shard(layer["q"]["w"]) == (width, heads // 4)
  assert shard(layer["k"]["w"]) == (width, CONFIG.head_dim)
  assert shard(layer["o"]["w"]) == (heads // 4, width)
  assert shard(layer["down"]["w"]) == (CONFIG.mlp_dim // 4, width)
  assert shard(params["embed"]) == (CONFIG.vocab_size // 4, width)
  assert shard(layer["attn_norm"]["scale"]) == (width,)
  assert jax.tree.map(lambda x: x.sharding, params) == sharding.param_shardings(mesh, params, 4)


def test_kv_heads_fewer_than_devices_are_repeated_in_order():
  _, put = place(EngineConfig(tensor_parallel_size=8), "cpu")[0].target(CONFIG)
  k = np.arange(2 * 8.0)[None].repeat(3, 0)
  got = np.array(put(("layers", 0, "k", "w"), k)).reshape(3, 8, 8)
  np.testing.assert_array_equal(got[0, :4], np.tile(np.arange(8.0), (4, 1)))
  np.testing.assert_array_equal(got[0, 4:], np.tile(np.arange(8, 16.0), (4, 1)))


@pytest.mark.parametrize("options, words", [
    ({"tensor_parallel_size": 3}, "tensor_parallel_size=3.*num_heads=8 is not a multiple"),
    ({"tensor_parallel_size": 16}, "needs 16 devices, there are 8"),
    ({"tensor_parallel_size": 4, "data_parallel_size": 4}, "needs 16 devices, there are 8"),
    ({"data_parallel_size": 3}, "max_num_seqs=4 must be a multiple of data_parallel_size=3"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be in 1..2147483647, got 0"),
    ({"tensor_parallel_size": 2, "numerics": "bitwise"}, "tensor_parallel_size=1, not 2"),
    ({"numerics": "bitwise", "attention_backend": "tpu"}, "needs attention_backend 'reference'"),
    ({"attention_backend": "tpu"}, "'tpu' does not run on cpu"),
    ({"attention_backend": "flash"}, "'flash' is not one of"),
    ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype 'fp4' is not one of"),
    ({"tensor_parallel_size": 4, "speculative_config": {
        "model": tiny_llm.NAME, "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}},
     "draft_tensor_parallel_size=2 must be 1 or tensor_parallel_size=4")])
def test_bad_input_is_refused_before_anything_is_compiled(options, words):
  with pytest.raises(ValueError, match=words):
    LLM(model(), progress=False, **{**tiny_llm.OPTIONS, **options})


def test_engines_side_by_side_forget_what_they_never_took():
  """Such as a request for more pages than an engine has."""
  class Engine:
    drafter = config = num_requests = None

    def add(self, request):
      raise ValueError("too many pages")

  replicas = Replicas([Engine()])
  with pytest.raises(ValueError, match="too many pages"):
    replicas.add("request")
  replicas.abort("request")


def test_kv_heads_must_divide_or_be_a_divisor():
  config = dataclasses.replace(CONFIG, num_heads=12, num_kv_heads=6, mlp_dim=48)
  with pytest.raises(ValueError, match="num_kv_heads=6 neither divides"):
    sharding.split_config(config, 4)


# ------------------------------------------------------------------ dispatch


def test_the_next_implementation_is_tried_and_the_choice_logged_once(monkeypatch, caplog):
  calls = []

  def load(name, interpret):
    def kernel(*args, **options):
      calls.append(name)
      if name != "reference":
        raise NotImplementedError(f"not by {name}")
      return jnp.zeros(1)
    return kernel

  monkeypatch.setattr(attention, "_load", load)
  attention._log.cache_clear()
  attend = attention.choose("gpu")
  with caplog.at_level("INFO", logger="jspec"):
    for _ in range(2):
      attend(*[jnp.zeros((1, 1, 1, 1))] * 6)
  assert calls == [*attention.PREFERENCE["gpu"]] * 2
  (message,) = [r.message for r in caplog.records]
  assert message == ("paged attention on gpu: reference (mosaic_gpu: not by mosaic_gpu; "
                     "triton: not by triton)")
  with pytest.raises(NotImplementedError, match="triton: not by triton"):
    attention.choose("gpu", "triton")(*[jnp.zeros((1, 1, 1, 1))] * 6)


# ------------------------------------------------------------------ several processes


def test_two_processes_generate_what_one_does(tmp_path):
  """jax.distributed over TCP, two devices in each process, four in all."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    address = f"localhost:{s.getsockname()[1]}"
  root = pathlib.Path(__file__).parents[2]
  command = [sys.executable, root / "tests/support/two_processes.py", address]
  started = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONPATH": str(root)})
             for i in range(2)]
  results = [p.communicate(timeout=300) for p in started]
  for process, (out, err) in zip(started, results, strict=True):
    assert process.returncode == 0, err[-3000:]
    assert out.splitlines()[-1] == str([list(a.token_ids[:6]) for a in alone("ngram")])
