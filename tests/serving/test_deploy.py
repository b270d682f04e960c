"""Deployment files: what parsers and cross-references can tell without a cluster or a cloud."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import pathlib
import re

import hcl2
import pytest
import yaml

from jspec.cli import main
from jspec.serving import command

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "serving/deploy"
KUBERNETES, TERRAFORM = DEPLOY / "kubernetes", DEPLOY / "terraform"
BUILDS = ("base", "overlays/gpu", "overlays/tpu")
LABEL = "app.kubernetes.io/name"


def served(flags: list[str]):
  """What `jspec serve` makes of them; flags that it doesn't have, or contradictions, fail."""
  arguments = main.build_parser().parse_args(["serve", *flags])
  command.loader(arguments)
  return arguments


def documents(path: pathlib.Path) -> list[dict]:
  return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


# ------------------------------------------------------------------------- Kubernetes


@functools.cache
def _built(folder: str) -> dict[str, dict]:
  """What `kustomize build` makes, by kind, as far as these files use kustomize."""
  (kustomization,) = documents(KUBERNETES / folder / "kustomization.yaml")
  out: dict[str, dict] = {}
  for name in kustomization["resources"]:
    path = KUBERNETES / folder / name
    new = built(str(path.resolve().relative_to(KUBERNETES.resolve()))).values(
        ) if path.is_dir() else documents(path)
    for resource in new:
      assert resource["kind"] not in out
      out[resource["kind"]] = resource
  for patch in kustomization.get("patches", ()):
    (change,) = documents(KUBERNETES / folder / patch["path"])
    target = out[change["kind"]]
    assert target["metadata"]["name"] == change["metadata"]["name"]
    out[change["kind"]] = merged(target, change)
  for container in out["Deployment"]["spec"]["template"]["spec"]["containers"]:
    name, _, tag = container["image"].partition(":")
    for image in kustomization["images"]:
      if image["name"] == name:
        container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
  return out


def built(folder: str) -> dict[str, dict]:
  return copy.deepcopy(_built(folder))


def merged(target, change):
  """A strategic merge: maps by key, containers, volumes and mounts by name, the rest anew."""
  if isinstance(target, dict) and isinstance(change, dict):
    both = {**target, **{k: merged(target.get(k), v) for k, v in change.items()}}
    return {k: v for k, v in both.items() if v is not None}
  keys = [k for k in ("mountPath", "name") if isinstance(change, list) and change
          and isinstance(change[0], dict) and k in change[0]]
  if not keys or not isinstance(target, list):
    return merged({}, change) if isinstance(change, dict) else change
  key, theirs = keys[0], {item[keys[0]]: item for item in change}
  return [merged(item, theirs.pop(item[key], {})) for item in target] + list(theirs.values())


def pod_and_container(folder: str) -> tuple[dict, dict]:
  pod = built(folder)["Deployment"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  return pod, container


def test_every_manifest_is_an_object_and_part_of_a_build():
  for path in KUBERNETES.rglob("*.yaml"):
    if path.name == "adapter-rules.yaml":
      continue  # values of a chart
    for content in documents(path):
      assert content["apiVersion"] and content["kind"]
      assert content["kind"] == "Kustomization" or content["metadata"]["name"]
      assert content["kind"] != "Secret"
  for folder in BUILDS:
    (kustomization,) = documents(KUBERNETES / folder / "kustomization.yaml")
    listed = {*kustomization["resources"],
              *(patch["path"] for patch in kustomization.get("patches", ()))}
    there = {p.name for p in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert listed - {"../../base"} == there


@pytest.mark.parametrize("folder", BUILDS)
def test_the_flags_are_those_of_jspec_serve(folder):
  pod, container = pod_and_container(folder)
  arguments = served(container["args"])
  ports = {port["name"]: port["containerPort"] for port in container["ports"]}
  assert ports == {"http": arguments.port, "grpc": arguments.grpc_port}
  assert arguments.api_key_file == pathlib.Path("/etc/jspec/keys") and not arguments.api_key
  stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
  assert pod["terminationGracePeriodSeconds"] >= stop + arguments.drain_timeout + 10


@pytest.mark.parametrize("folder", BUILDS)
def test_probes_ask_the_doors_that_there_are(folder):
  _, container = pod_and_container(folder)
  ports = {port["name"]: port["containerPort"] for port in container["ports"]}
  for probe in ("startupProbe", "livenessProbe"):
    assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
  assert container["readinessProbe"]["grpc"] == {"port": ports["grpc"],
                                                 "service": "jspec.v1.Jspec"}
  start = container["startupProbe"]
  assert start["periodSeconds"] * start["failureThreshold"] >= 1800  # a cold compilation
  for port in built(folder)["Service"]["spec"]["ports"]:
    assert port["targetPort"] in ports and port["port"] == ports[port["targetPort"]]


@pytest.mark.parametrize("folder", BUILDS)
def test_containers_run_with_least_privilege_and_bounded(folder):
  pod, container = pod_and_container(folder)
  assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
  assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
  assert pod["automountServiceAccountToken"] is False
  assert container["securityContext"] == {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]}}
  assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
  requests, limits = container["resources"]["requests"], container["resources"]["limits"]
  assert requests["cpu"] and requests["memory"] == limits["memory"]
  name, _, tag = container["image"].rpartition(":")
  assert name and re.fullmatch(r"\d+\.\d+\.\d+-(cpu|cuda|tpu)", tag)


