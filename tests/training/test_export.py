"""Exports: every format gives back what was in memory, names tensors and keys as its readers
do, and drafts the same tokens."""

from __future__ import annotations

import dataclasses
import json

import head_checkpoints as hc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_llm
from export_cases import (
  BF16,
  EAGLE,
  EAGLE3,
  F32,
  GEMMA3,
  HEADS,
  LAYER,
  MEDUSA,
  MLP,
  NAME,
  QWEN3,
  TARGET,
  WIDE,
  assert_same,
  head_of,
  is_norm,
  model_of,
  tensors_of,
)

from jspec.checkpoints import hub, load_head
from jspec.cli import main
from jspec.config import ModelConfig, draft_trees
from jspec.drafters.draft_model import draft_model
from jspec.drafters.eagle import eagle, with_lm_head
from jspec.drafters.medusa import medusa
from jspec.drafters.mlp_speculator import mlp_speculator
from jspec.heads.config import EagleConfig
from jspec.heads.init import init_head
from jspec.speculation import tree
from jspec.training.export.formats import STYLES
from jspec.training.export.write import export, quantise_rows, without_copies
from jspec.types import Committed


def config_of(folder) -> dict:
  return json.loads((folder / "config.json").read_text())


# ------------------------------------------------------------ back again


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_comes_back_as_it_was(name, dtype, tmp_path):
  config, style = HEADS[name]
  params = head_of(config)
  folder = export(tmp_path / "head", config, params, TARGET, NAME, style, dtype)
  read, tree_read = load_head.load_head(folder, TARGET)
  assert read == config and load_head.detect_method(folder) == config.method
  assert_same(tree_read, params, BF16 if dtype == "bfloat16" else F32)
  again = export(tmp_path / "again", read, tree_read, TARGET, NAME, style, dtype)
  for file in folder.iterdir():
    assert (again / file.name).read_bytes() == file.read_bytes()


def test_the_first_style_of_a_method_and_bfloat16_are_the_defaults(tmp_path):
  for config in (MEDUSA, MLP, EAGLE, EAGLE3):
    params, method = head_of(config), config.method
    first = export(tmp_path / method / "a", config, params, TARGET, NAME)
    named = export(tmp_path / method / "b", config, params, TARGET, NAME, STYLES[method][0],
                   "bfloat16")
    assert {file.name: file.read_bytes() for file in first.iterdir()} == {
      file.name: file.read_bytes() for file in named.iterdir()}


@pytest.mark.parametrize("name", ["compact", "compact shared"])
def test_int8_rows_are_off_by_half_a_step_and_export_to_the_same_bytes(name, tmp_path):
  config = HEADS[name][0]
  params = head_of(config)
  folder = export(tmp_path / "head", config, params, TARGET, NAME, "compact", "int8")
  read, loaded = load_head.load_head(folder, TARGET)
  assert read == config
  kinds = {name: array.dtype for name, array in tensors_of(folder).items()}
  assert kinds["fc.weight"] == np.int8 and kinds["fc.weight_scale"] == F32
  coarse = 0
  for (path, got), (_, array) in zip(jax.tree_util.tree_leaves_with_path(loaded),
                                     jax.tree_util.tree_leaves_with_path(params), strict=True):
    got, array = np.asarray(got), np.asarray(array)
    if array.ndim < 2:
      np.testing.assert_array_equal(got, array)  # norms, biases, target_id
      continue
    rows, got = (array, got) if path[-1].key == "embed" else (array.T, got.T)
    step = np.abs(rows).max(1, keepdims=True) / 127
    assert (np.abs(got - rows) <= 0.5001 * step).all()
    coarse += (np.abs(got - rows) > 0.4 * step).any()
  assert coarse  # the bound is not idle
  again = export(tmp_path / "again", config, loaded, TARGET, NAME, "compact", "int8")
  assert all((again / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir())


def test_int8_rows_survive_zeros_tiny_and_huge_numbers():
  rows = np.array([[0, 0, 0], [1e-38, -1e-38, 0], [3e38, 1e30, -3e38], [1, -0.6, 1 / 127]], F32)
  numbers, scale = quantise_rows(rows)
  product = numbers.astype(F32) * scale[:, None]
  assert np.isfinite(product).all() and (np.abs(product - rows) <= 0.5001 * scale[:, None]).all()
  again = quantise_rows(product)
  np.testing.assert_array_equal(again[0], numbers)
  np.testing.assert_array_equal(again[1], scale)
  np.testing.assert_array_equal(numbers[3], [127, -76, 1])


def test_a_head_for_smollm2_takes_less_than_twelve_megabytes(tmp_path):
  target = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, tie_embeddings=True)
  config = EagleConfig(3, dataclasses.replace(target, num_layers=1), 576, 8192, has_head=True)
  shapes = jax.eval_shape(lambda: init_head(jax.random.key(0), config))
  params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
  params["target_id"] = np.arange(8192, dtype=np.int32) * 6
  folder = export(tmp_path / "head", config, params, target, NAME, "compact", "int8")
  size = sum(file.stat().st_size for file in folder.iterdir())
  assert 9.8e6 < size < 10e6  # 9.8 million numbers, 15,000 scales


