"""Head checkpoints -> config and parameter tree, in every format; what doesn't fit is refused."""

from __future__ import annotations

import dataclasses
import json

import head_checkpoints as hc
import jax
import ml_dtypes
import numpy as np
import pytest

from jspec.checkpoints import head_files, hub, load_head
from jspec.model.params import on_device

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
CHECKPOINTS = {
  "medusa": hc.medusa(),
  "medusa-2-layers": hc.medusa(BF16, layers=2, heads=5),
  "medusa-without-lm-heads": hc.medusa(F16, own_head=False),
  "medusa-inside-a-model": hc.medusa(prefix="medusa_head."),
  "medusa-modelopt": hc.medusa(BF16, prefix="medusa_heads."),
  "medusa-vllm": hc.vllm_medusa(F16),
  "medusa-vllm-bias": hc.vllm_medusa(bias=True, scale=0.5, layers=1),
  "medusa-vllm-cut": hc.vllm_medusa(BF16, truncated="cut"),
  "medusa-vllm-whole": hc.vllm_medusa(truncated="whole"),
  "medusa-vllm-one-head": hc.vllm_medusa(one_head="lm_heads.0.weight", truncated="cut"),
  "medusa-vllm-lm-head": hc.vllm_medusa(one_head="lm_head.weight"),
  "medusa-vllm-targets-head": hc.vllm_medusa(one_head=""),
  "mlp": hc.mlp_speculator(F16),
  "mlp-prefix": hc.mlp_speculator(BF16, prefix="speculator.", width_key="hidden_size"),
  "mlp-as-wide": hc.mlp_speculator(inner=0),
  "mlp-tied": hc.mlp_speculator(tied=True),
  "mlp-tied-copies": hc.mlp_speculator(BF16, tied=True, copies=True),
  "eagle": hc.eagle(),
  "eagle-no-bias": hc.eagle(F16, bias=False),
  "eagle-bias-named": hc.eagle(BF16, bias=True, prefix="model.", layers=2),
  "eagle-qkv-bias": hc.eagle(bias=False, qkv_bias=True),
  "eagle3": hc.eagle3(F16),
  "eagle3-modelopt": hc.eagle3(BF16, "layers.0"),
  "eagle3-prefix": hc.eagle3(prefix="model.", embed=True),
  "eagle3-whole": hc.eagle3(vocabulary="whole"),
  "eagle3-zero-offsets": hc.eagle3(vocabulary="offsets"),
  "eagle3-shared": hc.eagle3(vocabulary="shared"),
  "eagle3-3.1": hc.with_config(
    hc.eagle3(head={"fc_norm": True, "norm_output": True}), fc_norm=True, norm_output=True,
    architectures=["LlamaForCausalLMEagle3"]),
  "eagle3-layer-outputs": hc.with_config(hc.eagle3(), {"feature_layers": (2, 5, 8)}, eagle_config={
    "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}),
  "eagle3-other-models-type": hc.with_config(hc.eagle3(BF16), model_type="qwen3"),
  "speculators": hc.speculators(),
  "speculators-all": hc.speculators(
    BF16, 2, (0, 3, 4, 8), norm_before_residual=True, norm_before_fc=True, norm_output=True),
  "speculators-fc-norm": hc.speculators(F16, taps=(2, 4), fc_norm=True, embed=True),
}


def load(checkpoint, folder, file="model.safetensors", **keywords):
  target = keywords.pop("target", hc.TARGET)
  return load_head.load_head(hc.write(checkpoint, folder, file), target, **keywords)


def refused(checkpoint, folder, **keywords) -> str:
  """The one sentence, which names the folder."""
  with pytest.raises(ValueError) as error:
    load(checkpoint, folder, **keywords)
  assert str(folder) in str(error.value)
  return str(error.value)


def mutated(name, drop=(), config=None, **tensors):
  """A checkpoint without some tensors, with others, and with other keys in its config."""
  c = CHECKPOINTS[name]
  kept = {key: value for key, value in c.tensors.items() if key not in drop}
  return dataclasses.replace(c, tensors=kept | tensors, config=c.config | (config or {}))


def assert_tree(params, expected, dtype=F32):
  """Same structure, and every leaf is the written array."""
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  for (path, leaf), (_, array) in zip(jax.tree_util.tree_leaves_with_path(params),
                                      jax.tree_util.tree_leaves_with_path(expected), strict=True):
    place = jax.tree_util.keystr(path)
    is_norm = path[-1].key in ("scale", "bias") if hasattr(path[-1], "key") else False
    kind = np.int32 if "target_id" in place else F32 if is_norm else dtype
    assert leaf.dtype == kind, place
    np.testing.assert_array_equal(np.asarray(leaf), array.astype(F32).astype(kind), place)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_leaf_is_the_written_tensor(name, file, tmp_path):
  checkpoint = CHECKPOINTS[name]
  config, params = load(checkpoint, tmp_path, file)
  assert config == checkpoint.head
  assert_tree(params, checkpoint.tree)
  assert load_head.detect_method(tmp_path) == config.method == checkpoint.method


@pytest.mark.parametrize("name", ["medusa", "mlp", "eagle3", "speculators-fc-norm"])
def test_matrices_take_the_dtype_asked_for_and_norms_stay_float32(name, tmp_path):
  params = load(CHECKPOINTS[name], tmp_path, dtype="bfloat16")[1]
  assert_tree(params, CHECKPOINTS[name].tree, BF16)
  with pytest.raises(ValueError, match="dtype='int8' is not one of"):
    load_head.load_head(tmp_path, hc.TARGET, dtype="int8")


def test_tied_leaves_are_one_array_and_each_is_put_once(tmp_path):
  placed = []

  def put(path, array):
    placed.append(path)
    return on_device(path, array)

  stages = load(CHECKPOINTS["mlp-tied-copies"], tmp_path / "mlp", put=put)[1]["stages"]
  assert all(stage["emb"] is stages[0]["emb"] for stage in stages)
  assert stages[2]["proj"]["w"] is stages[1]["proj"]["w"] is not stages[0]["proj"]["w"]
  assert len(placed) == 6 and placed[0] == ("stages", 0, "emb")
  own = load(CHECKPOINTS["medusa-vllm-lm-head"], tmp_path / "vllm")[1]["heads"]
  assert own[0]["head"]["w"] is own[1]["head"]["w"]


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "any.pt"])
def test_medusa_heads_lie_in_a_file_of_their_own(file, tmp_path):
  checkpoint = dataclasses.replace(CHECKPOINTS["medusa"], config=None)  # which they may lack
  assert_tree(load(checkpoint, tmp_path, file)[1], checkpoint.tree)
  assert_tree(load_head.load_head(tmp_path / file, hc.TARGET)[1], checkpoint.tree)


