"""The manifests: rendered by the real kustomize where there is one, checked against Kubernetes' own
schemas, and held to our command line, configuration and images."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore.cli import build_app
from kvstore.config.settings import Settings, validate
from kvstore.store.assembly import check_settings, tier_module

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed (it is in the dev extra)")
schemas = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed (it is in the dev extra)"
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.37")
"""The oldest and the newest Kubernetes that the manifests are checked for."""
OURS = {"kustomize.config.k8s.io/v1beta1", "kustomize.config.k8s.io/v1alpha1"}
FOREIGN = {"PodMonitor"}
"""Kinds of operators, whose schemas Kubernetes does not bring."""
PATCHES = {"components/hugepages/daemonset.yaml"}

Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def sources() -> Iterator[tuple[str, Manifest]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        for document in documents(path.read_text()):
            yield path.relative_to(FOLDER).as_posix(), document


WRITTEN = [
    (name, document)
    for name, document in sources()
    if document["apiVersion"] not in OURS and name not in PATCHES
]
BY_KIND = {(document["kind"], document["metadata"]["name"]): document for _, document in WRITTEN}


def rendered(name: str) -> list[Manifest]:
    program = shutil.which("kustomize")
    words = [program, "build"] if program else [shutil.which("kubectl"), "kustomize"]
    if words[0] is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run(
        [*(word for word in words if word), str(FOLDER / name)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "not found in schema" in done.stderr or 'unknown field "labels"' in done.stderr:
        pytest.skip("a kustomize from before 4.1")
    assert (done.returncode, done.stderr) == (0, "")
    return documents(done.stdout)


def faults(document: Manifest, version: str) -> str:
    """What the schemas of this version have against it, unknown fields too; "" for nothing."""
    try:
        schemas.validate(document, version, strict=True)
    except schemas.ValidationError as error:
        return str(error)
    return ""


def pod(document: Manifest) -> Manifest:
    spec: Manifest = document["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def sidecar() -> Manifest:
    return BY_KIND["DaemonSet", "kvstore"]


@pytest.fixture(scope="module")
def engine() -> Manifest:
    return BY_KIND["Deployment", "engine"]


@pytest.fixture(scope="module")
def settings() -> Settings:
    loaded = Settings.load(FOLDER / "base" / "sidecar.toml", environment=False)
    check_settings(loaded)
    return loaded


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "document"), WRITTEN, ids=lambda value: str(value)[:40])
def test_a_manifest_is_one_to_kubernetes(name: str, document: Manifest, version: str) -> None:
    if document["kind"] not in FOREIGN:
        assert faults(document, version) == ""


def test_the_schemas_would_refuse_a_wrong_one(sidecar: Manifest) -> None:
    misspelt = json.loads(json.dumps(sidecar))
    misspelt["spec"]["template"]["spec"]["hostPid"] = True
    assert "hostPid" in faults(misspelt, VERSIONS[-1])
    wrong = json.loads(json.dumps(sidecar))
    wrong["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = "30"
    assert "30" in faults(wrong, VERSIONS[-1])


def test_every_file_is_named_by_a_kustomization() -> None:
    named: set[Path] = set()
    for name, document in sources():
        if document["apiVersion"] not in OURS:
            continue
        here = (FOLDER / name).parent
        words = [*document.get("resources", []), *document.get("components", [])]
        words += [patch["path"] for patch in document.get("patches", [])]
        words += [file for one in document.get("configMapGenerator", []) for file in one["files"]]
        words += [file for one in document.get("secretGenerator", []) for file in one["envs"]]
        named |= {(here / word).resolve() for word in words}
    assert [path for path in named if not path.exists()] == []
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    files -= set(FOLDER.rglob("kustomization.yaml"))
    assert files - named == set()


@pytest.mark.parametrize("name", ["base", "engine", "example"])
def test_kustomize_renders_what_kubernetes_takes(name: str) -> None:
    made = rendered(name)
    for document in made:
        if document["kind"] not in FOREIGN:
            assert faults(document, VERSIONS[-1]) == "", document["kind"]
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "kvstore"
    kinds = {document["kind"]: document for document in made}
    if name == "engine":
        return
    config = kinds["ConfigMap"]
    assert config["data"]["sidecar.toml"] == (FOLDER / "base" / "sidecar.toml").read_text()
    [volume] = [one for one in pod(kinds["DaemonSet"])["volumes"] if one["name"] == "config"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert pod(kinds["DaemonSet"])["containers"][0]["image"].endswith(":0.1.0")
    if name == "example":
        assert {"Secret", "PodMonitor", "Deployment"} <= set(kinds)
        check_secret(kinds["Secret"]["data"])


def check_secret(data: dict[str, str]) -> None:
    plain = {name: base64.b64decode(value).decode() for name, value in data.items()}
    assert json.loads(plain["KVSTORE_SERVER__AUTH_TOKENS"]) == {plain["STORE_TOKEN"]: "team-a"}


def test_the_secrets_are_variables_that_the_sidecar_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    for line in (FOLDER / "example" / "secrets.env").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            monkeypatch.setenv(name, value)
    server = Settings.load(FOLDER / "base" / "sidecar.toml").server
    assert server.auth_tokens == {os.environ["STORE_TOKEN"]: "team-a"}
    assert server.admin_auth_token


def test_the_huge_pages_are_as_many_as_the_slab_needs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    [patch] = documents((FOLDER / "components" / "hugepages" / "daemonset.yaml").read_text())
    [container] = pod(patch)["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert Settings.load(FOLDER / "base" / "sidecar.toml").l2.huge_pages is True
    assert in_bytes(container["resources"]["limits"]["hugepages-2Mi"]) == settings.l2.bytes
    assert container["resources"]["limits"] == container["resources"]["requests"]


def in_bytes(text: str) -> int:
    return int(text.removesuffix("Gi")) << 30


def test_every_command_is_one_of_ours(sidecar: Manifest, engine: Manifest) -> None:
    program = typer.main.get_command(build_app())
    for document in (sidecar, engine):
        [container] = pod(document)["containers"]
        words = container["args"]
        command = program.commands[words[0]]  # type: ignore[attr-defined]
        assert command.make_context("pod", list(words[1:])).params


def test_engines_reach_the_sidecars_socket(
    sidecar: Manifest, engine: Manifest, settings: Settings
) -> None:
    folder = str(Path(settings.server.socket).parent)

    def host_folder(document: Manifest) -> str:
        [container] = pod(document)["containers"]
        [mount] = [one for one in container["volumeMounts"] if one["mountPath"] == folder]
        [volume] = [one for one in pod(document)["volumes"] if one["name"] == mount["name"]]
        return str(volume["hostPath"]["path"])

    assert host_folder(sidecar) == host_folder(engine)
    words = pod(engine)["containers"][0]["args"]
    assert words[words.index("--store") + 1] == settings.server.socket
    # The socket is open to its user and group only.
    for key in ("runAsUser", "runAsGroup"):
        assert pod(sidecar)["securityContext"][key] == pod(engine)["securityContext"][key] == 10001
    assert pod(sidecar)["nodeSelector"] == pod(engine)["nodeSelector"]


def test_the_configuration_fits_the_pod(sidecar: Manifest, settings: Settings) -> None:
    [container] = pod(sidecar)["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert settings.l2.bytes < in_bytes(limits["memory"]) == in_bytes(requests["memory"])
    [port] = container["ports"]
    assert port["containerPort"] == settings.server.port
    assert settings.server.host == "0.0.0.0"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for tier in settings.tiers:
        values = validate(tier_module(tier.kind).Config, tier.model_extra or {}, tier.kind)
        assert set(values.directories) <= mounts
    assert (
        settings.limits.shutdown_drain_timeout / 1e3 < pod(sidecar)["terminationGracePeriodSeconds"]
    )


def test_the_tiers_in_its_comments_are_right_too(tmp_path: Path) -> None:
    lines = (FOLDER / "base" / "sidecar.toml").read_text().splitlines()
    first = lines.index("# [[tiers]]")
    last = lines.index("[server]")
    text = "\n".join([line.removeprefix("# ").lstrip("#") for line in lines[first:last]])
    file = tmp_path / "more.toml"
    file.write_text(text)
    tiers = Settings.load(file, environment=False).tiers
    assert [tier.kind for tier in tiers] == ["redis", "s3"]
    for tier in tiers:
        validate(tier_module(tier.kind).Config, tier.model_extra or {}, tier.kind)


def test_nothing_runs_as_root_but_who_makes_the_folders(
    sidecar: Manifest, engine: Manifest
) -> None:
    for document in (sidecar, engine):
        assert pod(document)["securityContext"]["runAsNonRoot"] is True
        assert pod(document)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod(document)["containers"], *pod(document).get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"]
    roots = [c for c in pod(sidecar)["initContainers"] if c["securityContext"]["runAsUser"] == 0]
    assert [c["securityContext"]["capabilities"].get("add") for c in roots] == [["CHOWN"]]


def test_every_container_is_probed(sidecar: Manifest, engine: Manifest) -> None:
    paths = {"sidecar": {"/readyz", "/healthz"}, "engine": {"/health"}}
    for document in (sidecar, engine):
        [container] = pod(document)["containers"]
        probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")]
        probes.append(container["livenessProbe"]["httpGet"])
        assert {probe["path"] for probe in probes} == paths[container["name"]]
        assert {probe["port"] for probe in probes} == {"http"}


def test_services_and_the_monitor_select_the_pods(sidecar: Manifest, engine: Manifest) -> None:
    labels = {
        name: document["spec"]["template"]["metadata"]["labels"]
        for name, document in (("kvstore", sidecar), ("engine", engine))
    }
    for name, pod_labels in labels.items():
        service = BY_KIND["Service", name]
        assert service["spec"]["selector"].items() <= pod_labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} == {"http"}
    [rule] = BY_KIND["PodMonitor", "kvstore"]["spec"]["selector"]["matchExpressions"]
    assert {one[rule["key"]] for one in labels.values()} == set(rule["values"])