# ------------------------------------------------------------ the formats' own names


WRITTEN = {  # as tests/support/head_checkpoints.py writes them from the formats' descriptions
  "fasterdecoding": (hc.medusa(layers=2), ()),
  "fasterdecoding shared": (hc.medusa(own_head=False), ()),
  "vllm": (hc.vllm_medusa(bias=True, scale=0.5), ()),
  "vllm cut": (hc.vllm_medusa(truncated="cut"), ()),
  "ibm": (hc.mlp_speculator(prefix="speculator."), ()),
  "ibm tied": (hc.mlp_speculator(tied=True, prefix="speculator."), ()),
  "safeailab": (hc.eagle(bias=True, qkv_bias=True, layers=2), ("embed_tokens.weight",)),
  "specforge": (hc.eagle3(layers=2, embed=True, theta=1e4), ()),
  "specforge taps": (hc.with_config(hc.eagle3(), {"feature_layers": (2, 5, 8)}, eagle_config={
    "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}), ()),
  "specforge 3.1": (hc.with_config(hc.eagle3(head={"fc_norm": True, "norm_output": True}),
                                   fc_norm=True, norm_output=True), ()),
  "specforge whole": (hc.eagle3(vocabulary="whole"), ()),
  "speculators": (hc.speculators(layers=2, taps=(0, 3, 4, 8), norm_before_residual=True,
                                 norm_before_fc=True, norm_output=True), ()),
  "speculators fc_norm": (hc.speculators(taps=(2, 4), fc_norm=True, embed=True), ()),
}
# Keys with other values than the descriptions' examples, which no reader minds.
FREE_KEYS = {"architectures", "base_model_name_or_path", "medusa_num_heads", "max_paths", "topk"}


@pytest.mark.parametrize("name", WRITTEN)
def test_names_shapes_and_keys_are_the_formats(name, tmp_path):
  checkpoint, left_out = WRITTEN[name]
  config, params = load_head.load_head(hc.write(checkpoint, tmp_path / "given"), TARGET)
  folder = export(tmp_path / "head", config, params, TARGET, NAME, name.split()[0], "float32")
  written = tensors_of(folder)
  assert set(written) == set(checkpoint.tensors) - set(left_out)
  for tensor, array in written.items():
    np.testing.assert_array_equal(array, checkpoint.tensors[tensor], tensor)
  given = config_of(folder)
  for key, value in checkpoint.config.items():
    if key == "transformer_layer_config":
      assert value.items() <= given[key].items()
    elif key == "speculators_config":
      assert given[key]["verifier"] == {"name_or_path": NAME, "architectures": ["LlamaForCausalLM"]}
      assert set(value) == set(given[key])
    elif key not in FREE_KEYS:
      assert given[key] == value, key


def test_loaders_find_the_keys_that_they_select_a_class_by(tmp_path):
  def given(config, style):
    folder = tmp_path / f"{config.method}-{style}"
    return config_of(export(folder, config, head_of(config), TARGET, NAME, style))

  taps = dataclasses.replace(EAGLE3, feature_layers=(2, 4, 5))
  specforge = given(taps, "specforge")
  assert specforge["architectures"] == ["LlamaForCausalLMEagle3"]
  assert specforge["torch_dtype"] == "bfloat16" and specforge["rope_theta"] == 10000.0
  assert specforge["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # inputs of layers: vLLM
  assert specforge["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # outputs
  assert given(EAGLE3, "speculators")["architectures"] == ["Eagle3Speculator"]
  assert given(MLP, "ibm")["architectures"] == ["MLPSpeculatorPreTrainedModel"]
  vllm = given(MEDUSA, "vllm")
  assert vllm["architectures"] == ["MedusaModel"] and vllm["num_heads"] == 3
  medusa_config = given(MEDUSA, "fasterdecoding")
  assert (medusa_config["medusa_num_heads"], medusa_config["medusa_num_layers"]) == (3, 1)
  assert medusa_config["base_model_name_or_path"] == NAME
  assert (tmp_path / "medusa-fasterdecoding" / "medusa_lm_head.safetensors").is_file()
  assert given(EAGLE, "safeailab")["bias"] is False


def test_d2t_holds_offsets_and_t2d_marks_their_sums(tmp_path):
  for style in ("specforge", "speculators"):
    folder = export(tmp_path / style, EAGLE3, head_of(EAGLE3), TARGET, NAME, style)
    d2t, t2d = (tensors_of(folder)[name] for name in ("d2t", "t2d"))
    assert d2t.dtype == np.int64 and t2d.dtype == np.bool_ and t2d.shape == (hc.V,)
    assert [i + int(offset) for i, offset in enumerate(d2t)] == hc.IDS.tolist()
    assert [i for i in range(hc.V) if t2d[i]] == hc.IDS.tolist()
  compact = tensors_of(export(tmp_path / "c", EAGLE3, head_of(EAGLE3), TARGET, NAME, "compact"))
  assert "t2d" not in compact and compact["d2t"].dtype == np.int32


def test_a_bias_of_eagles_fc_is_kept(tmp_path):
  params = head_of(EAGLE)
  params["fc"]["b"] = jnp.arange(hc.E, dtype=jnp.float32)
  folder = export(tmp_path / "head", EAGLE, params, TARGET, NAME, dtype="float32")
  assert config_of(folder)["bias"] is True
  assert_same(load_head.load_head(folder, TARGET)[1], params)


def test_what_has_no_effect_on_a_head_is_left_to_the_reader(tmp_path):
  layer = dataclasses.replace(LAYER, family="mistral", tie_embeddings=True)
  config = dataclasses.replace(EAGLE, layer=layer, num_taps=3)
  params = head_of(EAGLE)
  folder = export(tmp_path / "head", config, params, TARGET, NAME, dtype="float32")
  read, loaded = load_head.load_head(folder, TARGET)
  assert read == EAGLE
  assert_same(loaded, params)
  plain = dataclasses.replace(MLP, top_k_tokens_per_head=())
  folder = export(tmp_path / "mlp", plain, head_of(plain), TARGET, NAME)
  assert config_of(folder)["top_k_tokens_per_head"] == [1, 1, 1]  # vLLM wants one of each stage


# ------------------------------------------------------------ drafting


def chain(num_draft: int):
  return tree.shape_of(draft_trees.of_widths((1,) * num_draft))


DRAFTERS = {
  "medusa vllm cut": lambda c: medusa(c, chain(3), TARGET),
  "mlp tied": lambda c: mlp_speculator(c, chain(3), TARGET),
  "eagle": lambda c: eagle(c, chain(3), TARGET, tiny.PAGE, jnp.float32),
  "eagle3 3.1": lambda c: eagle(c, chain(3), TARGET, tiny.PAGE, jnp.float32),
  "speculators 3.1": lambda c: eagle(c, chain(3), TARGET, tiny.PAGE, jnp.float32),
}
TARGET_PARAMS = model_of(LAYER, 9)


def proposals(drafter, width: int):
  """A jitted function of the drafter's parameters: its trees for two slots after 6 and 4 tokens."""
  rng = np.random.default_rng(2)
  table, num_pages = tiny.page_table(2, drafter.lookahead, 24)
  tokens = jnp.asarray(rng.integers(0, hc.V, (2, 7)), jnp.int32)
  feature = jnp.asarray(rng.normal(size=(2, 6, width)), jnp.float32)
  count = jnp.array([6, 4])
  before = tiny.slots_of(table, [0, 0], feature=jnp.zeros((2, width)))
  after = tiny.slots_of(table, count, feature=feature[jnp.arange(2), count - 1])

  def run(params):
    state = drafter.observe(params, drafter.init(2, num_pages), before,
                            Committed(tokens[:, :-1], tokens[:, 1:], feature, count))
    return drafter.propose(params, state, tokens[jnp.arange(2), count], after)[0].token

  return tiny.compiled(run, ())[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_exported_head_drafts_the_same_tokens(name, tmp_path):
  config, style = HEADS[name]
  folder = export(tmp_path / "head", config, head_of(config), TARGET, NAME, style, "float32")
  read, loaded = load_head.load_head(folder, TARGET)
  taps = config.num_taps if isinstance(config, EagleConfig) else 1
  propose = proposals(DRAFTERS[name](read), taps * hc.E)
  drafts, expected, others = (np.asarray(propose({"head": head, "target": TARGET_PARAMS}))
                              for head in (loaded, head_of(config), head_of(config, seed=2)))
  np.testing.assert_array_equal(drafts, expected)
  assert (drafts != others).any()


# ------------------------------------------------------------ draft models


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("target")
  tiny_llm.byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tiny_llm.EOS]}))
  return folder


@pytest.mark.parametrize("config", [LAYER, QWEN3, GEMMA3, dataclasses.replace(
  WIDE, tie_embeddings=True)], ids=["llama", "qwen3", "gemma3", "llama wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_model_comes_back_as_a_model_folder(config, dtype, tokenizer_folder, tmp_path):
  params = model_of(config)
  folder = export(tmp_path / "draft", config, params, TARGET, NAME, None, dtype,
                  tokenizer=tokenizer_folder)
  assert load_head.detect_method(folder) is None
  loaded = hub.load_model(folder)
  assert loaded.config == config and loaded.tokenizer.eos_ids == (tiny_llm.EOS,)
  if config is GEMMA3:  # the file has the scale less 1, which rounds
    norms = lambda tree: jax.tree_util.tree_map_with_path(
      lambda path, leaf: np.asarray(leaf) if is_norm(path) else 0, tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), norms(loaded.params),
                 norms(params))
    params = jax.tree_util.tree_map_with_path(
      lambda path, a, b: b if is_norm(path) else a, params, loaded.params)
  assert_same(loaded.params, params, BF16 if dtype == "bfloat16" else F32)


def test_an_exported_draft_model_drafts_the_same_tokens(tokenizer_folder, tmp_path):
  params = [model_of(LAYER, seed) for seed in (3, 4)]
  folder = export(tmp_path / "draft", LAYER, params[0], TARGET, NAME, dtype="float32",
                  tokenizer=tokenizer_folder)
  loaded = hub.load_model(folder)
  propose = proposals(draft_model(loaded.config, (1, 1), tiny.PAGE, jnp.float32, False), 0)
  drafts, expected, others = (np.asarray(propose(p)) for p in (loaded.params, *params))
  np.testing.assert_array_equal(drafts, expected)
  assert (drafts != others).any()


def test_inspect_says_what_an_export_is_and_that_it_fits(tokenizer_folder, tmp_path, capsys):
  target = export(tmp_path / "target", TARGET, model_of(TARGET), TARGET, NAME,
                  tokenizer=tokenizer_folder)
  for name in ("medusa vllm cut", "mlp", "eagle", "speculators 3.1", "compact"):
    config, style = HEADS[name]
    dtype = "int8" if style == "compact" else "bfloat16"
    folder = export(tmp_path / name, config, head_of(config), TARGET, NAME, style, dtype)
    assert main.main(["models", "inspect", str(folder), "--target", str(target), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["method"], report["fits"]) == ("head", config.method, True)
    assert report["parameters"] == sum(
      array.size for name, array in tensors_of(folder).items()
      if array.dtype != bool and name not in ("d2t", "token_map") and "_scale" not in name)


# ------------------------------------------------------------ what is the target's own


def test_rows_of_the_targets_lm_head_are_not_stored_and_draft_the_same(tmp_path):
  params = head_of(EAGLE3)
  rows = TARGET_PARAMS["head"]["w"][:, params["target_id"]]
  params = params | {"head": {"w": rows}}
  lean, rest = without_copies(EAGLE3, params, TARGET, TARGET_PARAMS)
  assert lean == dataclasses.replace(EAGLE3, has_head=False) and "head" not in rest
  folder = export(tmp_path / "head", lean, rest, TARGET, NAME, "compact", "float32")
  assert "lm_head.weight" not in tensors_of(folder)
  config, read = load_head.load_head(folder, TARGET)
  assert not config.has_head
  config, read = with_lm_head(config, read, TARGET_PARAMS)
  assert config.has_head
  np.testing.assert_array_equal(read["head"]["w"], rows)
  np.testing.assert_array_equal(read["fc"]["w"], params["fc"]["w"])


def test_copies_of_the_targets_embedding_and_lm_head_are_dropped(tmp_path):
  config = dataclasses.replace(EAGLE3, draft_vocab_size=0, has_embed=True)
  params = head_of(config) | {"embed": TARGET_PARAMS["embed"].copy(),
                              "head": {"w": TARGET_PARAMS["head"]["w"].copy()}}
  lean, rest = without_copies(config, params, TARGET, TARGET_PARAMS)
  assert lean == dataclasses.replace(config, has_embed=False, has_head=False)
  assert set(params) - set(rest) == {"embed", "head"}
  export(tmp_path / "head", lean, rest, TARGET, NAME, "compact", "int8")
  trained = params | {"embed": params["embed"] + F32(1e-3)}
  lean, rest = without_copies(config, trained, TARGET, TARGET_PARAMS)
  assert lean.has_embed and not lean.has_head and rest["embed"] is trained["embed"]
  own = head_of(MEDUSA)
  assert without_copies(MEDUSA, own, TARGET, TARGET_PARAMS) == (MEDUSA, own)
  for head in own["heads"]:
    head["head"] = TARGET_PARAMS["head"]
  lean, rest = without_copies(MEDUSA, own, TARGET, TARGET_PARAMS)
  assert lean.shares_head and all(set(head) == {"blocks"} for head in rest["heads"])
  scaled = dataclasses.replace(TARGET, embed_scale=2.0)  # whose embedding a head would scale, too
  assert without_copies(config, params, scaled, TARGET_PARAMS) == (config, params)
