"""coordinator.toml, operator.toml and the environment variables."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.config import (
    CoordinatorConfig,
    OperatorConfig,
    environment_name,
    load_config,
    load_operator,
    operator_toml,
    write_config,
)
from tacit.documents import DocumentInvalid
from toolkit.durable import durable_file


def _write(folder: Path, text: str) -> Path:
    (folder / "coordinator.toml").write_text(text)
    return folder


def test_the_written_configuration_reads_back_and_has_comments(tmp_path):
    config = CoordinatorConfig(advertise=("coordinator.example.org", "10.0.0.1"), log_format="json", token_hours=1.5)
    write_config(tmp_path / "coordinator.toml", config)
    text = (tmp_path / "coordinator.toml").read_text()
    loaded = load_config(tmp_path, {})
    assert loaded.model_copy(update={"database_url": config.database_url, "store_url": config.store_url}) == config
    lines = text.splitlines()
    for key in CoordinatorConfig.model_fields:
        name = "schema" if key == "schema_version" else key
        place = next(number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
        # A comment is above the key, or above its group.
        assert any(line.startswith("#") for line in lines[max(0, place - 3) : place]), key


@pytest.mark.parametrize(
    ("written", "database", "store"),
    [
        pytest.param("", "tacit.db", "store", id="defaults"),
        pytest.param('database_url = "sqlite:////data/a.db"\nstore_url = "/blobs"', "/data", "/blobs", id="elsewhere"),
        pytest.param('store_url = "file:///blobs"', "tacit.db", "/blobs", id="file"),
        pytest.param('database_url = "postgresql://t@h/t"\nstore_url = "s3://b/p"', None, None, id="not-on-a-disk"),
        pytest.param('database_url = "sqlite://"\nstore_url = "memory://x"', None, None, id="memory"),
    ],
)
def test_disks_are_those_of_the_folder_the_database_and_the_store(tmp_path, written, database, store):
    found = load_config(_write(tmp_path, f'schema = 1\nadvertise = ["h"]\n{written}\n'), {}).disks(tmp_path)
    # SQLite's file is made later, and its folder is there.
    expected = {"folder": tmp_path}
    if database is not None:
        expected["database"] = tmp_path if database == "tacit.db" else Path(database)
    if store is not None:
        expected["store"] = tmp_path / store
    assert found == expected


def test_defaults_and_addresses(tmp_path):
    config = load_config(_write(tmp_path, 'schema = 1\nadvertise = ["Federation.Example.ORG", "::1"]\n'), {})
    assert (config.enrolment_port, config.federation_port, config.metrics_port) == (7440, 7441, 7442)
    assert config.metrics_host == "127.0.0.1"
    assert config.advertise == ("federation.example.org", "::1")
    assert config.enrolment_address == "federation.example.org:7440"
    assert config.federation_address == "federation.example.org:7441"
    assert config.database_url == f"sqlite:///{tmp_path}/tacit.db"
    assert config.store_url == f"file://{tmp_path}/store"


def test_paths_are_relative_to_the_coordinators_folder(tmp_path, monkeypatch):
    inner = tmp_path / "a folder"
    inner.mkdir()
    _write(inner, 'schema = 1\nadvertise = ["localhost"]\n')
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("a folder"), {})
    assert config.database_url == f"sqlite:///{inner}/tacit.db"
    assert config.store_url == f"file://{inner}/store"


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://tacit@db/tacit", "sqlite:////var/lib/tacit.db", "sqlite:///:memory:", "sqlite://"]
)
def test_other_database_urls_are_not_changed(tmp_path, url):
    _write(tmp_path, f'schema = 1\nadvertise = ["localhost"]\ndatabase_url = "{url}"\n')
    assert load_config(tmp_path, {}).database_url == url


def test_every_key_can_be_overridden(tmp_path):
    _write(tmp_path, 'schema = 1\nadvertise = ["localhost"]\n')
    environ = {
        "TACIT_ADVERTISE": "a.example.org, 10.0.0.9",
        "TACIT_LISTEN_HOST": "127.0.0.1",
        "TACIT_ENROLMENT_PORT": "1",
        "TACIT_FEDERATION_PORT": "2",
        "TACIT_METRICS_HOST": "10.0.0.1",
        "TACIT_METRICS_PORT": "0",
        "TACIT_ENROLMENT_CONNECTIONS": "100",
        "TACIT_ENROLMENT_CONNECTIONS_PER_ADDRESS": "10",
        "TACIT_MEMBER_MESSAGES_PER_SECOND": "50",
        "TACIT_MEMBER_CALLS_PER_SECOND": "20.5",
        "TACIT_TRACES_TO": "https://collector.example.org:4317",
        "TACIT_AUTHORITY_ELSEWHERE": "true",
        "TACIT_WITNESSES": f"{'ab' * 32}, {'cd' * 32}",
        "TACIT_REPLICA_ADDRESS": "b.example.org:7441",
        "TACIT_REPLICAS": "a.example.org:7441, 10.0.0.9:7441",
        "TACIT_DATABASE_URL": "postgresql://db/tacit",
        "TACIT_STORE_URL": "s3://bucket/prefix",
        "TACIT_S3_ENDPOINT": "https://minio.example.org:9000",
        "TACIT_S3_REGION": "eu-west-3",
        "TACIT_S3_CA_FILE": "ca.pem",
        "TACIT_S3_PATH_STYLE": "true",
        "TACIT_STORE_CACHE_GB": "2.5",
        "TACIT_KEEP_VERSIONS": "5",
        "TACIT_KEEP_BEST": "false",
        "TACIT_KEEP_EXPORTED": "false",
        "TACIT_KEEP_RESTARTS": "false",
        "TACIT_KEEP_NAMED": "desk/3, ward/10",
        "TACIT_PRUNE_GRACE_HOURS": "48",
        "TACIT_WORKERS": "4",
        "TACIT_UPLOAD_WINDOW_KIB": "1024",
        "TACIT_LOG_FORMAT": "json",
        "TACIT_TOKEN_HOURS": "2.5",
        "TACIT_MEMBER_DAYS": "30",
        "TACIT_HOME": "unrelated",
    }
    keys = [key for key in CoordinatorConfig.model_fields if key != "schema_version"]
    assert {environment_name(key) for key in keys} == set(environ) - {"TACIT_HOME"}
    config = load_config(tmp_path, environ)
    assert config.advertise == ("a.example.org", "10.0.0.9")
    assert config.metrics_port == 0
    assert config.authority_elsewhere
    assert config.witnesses == (b"\xab" * 32, b"\xcd" * 32)
    assert (config.keep_versions, config.keep_best, config.keep_exported) == (5, False, False)
    assert not config.keep_restarts
    assert (config.keep_named, config.prune_grace_hours) == (("desk/3", "ward/10"), 48)
    assert (config.enrolment_connections, config.enrolment_connections_per_address) == (100, 10)
    assert (config.member_messages_per_second, config.member_calls_per_second) == (50, 20.5)
    assert config.own_address == "b.example.org:7441"
    assert config.replicas == ("a.example.org:7441", "10.0.0.9:7441")
    assert config.database_url == "postgresql://db/tacit"
    assert config.store_url == "s3://bucket/prefix"
    assert (config.s3_endpoint, config.s3_region) == ("https://minio.example.org:9000", "eu-west-3")
    assert (config.s3_ca_file, config.s3_path_style, config.store_cache_gb) == ("ca.pem", True, 2.5)
    assert (config.log_format, config.token_hours, config.member_days) == ("json", 2.5, 30)
    assert config.workers == 4
    assert config.upload_window_kib == 1024


def test_an_invalid_variable_is_named(tmp_path):
    _write(tmp_path, 'schema = 1\nadvertise = ["localhost"]\n')
    with pytest.raises(DocumentInvalid, match="TACIT_FEDERATION_PORT from the environment"):
        load_config(tmp_path, {"TACIT_FEDERATION_PORT": "many"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('advertise = ["localhost"]', "no schema"),
        ('schema = 2\nadvertise = ["localhost"]', "schema = 2"),
        ("schema = 1", "advertise"),
        ("schema = 1\nadvertise = []", "advertise"),
        ('schema = 1\nadvertise = ["localhost:7441"]', "without a port"),
        ('schema = 1\nadvertise = ["http://localhost"]', "not a host name"),
        ('schema = 1\nadvertise = ["a", "A"]', "twice"),
        ('schema = 1\nadvertise = ["localhost"]\nfederation_prot = 1', "federation_prot: unknown key"),
        ('schema = 1\nadvertise = ["localhost"]\nfederation_port = 70000', "federation_port"),
        ('schema = 1\nadvertise = ["localhost"]\nlog_format = "xml"', "log_format"),
        ('schema = 1\nadvertise = ["localhost"]\nreplicas = ["nowhere"]', "host:port"),
        ('schema = 1\nadvertise = ["localhost"]\nreplicas = ["a:1", "a:1"]', "twice"),
        ('schema = 1\nadvertise = ["localhost"]\nreplicas = ["localhost:1", "a:1"]', "add it to advertise"),
        ('schema = 1\nadvertise = ["localhost"]\ntraces_to = "collector:4317"', "http://HOST:4317"),
        ('schema = 1\nadvertise = ["localhost"]\nreplica_address = "nowhere"', "host:port"),
        ('schema = 1\nadvertise = ["localhost"]\nprune_grace_hours = 0.9', "prune_grace_hours"),
        ('schema = 1\nadvertise = ["localhost"]\nmember_days = 1000', "member_days"),
        ('schema = 1\nadvertise = ["localhost"]\ns3_endpoint = "http://minio.example.org"', "use https://"),
        ('schema = 1\nadvertise = ["localhost"]\ns3_endpoint = "http://localhost.example.org"', "use https://"),
        ('schema = 1\nadvertise = ["localhost"]\ns3_endpoint = "https://key:secret@minio"', "s3_endpoint"),
        ('schema = 1\nadvertise = ["localhost"]\ns3_region = "EU West"', "s3_region"),
        ('schema = 1\nadvertise = ["localhost"]\nstore_cache_gb = -1', "store_cache_gb"),
        ("schema = 1\nadvertise = [", "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, sentence):
    with pytest.raises(DocumentInvalid, match=sentence):
        load_config(_write(tmp_path, text), {})


def test_a_missing_folder_names_coordinator_init(tmp_path):
    with pytest.raises(DocumentInvalid, match="coordinator init"):
        load_config(tmp_path / "nowhere", {})


def test_the_operators_folder(tmp_path):
    config = OperatorConfig(address="coordinator.example.org:7441", federation=b"f" * 32)
    (tmp_path / "operator.toml").write_text(operator_toml(config))
    with pytest.raises(DocumentInvalid, match="copy the coordinator's whole operator folder"):
        load_operator(tmp_path)
    for name in ("cert.pem", "key.pem", "root.pem"):
        durable_file(tmp_path / name, name.encode())
    operator = load_operator(tmp_path)
    assert operator.config == config
    assert (operator.certificate_pem, operator.key_pem, operator.root_pem) == (b"cert.pem", b"key.pem", b"root.pem")
    assert "key.pem" not in repr(operator)


def test_an_operators_address_needs_a_port():
    with pytest.raises(ValidationError):
        OperatorConfig(address="coordinator.example.org", federation=b"f" * 32)


def test_tokens_name_the_enrolment_port_of_each_replica():
    config = CoordinatorConfig(
        advertise=("a.example.org", "b.example.org"),
        enrolment_port=8440,
        replicas=("a.example.org:7441", "b.example.org:7441", "b.example.org:9441"),
    )
    assert config.enrolment_address == "a.example.org:8440"
    assert config.other_enrolment_addresses == ("b.example.org:8440",)
    assert CoordinatorConfig(advertise=("localhost",)).other_enrolment_addresses == ()
