"""deploy/compose.yaml: what every service must have. Compose's own validator checks the whole file where installed."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.processes import ROOT  # type: ignore[attr-defined]

FOLDER = ROOT / "deploy"
FILE = FOLDER / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text())
SERVICES = COMPOSE["services"]


def validator() -> list[str] | None:
    """Return the command of docker-compose or docker's plugin. Neither needs a daemon to check a file."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = ["docker", "compose"]
    if (
        shutil.which("docker")
        and subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0
    ):
        return plugin
    return None


def test_compose_accepts_the_file():
    program = validator()
    if program is None:
        pytest.skip("no docker-compose here: install Debian's package docker-compose")
    done = subprocess.run(
        [*program, "-f", FILE, "config", "--quiet"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_services_are_the_expected_ones():
    assert set(SERVICES) == {"coordinator", "backup", "postgres", "prometheus", "grafana"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_each_service_is_hardened_bounded_and_health_checked(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert {"mem_limit", "pids_limit", "cpus"} <= service.keys()
    assert not service.keys() & {"privileged", "network_mode", "pid", "ipc", "devices"}
    # The coordinator's image has its own.
    assert "healthcheck" in service or service["build"]["dockerfile"] == "deploy/docker/coordinator.Dockerfile"
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", service["image"]), "an image is named by its version"


def test_only_postgres_has_capabilities_to_give_its_folder_away():
    assert {name for name, service in SERVICES.items() if "cap_add" in service} == {"postgres"}
    assert set(SERVICES["postgres"]["cap_add"]) <= {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_secrets_are_files_and_in_no_environment_or_command(name):
    service = SERVICES[name]
    for key, value in service.get("environment", {}).items():
        if re.search(r"PASS|SECRET|TOKEN|KEY", key):
            assert value.startswith("/run/secrets/"), key
            assert value.removeprefix("/run/secrets/") in service["secrets"]
        assert not re.search(r"//[^/@]*:[^/@]+@", str(value)), f"{key}: a password in a URL"
    assert "password" not in str(service.get("command", "")).lower()


def test_every_secret_is_a_file_outside_the_repository():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for secret in COMPOSE["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "/deploy/secrets/" in ignored


def test_only_containers_reach_database_and_metrics():
    assert COMPOSE["networks"]["inside"]["internal"] is True
    for name in ("postgres", "prometheus"):
        assert SERVICES[name]["networks"] == ["inside"]
        assert "ports" not in SERVICES[name]
    assert sorted(SERVICES["coordinator"]["ports"]) == ["7440:7440", "7441:7441"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["grafana"]["ports"])


def test_mounted_files_exist_and_are_read_only():
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            source, _, rest = volume.partition(":")
            if source.startswith("."):
                assert (FOLDER / source).exists(), f"{name}: {source}"
                assert rest.endswith(":ro"), f"{name}: {source} can be written"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"


def test_the_container_prometheus_scrapes_the_same_as_the_example():
    here = yaml.safe_load((FOLDER / "docker" / "prometheus.yml").read_text())
    elsewhere = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
    (scraped,) = here["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["coordinator:7442"]}]
    (other,) = elsewhere["scrape_configs"]
    assert {**scraped, "static_configs": other["static_configs"]} == other
    assert here["rule_files"] == elsewhere["rule_files"]
    mounted = [volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]]
    assert {f"/etc/prometheus/{file}" for file in here["rule_files"]} <= set(mounted)


def test_backups_cover_the_served_data_and_outlive_the_container():
    backup, coordinator = SERVICES["backup"], SERVICES["coordinator"]
    for key in ("image", "environment", "secrets", "volumes"):
        assert backup[key] == coordinator[key], key
    assert "ports" not in backup


@pytest.mark.parametrize(("works", "pause"), [(True, "86400"), (False, "3600")], ids=["made", "failed"])
def test_a_failed_backup_is_tried_again_in_an_hour(tmp_path, works, pause):
    """Runs the service's own script until it first sleeps, with a `coordinator` that works or fails."""
    (script,) = SERVICES["backup"]["command"]
    made = tmp_path / "made"
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, body in (
        ("coordinator", f'echo "$*" >> {tmp_path}/asked; exit {0 if works else 1}'),
        ("sleep", f"echo $1 > {tmp_path}/slept; kill $PPID"),
    ):
        (bin_folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_folder / name).chmod(0o755)
    subprocess.run(
        [*SERVICES["backup"]["entrypoint"], script.replace("/tmp/made", str(made))],  # noqa: S108
        env={"PATH": f"{bin_folder}:/usr/bin:/bin"},
        check=False,
        timeout=30,
    )
    assert (tmp_path / "slept").read_text().strip() == pause
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "backup /var/backups/tacit --keep 14"
    assert asked[1:] == (["backup /var/backups/tacit --verify"] if works else [])
    assert made.exists() == works
