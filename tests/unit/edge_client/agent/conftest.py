"""A coordinator with jobs, and a member's machine, for the commands that make a member's own model."""

from concurrent import futures

import grpc
import pytest

import toolkit.tls
from coordinator.services.credentials import federation_credentials
from tacit.v1 import federation_pb2_grpc
from tests.support import party
from tests.support.own_models import Machine, Town


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Yields the coordinator and its port."""
    folder = tmp_path_factory.mktemp("coordinator")
    town = Town(tmp_path_factory.mktemp("jobs"))
    server = grpc.server(futures.ThreadPoolExecutor(4))
    federation_pb2_grpc.add_FederationServiceServicer_to_server(town, server)
    port = server.add_secure_port(
        "127.0.0.1:0", federation_credentials(party.coordinator_folder(folder / "federation"))
    )
    server.start()
    yield town, port
    server.stop(None).wait()


@pytest.fixture
def town(served):
    """Yields the coordinator, and restores its blobs and versions afterwards."""
    made = served[0]
    blobs, versions = dict(made.served), dict(made.versions)
    yield made
    made.served, made.versions = blobs, versions


@pytest.fixture
def machine(served, tmp_path, monkeypatch):
    # It may only be called before gRPC is imported, and here gRPC is imported.
    monkeypatch.setattr(toolkit.tls, "tls_13_only", lambda: None)
    return Machine(tmp_path, f"localhost:{served[1]}")
