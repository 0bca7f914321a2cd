"""The manifests for Kubernetes: up to date, valid by Kubernetes' own schemas, closed, and with nothing that is missing.

No cluster ran them.
"""

import json
import re
import shlex
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from coordinator.cli import app as coordinator_app
from coordinator.config import CoordinatorConfig, environment_name, load_config
from coordinator.storage.bucket import place_of
from deploy.kubernetes import build
from edge_client.cli import app as edge_app
from edge_client.policy.policy import Policy
from tests.support.places import ROOT

FILES = {name: list(yaml.safe_load_all(text)) for name, text in build.rendered().items()}
ALL = [(name, each) for name, made in FILES.items() for each in made]
OURS = ("kustomize.config.k8s.io", "monitoring.coreos.com")
PROGRAMS = {"coordinator": coordinator_app, "edge_client": edge_app}
# What the page asks people to make; nothing secret is in the repository.
SECRETS = {
    "tacit-database": {"password"},
    "tacit-s3": {"access-key", "secret-key"},
    "tacit-authority": {"passphrase"},
    "tacit-join-token": {"token"},
}
CLAIMS = {"tacit-member-data"}


def pods() -> dict[str, dict[str, Any]]:
    found = {}
    for _, each in ALL:
        spec = each["spec"]["jobTemplate"]["spec"] if each["kind"] == "CronJob" else each.get("spec", {})
        if each["kind"] in ("Deployment", "Job", "CronJob"):
            found[each["metadata"]["name"]] = spec["template"]
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


EVERY_POD = sorted(pods())
EVERY_CONTAINER = [(pod, each["name"]) for pod in EVERY_POD for each in containers(pods()[pod])]


def container(pod: str, name: str) -> dict[str, Any]:
    return next(each for each in containers(pods()[pod]) if each["name"] == name)


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for _, each in ALL if each["kind"] == kind}


def test_the_files_are_up_to_date():
    on_disk = {str(path.relative_to(build.FOLDER)): path.read_text() for path in build.FOLDER.rglob("*.yaml")}
    assert on_disk == build.rendered(), "run python deploy/kubernetes/build.py"


