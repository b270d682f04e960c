"""What models and heads may be called: what is meant by a name, and what is said of a wrong one."""

from __future__ import annotations

import subprocess
import sys

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from jspec import llm
from jspec.checkpoints import hub, load_head
from jspec.checkpoints.model_names import head_named, may_be_head, model_named
from jspec.config.speculative_parse import parse_speculative

EMBEDDED = "smollm2-135m-instruct"


def test_embedded_models_and_shipped_heads_are_known_in_any_case():
  assert model_named("SmolLM2-135M-Instruct")[:2] == (EMBEDDED, "embedded")
  assert head_named("SmolLM2-135M-Instruct-EAGLE3")[:2] == (f"{EMBEDDED}-eagle3", "shipped")
  assert may_be_head("SmolLM2-135M-Instruct-EAGLE3") and not may_be_head("SmolLM2-135M-Instruct")
  assert hub.name_of("GEMMA-3-270M", None) == ("gemma-3-270m", None)


def test_what_is_there_comes_before_names_in_another_case(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / "SmolLM2-135M-Instruct"
  folder.mkdir()
  (folder / "config.json").write_text("{}")
  assert model_named("SmolLM2-135M-Instruct").kind == "folder"
  assert model_named(EMBEDDED).kind == "embedded"
  (tmp_path / "org").mkdir()
  (tmp_path / "org" / "name").symlink_to(folder)
  assert model_named("org/name").kind == "folder" and model_named("org/other").kind == "repo"


@pytest.mark.parametrize("name, meant", [
  ("smolm2-135m-instruct", EMBEDDED), ("SmolLM2", EMBEDDED), ("gemma-270m", "gemma-3-270m"),
  ("org/name@v2", "'org/name' with revision='v2'"), ("llama-3", None)])
def test_a_wrong_name_says_what_may_have_been_meant(name, meant, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=f"model '{name}' is unknown") as caught:
    model_named(name)
  assert f"did you mean {meant}" in str(caught.value).replace(f"'{meant}'", str(meant)) or (
      meant is None and "did you mean" not in str(caught.value))


def test_a_wrong_path_names_its_neighbour(tmp_path):
  (tmp_path / "llama-8b").mkdir()
  (tmp_path / "notes-8b.txt").write_text("")
  with pytest.raises(ValueError, match="did you mean '.*/llama-8b'"):
    model_named(tmp_path / "lama-8b")
  with pytest.raises(ValueError, match="is unknown: give"):
    model_named(tmp_path / "notes-8b")
  (tmp_path / "llama-8b" / "q4.gguf").write_bytes(b"")
  with pytest.raises(ValueError, match="has no config.json; did you mean '.*llama-8b/q4.gguf'"):
    model_named(tmp_path / "llama-8b")
  with pytest.raises(ValueError, match="checkpoint 'smollm2-135m-instruct-eagle' is unknown "
                     r"\(did you mean 'smollm2-135m-instruct-eagle3'\?\): give"):
    head_named("smollm2-135m-instruct-eagle")


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "a\0b", None, 7])
def test_names_that_no_file_can_have_are_refused_with_a_sentence(name):
  for named in (model_named, head_named):
    with pytest.raises(ValueError, match="is unknown|given by its name or path"):
      named(name)


@pytest.mark.parametrize("named, name, what", [
  (model_named, EMBEDDED, "an embedded model"), (model_named, "FOLDER", "a folder"),
  (head_named, f"{EMBEDDED}-eagle3", "a head that comes with jspec")])
def test_a_revision_belongs_to_a_repo_id(named, name, what, tmp_path):
  (tmp_path / "config.json").write_text("{}")
  name = str(tmp_path) if name == "FOLDER" else name
  with pytest.raises(ValueError, match=f"revision='v1' belongs to a .*repo id, .* {what}"):
    named(name, "v1")
  with pytest.raises(ValueError, match="revision must be a branch, a tag or a commit, got ''"):
    named("org/name", "")
  assert named("org/name", "v1").kind == "repo"


def test_a_missing_revision_and_a_bad_repo_id_are_called_that(monkeypatch):
  def fail(error):
    def download(*args, **keywords):
      raise error
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

  response = httpx.Response(404, request=httpx.Request("GET", "https://example.org"))
  fail(errors.RevisionNotFoundError("none", response=response))
  with pytest.raises(ValueError, match="model 'org/name' has no revision='v9' on huggingface.co"):
    hub.resolve("org/name", revision="v9")
  fail(errors.HFValidationError("Repo id must not have .."))
  with pytest.raises(ValueError, match="no local folder, and no repo id: Repo id must not have"):
    hub.resolve("org/na..me")
  fail(ConnectionError())
  with pytest.raises(ValueError, match="at revision='v9' is no local folder, not in .*offline\\?; "
                     f"jspec fetches '{EMBEDDED}' from elsewhere"):
    hub.resolve("HuggingFaceTB/SmolLM2-135M-Instruct", revision="v9")


def test_names_are_judged_before_jax_is_imported():
  code = ("import sys\nfrom jspec.cli import main\n"
          "code = main.main(['generate', '--model', 'smollm2-135m-instrukt', 'Hi'])\n"
          "assert 'jax' not in sys.modules\nsys.exit(code)")
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
  assert done.returncode == 2, done.stderr
  assert f"did you mean '{EMBEDDED}'?" in done.stderr


def test_revisions_go_to_the_target_and_to_the_draft(monkeypatch):
  """LLM fetches each at its own, and finds the method of a head at the head's."""
  asked = []

  def fetch(repo_id, patterns, revision):
    asked.append((repo_id, revision))
    raise ValueError("enough")

  monkeypatch.setattr(hub, "_hugging_face", fetch)
  with pytest.raises(ValueError, match="enough"):
    llm.LLM("org/target", revision="t1")
  with pytest.raises(ValueError, match="enough"):
    llm.LLM("org/target", revision="t1", speculative_config={"model": "org/head", "revision": "h2"})
  with pytest.raises(ValueError, match="enough"):
    load_head.load_head("org/head", None, revision="h3")
  assert asked == [("org/target", "t1"), ("org/head", "h2"), ("org/head", "h3")]


def test_wrong_draft_names_are_refused_before_the_target_is_loaded(monkeypatch):
  monkeypatch.setattr(hub, "load_model", lambda *a, **k: pytest.fail("loaded"))
  config = {"method": "draft_model", "model": "smolm2", "num_speculative_tokens": 2}
  with pytest.raises(ValueError, match="model 'smolm2' is unknown"):
    llm.LLM("org/name", speculative_config=config)
  with pytest.raises(ValueError, match="checkpoint 'no-head' is unknown"):
    llm.LLM("org/name", speculative_config={"method": "eagle3", "model": "no-head"})


def test_a_draft_is_the_target_only_at_the_same_revision():
  spec = lambda **keys: parse_speculative({"method": "draft_model", "num_speculative_tokens": 2,
                                           **keys})
  assert hub.name_of_draft(spec(model="org/a"), ("org/a", None)) == ("org/a", None)
  assert hub.name_of_draft(spec(model="org/a"), ("org/a", "v1")) == ("org/a", None)
  assert hub.name_of_draft(spec(model="org/a", revision="v1"), ("org/a", "v1")) == ("org/a", "v1")
  assert hub.name_of_draft(spec(model=EMBEDDED.upper()), (EMBEDDED, None)) == (EMBEDDED, None)
  assert hub.name_of_draft(parse_speculative(None), ("org/a", None)) is None
  assert hub.name_of_draft(spec(model="tiny"), ("tiny", None)) == ("tiny", None)  # loaded before