def test_the_heads_own_file_goes_before_the_model_beside_it(tmp_path):
  hc.write(CHECKPOINTS["eagle"], tmp_path)
  checkpoint = CHECKPOINTS["medusa"]
  assert_tree(load(checkpoint, tmp_path, "medusa_lm_head.pt")[1], checkpoint.tree)


def test_tensors_may_be_spread_over_files(tmp_path):
  c = CHECKPOINTS["eagle3"]
  names = sorted(c.tensors)
  for i in range(2):
    part = dataclasses.replace(c, tensors={name: c.tensors[name] for name in names[i::2]})
    hc.write(part, tmp_path / "bin", f"pytorch_model-0000{i + 1}-of-00002.bin")
    hc.write(part, tmp_path / "st", f"model-0000{i + 1}-of-00002.safetensors")
  for folder in ("bin", "st"):
    assert_tree(load_head.load_head(tmp_path / folder, hc.TARGET)[1], c.tree)


def test_repo_ids_fetch_torch_files_only_where_there_are_no_others(tmp_path, monkeypatch):
  asked = []

  def fetch(name, patterns, revision):
    asked.append(patterns)
    return tmp_path

  monkeypatch.setattr(hub, "_hugging_face", fetch)
  hc.write(CHECKPOINTS["eagle"], tmp_path, "pytorch_model.bin")
  assert load_head.detect_method("org/name") == "eagle"
  assert len(asked) == 2 and "pytorch_model*.bin" in asked[1] and "*.pt" in asked[1]
  hc.write(CHECKPOINTS["eagle"], tmp_path)
  assert load_head.detect_method("org/name") == "eagle" and len(asked) == 3
  assert hub.read_model_config("org/name").width == hc.E and asked[3:] == [["config.json"]]
  assert load_head.detect_method("no-such-folder") is None  # for whoever loads it to refuse
  with pytest.raises(ValueError, match="checkpoint 'no-such-folder' is unknown: give a folder"):
    load_head.load_head("no-such-folder", hc.TARGET, method="eagle")