@pytest.mark.parametrize("folder", BUILDS)
def test_references_between_objects_hold(folder):
  objects = built(folder)
  deployment = objects["Deployment"]
  labels = deployment["spec"]["template"]["metadata"]["labels"]
  name = deployment["metadata"]["name"]
  spreads = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
  for selector in (deployment["spec"]["selector"]["matchLabels"],
                   objects["Service"]["spec"]["selector"],
                   objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
                   objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
                   *(spread["labelSelector"]["matchLabels"] for spread in spreads)):
    assert selector and selector.items() <= labels.items()
  target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
  assert (target["kind"], target["name"]) == ("Deployment", name)
  assert "replicas" not in deployment["spec"]  # two owners would fight over it
  pod, container = pod_and_container(folder)
  assert pod["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
  volumes = {volume["name"]: volume for volume in pod["volumes"]}
  mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
  assert set(volumes) == set(mounts) and {"/cache", "/tmp", "/etc/jspec"} <= set(mounts.values())
  assert all(len(volume) == 2 for volume in volumes.values())  # a name and one source
  if folder != "base":
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == objects[
      "PersistentVolumeClaim"]["metadata"]["name"]
  ports = {port["name"] for port in container["ports"]}
  for rule in objects["NetworkPolicy"]["spec"]["ingress"]:
    assert rule["from"] and {port["port"] for port in rule["ports"]} <= ports


def test_a_tpu_pod_takes_all_chips_of_its_topology():
  pod, container = pod_and_container("overlays/tpu")
  topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
  chips = math.prod(map(int, topology.split("x")))
  for kind in ("requests", "limits"):
    assert container["resources"][kind]["google.com/tpu"] == str(chips)
  assert served(container["args"]).tensor_parallel_size == chips
  assert container["image"].endswith("-tpu")


def test_the_node_pool_has_what_a_gpu_pod_asks_for():
  pod, container = pod_and_container("overlays/gpu")
  (pool,) = documents(KUBERNETES / "karpenter/nodepool.yaml")
  (node_class,) = documents(KUBERNETES / "karpenter/nodeclass.yaml")
  template = pool["spec"]["template"]
  assert pod["nodeSelector"].items() <= template["metadata"]["labels"].items()
  tolerated = {(t["key"], t["effect"]) for t in pod["tolerations"] if t["operator"] == "Exists"}
  assert {(t["key"], t["effect"]) for t in template["spec"]["taints"]} <= tolerated
  reference = template["spec"]["nodeClassRef"]
  assert (reference["kind"], reference["name"]) == (node_class["kind"],
                                                    node_class["metadata"]["name"])
  assert node_class["apiVersion"].startswith(reference["group"] + "/")
  assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
  assert node_class["spec"]["metadataOptions"]["httpTokens"] == "required"
  assert container["image"].endswith("-cuda")


def test_the_scrape_configuration_reads_the_alerts_and_finds_the_pods():
  (config,) = documents(DEPLOY / "prometheus/prometheus.yml")
  assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
  static, pods = config["scrape_configs"]
  assert static["job_name"] == "jspec"
  assert static["static_configs"][0]["targets"][0].endswith(f":{served([]).port}")
  keep = next(rule for rule in pods["relabel_configs"] if rule.get("action") == "keep")
  _, container = pod_and_container("base")
  assert keep["regex"].split(";") == ["jspec", container["ports"][0]["name"]]
  assert {"target_label": "job", "replacement": "jspec"} in pods["relabel_configs"]
  namespaces = pods["kubernetes_sd_configs"][0]["namespaces"]["names"]
  role, binding = documents(KUBERNETES / "monitoring/prometheus-role.yaml")
  assert namespaces == [role["metadata"]["namespace"]] == [binding["metadata"]["namespace"]]
  assert binding["roleRef"]["name"] == role["metadata"]["name"]
  assert [rule["resources"] for rule in role["rules"]] == [["pods"]]
  assert set(role["rules"][0]["verbs"]) == {"get", "list", "watch"}


# ------------------------------------------------------------------------- Dockerfile


@functools.cache
def stages() -> dict[str, list[tuple[str, str]]]:
  """Stage -> its instructions and those of the stages it is made from. The last one is last."""
  text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
  text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
  out: dict[str, list[tuple[str, str]]] = {"": []}
  stage = ""
  for line in filter(None, map(str.strip, text.splitlines())):
    word, _, rest = line.partition(" ")
    assert word in {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "VOLUME",
                    "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}, line
    if word == "FROM":
      base, _, stage = rest.partition(" AS ")
      assert stage and stage not in out
      out[stage] = [*out.get(base, [])]
    out[stage].append((word, rest))
  return out


@pytest.mark.parametrize("target", ["cpu", "cuda", "tpu"])
def test_images_serve_as_nobody_and_say_how_they_are(target):
  found = dict(stages()[target])  # the last of each
  assert found["USER"] == "10001:10001" and found["STOPSIGNAL"] == "SIGTERM"
  name, subcommand, *flags = json.loads(found["ENTRYPOINT"])
  arguments = served(flags)
  assert (name, subcommand, arguments.host) == ("jspec", "serve", "0.0.0.0")
  assert found["EXPOSE"].split() == [str(arguments.port), str(arguments.grpc_port)]
  assert f":{arguments.port}/health" in found["HEALTHCHECK"]
  json.loads(found["HEALTHCHECK"].split("CMD", 1)[1])
  assert found["COPY"] == f"--from=build-{target} /opt/jspec /opt/jspec"
  assert pod_and_container("base")[0]["securityContext"]["runAsUser"] == 10001
  installs = [rest for word, rest in stages()[f"build-{target}"] if "pip install" in rest]
  plugin = {"cpu": [], "cuda": ["jax[cuda13]"], "tpu": ["jax[tpu]"]}[target]
  assert re.findall(r'"([^"]+)"', installs[-1]) == [".[serve]", *plugin]
  assert "--constraint constraints.txt" in installs[-1]


def test_the_default_image_is_the_cpu_one_and_bases_are_pinned():
  assert list(stages())[-1] == "cpu"
  ((_, argument),) = stages()[""]
  assert re.fullmatch(r"PYTHON_TAG=3\.\d+\.\d+-slim-\w+", argument)
  for stage, instructions in stages().items():
    for word, rest in instructions:
      if word == "FROM":
        base = rest.split()[0]
        assert base == "python:${PYTHON_TAG}" or base in stages()
      if word in ("ENV", "ARG"):
        assert not re.search("(?i)key|token|secret|password", rest), stage


def test_what_the_image_copies_is_there_and_reaches_the_builder():
  sources = itertools.chain(*(rest.split()[:-1] for word, rest in stages()["build"]
                              if word == "COPY"))
  ignore = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
  sent = {line[1:] for line in ignore if line.startswith("!")}
  assert "*" in ignore
  for source in sources:
    assert (ROOT / source).exists() and source in sent
    sent.discard(source)
  assert not sent


# -------------------------------------------------------------------------- Terraform


def plain(value):
  """hcl2's tree without the quotes and marks that some of its versions keep."""
  if isinstance(value, dict):
    return {k.strip('"'): plain(v) for k, v in value.items() if not k.startswith("__")}
  if isinstance(value, list):
    return [plain(v) for v in value]
  return value.strip('"') if isinstance(value, str) else value


@functools.cache
def terraform() -> dict:
  """Kind of block -> its blocks, over all files."""
  out: dict = {}
  for path in sorted(TERRAFORM.glob("*.tf")):
    for kind, blocks in plain(hcl2.loads(path.read_text(encoding="utf-8"))).items():
      out.setdefault(kind, []).extend(blocks)
  return out


def resources(kind: str, among: str = "resource") -> dict[str, dict]:
  return {name: body for block in terraform()[among] for name, body in block.get(kind, {}).items()}


def source() -> str:
  text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TERRAFORM.glob("*.tf")))
  return re.sub(r"(?m)(^|\s)#.*$", "", text)


