"""What is in deploy/ fits the server: its flags, its paths, its metrics. No image is built here."""

import argparse
import json
import re
import shlex
from typing import Any

import pytest
import yaml

from codd.cli import serve
from tests.support import ROOT
from tests.support.live import live
from tests.support.small_models import small

DEPLOY = ROOT / "deploy"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    serve.configure(parser)
    return parser.parse_args(arguments)


@pytest.fixture(scope="module")
def deployment() -> dict[str, Any]:
    return next(each for each in manifests() if each["kind"] == "Deployment")


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_every_metric_of_the_dashboard_is_printed():
    with live(small()) as server:
        text = server.http.get("/metrics").text
    printed = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE):
        printed |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    board = json.loads((DEPLOY / "grafana.json").read_text())
    used = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    page = (DEPLOY.parent / "docs" / "deployment.md").read_text()
    assert set(re.findall(r"\bcodd_\w+", page)) <= printed
    names = {name for expression in used for name in re.findall(r"\b(?:codd|process)_\w+", expression)}
    assert len(names) > 15
    assert names <= printed
    own, shown = ({re.sub("_(bucket|sum|count)$", "", name) for name in each} for each in (printed, names))
    hidden = {name for name in own - shown if name.startswith("codd_") and not name.endswith("_created")}
    assert not hidden, "metrics that no panel shows"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_the_pod_starts_the_server_as_it_is_probed(deployment):
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    told = parsed(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": told.port, "metrics": told.metrics_port}
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {
        "startupProbe": "/health/ready",
        "readinessProbe": "/health/ready",
        "livenessProbe": "/health/live",
    }
    assert all(container[name]["httpGet"]["port"] == "http" for name in paths)
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > pause + told.drain_timeout
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert told.api_key_file.startswith(mounts["key"])
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == told.metrics_port


def test_the_pod_is_confined(deployment):
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 10001
    confined = container["securityContext"]
    assert confined["readOnlyRootFilesystem"]
    assert not confined["allowPrivilegeEscalation"]
    assert confined["capabilities"] == {"drop": ["ALL"]}
    assert {"requests", "limits"} == set(container["resources"])
    assert not container["image"].endswith(":latest")
    assert ":" in container["image"]


def test_the_service_finds_the_pods(deployment):
    [service] = [each for each in manifests() if each["kind"] == "Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    [port] = service["spec"]["ports"]
    assert port["targetPort"] == "http"
    allowed = parsed(deployment["spec"]["template"]["spec"]["containers"][0]["args"]).allow_host
    assert service["metadata"]["name"] in allowed


def test_the_image_is_small_pinned_and_not_of_root():
    found = instructions()
    images = [rest.split()[0] for name, rest in found if name == "FROM"]
    stages = [rest.split()[-1] for name, rest in found if name == "FROM"]
    assert {"cpu", "cuda"} <= set(stages)
    assert all("slim" in image or image in stages for image in images)
    assert not any("latest" in image or "/" in image for image in images)
    [user] = [rest for name, rest in found if name == "USER"]
    assert user == "10001:10001"
    [entry] = [json.loads(rest) for name, rest in found if name == "ENTRYPOINT"]
    assert entry[-2:] == ["codd", "serve"]
    [command] = [json.loads(rest) for name, rest in found if name == "CMD"]
    told = parsed(command)
    [exposed] = [rest for name, rest in found if name == "EXPOSE"]
    assert exposed.split() == [str(told.port), str(told.metrics_port)]
    [check] = [rest for name, rest in found if name == "HEALTHCHECK"]
    assert f"127.0.0.1:{told.port}/health/live" in check


def test_what_the_image_copies_is_there_and_not_ignored():
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    copied = [shlex.split(rest)[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    assert {each for names in copied for each in names} == kept
    assert all((DEPLOY.parent / each).exists() for each in kept)


def test_no_file_names_a_registry():
    hosts = re.compile(r"https?://(?!127\.0\.0\.1)|\b\w[\w-]*\.(?:io|com|org)/(?!scrape|port|path|name)")
    for path in DEPLOY.iterdir():
        assert not hosts.findall(path.read_text()), path.name