# ------------------------------------------------------------ what a checkpoint is


@pytest.mark.parametrize("tensor, config, kind", [
  ("mtp.fc.weight", {}, "mtp"), ("model.layers.8.eh_proj.weight", {}, "mtp"),
  ("markov_head.markov_w1.weight", {}, "dspark"), ("hidden_norm.weight", {}, "dflash"),
  ("candidate_selector.hidden_projection.weight", {}, "dflash2"), ("mask_hidden", {}, "peagle"),
  ("prefix_gru.weight_ih", {}, "domino"), ("0.0.res_connection.weight", {}, "hydra"),
  ("fc.weight", {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "dflash"),
  ("fc.weight", {"architectures": ["PEagleDraftModel"]}, "peagle"),
  ("fc.weight", {"dflash_config": {}}, "dflash"),
  ("0.0.linear.weight", {"hydra_num_heads": 4}, "hydra"),
  ("fc.weight", {"speculators_model_type": "dspark"}, "dspark"),
  ("fc.weight", {"speculators_model_type": "eagle"}, "speculators eagle"),
  ("fc.weight", {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]},
   "peagle")])
def test_other_methods_heads_are_refused_by_name(tensor, config, kind, tmp_path):
  checkpoint = hc.Checkpoint("", config, {"fc.weight": np.ones((2, 4), F32),
                                          tensor: np.ones((2, 4), F32)}, None, {})
  assert f"holds a {kind} head, which jspec doesn't run: methods are" in refused(
    checkpoint, tmp_path)
  with pytest.raises(ValueError, match=f"holds a {kind} head"):
    load_head.detect_method(tmp_path)


def test_plain_models_are_no_heads(tmp_path):
  plain = hc.Checkpoint("", hc.llama_config(), {"model.embed_tokens.weight": np.ones((4, 2), F32),
                                          "model.norm.weight": np.ones(2, F32)}, None, {})
  assert "is not a drafting head that jspec knows: methods are medusa" in refused(plain, tmp_path)
  assert load_head.detect_method(tmp_path) is None
  assert load_head.detect_method("smollm2-135m-instruct") is None
  assert load_head.detect_method("some/model.gguf") is None