def test_terraform_declares_what_it_uses_and_uses_what_it_declares():
  text = source()
  declared = {name for block in terraform()["variable"] for name in block}
  assert set(re.findall(r"\bvar\.(\w+)", text)) == declared
  for block in terraform()["variable"]:
    for body in block.values():
      assert body["description"] and body["type"]
  made = {f"{kind}.{name}" for block in terraform()["resource"] for kind, body in block.items()
          for name in body}
  read = {f"{kind}.{name}" for block in terraform()["data"] for kind, body in block.items()
          for name in body}
  assert set(re.findall(r"\bdata\.(\w+\.\w+)", text)) == read
  used = set(re.findall(r"(?<![\w.\"])(aws_\w+\.\w+)", text))
  assert used and used <= made, used - made
  local = {name for block in terraform()["locals"] for name in block}
  assert set(re.findall(r"\blocal\.(\w+)", text)) == local
  for block in terraform()["output"]:
    assert all(body["description"] for body in block.values())


def test_terraform_pins_its_versions():
  (settings,) = terraform()["terraform"]
  assert settings["required_version"].startswith("~>")
  (providers,) = settings["required_providers"]
  assert providers["aws"]["version"].startswith("~>")
  images = re.findall(r'image\s+= "([^"]+)"', source())
  assert images and all(":" in image and not image.endswith(":latest") for image in images)


