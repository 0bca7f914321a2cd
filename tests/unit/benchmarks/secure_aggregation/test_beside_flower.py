"""The comparison with Flower has the right figures, and runs Flower's own code where it is installed."""

import json
import subprocess

import pytest

from benchmarks.library.stopwatch import Stopwatch
from benchmarks.secure_aggregation import costs as secure_agg
from benchmarks.secure_aggregation import flower as beside_flower
from benchmarks.secure_aggregation.cohort import Outcome
from benchmarks.secure_aggregation.flower import (
    PEER_VENV,
    PeerMissing,
    figures,
    flower_python,
    lost_of,
    theirs,
    threshold_of,
)


class Timed:
    """A server with a given time."""

    def __init__(self, wall, cpu):
        self.watch = Stopwatch()
        self.watch.wall, self.watch.cpu = wall, cpu


def outcome(wall, cpu=0.02, error=1e-7):
    return Outcome(wall, cpu, 90, 3.75, error, {"member": 289, "server": 380})


def peer(server, client):
    return {
        "server_seconds": server,
        "server_cpu_seconds": server / 2,
        "client_seconds": client,
        "client_cpu_seconds": client / 2,
        "upload_bytes_per_value": 8.0026,
        "max_abs_error": 7e-7,
        "versions": {"flwr": "1.41.0"},
    }


def made(members=100):
    mine = [(outcome(wall), Timed(server, 0.2)) for wall, server in ((0.9, 9.0), (0.05, 0.3), (0.04, 0.25))]
    return {each.name: each for each in figures(members, mine, [peer(90.0, 1.5)], 0.0001)}


def test_figures_are_ratios_of_medians_with_both_sides():
    found = made()
    server = found["server_times_faster_than_flower"]
    assert server.value == 300.0
    assert (server.more["peer"], server.more["ours"], server.more["target"]) == (90.0, 0.3, 200.0)
    assert (server.more["peer_cpu"], server.more["ours_cpu"]) == (45.0, 0.2)
    client = found["client_times_faster_than_flower"]
    assert (client.value, client.more["target"]) == (30.0, 20.0)
    assert client.more["checked"] == {"member": 289, "server": 380}
    assert (found["upload_bytes_per_value"].value, found["upload_bytes_per_value"].more["peer"]) == (3.75, 8.0026)
    error = found["max_abs_error"]
    assert (error.value, error.more["target"]) == (1e-7, 7e-7)
    assert found.keys() == {
        "server_times_faster_than_flower",
        "client_times_faster_than_flower",
        "upload_bytes_per_value",
        "max_abs_error",
    }


def test_times_have_a_target_only_at_a_hundred_members():
    assert "target" not in made(50)["server_times_faster_than_flower"].more
    assert "target" in made(50)["upload_bytes_per_value"].more


def test_the_lost_members_are_spread_and_never_all():
    assert lost_of(10, 2) == [0, 5]
    assert len(set(lost_of(100, 10))) == 10
    assert lost_of(10, 0) == []
    assert [threshold_of(members) for members in (10, 50, 100)] == [7, 34, 67]


def test_a_complete_environment_is_used(tmp_path):
    (tmp_path / ".installed").write_text("flwr==1.41.0")
    assert flower_python(tmp_path) == tmp_path / "bin" / "python"


def test_an_environment_of_another_version_is_not_used(tmp_path):
    (tmp_path / ".installed").write_text("flwr==1.40.0")
    with pytest.raises(PeerMissing, match=r"does not have flwr==1\.41\.0; run the benchmark without --quick"):
        flower_python(tmp_path, make=False)


def test_a_failed_installation_is_reported_and_leaves_no_stamp(tmp_path, monkeypatch):
    def fails(command, **_):
        if "pip" in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(beside_flower.subprocess, "run", fails)  # type: ignore[attr-defined]
    with pytest.raises(PeerMissing, match=r"flwr==1\.41\.0 cannot be installed into .*check that pip reaches"):
        flower_python(tmp_path)
    assert not (tmp_path / ".installed").exists()


def test_an_environment_is_made_with_flower_pinned(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(
        beside_flower.subprocess,  # type: ignore[attr-defined]
        "run",
        lambda command, **_: ran.append([str(each) for each in command]),
    )
    assert flower_python(tmp_path) == tmp_path / "bin" / "python"
    assert ran[0][1:4] == ["-m", "venv", "--clear"]
    assert ran[1][-1] == "flwr==1.41.0"
    ran.clear()
    flower_python(tmp_path)
    assert not ran, "an existing environment is not made again"


def test_a_failed_side_gives_no_figure(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no flower here >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match="no flower here"):
        theirs(3, 10, 1, broken)


@pytest.mark.skipif(not (PEER_VENV / ".installed").exists(), reason="needs build/flower-venv: make bench-secagg")
def test_flowers_own_code_opens_the_mean_of_the_survivors():
    found = theirs(5, 1000, 1, flower_python(make=False))
    assert found["max_abs_error"] < 2**-18, "a step of its grid"
    assert 8 < found["upload_bytes_per_value"] < 8.5
    assert found["versions"]["flwr"] == "1.41.0"
    assert found["server_seconds"] > 0 < found["client_seconds"]
    assert json.dumps(found)


@pytest.mark.parametrize(("arguments", "status"), [(["--quick"], 0), ([], 1)])
def test_the_other_parts_run_without_flower(monkeypatch, capsys, arguments, status):
    def missing(**_):
        raise PeerMissing("flwr cannot be installed")

    ran = []
    monkeypatch.setattr(beside_flower, "flower_python", missing)
    monkeypatch.setattr(secure_agg, "PARTS", {**secure_agg.PARTS, "limit": ran.append})
    assert secure_agg.main([*arguments, "--part", "peer", "limit"]) == status
    assert len(ran) == 1
    assert "flwr cannot be installed" in capsys.readouterr().err
