"""Static trees: their names and notations, the search for the best one, and what it searches by."""

from __future__ import annotations

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tiny_llm

from jspec.config.draft_trees import CHOICES, parse
from jspec.heads import calibration
from jspec.heads.config import MedusaConfig
from jspec.heads.medusa import head_logits
from jspec.heads.tree_search import expected_length, measure, search
from jspec.speculation import tree
from scripts import calibrate_tree

# ------------------------------------------------------------------ notations


def test_the_published_tree_is_whole():
  """63 nodes, 4 deep; by depth 10, 28, 23 and 2 of them, ranks up to 9."""
  paths = CHOICES["mc_sim_7b_63"]
  shape = tree.shape_of(paths)  # refuses repeats and orphans
  assert len(paths) == shape.num_nodes - 1 == 63
  assert [shape.depth.count(d) for d in range(6)] == [1, 10, 28, 23, 2, 0]
  assert max(max(p) for p in paths) == 9
  assert paths[:5] == ((0,), (0, 0), (1,), (0, 1), (2,)) and paths[-1] == (0, 7, 0)


def test_a_tree_has_a_name_or_is_a_list_or_a_text():
  paths = ((0,), (1,), (0, 0))
  assert parse("mc_sim_7b_63") == CHOICES["mc_sim_7b_63"]
  assert parse([[0], [1], [0, 0]]) == parse("[(0,), (1,), (0, 0)]") == parse("[[0],[1],[0,0]]")
  assert parse(paths) == paths
  assert all(parse(paths) == paths for paths in CHOICES.values())


@pytest.mark.parametrize("value, message", [
    ("mc_sim_8b", "'mc_sim_8b' is neither a list of paths .* nor one of mc_sim_7b_63"),
    ("[(0,), (1", "neither a list of paths"),
    ("__import__('os').getcwd()", "neither a list of paths"),
    ("5", "is a list of paths such as .*, got 5"),
    (None, "got None"),
    ([], r"got \[\]"),
    ({(0,): 1}, "got {"),
    ([()], r"path \(\) is not a list of ranks"),
    ([0, 1], "path 0 is not a list of ranks"),
    (["0"], "path '0' is not a list of ranks"),
    ([(-1,)], r"path \(-1,\) is not a list of ranks"),
    ([(0.0,)], r"path \(0.0,\) is not"),
    ([(True,)], r"path \(True,\) is not"),
    ([(0,), (1,), [0]], r"path \(0,\) is there twice"),
    ([(0,), (1, 0)], r"path \(1, 0\) has no parent: \(1,\) is not a path"),
    ([(0, 0)], r"path \(0, 0\) has no parent"),
])
def test_what_is_no_tree_is_refused(value, message):
  with pytest.raises(ValueError, match=message):
    parse(value)


# ------------------------------------------------------------------ the search


def all_trees(num_heads, num_ranks, num_nodes):
  """Every set of num_nodes paths that has all its prefixes, siblings in any order."""
  trees = {frozenset()}
  for _ in range(num_nodes):
    grown = set()
    for paths in trees:
      for above in {(), *paths}:
        if len(above) < num_heads:
          grown |= {paths | {(*above, r)} for r in range(num_ranks) if (*above, r) not in paths}
    trees = grown
  return trees


def accepted(accuracy, paths):
  total = 0.0
  for path in paths:
    chance = 1.0
    for depth, rank in enumerate(path):
      chance *= accuracy[depth][rank]
    total += chance
  return total


def falling(rng, num_heads, num_ranks):
  """Accuracies of one head add up to less than 1 and fall with the rank; deeper heads know less."""
  table = np.sort(rng.dirichlet(np.ones(num_ranks + 1), num_heads)[:, :num_ranks])[:, ::-1]
  return table * np.linspace(1, 0.6, num_heads)[:, None]


@pytest.mark.parametrize("num_heads, num_ranks, num_nodes", [
    (3, 3, 1), (3, 3, 2), (2, 3, 4), (3, 2, 5), (4, 2, 5), (3, 3, 5), (1, 4, 3)])
def test_no_tree_of_its_size_is_accepted_longer(num_heads, num_ranks, num_nodes):
  rng, trees = np.random.default_rng(num_nodes), all_trees(num_heads, num_ranks, num_nodes)
  for _ in range(5):
    accuracy = falling(rng, num_heads, num_ranks)
    paths = search(accuracy, num_nodes)
    assert frozenset(paths) in trees and len(paths) == num_nodes
    best = max(accepted(accuracy, t) for t in trees)
    assert accepted(accuracy, paths) == pytest.approx(best, abs=1e-12)
    assert expected_length(accuracy, paths) == pytest.approx(best, abs=1e-12)


def test_the_search_beats_what_it_is_not():
  """Wide, deep and even trees of the same size, on accuracies that make none of them best."""
  accuracy = [[0.6, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.05]]
  paths = search(accuracy, 6)
  assert paths == ((0,), (0, 0), (1,), (0, 1), (2,), (1, 0))
  for other in ([(0,), (1,), (2,), (0, 0), (0, 1), (0, 2)],
                [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2), (1,)],
                [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]):
    assert accepted(accuracy, other) < accepted(accuracy, paths)


def test_of_equals_the_shallow_and_low_come_first():
  assert search([[0.5, 0.5], [1.0, 0.5]], 5) == ((0,), (1,), (0, 0), (1, 0), (0, 1))
  assert search([[1.0], [1.0], [1.0]], 3) == ((0,), (0, 0), (0, 0, 0))


