"""Dashboard and alerts ask for what a server exports."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import types

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jspec import EngineStats, SpeculativeStats
from jspec.engine.metrics import metrics_of
from jspec.serving.metrics import Metrics

DEPLOY = pathlib.Path(__file__).parents[2] / "serving/deploy"


def documents(name: str) -> list[dict]:
  return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


@functools.cache
def exported() -> dict[str, set[str]]:
  """Names in a scrape -> their labels."""
  stats = EngineStats(speculation=SpeculativeStats(accepted_histogram=(1, 1)))
  engine = types.SimpleNamespace(stats=lambda: stats, llm=types.SimpleNamespace(
      max_model_len=64, get_metrics=lambda: metrics_of(stats)))
  metrics = Metrics(engine, "m")
  metrics.count_refusal("http", 503, "connections")
  body = metrics.render()[0].decode()
  out: dict[str, set[str]] = {"up": set()}  # Prometheus' own
  for family in text_string_to_metric_families(body):
    for sample in family.samples:
      out.setdefault(sample.name, set()).update(sample.labels)
  return {name: labels | {"job", "instance"} for name, labels in out.items()}


WORDS = {"sum", "max", "by", "and", "rate", "deriv", "changes", "absent", "histogram_quantile",
         "ignoring", "group_left"}


def check_query(query: str) -> set[str]:
  """The metrics of a query, each exported with the labels asked of it."""
  query = re.sub(r'"(?:[^"\\]|\\.)*"', '""', query)
  for name, labels in re.findall(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}", query):
    assert set(re.findall(r"(\w+)\s*[!=]", labels)) <= exported()[name], name
  query = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", query)
  grouped = r"\b(?:by|ignoring|group_left)\s*\(([^)]*)\)"
  groups = {label.strip() for found in re.findall(grouped, query) for label in found.split(",")}
  names = set(re.findall(r"[a-zA-Z_:][\w:]*", re.sub(grouped, "", query))) - WORDS
  assert names and names <= set(exported()), names - set(exported())
  assert groups - {""} <= set().union(*(exported()[name] for name in names))
  return names


RULE = {
  "type": "object", "additionalProperties": False, "required": ["alert", "expr", "labels",
                                                                "annotations"],
  "properties": {
    "alert": {"pattern": "^Jspec[A-Za-z]+$"}, "expr": {"type": "string"},
    "for": {"pattern": "^[0-9]+[mh]$"},
    "labels": {"type": "object", "required": ["severity"], "additionalProperties": False,
               "properties": {"severity": {"enum": ["warning", "critical"]}}},
    "annotations": {"type": "object", "additionalProperties": False,
                    "required": ["summary", "description"],
                    "properties": {"summary": {"type": "string"},
                                   "description": {"type": "string"}}}},
}


def alerts() -> dict[str, dict]:
  (content,) = documents("prometheus/alerts.yml")
  (group,) = content["groups"]
  return {rule["alert"]: rule for rule in group["rules"]}


def test_a_query_for_what_is_not_exported_is_caught():
  assert check_query('sum by (position) (rate(jspec:spec_decode_num_accepted_tokens_per_pos_total'
                     '{model_name=~"x"}[5m]))')
  for query in ("rate(vllm:prompt_tokens_total[5m])", "jspec:prompt_tokens",
                'jspec:num_requests_running{model="x"}', "sum by (reason) (up)"):
    with pytest.raises((AssertionError, KeyError)):
      check_query(query)


def test_alerts_ask_for_exported_metrics_and_name_labels_that_are_left():
  for rule in alerts().values():
    jsonschema.validate(rule, RULE)
    check_query(rule["expr"])
    groups = re.findall(r"by \(([^)]*)\)", rule["expr"])
    left = set(groups[0].split(", ")) if groups else {"instance", "job"}
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= left, rule["alert"]
    assert len(set(groups) - {"model_name, le"}) <= 1  # `and` and `/` match equal labels only


def test_alerts_cover_acceptance_queue_memory_latency_preemption_and_health():
  found = alerts()
  low = found["JspecAcceptanceLow"]
  assert low["for"] == "15m"
  assert re.search(r"accepted_tokens_total.* / .*draft_tokens_total.* < 0\.6 and .*num_drafts",
                   low["expr"])
  for name, metric in {"QueueGrowing": "jspec:num_requests_waiting", "Down": "up", "Absent": "up",
                       "KVCacheFull": "jspec:kv_cache_usage_perc",
                       "TimeToFirstTokenHigh": "jspec:time_to_first_token_seconds_bucket",
                       "Preempting": "jspec:num_preemptions_total",
                       "RequestsFailing": "jspec:request_errors_total"}.items():
    assert metric in check_query(found[f"Jspec{name}"]["expr"])


def test_the_dashboard_asks_for_exported_metrics_with_variables_it_declares():
  board = json.loads((DEPLOY / "grafana/jspec.json").read_text(encoding="utf-8"))
  variables = {v["name"]: v for v in board["templating"]["list"]}
  assert variables["datasource"]["type"] == "datasource" and board["schemaVersion"] >= 39
  panels = [panel for panel in board["panels"] if panel["type"] != "row"]
  assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
  shown = set()
  for panel in panels:
    assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
    for target in panel["targets"]:
      used = set(re.findall(r"\$(\w+)", target["expr"]))
      assert used <= {"__rate_interval", *variables}
      assert "model_name" in used or "process_" in target["expr"]
      shown |= check_query(target["expr"].replace("$__rate_interval", "5m"))
  for name in ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total",
               "spec_decode_num_accepted_tokens_per_pos_total", "generation_tokens_total",
               "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
               "e2e_request_latency_seconds_bucket", "num_requests_running",
               "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total",
               "num_preemptions_total", "request_errors_total"):
    assert f"jspec:{name}" in shown
  quantiles = [re.findall(r"histogram_quantile\((0\.\d+)", str(p["targets"])) for p in panels
               if p["title"] in ("Time to first token", "Time per output token", "Whole request")]
  assert quantiles == [["0.5", "0.9", "0.99"]] * 3


def test_no_two_panels_lie_on_each_other():
  board = json.loads((DEPLOY / "grafana/jspec.json").read_text(encoding="utf-8"))
  cells = [(place["x"] + x, place["y"] + y) for place in (p["gridPos"] for p in board["panels"])
           for x in range(place["w"]) for y in range(place["h"])]
  assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_accelerators_scale_on_a_metric_that_the_adapter_makes_of_an_exported_one():
  (values,) = documents("kubernetes/monitoring/adapter-rules.yaml")
  (rule,) = values["rules"]["custom"]
  assert re.search(r'__name__="([^"]+)"', rule["seriesQuery"]).group(1) in exported()
  for overlay in ("gpu", "tpu"):
    (patch,) = documents(f"kubernetes/overlays/{overlay}/autoscaler.yaml")
    (metric,) = patch["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