@pytest.mark.parametrize(("name", "manifest"), [each for each in ALL if not each[1]["apiVersion"].startswith(OURS)])
def test_kubernetes_own_schema_accepts_it(name, manifest):
    kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_the_schema_refuses_a_wrong_manifest():
    wrong = json.loads(json.dumps(of_kind("Deployment")["tacit-coordinator"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_kustomizations_name_every_file_and_no_other():
    for folder in ("coordinator", "edge"):
        (made,) = FILES[f"{folder}/kustomization.yaml"]
        there = {name.partition("/")[2] for name in FILES if name.startswith(f"{folder}/")}
        assert set(made["resources"]) == there - {"kustomization.yaml"}
    for _, each in ALL:
        # A kustomization has no metadata.
        if each["kind"] not in ("Namespace", "Kustomization"):
            assert each["metadata"]["namespace"] == build.NAMESPACE


@pytest.mark.parametrize("name", EVERY_POD)
def test_a_pod_is_restricted(name):
    spec = pods()[name]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec)
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any("hostPath" in volume for volume in spec["volumes"])


@pytest.mark.parametrize(("pod", "name"), EVERY_CONTAINER)
def test_a_container_is_restricted_and_bounded(pod, name):
    found = container(pod, name)
    assert found["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= set(found["resources"]["requests"])
    assert "memory" in found["resources"]["limits"]
    assert not found["image"].endswith(":latest")
    mounted = {each["mountPath"] for each in found["volumeMounts"]}
    assert "/tmp" in mounted  # noqa: S108


def test_the_users_are_those_of_the_images():
    for name, user in (("coordinator", build.COORDINATOR_ID), ("edge", build.EDGE_ID)):
        assert f"USER {user}:{user}" in (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
    for name, pod in pods().items():
        wanted = build.EDGE_ID if name == "tacit-member" else build.COORDINATOR_ID
        security = pod["spec"]["securityContext"]
        assert {security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {wanted}


@pytest.mark.parametrize("pod", EVERY_POD)
def test_everything_that_a_pod_names_exists(pod):
    maps, claims = of_kind("ConfigMap"), set(of_kind("PersistentVolumeClaim")) | CLAIMS
    volumes = {each["name"]: each for each in pods()[pod]["spec"]["volumes"]}
    for each in volumes.values():
        if "configMap" in each:
            assert each["configMap"]["name"] in maps
        if "secret" in each:
            assert each["secret"]["secretName"] in SECRETS
            assert each["secret"]["defaultMode"] & 0o007 == 0
        if "persistentVolumeClaim" in each:
            assert each["persistentVolumeClaim"]["claimName"] in claims
    for found in containers(pods()[pod]):
        for mount in found["volumeMounts"]:
            assert mount["name"] in volumes
        for source in found.get("envFrom", ()):
            assert source["configMapRef"]["name"] in maps
        for variable in found.get("env", ()):
            of = variable.get("valueFrom", {}).get("secretKeyRef")
            assert "value" in variable or of["key"] in SECRETS[of["name"]]


def test_a_secret_is_in_no_manifest_and_on_the_page():
    assert not of_kind("Secret")
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for name, keys in SECRETS.items():
        assert f"`{name}`" in page
        assert all(f"`{key}`" in page for key in keys)
    assert all(f"`{name}`" in page for name in CLAIMS)
    named = {
        of["name"]
        for pod in pods().values()
        for found in containers(pod)
        for variable in found.get("env", ())
        if (of := variable.get("valueFrom", {}).get("secretKeyRef"))
    } | {each["secret"]["secretName"] for pod in pods().values() for each in pod["spec"]["volumes"] if "secret" in each}
    assert named == set(SECRETS)


def test_the_settings_are_read_by_the_coordinator(tmp_path):
    data = of_kind("ConfigMap")["tacit-coordinator"]["data"]
    keys = {environment_name(key) for key in CoordinatorConfig.model_fields}
    assert set(data) - keys == {"TACIT_DIR", "TACIT_AUTHORITY_PASSPHRASE_FILE"}
    (tmp_path / "coordinator.toml").write_text('schema = 1\nadvertise = ["localhost"]\n')
    config = load_config(tmp_path, data)
    assert place_of(config.store_url, endpoint=config.s3_endpoint).prefix
    defaults = {"enrolment": config.enrolment_port, "federation": config.federation_port}
    assert defaults | {"metrics": config.metrics_port} == build.PORTS
    # Below the mounted volumes.
    mounts = {each["mountPath"] for each in container("tacit-coordinator", "coordinator")["volumeMounts"]}
    assert data["TACIT_DIR"].rpartition("/")[0] in mounts
    assert data["TACIT_AUTHORITY_PASSPHRASE_FILE"].rpartition("/")[0] in mounts


def test_the_members_policy_is_a_policy(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(of_kind("ConfigMap")["tacit-member-policy"]["data"]["policy.toml"])
    # The defaults, which are strict.
    assert Policy.from_toml(path) == Policy()


def commands() -> list[list[str]]:
    found = []
    for pod in pods().values():
        for each in containers(pod):
            given = [each["command"], *(each[key]["exec"]["command"] for key in each if "exec" in _probe(each, key))]
            for words in given:
                if words[0] == "/bin/sh":
                    parts = re.split(r"\|\||&&|;", words[-1])
                    given_parts = [shlex.split(part) for part in parts]
                    found += [part for part in given_parts if part and part[0] in PROGRAMS]
                else:
                    found.append(words)
    return found


def _probe(found: dict[str, Any], key: str) -> dict[str, Any]:
    return found[key] if key.endswith("Probe") else {}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_parses_with_the_real_command_line(words):
    command: Any = typer.main.get_command(PROGRAMS[words[0]])
    rest = words[1:]
    while rest and getattr(command, "commands", None):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], list(rest), resilient_parsing=False)


def test_ports_and_probes_lead_to_ports_that_are_listened_on():
    listening = {each["name"]: each["containerPort"] for each in container("tacit-coordinator", "coordinator")["ports"]}
    assert listening == build.PORTS
    labels = pods()["tacit-coordinator"]["metadata"]["labels"]
    for service in of_kind("Service").values():
        assert service["spec"]["selector"].items() <= labels.items()
        for port in service["spec"]["ports"]:
            assert listening[port["targetPort"]] == port["port"]
    coordinator = container("tacit-coordinator", "coordinator")
    assert coordinator["livenessProbe"]["httpGet"]["port"] in listening
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(coordinator)
    assert coordinator["readinessProbe"]["httpGet"]["port"] in listening
    for policy in of_kind("NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            assert {each["port"] for each in rule["ports"]} <= set(listening.values())


def test_two_coordinators_share_a_folder_and_there_is_time_to_say_goodbye():
    for name, replicas in (("tacit-coordinator", 2), ("tacit-member", 1)):
        spec = of_kind("Deployment")[name]["spec"]
        assert (spec["replicas"], spec["strategy"]) == (replicas, {"type": "Recreate"})
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 30
    assert of_kind("PersistentVolumeClaim")["tacit-coordinator"]["spec"]["accessModes"] == ["ReadWriteMany"]
    # Standbys are never ready, and the budget counts them as missing. A drain must be able to evict the active one.
    assert of_kind("PodDisruptionBudget")["tacit-coordinator"]["spec"]["maxUnavailable"] == 2
    # Nor would a probe that only the active one passes let a standby start.
    probes = container("tacit-coordinator", "coordinator")
    assert "--standby" in probes["startupProbe"]["exec"]["command"]
    assert probes["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_every_pod_has_a_network_policy_and_a_member_takes_no_connection():
    def chosen(policy, labels):
        selector = policy["spec"]["podSelector"]
        if "matchLabels" in selector:
            return selector["matchLabels"].items() <= labels.items()
        (one,) = selector["matchExpressions"]
        return labels.get(one["key"]) in one["values"]

    for name, pod in pods().items():
        assert any(chosen(each, pod["metadata"]["labels"]) for each in of_kind("NetworkPolicy").values()), name
    assert of_kind("NetworkPolicy")["tacit-member"]["spec"]["ingress"] == []
    for policy in of_kind("NetworkPolicy").values():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    budget = of_kind("PodDisruptionBudget")["tacit-coordinator"]["spec"]["selector"]["matchLabels"]
    jobs = [
        pod for name, pod in pods().items() if name in ("tacit-init", "tacit-migrate", "tacit-backup", "tacit-restore")
    ]
    assert len(jobs) == 4
    assert not any(budget.items() <= pod["metadata"]["labels"].items() for pod in jobs)


def test_prometheus_finds_the_metrics_and_has_the_rules_of_this_repository():
    monitor = of_kind("ServiceMonitor")["tacit-coordinator"]["spec"]
    services = [
        each
        for each in of_kind("Service").values()
        if monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    assert [each["metadata"]["name"] for each in services] == ["tacit-coordinator-metrics"]
    (end,) = monitor["endpoints"]
    assert end["port"] in {port["name"] for port in services[0]["spec"]["ports"]}
    # The alerts' own label.
    assert services[0]["metadata"]["labels"][monitor["jobLabel"]] == "tacit-coordinator"
    assert end["honorLabels"] is True
    for name in ("tacit.rules", "tacit.alerts"):
        groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / f"{name}.yml").read_text())["groups"]
        assert of_kind("PrometheusRule")[name.replace(".", "-")]["spec"]["groups"] == groups


def test_the_dashboards_are_those_of_this_repository_and_fit():
    for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        made = of_kind("ConfigMap")[f"dashboard-{path.stem}"]
        assert json.loads(made["data"][path.name]) == json.loads(path.read_text())
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
        # What a ConfigMap may hold.
        assert len(json.dumps(made)) < 1024 * 1024


def test_callers_keep_their_addresses():
    """The enrolment port's limits, and `from` in the network policy, go by them."""
    found = {name: each["spec"] for name, each in of_kind("Service").items()}
    assert {spec["externalTrafficPolicy"] for spec in found.values() if spec["type"] == "LoadBalancer"} == {"Local"}
    assert not any("externalTrafficPolicy" in spec for spec in found.values() if spec["type"] == "ClusterIP")


def test_backups_are_made_and_verified_on_a_volume_of_their_own_and_restored_from_it():
    cron = of_kind("CronJob")["tacit-backup"]["spec"]
    # Two would wait for each other, and one that still runs is no failure.
    assert cron["concurrencyPolicy"] == "Forbid"
    # More often than the alert on missing backups waits.
    assert re.fullmatch(r"\d+ \d+ \* \* \*", cron["schedule"])
    pod = pods()["tacit-backup"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (made,), (verified,) = pod["initContainers"], pod["containers"]
    assert made["command"][:2] == verified["command"][:2] == ["coordinator", "backup"]
    assert "--verify" in verified["command"]
    assert "--verify" not in made["command"]
    # Another try would make another backup in the place of an older one, of which --keep leaves 14.
    (rule,) = cron["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": verified["name"], "operator": "NotIn", "values": [0]}
    # A backup that could not be made is tried again.
    assert cron["jobTemplate"]["spec"]["backoffLimit"] > 0
    folders = {next(word for word in each["command"] if word.startswith("/")) for each in (made, verified)}
    restored = container("tacit-restore", "restore")
    assert folders == {restored["command"][2]}
    (folder,) = folders
    for each in (made, verified, restored):
        (mount,) = [mount for mount in each["volumeMounts"] if folder.startswith(mount["mountPath"] + "/")]
        assert mount["name"] == "backups"
        # Not in the folder that it would be lost with.
        assert mount["mountPath"] != "/var/lib/tacit"
    for name in ("tacit-backup", "tacit-restore"):
        volumes = {each["name"]: each for each in pods()[name]["spec"]["volumes"]}
        assert volumes["backups"]["persistentVolumeClaim"]["claimName"] == "tacit-backups"
    # Then the bucket is the restored database's own.
    assert container("tacit-restore", "take-over")["command"][1:3] == ["store", "take-over"]
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "deploy/kubernetes/jobs/restore.yaml" in page