def test_the_search_takes_its_next_node_beside_or_below_chosen_ones():
  """Where accuracies do not fall with the rank, too: no node before its elder sibling."""
  assert search([[0.1, 0.9], [0.8, 0.7]], 4) == ((0,), (1,), (1, 0), (1, 1))


def test_more_nodes_than_there_are_paths_are_refused():
  table = [[0.5, 0.3], [0.2, 0.1]]
  assert len(search(table, 6)) == 6
  for num_nodes in (0, 7):
    with pytest.raises(ValueError, match=f"num_nodes={num_nodes} must lie in 1..6"):
      search(table, num_nodes)


# ------------------------------------------------------------------ measuring


def test_accuracies_are_shares_of_the_positions_that_count():
  top = np.array([[[4, 2], [1, 3]], [[2, 4], [1, 3]], [[4, 5], [3, 1]], [[4, 2], [9, 9]]])
  true = np.array([[4, 3], [4, 1], [7, 1], [4, -1]])
  np.testing.assert_allclose(measure(top, true), [[2 / 4, 1 / 4], [1 / 3, 2 / 3]])
  with pytest.raises(ValueError, match="head 1 has no position"):
    measure(top[3:], true[3:])


def test_each_head_is_held_to_the_token_it_predicts():
  text = [10, 11, 12, 13, 14]
  np.testing.assert_array_equal(calibration.predicted(text, 2, 0, 6),
                                [[12, 13], [13, 14], [14, -1], [-1, -1], [-1, -1], [-1, -1]])
  np.testing.assert_array_equal(calibration.predicted(text, 3, 2, 4),
                                [[-1] * 3, [-1] * 3, [14, -1, -1], [-1] * 3])
  np.testing.assert_array_equal(calibration.predicted(text, 2, 4, 5), np.full((5, 2), -1))


def test_heads_are_ranked_at_every_position_of_a_text(monkeypatch):
  """As head by head, from hidden states of the text so far."""
  monkeypatch.setattr(calibration, "ROWS", 4)
  rng, params, t = np.random.default_rng(0), tiny.target_params(), 10
  config = MedusaConfig(tiny.TARGET.width, tiny.VOCAB, 2, has_bias=False, draft_vocab_size=8)
  draw = lambda *shape: jnp.array(rng.normal(size=shape) / 4, jnp.float32)
  heads = {"head": {"heads": [{"blocks": [{"w": draw(32, 32)}], "head": {"w": draw(32, 8)}}
                              for _ in range(2)], "target_id": jnp.arange(8) + 3}}
  token = jnp.array(rng.integers(0, tiny.VOCAB, t), jnp.int32)

  @jax.jit
  def run(token):
    hidden = calibration.hidden_states(params, tiny.TARGET, token)
    return hidden, calibration.likeliest(heads, config, tiny.TARGET, hidden, 3)

  hidden, top = run(token)
  assert top.shape == (t, 2, 3)
  for head in range(2):
    logits = jax.jit(lambda hidden, i=head: head_logits(heads, config, tiny.TARGET, hidden, i))(
        hidden)
    np.testing.assert_array_equal(top[:, head], np.argsort(-logits, -1)[:, :3] + 3)
  # A position sees what precedes it, not what follows: the end of the text may be padding.
  other, _ = run(token.at[6:].set(0))
  np.testing.assert_allclose(other[:6], hidden[:6], atol=1e-5)
  assert np.abs(other[6:] - hidden[6:]).max() > 0.1
  other, _ = run(token.at[0].set((token[0] + 1) % tiny.VOCAB))
  assert np.abs(other[1:] - hidden[1:]).max() > 0.1


def test_the_script_prints_the_tree_of_a_model_its_heads_and_prompts(monkeypatch, tmp_path, capsys):
  """Heads that know one token each: their accuracies are that token's shares of the answers."""
  prompts, options = ["the end and", "an hour on"], dict(max_tokens=24)
  llm = tiny_llm.tiny_llm()
  answers = [out.token_ids for out in llm.generate(prompts, tiny_llm.greedy(**options))]
  known = [collections.Counter(t for answer in answers for t in answer[1 + i:]).most_common(1)[0][0]
           for i in range(2)]
  tensors = {}
  for i, token in enumerate(known):
    # W = 0 and a large bias: the first entry outweighs the rest of the hidden state.
    tensors[f"{i}.0.linear.weight"] = np.zeros((32, 32), np.float32)
    tensors[f"{i}.0.linear.bias"] = np.where(np.arange(32) == 0, 1e4, 0).astype(np.float32)
    tensors[f"{i}.1.weight"] = np.zeros((64, 32), np.float32)
    tensors[f"{i}.1.weight"][token, 0] = 1
  safetensors.numpy.save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
  (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
  (tmp_path / "prompts.txt").write_text("\n\n".join([*prompts, "this is far too long" + 99 * "x"]))
  monkeypatch.setattr(calibrate_tree, "LLM", lambda name, **options: llm)
  arguments = [str(tmp_path), str(tmp_path / "prompts.txt"), "--max-model-len=96", "--num-ranks=2"]
  assert calibrate_tree.main([*arguments, "--max-tokens=24", "--num-nodes=4"]) == 0
  heads, *rows, summary, paths = capsys.readouterr().out.splitlines()
  assert heads.split() == ["head", "rank", "0", "rank", "1"]
  for i, (row, token) in enumerate(zip(rows, known, strict=True)):
    count = [t for answer in answers for t in answer[1 + i:]]
    assert row.split()[:2] == [str(i), f"{count.count(token) / len(count):.4f}"]
  assert len(parse(paths)) == 4 and summary.startswith("4 nodes, ")
  with pytest.raises(SystemExit):
    calibrate_tree.main([*arguments, "--max-tokens=94"])
