"""Makes the manifests for Kubernetes, with the rules, alerts and dashboards of this repository.

python deploy/kubernetes/build.py            writes deploy/kubernetes/{coordinator,edge,jobs}/*.yaml
python deploy/kubernetes/build.py --check    fails if those files are stale

docs/kubernetes.md says what to fill in.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FOLDER", "main", "rendered"]

FOLDER = Path(__file__).resolve().parent
DEPLOY = FOLDER.parent
VERSION = "0.1.0"
NAMESPACE = "tacit"
# The ids of the images' users (deploy/docker).
COORDINATOR_ID, EDGE_ID = 10001, 10002
# Below the volume's root, whose mode the cluster widens for the pod's group. Ours must be closed (0700).
DIR, HOME = "/var/lib/tacit/federation", "/var/lib/tacit/home"
# Below the root of a volume of their own, for the same reason.
BACKUPS = "/var/backups/tacit"
PASSPHRASE = "/run/secrets/tacit/passphrase"  # noqa: S105  a path
PORTS = {"enrolment": 7440, "federation": 7441, "metrics": 7442}

SETTINGS = {
    "TACIT_DIR": DIR,
    "TACIT_LOG_FORMAT": "json",
    "TACIT_DATABASE_URL": "postgresql+psycopg://tacit@postgres:5432/tacit",
    "TACIT_STORE_URL": "s3://tacit-blobs/federation",
    "TACIT_S3_ENDPOINT": "https://s3.example.org",
    "TACIT_S3_REGION": "us-east-1",
    "TACIT_S3_PATH_STYLE": "true",
    "TACIT_STORE_CACHE_GB": "8",
    # The network policy lets only Prometheus in.
    "TACIT_METRICS_HOST": "0.0.0.0",  # noqa: S104
    "TACIT_AUTHORITY_PASSPHRASE_FILE": PASSPHRASE,
}
POLICY = """\
# What this member allows. Every rule has its default, which is strict: see docs/policy.md.
schema = 1
"""

Manifest = dict[str, Any]


def _meta(name: str, app: str) -> Manifest:
    labels = {"app.kubernetes.io/name": app, "app.kubernetes.io/part-of": "tacit", "app.kubernetes.io/version": VERSION}
    return {"name": name, "namespace": NAMESPACE, "labels": labels}


def _selector(app: str) -> Manifest:
    return {"matchLabels": {"app.kubernetes.io/name": app}}


def _secret(variable: str, name: str, key: str, *, optional: bool = False) -> Manifest:
    of: Manifest = {"name": name, "key": key}
    return {"name": variable, "valueFrom": {"secretKeyRef": of | ({"optional": True} if optional else {})}}


def _container(name: str, image: str, command: list[str], **more: Any) -> Manifest:
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    return {
        "name": name,
        "image": f"{image}:{VERSION}",
        "command": command,
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    } | more


def _pod(app: str, user: int, volumes: list[Manifest], containers: list[Manifest], **more: Any) -> Manifest:
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            # Keys keep mode 0600: the cluster changes modes only while the volume is new.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}}, *volumes],
        "containers": containers,
    }
    return {"metadata": {"labels": _meta("", app)["labels"]}, "spec": spec | more}


def _resources(cpu: str, memory: str, most: str) -> Manifest:
    # No limit of processor time: it would stop a round in the middle of a phase.
    return {"requests": {"cpu": cpu, "memory": memory, "ephemeral-storage": "256Mi"}, "limits": {"memory": most}}


_COORDINATOR_VOLUMES: list[Manifest] = [
    {"name": "folder", "persistentVolumeClaim": {"claimName": "tacit-coordinator"}},
    {"name": "passphrase", "secret": {"secretName": "tacit-authority", "defaultMode": 0o440}},
]
_COORDINATOR_MOUNTS: list[Manifest] = [
    {"name": "folder", "mountPath": "/var/lib/tacit"},
    {"name": "passphrase", "mountPath": "/run/secrets/tacit", "readOnly": True},
    {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
]


_BACKUP_VOLUMES: list[Manifest] = [
    *_COORDINATOR_VOLUMES,
    {"name": "backups", "persistentVolumeClaim": {"claimName": "tacit-backups"}},
]
_BACKUP_MOUNTS: list[Manifest] = [*_COORDINATOR_MOUNTS, {"name": "backups", "mountPath": BACKUPS.rpartition("/")[0]}]


def _coordinator(
    name: str, command: list[str], resources: Manifest, mounts: list[Manifest] = _COORDINATOR_MOUNTS, **more: Any
) -> Manifest:
    return _container(
        name,
        "tacit-coordinator",
        ["coordinator", *command],
        envFrom=[{"configMapRef": {"name": "tacit-coordinator"}}],
        env=[
            _secret("PGPASSWORD", "tacit-database", "password"),
            # Leave the secret out where the cluster gives pods a role.
            _secret("AWS_ACCESS_KEY_ID", "tacit-s3", "access-key", optional=True),
            _secret("AWS_SECRET_ACCESS_KEY", "tacit-s3", "secret-key", optional=True),
        ],
        volumeMounts=mounts,
        resources=resources,
        **more,
    )


def _claim(name: str, app: str, size: str, mode: str = "ReadWriteOnce") -> Manifest:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _meta(name, app), "spec": spec}


def _service(name: str, ports: tuple[str, ...], kind: str, **more: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(name, "tacit-coordinator"),
        "spec": {
            "type": kind,
            "selector": _selector("tacit-coordinator")["matchLabels"],
            "ports": [{"name": each, "port": PORTS[each], "targetPort": each, "protocol": "TCP"} for each in ports],
        }
        | more,
    }


# Over TLS, as members come. A standby has started, too.
_STARTED = {"exec": {"command": ["coordinator", "health", "--standby"]}, "timeoutSeconds": 10}
# Only the active one. Cheap, because it decides how soon members find the next one.
_READY = {"httpGet": {"path": "/ready", "port": "metrics"}, "timeoutSeconds": 2}
_ALIVE = {"httpGet": {"path": "/metrics", "port": "metrics"}, "timeoutSeconds": 10}


# A node takes only one of the two with it.
_APART = {
    "weight": 100,
    "podAffinityTerm": {"labelSelector": _selector("tacit-coordinator"), "topologyKey": "kubernetes.io/hostname"},
}


def _deployment() -> Manifest:
    container = _coordinator(
        "coordinator",
        ["serve"],
        _resources("500m", "512Mi", "2Gi"),
        ports=[{"name": each, "containerPort": port, "protocol": "TCP"} for each, port in PORTS.items()],
        # A database that is migrated and a store that is slow take their time.
        startupProbe=_STARTED | {"periodSeconds": 5, "failureThreshold": 120},
        readinessProbe=_READY | {"periodSeconds": 2, "failureThreshold": 2},
        livenessProbe=_ALIVE | {"periodSeconds": 30, "failureThreshold": 6},
    )
    pod = _pod(
        "tacit-coordinator",
        COORDINATOR_ID,
        _COORDINATOR_VOLUMES,
        [container],
        # Members get a Goodbye, and calls five seconds.
        terminationGracePeriodSeconds=30,
        affinity={"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_APART]}},
    )
    spec = {
        # One is active, and the other stands by. Recreate: a rolling update would wait for a standby to be ready, and
        # software with a newer schema must not start beside an older active one.
        "replicas": 2,
        "strategy": {"type": "Recreate"},
        "selector": _selector("tacit-coordinator"),
        "template": pod,
    }
    meta = _meta("tacit-coordinator", "tacit-coordinator")
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}


def _job_spec(
    app: str, containers: list[Manifest], volumes: list[Manifest] = _COORDINATOR_VOLUMES, seconds: int = 1800
) -> Manifest:
    # All but the last run first, one after the other.
    *before, last = containers
    first = {"initContainers": before} if before else {}
    pod = _pod(app, COORDINATOR_ID, volumes, [last], restartPolicy="Never", **first)
    return {"backoffLimit": 3, "activeDeadlineSeconds": seconds, "template": pod}


def _job(name: str, command: list[str]) -> Manifest:
    container = _coordinator(name, command, _resources("100m", "256Mi", "512Mi"))
    # Its own name: neither the Services nor the disruption budget count it.
    app = f"tacit-coordinator-{name}"
    spec = _job_spec(app, [container])
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(f"tacit-{name}", app), "spec": spec}


def _backup() -> list[Manifest]:
    app, size = "tacit-coordinator-backup", _resources("100m", "512Mi", "2Gi")
    make = ["backup", BACKUPS, "--keep", "14"]
    steps = [
        _coordinator("backup", make, size, _BACKUP_MOUNTS),
        _coordinator("verify", ["backup", BACKUPS, "--verify"], size, _BACKUP_MOUNTS),
    ]
    # A pod whose verification fails has made a backup. Another try would make one more, and --keep would remove an
    # older one for it.
    unverified = {"containerName": "verify", "operator": "NotIn", "values": [0]}
    once = {"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": unverified}]}}
    spec = {
        "schedule": "15 3 * * *",
        "concurrencyPolicy": "Forbid",
        # The cluster was down at the time: later is better than tomorrow.
        "startingDeadlineSeconds": 6 * 3600,
        "successfulJobsHistoryLimit": 1,
        "failedJobsHistoryLimit": 3,
        "jobTemplate": {"spec": _job_spec(app, steps, _BACKUP_VOLUMES, seconds=6 * 3600) | once},
    }
    cron = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": _meta("tacit-backup", app), "spec": spec}
    return [_claim("tacit-backups", app, "50Gi"), cron]


def _restore() -> Manifest:
    app, size = "tacit-coordinator-restore", _resources("100m", "512Mi", "2Gi")
    steps = [
        _coordinator("restore", ["restore", BACKUPS, "--yes"], size, _BACKUP_MOUNTS),
        _coordinator("take-over", ["store", "take-over", "--yes"], size),
    ]
    spec = _job_spec(app, steps, _BACKUP_VOLUMES, seconds=6 * 3600)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta("tacit-restore", app), "spec": spec}


def _ports(*given: int, protocol: str = "TCP") -> list[Manifest]:
    return [{"protocol": protocol, "port": each} for each in given]


_DNS = {
    "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
    "ports": [*_ports(53, protocol="UDP"), *_ports(53)],
}


def _network(name: str, app: str, chosen: Manifest, ingress: list[Manifest], egress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(name, app),
        "spec": {
            "podSelector": chosen,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _coordinator_network() -> list[Manifest]:
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    # The database, and the object store.
    out = [_DNS, {"ports": _ports(5432, 443)}]
    jobs = [f"tacit-coordinator-{each}" for each in ("init", "migrate", "backup", "restore")]
    each_job = {"matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": jobs}]}
    return [
        _network(
            "tacit-coordinator",
            "tacit-coordinator",
            _selector("tacit-coordinator"),
            # Members are outside. Narrow this with `from` to their networks (docs/configuration.md).
            [
                {"ports": _ports(PORTS["enrolment"], PORTS["federation"])},
                {"from": monitoring, "ports": _ports(PORTS["metrics"])},
            ],
            out,
        ),
        _network("tacit-coordinator-jobs", "tacit-coordinator", each_job, [], out),
    ]


def _monitoring() -> list[Manifest]:
    # Operators of Prometheus usually choose rules and monitors by this label.
    def meta(name: str) -> Manifest:
        made = _meta(name, "tacit-coordinator")
        made["labels"] = made["labels"] | {"release": "prometheus"}
        return made

    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": meta("tacit-coordinator"),
        "spec": {
            # `up` then has job="tacit-coordinator", as the alerts expect.
            "jobLabel": "app.kubernetes.io/name",
            "selector": {"matchLabels": {"app.kubernetes.io/name": "tacit-coordinator", "tacit/metrics": "true"}},
            # Our own label `job` (the model being trained) stays.
            "endpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s", "honorLabels": True}],
        },
    }
    rules = []
    for name in ("tacit.rules", "tacit.alerts"):
        groups = yaml.safe_load((DEPLOY / "prometheus" / f"{name}.yml").read_text())["groups"]
        rules.append(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PrometheusRule",
                "metadata": meta(name.replace(".", "-")),
                "spec": {"groups": groups},
            }
        )
    return [monitor, *rules]


def _config(name: str, app: str, data: dict[str, str], **labels: str) -> Manifest:
    meta = _meta(name, app)
    meta["labels"] = meta["labels"] | labels
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def _dashboards() -> list[Manifest]:
    made = []
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        text = json.dumps(json.loads(path.read_text()), separators=(",", ":"), ensure_ascii=True)
        # Grafana's sidecar collects ConfigMaps with this label.
        made.append(_config(f"dashboard-{path.stem}", "tacit-coordinator", {path.name: text}, grafana_dashboard="1"))
    return made


def _disruption() -> Manifest:
    # Only the active one is ready, so by this count one of two is always missing. With a smaller number nobody could
    # drain the active one's node, whose lease passes to the other one.
    spec = {"maxUnavailable": 2, "selector": _selector("tacit-coordinator")}
    meta = _meta("tacit-coordinator", "tacit-coordinator")
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec}


def _public_service() -> Manifest:
    # Otherwise a node's address is in the place of the caller's: strangers and members would share one limit of the
    # enrolment port, and `from` in the network policy would let nobody in.
    return _service("tacit-coordinator", ("enrolment", "federation"), "LoadBalancer", externalTrafficPolicy="Local")


def _metrics_service() -> Manifest:
    made = _service("tacit-coordinator-metrics", ("metrics",), "ClusterIP")
    made["metadata"]["labels"]["tacit/metrics"] = "true"
    return made


_EDGE_MOUNTS = [
    {"name": "home", "mountPath": "/var/lib/tacit"},
    {"name": "policy", "mountPath": "/etc/tacit", "readOnly": True},
    {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
]
# Enrols once, and lets the policy of the ConfigMap be the member's.
_ENROL = (
    'umask 077; mkdir -p "$TACIT_HOME"; test -e "$TACIT_HOME/identity/identity.json" || edge_client enrol; '
    'cp /etc/tacit/policy.toml "$TACIT_HOME/policy.toml"'
)


def _edge() -> list[Manifest]:
    home = [{"name": "TACIT_HOME", "value": HOME}]
    enrol = _container(
        "enrol",
        "tacit-edge",
        ["/bin/sh", "-euc", _ENROL],
        # Used once. The key is made in the volume, and never leaves it.
        env=[*home, _secret("TACIT_JOIN_TOKEN", "tacit-join-token", "token", optional=True)],
        volumeMounts=_EDGE_MOUNTS,
        resources=_resources("100m", "256Mi", "1Gi"),
    )
    member = _container(
        "member",
        "tacit-edge",
        ["edge_client", "run", "--data", "/data/train.jsonl", "--log-format", "json"],
        env=[*home, {"name": "OMP_NUM_THREADS", "value": "2"}],
        volumeMounts=[*_EDGE_MOUNTS, {"name": "data", "mountPath": "/data", "readOnly": True}],
        resources=_resources("1", "2Gi", "6Gi"),
    )
    volumes: list[Manifest] = [
        {"name": "home", "persistentVolumeClaim": {"claimName": "tacit-member"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "tacit-member-data", "readOnly": True}},
        {"name": "policy", "configMap": {"name": "tacit-member-policy"}},
    ]
    pod = _pod("tacit-member", EDGE_ID, volumes, [member], initContainers=[enrol], terminationGracePeriodSeconds=60)
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta("tacit-member", "tacit-member"),
        # Never two: a member's ledger has one writer.
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": _selector("tacit-member"),
            "template": pod,
        },
    }
    out = [_DNS, {"ports": _ports(PORTS["enrolment"], PORTS["federation"])}]
    network = _network("tacit-member", "tacit-member", _selector("tacit-member"), [], out)
    policy = _config("tacit-member-policy", "tacit-member", {"policy.toml": POLICY})
    return [_claim("tacit-member", "tacit-member", "10Gi"), policy, deployment, network]


def _kustomization(files: list[str]) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": files,
    }


def rendered() -> dict[str, str]:
    """Returns each file below this folder with its text."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": restricted}}
    coordinator = {
        "namespace": [namespace],
        "settings": [_config("tacit-coordinator", "tacit-coordinator", SETTINGS)],
        "volume": [_claim("tacit-coordinator", "tacit-coordinator", "20Gi", "ReadWriteMany")],
        "deployment": [_deployment()],
        "backup": _backup(),
        "services": [_public_service(), _metrics_service()],
        "network": _coordinator_network(),
        "disruption": [_disruption()],
        "monitoring": _monitoring(),
        "dashboards": _dashboards(),
    }
    init = ["init", DIR, "--host", "coordinator.example.org", "--database-url", SETTINGS["TACIT_DATABASE_URL"]]
    files: dict[str, list[Manifest]] = {f"coordinator/{name}.yaml": made for name, made in coordinator.items()}
    files["coordinator/kustomization.yaml"] = [_kustomization([f"{name}.yaml" for name in coordinator])]
    files["jobs/init.yaml"] = [_job("init", init)]
    files["jobs/migrate.yaml"] = [_job("migrate", ["migrate"])]
    files["jobs/restore.yaml"] = [_restore()]
    files["edge/member.yaml"] = _edge()
    files["edge/kustomization.yaml"] = [_kustomization(["member.yaml"])]
    head = "# Made by deploy/kubernetes/build.py: change it there. docs/kubernetes.md says what to fill in.\n"
    return {name: head + yaml.safe_dump_all(made, sort_keys=False, width=120) for name, made in files.items()}


def main() -> None:
    """Writes the files, or with --check fails if they are stale."""
    stale = False
    for name, text in rendered().items():
        path = FOLDER / name
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text() != text:
                sys.stderr.write(f"deploy/kubernetes/{name} is stale; run python deploy/kubernetes/build.py\n")
                stale = True
            continue
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    sys.exit(stale)


if __name__ == "__main__":
    main()