@pytest.mark.parametrize("name", ["medusa", "mlp", "eagle", "eagle3", "speculators"])
def test_another_method_than_the_checkpoints_names_both(name, tmp_path):
  method = CHECKPOINTS[name].method
  for other in set(head_files.METHODS) - {method}:
    assert f"a head for method {method!r}, not {other!r}" in refused(
      CHECKPOINTS[name], tmp_path, method=other)
  assert load(CHECKPOINTS[name], tmp_path, method=method)[0].method == method


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_missing_tensor_is_named(name, tmp_path):
  """But for copies, for tables nobody needs, and for those whose absence means something else."""
  c = CHECKPOINTS[name]
  optional = {
    "eagle": {"fc.bias", "embed_tokens.weight"}, "eagle3-prefix": {"model.embed_tokens.weight"},
    "eagle-bias-named": {"model.embed_tokens.weight"}, "eagle3-whole": {"lm_head.weight"},
    "speculators-fc-norm": {"embed_tokens.weight"},
    "eagle3-zero-offsets": {"d2t", "lm_head.weight"},
    "medusa-vllm-lm-head": {"lm_head.weight"},
    "medusa-inside-a-model": {"model.embed_tokens.weight", "lm_head.weight"},
    "medusa-modelopt": {"model.embed_tokens.weight", "lm_head.weight"}}.get(name, set())
  optional |= {"embed_tokens.weight"} if name.startswith("eagle-") else set()
  hc.write(c, tmp_path)
  files = head_files.read_head_files(tmp_path)
  for missing in set(c.tensors) - optional - {"t2d"}:
    tensors = {key: value for key, value in files.tensors.items() if key != missing}
    if name == "mlp-tied-copies" and missing != "proj.0.weight":  # any copy will do
      load_head.open_head(files._replace(tensors=tensors), hc.TARGET)
      continue
    bare = missing.removeprefix("model.").removeprefix("speculator.").replace(
      "midlayer", "layers.0").removeprefix("medusa_head.").removeprefix("medusa_heads.")
    with pytest.raises(ValueError, match=f"tensor {bare}"):
      load_head.open_head(files._replace(tensors=tensors), hc.TARGET, c.method)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_misshapen_and_every_unknown_tensor_is_named(name, tmp_path):
  c = CHECKPOINTS[name]
  hc.write(c, tmp_path)
  files = head_files.read_head_files(tmp_path)
  ignored = {"t2d", "embed_tokens.weight", "model.embed_tokens.weight"}
  ignored -= {"model.embed_tokens.weight"} if name == "eagle3-prefix" else set()
  ignored |= {"lm_head.weight"} if "medusa-inside" in name or "modelopt" in name else set()
  for wrong in set(c.tensors) - ignored:
    if name == "mlp-tied-copies" and not any(part in wrong for part in (".0.", "proj.1")):
      continue
    tensor = files.tensors[wrong]
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 1)
    with pytest.raises(ValueError) as error:
      load_head.open_head(files._replace(tensors={**files.tensors, wrong: tensor._replace(
        shape=shape)}), hc.TARGET)
    if not wrong.endswith("0.0.linear.weight"):  # this one's says how wide Medusa heads are
      assert str(shape) in str(error.value) and str(tensor.shape) in str(error.value)
  if "medusa-inside" in name or name == "medusa-modelopt":
    return  # the rest is the model's
  surprise = {**files.tensors, "surprise.weight": next(iter(files.tensors.values()))}
  with pytest.raises(ValueError, match="has no tensor surprise.weight"):
    load_head.open_head(files._replace(tensors=surprise), hc.TARGET)


def test_harmless_extras_are_allowed(tmp_path):
  inv_freq = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, F32)}
  load(mutated("eagle", **inv_freq), tmp_path / "1")
  load(mutated("eagle3-modelopt", **inv_freq), tmp_path / "3")
  load(mutated("eagle3", drop=["t2d"]), tmp_path / "no-t2d")


@pytest.mark.parametrize("name, change, words", [
  ("medusa", {"width": 32},
   "weight has shape (16, 16), for targets of width 16: this target has 32 and needs (32, 32)"),
  ("medusa", {"vocab_size": 41}, "a vocabulary of 40 tokens, the target has 41"),
  ("medusa-vllm-cut", {"vocab_size": 41}, "a vocabulary of 40 tokens, the target has 41"),
  ("mlp", {"width": 32},
   "weight has shape (24, 16), for targets of width 16: this target has 32 and needs (24, 32)"),
  ("mlp", {"vocab_size": 41}, "a vocabulary of 40 tokens, the target has 41"),
  ("eagle", {"width": 32},
   "weight has shape (16, 32), for targets of width 16: this target has 32 and needs (16, 48)"),
  ("eagle", {"vocab_size": 39}, "a vocabulary of 40 tokens, the target has 39"),
  ("eagle3", {"width": 32},
   "weight has shape (16, 48), for targets of width 16: this target has 32 and needs (16, 96)"),
  ("eagle3", {"num_layers": 2}, "reads hidden states [2, 1, -1] of the target, which has 0 to 2"),
  ("speculators-all", {"num_layers": 7}, "hidden states [0, 3, 4, 8] of the target, which has 0"),
])
def test_another_target_is_refused(name, change, words, tmp_path):
  assert words in refused(CHECKPOINTS[name], tmp_path,
                          target=dataclasses.replace(hc.TARGET, **change))