def test_roles_may_do_no_more_than_is_named():
  policies = resources("aws_iam_policy_document", "data")
  assert {"ecs_tasks", "execution", "task"} <= set(policies)
  for policy in policies.values():
    for statement in policy["statement"]:
      for action in statement["actions"]:
        assert re.fullmatch(r"[a-z0-9-]+:[A-Z][A-Za-z]+", action), action
      if "*" in statement.get("resources", ()):
        assert statement["actions"] == ["ecr:GetAuthorizationToken"]  # has no resource
  assert "managed_policy_arns" not in source() and "AdministratorAccess" not in source()


def test_the_balancer_speaks_tls_and_knows_both_doors():
  listeners = resources("aws_lb_listener")
  (redirect,) = listeners["redirect"]["default_action"]
  assert listeners["redirect"]["port"] == 80 and redirect["type"] == "redirect"
  assert redirect["redirect"][0]["protocol"] == "HTTPS"
  assert listeners["tls"]["port"] == 443 and "TLS13" in listeners["tls"]["ssl_policy"]
  assert listeners["tls"]["certificate_arn"] == "${var.certificate_arn}"
  groups = resources("aws_lb_target_group")
  assert groups["grpc"]["protocol_version"] == "GRPC"
  assert groups["grpc"]["health_check"][0]["path"] == "/grpc.health.v1.Health/Check"
  assert groups["http"]["health_check"][0]["path"] == "/health"
  (rule,) = resources("aws_lb_listener_rule")["grpc"]["condition"]
  assert "/jspec.v1.Jspec/*" in rule["path_pattern"][0]["values"]
  (hidden,) = resources("aws_lb_listener_rule")["hide_metrics"]["condition"]
  assert "/metrics" in hidden["path_pattern"][0]["values"]


def test_the_tasks_flags_and_ports_are_those_of_jspec_serve():
  (block,) = re.findall(r"command = \[\n(.*?)\n +\]", source(), flags=re.S)
  defaults = {name: body.get("default") for part in terraform()["variable"]
              for name, body in part.items()}
  flags = re.findall(r'"(--.+)",', block)
  filled = [re.sub(r"\$\{var\.(\w+)\}", lambda m: str(defaults[m.group(1)]).replace("\\", ""), flag)
            for flag in flags]
  drain = re.search(r"drain_seconds = (\d+)", source()).group(1)
  arguments = served([flag.replace("${local.drain_seconds}", drain) for flag in filled])
  (ports,) = re.findall(r"ports\s+= \{ http = (\d+), grpc = (\d+) \}", source())
  assert ports == (str(arguments.port), str(arguments.grpc_port))
  assert arguments.drain_timeout < int(re.search(r"stopTimeout = (\d+)", source()).group(1)) <= 120
  assert command.KEY_VARIABLE in source()


def test_the_acceptance_alarm_is_the_alert_with_its_threshold_replaced():
  rules = resources("aws_prometheus_rule_group_namespace")["alerts"]["data"]
  path, old = re.search(r'path\.module\}/([^"\\]+)\\?"\), \\?"(< 0\.6)', rules).groups()
  text = (TERRAFORM / path).read_text(encoding="utf-8")
  assert text.count(old + "\n") == 1
  changed = yaml.safe_load(text.replace(old + "\n", "< 0.25\n"))["groups"][0]["rules"]
  assert "< 0.25 and" in next(r for r in changed if r["alert"] == "JspecAcceptanceLow")["expr"]
  default = next(part["min_acceptance_rate"]["default"] for part in terraform()["variable"]
                 if "min_acceptance_rate" in part)
  assert default == 0.6
