"""Ports that cannot be bound, and addresses that this machine has not: one sentence each, which says what to change."""

import asyncio
import socket
from contextlib import AsyncExitStack, closing

import pytest

from coordinator import ports, server
from coordinator.config import CoordinatorConfig, load_config
from coordinator.ports import CannotServe
from coordinator.relay import supervisor
from tacit.documents import DocumentInvalid
from tests.support import party

# Reserved for documentation (RFC 5737), so no machine has it.
ELSEWHERE = "203.0.113.9"


@pytest.fixture
def taken():
    """A port on which another program listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        yield other.getsockname()[1]


def _refusal(tmp_path, monkeypatch, **changes):
    monkeypatch.setattr(supervisor, "_PORT_SECONDS", 0.0)
    monkeypatch.setattr(ports, "speaks_tls_12", lambda *_: False)
    folder = party.coordinator_folder(tmp_path / "coordinator")
    config = load_config(folder.path, {}).model_copy(update=changes)

    async def start():
        async with AsyncExitStack() as stack:
            await server.start(folder, config, stack)

    with pytest.raises(CannotServe) as raised:
        asyncio.run(start())
    return str(raised.value)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("key", ["enrolment_port", "federation_port", "metrics_port"])
def test_a_taken_port_is_named_with_its_key(tmp_path, monkeypatch, taken, key, workers):
    said = _refusal(tmp_path, monkeypatch, workers=workers, **{key: taken})
    host_key = "metrics_host" if key == "metrics_port" else "listen_host"
    assert f"port {taken} on 127.0.0.1 cannot be used: another program listens there" in said
    assert f"set another {key} or {host_key} in coordinator.toml" in said


@pytest.mark.parametrize("key", ["listen_host", "metrics_host"])
def test_an_address_of_another_machine_is_called_that(tmp_path, monkeypatch, key):
    said = _refusal(tmp_path, monkeypatch, **{key: ELSEWHERE})
    assert said.startswith(f"{key} is {ELSEWHERE}, which is not an address of this machine")
    assert "another program" not in said


@pytest.mark.parametrize("name", ["no.such.host.invalid", "a..b"])
@pytest.mark.parametrize("key", ["listen_host", "metrics_host"])
def test_a_name_without_an_address_is_called_that(tmp_path, monkeypatch, key, name):
    said = _refusal(tmp_path, monkeypatch, **{key: name})
    assert said.startswith(f"{key} names {name}, which has no address here")


@pytest.mark.parametrize("changes", [{"metrics_host": ELSEWHERE}, {"listen_host": ELSEWHERE}, {"metrics_host": "a..b"}])
def test_a_standby_words_it_alike(monkeypatch, changes):
    monkeypatch.setattr(supervisor, "_PORT_SECONDS", 0.0)
    given = {"listen_host": "127.0.0.1", "enrolment_port": 0, "federation_port": 0, "metrics_port": 0} | changes
    with pytest.raises(CannotServe, match="of this machine"):
        asyncio.run(ports.check_free(CoordinatorConfig(advertise=("localhost",), **given)))


@pytest.mark.parametrize(
    ("first", "second"),
    [("enrolment_port", "federation_port"), ("enrolment_port", "metrics_port"), ("federation_port", "metrics_port")],
)
def test_two_keys_cannot_name_one_port(tmp_path, first, second):
    (tmp_path / "coordinator.toml").write_text(
        f'schema = 1\nadvertise = ["localhost"]\n{first} = 9440\n{second} = 9440\n'
    )
    with pytest.raises(DocumentInvalid, match=f"{first} and {second} are both 9440; give each another port"):
        load_config(tmp_path, {})


def test_a_port_may_be_one_that_another_key_has_by_default(tmp_path):
    (tmp_path / "coordinator.toml").write_text(
        'schema = 1\nadvertise = ["localhost"]\nenrolment_port = 7441\nfederation_port = 7440\n'
    )
    config = load_config(tmp_path, {})
    assert (config.enrolment_port, config.federation_port) == (7441, 7440)


def test_any_free_port_may_be_asked_for_several_times():
    config = CoordinatorConfig(advertise=("localhost",), enrolment_port=0, federation_port=0, metrics_port=0)
    assert config.metrics_port == 0