def test_a_head_narrower_than_its_target_needs_its_own_embedding(tmp_path):
  wide = dataclasses.replace(hc.TARGET, width=32)
  checkpoint = hc.speculators(target_width=32)
  assert "16 wide and has no embedding of its own: it can't share the target's, which is 32" in (
    refused(checkpoint, tmp_path, target=wide))
  own = hc.speculators(target_width=32, embed=True)
  assert load(own, tmp_path, target=wide)[0] == own.head


def d2t(ids):
  return {"d2t": np.array(ids) - np.arange(hc.VD)}


@pytest.mark.parametrize("tensors, words", [
  (d2t([*hc.IDS[:-1], 40]), "d2t maps draft token 11 to token 40, outside the vocabulary of 40"),
  (d2t([-1, *hc.IDS[1:]]), "d2t maps draft token 0 to token -1, outside the vocabulary of 40"),
  (d2t([0, 3, 1, *hc.IDS[3:]]), "ascending tokens, but maps 1 to 3 and 2 to 1"),
  (d2t([0, 1, 1, *hc.IDS[3:]]), "ascending tokens, but maps 1 to 1 and 2 to 1"),
  ({"d2t": np.zeros(hc.VD, F32)}, "tensor d2t has shape (12,) and dtype float32"),
  ({"t2d": np.arange(hc.V) < hc.VD}, "t2d marks 12 tokens, which are not the 12 that d2t maps to"),
  ({"t2d": np.ones(hc.V, bool)}, "t2d marks 40 tokens, which are not the 12"),
  ({"t2d": np.ones(hc.V + 1, bool)}, "tensor t2d has shape (41,)"),
  ({"fc.weight": np.ones((hc.E, 3 * hc.E), np.int32)}, "fc.weight holds int32 numbers"),
  ({"model.norm.weight": np.ones(hc.E, F32)}, "is there twice, under two names")])
def test_damaged_draft_vocabularies_and_tensors_are_refused(tensors, words, tmp_path):
  assert words in refused(mutated("eagle3", **tensors), tmp_path)


@pytest.mark.parametrize("ids, words", [
  ([*range(11), 40], "token_map maps draft token 11 to token 40"),
  ([*range(11), 0], "token_map maps two draft tokens to the same token")])
def test_damaged_token_maps_are_refused(ids, words, tmp_path):
  assert words in refused(mutated("medusa-vllm-cut", token_map=np.array(ids)), tmp_path)


