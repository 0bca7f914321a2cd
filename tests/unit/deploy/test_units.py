"""The systemd units, verified and scored offline by systemd's own tool where it is installed."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from edge_client.cli import app as edge_app
from tests.support.processes import ROOT  # type: ignore[attr-defined]
from toolkit.console import ExitCode

FOLDER = ROOT / "deploy" / "systemd"
WITNESS = "edge_client-witness@.service"
SERVICES = ("coordinator.service", "coordinator-backup.service", "edge_client@.service", WITNESS)
FAILED = "tacit-failed@.service"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: install Debian's package systemd"
)


@pytest.fixture
def units(tmp_path) -> Path:
    """Copy the units, with a program that exists here in place of the installed ones."""
    for name in (*SERVICES, FAILED, "coordinator-backup.timer"):
        text = (FOLDER / name).read_text().replace("/opt/tacit/bin/coordinator", "/bin/true")
        (tmp_path / name).write_text(text.replace("/opt/tacit/bin/edge_client", "/bin/true"))
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("unit", [*SERVICES, FAILED, "coordinator-backup.timer"])
def test_systemd_accepts_every_line(units, unit):
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", units / unit], capture_output=True, text=True, check=False, timeout=60
    )
    # systemd only warns about an unknown key; here it is an error.
    ours = [line for line in done.stderr.splitlines() if unit.split(".")[0] in line or "Unknown" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr


@needs_systemd
@pytest.mark.parametrize("unit", [*SERVICES, FAILED])
def test_a_units_exposure_is_low(units, unit):
    """systemd scores at most 1.6 of 10 (newer versions score higher). A unit without hardening scores 9.6."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=16", units / unit],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if "✗" in line or "→" in line)


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (FOLDER / unit).read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("unit", SERVICES)
def test_no_unit_has_a_secret_in_environment_or_arguments(unit):
    text = (FOLDER / unit).read_text()
    assert not re.search(r"(?i)^Environment=.*(passw|passphrase|token)", text, flags=re.MULTILINE)
    assert not re.search(r"(?i)^Exec\w+=.*(passw|passphrase|token)", text, flags=re.MULTILINE)


def test_coordinator_member_and_witness_are_always_restarted():
    for unit in ("coordinator.service", "edge_client@.service", WITNESS):
        assert values(unit, "Restart") == ["always"]
        # systemd gives up on a unit that fails five times in ten seconds, unless told not to.
        assert values(unit, "StartLimitIntervalSec") == ["0"]


def test_a_witness_that_refuses_stops_and_is_reported():
    """A log that does not continue is a finding for a person; a restart would only repeat it."""
    assert values(WITNESS, "RestartPreventExitStatus") == [str(int(ExitCode.REFUSED))]
    assert values(WITNESS, "OnFailure") == [FAILED.replace("@", "@%n")]


def test_the_witness_starts_with_what_its_example_names():
    """systemd splits a variable without braces into words, so that one variable holds several addresses."""
    (words,) = values(WITNESS, "ExecStart")
    given = {}
    for line in (FOLDER / "witness.env.example").read_text().splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            given[key] = value.strip('"')
    assert len(shlex.split(given["TACIT_WITNESS_ADDRESSES"])) >= 2
    whole = re.sub(r"\$\{?(\w+)\}?", lambda found: given[found[1]], words).replace("%i", "a")
    command: Any = typer.main.get_command(edge_app)
    rest = shlex.split(whole)[1:]
    while getattr(command, "commands", None):
        command, rest = command.commands[rest[0]], rest[1:]
    read = command.make_context("run", rest).params
    assert len(read["address"]) * 2 == len(shlex.split(given["TACIT_WITNESS_ADDRESSES"]))
    assert str(read["folder"]) == f"/var/lib/{values(WITNESS, 'StateDirectory')[0]}".replace("%i", "a")
    assert len(read["federation"]) == 64
    assert "${" not in words.partition("$TACIT_WITNESS_ADDRESSES")[2]


def test_a_failed_backup_is_reported():
    assert values("coordinator-backup.service", "OnFailure") == [FAILED.replace("@", "@%n")]
    # The same unit verifies every backup, so a damaged one fails too.
    assert [line.split()[-1] for line in values("coordinator-backup.service", "ExecStart")] == ["14", "--verify"]
    (told,) = values(FAILED, "ExecStart")
    assert "--priority daemon.crit" in told
    assert "%i failed" in told


HARDENING = """\
CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
ProtectSystem=strict
PrivateTmp=yes
PrivateMounts=yes
PrivateDevices=yes
PrivateUsers=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
KeyringMode=private
SystemCallArchitectures=native
LimitCORE=0
UMask=0077
StateDirectoryMode=0700
""".splitlines()


@pytest.mark.parametrize("unit", SERVICES)
def test_each_unit_has_every_line_of_the_hardening(unit):
    assert set(HARDENING) <= set((FOLDER / unit).read_text().splitlines())


def test_users_and_folders_of_the_units_are_created():
    users = set(re.findall(r"^u (\S+)", (FOLDER / "tacit.sysusers.conf").read_text(), flags=re.MULTILINE))
    made = set(re.findall(r"^d (\S+)", (FOLDER / "tacit.tmpfiles.conf").read_text(), flags=re.MULTILINE))
    for unit in SERVICES:
        assert set(values(unit, "User")) <= users
        assert set(values(unit, "ReadWritePaths")) <= made
    # Any of these may be alone on its machine with the unit that reports its failure, whose user must be there, too.
    (reporter,) = values(FAILED, "User")
    assert reporter in users
    comment = "".join(re.findall(r"^#(.*)$", (FOLDER / "tacit.sysusers.conf").read_text(), flags=re.MULTILINE))
    assert f"`{reporter}` wherever {FAILED} is" in comment


def test_the_gpu_drop_in_opens_devices_and_nothing_else():
    keys = set(re.findall(r"^(\w+)=", (FOLDER / "cuda.conf").read_text(), flags=re.MULTILINE))
    assert keys == {"PrivateDevices", "DevicePolicy", "DeviceAllow"}
