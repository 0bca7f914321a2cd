"""`coordinator health` where it must report a failure."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from coordinator.config import CoordinatorFolder
from tests.support import party
from tests.support.processes import command, free_ports


def folder_at(path, port):
    """Make a coordinator's folder with this enrolment port. Nobody serves there."""
    made = party.coordinator_folder(path)
    made.config_toml.write_text(
        f'schema = 1\nadvertise = ["localhost"]\nlisten_host = "0.0.0.0"\nenrolment_port = {port}\n'
    )
    return made


def test_nobody_serves(tmp_path):
    (port,) = free_ports(1)
    made = folder_at(tmp_path / "federation", port)
    done = command("coordinator", "health", "--dir", made.path, "--json")
    assert done.returncode == 3
    assert f"no coordinator serves at 127.0.0.1:{port}" in json.loads(done.stdout)["error"]


def test_somebody_else_serves_there(tmp_path):
    """A healthy coordinator of another federation does not pass for this one. Its own folder reports it as healthy."""
    other = party.coordinator_folder(tmp_path / "other", of=party.authority(1))
    pair = (other.server_key.read_bytes(), other.server_certificate.read_bytes())
    server = grpc.server(ThreadPoolExecutor(1))
    checks = HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        made = folder_at(tmp_path / "federation", port)
        done = command("coordinator", "health", "--dir", made.path)
        assert done.returncode == 3
        assert "no coordinator serves" in done.stderr
        shutil.copy(made.config_toml, other.config_toml)
        assert command("coordinator", "health", "--dir", other.path).returncode == 0
        checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        done = command("coordinator", "health", "--dir", other.path)
        assert done.returncode == 1
        assert "answers NOT_SERVING" in done.stderr
    finally:
        server.stop(None)


def test_health_says_why_it_cannot_ask(tmp_path):
    done = command("coordinator", "health", "--dir", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "coordinator init" in done.stderr
    made = folder_at(tmp_path / "federation", 0)
    assert "so its port is unknown" in command("coordinator", "health", "--dir", made.path).stderr
    CoordinatorFolder(made.path).server_certificate.unlink()
    done = command("coordinator", "health", "--dir", made.path)
    assert done.returncode == 5
    assert "coordinator serve" in done.stderr