@pytest.mark.parametrize("name, config, words", [
  ("eagle3", {"hidden_size": None}, "'hidden_size' is missing"),
  ("eagle3", {"hidden_size": "16"}, "hidden_size must be an integer in 1"),
  ("eagle3", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope type 'yarn'"),
  ("eagle3", {"draft_vocab_size": 41}, "draft_vocab_size=41 must lie in 0..vocab_size=40"),
  ("eagle3", {"draft_vocab_size": "12"}, "draft_vocab_size must be an integer in 0"),
  ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
  ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, "x", 3]}, "must be a list of integers"),
  ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]},
   "fc.weight has shape (16, 48), the config needs (16, 32)"),
  ("eagle3", {"fc_norm": True}, "missing tensor fc_norm.0.weight"),
  ("eagle3-3.1", {"fc_norm": False}, "has no tensor fc_norm.0.weight"),
  ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
  ("eagle3", {"attention_bias": True}, "missing tensor layers.0.self_attn.q_proj.bias"),
  ("eagle", {"bias": True}, None), ("eagle", {"bias": False}, "has no tensor fc.bias"),
  ("eagle-no-bias", {"bias": True}, "missing tensor fc.bias"),
  ("speculators", {"transformer_layer_config": {"model_type": "mamba"}}, "model_type 'mamba'"),
  ("speculators", {"transformer_layer_config": []}, "transformer_layer_config must be an object"),
  ("eagle3", {"norm_before_fc": "false"}, "norm_before_fc must be true or false, got 'false'"),
  ("eagle3", {"norm_before_fc": None, "eagle_config": None}, None),
  ("medusa-vllm", {"logit_scale": "2"}, "logit_scale must be a number"),
  ("medusa-vllm", {"logit_scale": None}, None),
  ("mlp", {"n_predict": None}, "'n_predict' is missing"),
  ("mlp", {"n_predict": 2}, "top_k_tokens_per_head=(4, 3, 2) must have n_predict=2"),
  ("mlp", {"inner_dim": 8}, "emb.0.weight has shape (40, 24), the config needs (40, 8)"),
  ("mlp", {"tie_weights": True}, None), ("mlp", {"inner_dim": -1}, "inner_dim must be in 0.."),
  ("medusa-vllm", {"medusa_num_heads": 3}, "missing tensor blocks.2.layers.0.weight"),
  ("medusa-vllm", {"hidden_size": None}, "'hidden_size' is missing"),
  ("medusa-vllm-bias", {"medusa_fc_bias": False}, "has no tensor blocks.0.layers.0.bias"),
  ("medusa-vllm", {"medusa_fc_bias": True}, "missing tensor blocks.0.layers.0.bias"),
  ("medusa-vllm", {"truncated_vocab_size": 12}, "missing tensor token_map"),
  ("medusa-vllm", {"truncated_vocab_size": 0}, "token_map"),
  ("medusa", {"medusa_num_heads": 77}, None)])
def test_configs_that_do_not_fit_the_tensors_are_refused(name, config, words, tmp_path):
  checkpoint = mutated(name, config=config)
  if words is None:  # it may say so
    load(checkpoint, tmp_path)
  else:
    assert words in refused(checkpoint, tmp_path)


def test_damaged_and_absent_files_are_refused(tmp_path):
  hc.write(CHECKPOINTS["eagle3"], tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json is damaged"):
    load_head.load_head(tmp_path, hc.TARGET)
  (tmp_path / "config.json").write_text(json.dumps(CHECKPOINTS["eagle3"].config))
  file = tmp_path / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-8])
  with pytest.raises(ValueError, match="model.safetensors is truncated: tensor .* ends at byte"):
    load_head.load_head(tmp_path, hc.TARGET)
  file.unlink()
  with pytest.raises(ValueError, match="has no .safetensors, pytorch_model.bin or .pt file"):
    load_head.load_head(tmp_path, hc.TARGET)
  for name in ("a.pt", "b.pt"):
    hc.write_torch(tmp_path / name, CHECKPOINTS["eagle3"].tensors)
  with pytest.raises(ValueError, match="has 2 .pt files: name one of them"):
    load_head.load_head(tmp_path, hc.TARGET)
  with pytest.raises(ValueError, match="config.json is not a .safetensors, .bin or .pt file"):
    load_head.load_head(tmp_path / "config.json", hc.TARGET)


def test_nothing_is_read_before_all_is_checked(tmp_path):
  """Only the tables of a draft vocabulary, which are part of what a head is."""
  hc.write(CHECKPOINTS["eagle3"], tmp_path)
  files, read = head_files.read_head_files(tmp_path), []

  def noted(name, tensor):
    return tensor._replace(read=lambda: read.append(name) or tensor.read())

  load_head.open_head(files._replace(tensors={name: noted(name, tensor) for name, tensor
                                          in files.tensors.items()}), hc.TARGET)
  assert sorted(read) == ["d2t", "t2d"]
