"""The coordinator's configuration and the layout of its folder.

`coordinator init DIR` creates the folder, and everything else reads it:

    DIR/                      0700
      coordinator.toml        `CoordinatorConfig`, written with comments, edited by the operator
      authority/root.pem      the federation's first authority; its SHA-256 names the federation
      authority/root.key      0600; anyone who has it can create members
      authority/root-2.pem    the next one, and its key, after `coordinator authority rotate`; and so on
      authority/authorities.json    all authorities so far, each signed by the previous one; absent before the second
      server/cert.pem         the server's certificate, then its issuer: what the server shows to members
      server/key.pem          0600
      operator/               `OperatorConfig` and all that `coordinator job ...` needs; may be copied elsewhere
      operator/backbones/     frozen language models (`learning.backbones.collection`), once the operator adds one
      tacit.db                unless `database_url` says otherwise
      database.json           which database this folder belongs to
      store/                  unless `store_url` says otherwise
      spool/                  incoming masked vectors and corpora

Only the owner may use these files (`coordinator.closed`): folders have mode 0700 and files 0600. Others may read the
configuration and the certificates, but must not be able to change them.

An environment variable can override every key of coordinator.toml: `TACIT_` and the key in capitals
(`TACIT_DATABASE_URL`, `TACIT_LISTEN_HOST`, ...; commas separate list items). `load_config` returns absolute URLs, so
nothing depends on the folder in which a process was started.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Location
from tacit.reading import toml_values
from tacit.token import Address, Addresses, join_address, split_address
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_keys
from toolkit.spans import check_endpoint

__all__ = [
    "CoordinatorConfig",
    "CoordinatorFolder",
    "OperatorConfig",
    "OperatorIdentity",
    "environment_name",
    "load_config",
    "load_operator",
    "operator_toml",
    "write_config",
]

_Host = Annotated[str, StringConstraints(max_length=253)]
_VersionName = Annotated[str, StringConstraints(max_length=80, pattern=r"^[a-z0-9][a-z0-9._-]{0,62}/[0-9]{1,9}$")]
_Endpoint = Annotated[
    str, StringConstraints(max_length=512, pattern=r"^(?:|https?://[A-Za-z0-9\[\]:._-]{1,300}(?:/[A-Za-z0-9/._-]*)?)$")
]
_LOOPBACK = re.compile(r"http://(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?/?")
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class CoordinatorConfig(Document):
    """coordinator.toml. `load_config` also applies the environment and makes the two URLs absolute."""

    # Host names and addresses that members dial. The server's certificate has them all, join tokens the first.
    advertise: Annotated[tuple[_Host, ...], AtMost(64)] = Field(min_length=1)

    listen_host: _Host = Field(default="0.0.0.0", min_length=1)  # noqa: S104  members come from outside
    # Port 0 asks the system for any free port.
    enrolment_port: int = Field(default=7440, ge=0, le=65535)
    federation_port: int = Field(default=7441, ge=0, le=65535)
    # Metrics are plain HTTP without authentication, so they stay on loopback by default.
    metrics_host: _Host = Field(default="127.0.0.1", min_length=1)
    metrics_port: int = Field(default=7442, ge=0, le=65535)
    # Where spans of rounds go: the gRPC port of an OpenTelemetry collector. Empty: nowhere.
    traces_to: Annotated[str, StringConstraints(max_length=512)] = ""

    # Processes that end members' connections. 1: the coordinator's own process does, and there is no other.
    workers: int = Field(default=1, ge=1, le=64)

    # Maximum open connections to the enrolment port: in total, and from one IPv4 address or IPv6 /64.
    enrolment_connections: int = Field(default=512, ge=8, le=16384)
    enrolment_connections_per_address: int = Field(default=64, ge=1, le=16384)
    # Limits for one member: messages of its session, and calls.
    member_messages_per_second: float = Field(default=100.0, ge=1, le=100_000)
    member_calls_per_second: float = Field(default=50.0, ge=1, le=100_000)

    # Whether the authority's key is on another machine: requests then wait for `coordinator authority sign` there.
    authority_elsewhere: bool = False
    # Ed25519 keys of the witnesses that may sign heads of the roster log.
    witnesses: Annotated[tuple[Digest, ...], AtMost(64)] = ()

    # Of several coordinators over one PostgreSQL: where members reach this one (host:port; empty: the first name of
    # `advertise` with the federation port), and the federation addresses of all of them, which members get with their
    # certificates.
    replica_address: Annotated[str, StringConstraints(max_length=300)] = ""
    replicas: Addresses = ()

    database_url: Location = "sqlite:///tacit.db"
    store_url: Location = "store"
    # For s3://BUCKET/PREFIX. Empty: AWS's own endpoint, the region of the environment, the system's authorities.
    # Credentials are never here: AWS's libraries find them in the environment, a profile, or the machine's role.
    s3_endpoint: _Endpoint = ""
    s3_region: Annotated[str, StringConstraints(max_length=64, pattern=r"^[a-z0-9-]*$")] = ""
    s3_ca_file: Annotated[str, StringConstraints(max_length=4096)] = ""
    # Whether the bucket is in the path of requests, and not in the host's name.
    s3_path_style: bool = False
    # How much of this machine's disk copies of an S3 store's blobs may take, in GB (10^9 bytes).
    store_cache_gb: float = Field(default=10.0, ge=0, le=100_000)

    # What `coordinator store prune` leaves of each job's versions: the newest (0: all), the best evaluated, those that
    # `coordinator export` fetched, and those named here as JOB/NUMBER.
    keep_versions: int = Field(default=0, ge=0, le=1_000_000)
    keep_best: bool = True
    keep_exported: bool = True
    # And the version before each member's first sum, from which a job starts anew if that member withdraws.
    keep_restarts: bool = True
    keep_named: Annotated[tuple[_VersionName, ...], AtMost(1000)] = ()
    # How long a blob stays that no row names, because somebody may be about to name it. Minutes are the least that is
    # safe beside a serving coordinator; hours leave room for uploads that break and resume.
    prune_grace_hours: float = Field(default=24.0, ge=1, le=24 * 365)

    log_format: Literal["console", "json"] = "console"

    # How much of each upload may be on its way, or arrived and not read, beside the message that is being read, in KiB.
    # To keep a line full it needs what the line carries in a round trip; each concurrent upload may take it as memory.
    upload_window_kib: int = Field(default=128, ge=64, le=8192)

    # How long a join token is valid, unless `coordinator member invite` says otherwise.
    token_hours: float = Field(default=24.0, gt=0, le=24 * 30)
    # How long a member's certificate is valid. Members renew it by themselves when two thirds of that are over.
    member_days: float = Field(default=14.0, ge=1 / 1440, le=397)

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        hosts = tuple(_host(name) for name in names)
        if len(set(hosts)) != len(hosts):
            raise ValueError("a name occurs twice")
        return hosts

    @field_validator("replica_address")
    @classmethod
    def _replica_address(cls, value: str) -> str:
        if value:
            split_address(value)
        return value

    @field_validator("replicas")
    @classmethod
    def _replicas(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(values)) != len(values):
            raise ValueError("an address occurs twice")
        return values

    @model_validator(mode="after")
    def _replicas_are_advertised(self) -> Self:
        for address in self.replicas:
            if (host := split_address(address)[0]) not in self.advertise:
                raise ValueError(f"replicas: the server's certificate would not have {host}; add it to advertise")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        keys = ("enrolment_port", "federation_port", "metrics_port")
        names: dict[int, str] = {}
        for key in keys:
            # Each 0 takes another free port.
            if (port := getattr(self, key)) and (other := names.setdefault(port, key)) != key:
                raise ValueError(f"{other} and {key} are both {port}; give each another port")
        return self

    @field_validator("traces_to")
    @classmethod
    def _traces_to(cls, url: str) -> str:
        return check_endpoint(url) if url else url

    @field_validator("s3_endpoint")
    @classmethod
    def _endpoint(cls, url: str) -> str:
        # Blobs hold members' synthetic text.
        if url.startswith("http://") and not _LOOPBACK.fullmatch(url):
            raise ValueError("http:// is for this machine alone (127.0.0.1, localhost); use https://")
        return url

    @property
    def enrolment_address(self) -> str:
        """The host:port that join tokens carry."""
        return join_address(self.advertise[0], self.enrolment_port)

    @property
    def other_enrolment_addresses(self) -> tuple[str, ...]:
        """The enrolment addresses of the federation's other coordinators, which all listen on the same port."""
        hosts = (split_address(address)[0] for address in self.replicas)
        found = dict.fromkeys(join_address(host, self.enrolment_port) for host in hosts)
        return tuple(address for address in found if address != self.enrolment_address)

    @property
    def federation_address(self) -> str:
        """The host:port of the federation, operator and health services."""
        return join_address(self.advertise[0], self.federation_port)

    @property
    def other_addresses(self) -> tuple[str, ...]:
        """The federation addresses of the federation's other coordinators."""
        return tuple(each for each in self.replicas if each != self.federation_address)

    @property
    def own_address(self) -> str:
        """The host:port at which members reach this coordinator, of several."""
        return self.replica_address or self.federation_address

    def disks(self, folder: Path) -> dict[str, Path]:
        """The folders whose disks must not fill up: the coordinator's own, and those of the database and the store.

        A database server and a bucket have none. The URLs are absolute, as `load_config` makes them.
        """
        found = {"folder": folder}
        scheme, _, path = self.database_url.partition(":///")
        path = path.partition("?")[0]
        if scheme.startswith("sqlite") and path and not path.startswith(":memory:"):
            found["database"] = Path(path).parent
        if self.store_url.startswith("file://"):
            found["store"] = Path(self.store_url.removeprefix("file://"))
        return found


class OperatorConfig(Document):
    """operator.toml: which coordinator the operator's certificate beside it belongs to."""

    # host:port of the federation port.
    address: Address
    # The same of the federation's other coordinators, one of which may be the active one.
    other_addresses: Addresses = ()
    # The fingerprint of root.pem.
    federation: Digest


def _host(name: str) -> str:
    """Returns the one spelling of a name, so that lists compare with certificates. Ports have their own keys."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if _HOST_NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a host name or an IP address (without a port)") from None
        return name.lower()


@dataclass(frozen=True, slots=True, repr=False)
class OperatorIdentity:
    """The content of an operator's folder, with PEM as bytes for gRPC."""

    config: OperatorConfig
    certificate_pem: bytes
    key_pem: bytes
    root_pem: bytes


@dataclass(frozen=True, slots=True)
class CoordinatorFolder:
    """The paths of everything in DIR."""

    path: Path

    @property
    def config_toml(self) -> Path:
        return self.path / "coordinator.toml"

    @property
    def authority_certificate(self) -> Path:
        return self.path / "authority" / "root.pem"

    @property
    def authority_key(self) -> Path:
        return self.path / "authority" / "root.key"

    def authority_of(self, number: int) -> tuple[Path, Path]:
        """Returns the paths of certificate and key of an authority; the first has number 1."""
        name = "root" if number == 1 else f"root-{number}"
        folder = self.path / "authority"
        return folder / f"{name}.pem", folder / f"{name}.key"

    @property
    def authorities(self) -> Path:
        """The list of authorities (`tacit.authorities.Authorities`); absent if there has been only one."""
        return self.path / "authority" / "authorities.json"

    @property
    def server_certificate(self) -> Path:
        """The server's certificate and then the authority that issued it, PEM."""
        return self.path / "server" / "cert.pem"

    @property
    def server_key(self) -> Path:
        return self.path / "server" / "key.pem"

    @property
    def operator(self) -> Path:
        return self.path / "operator"

    @property
    def database(self) -> Path:
        return self.path / "tacit.db"

    @property
    def database_mark(self) -> Path:
        """Names the database that this folder's coordinator serves from; see `coordinator.storage.mark`."""
        return self.path / "database.json"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def spool(self) -> Path:
        """Incoming masked vectors and corpora."""
        return self.path / "spool"


# Keys whose environment variable holds a list, separated by commas.
_LISTS = ("advertise", "witnesses", "replicas", "keep_named")


def environment_name(key: str) -> str:
    """Returns the environment variable that overrides a key."""
    return f"TACIT_{key.upper()}"


def load_config(folder: Path, environ: Mapping[str, str] | None = None) -> CoordinatorConfig:
    """Reads DIR/coordinator.toml, applies the `TACIT_*` variables, and makes the URLs absolute.

    Args:
        folder: The coordinator's folder.
        environ: The environment. Default: `os.environ`.

    Raises:
        DocumentInvalid: the file is missing, a key is unknown, or a value is out of range. The sentence names the
            environment variable at fault, if one is.
    """
    path = CoordinatorFolder(folder).config_toml
    if not path.exists():
        raise DocumentInvalid(f"{path} does not exist; create a coordinator with `coordinator init {folder}`")
    config = CoordinatorConfig.from_toml(path)
    environ = os.environ if environ is None else environ
    changes: dict[str, object] = {}
    for key in CoordinatorConfig.model_fields:
        variable = environment_name(key)
        if key == "schema_version" or not environ.get(variable):
            continue
        text = environ[variable]
        changes[key] = [part.strip() for part in text.split(",") if part.strip()] if key in _LISTS else text
    if changes:
        content = config.model_dump(mode="json", by_alias=True) | changes
        names = ", ".join(environment_name(key) for key in sorted(changes))
        config = CoordinatorConfig._from_content(content, f"{path} with {names} from the environment")
    return config.model_copy(
        update={
            "database_url": _absolute_database(config.database_url, folder),
            "store_url": _absolute_store(config.store_url, folder),
        }
    )


def _absolute_database(url: str, folder: Path) -> str:
    # SQLAlchemy's URLs: sqlite:///relative, sqlite:////absolute, sqlite:// for memory.
    scheme, separator, rest = url.partition(":///")
    if not separator or not scheme.startswith("sqlite") or not rest or rest.startswith(("/", ":memory:")):
        return url
    return f"{scheme}:///{folder.resolve() / rest}"


def _absolute_store(url: str, folder: Path) -> str:
    if "://" not in url:
        # Do not use `as_uri`: fsspec does not decode its percent signs.
        return f"file://{folder.resolve() / url}"
    return url


def load_operator(folder: Path) -> OperatorIdentity:
    """Reads an operator's folder (DIR/operator, or a copy of it).

    Raises:
        DocumentInvalid: a file is missing, cannot be used, or is open to other users.
    """
    try:
        check_keys(folder)
    except NotPrivate as error:
        raise DocumentInvalid(str(error)) from error
    except OSError as error:
        raise DocumentInvalid(
            f"{error.filename or folder} cannot be read: {error.strerror}; check permissions"
        ) from error
    config = OperatorConfig.from_toml(folder / "operator.toml")
    parts = {}
    for name in ("cert.pem", "key.pem", "root.pem"):
        try:
            parts[name] = (folder / name).read_bytes()
        except OSError as error:
            raise DocumentInvalid(
                f"{folder / name} cannot be read ({error.strerror}); copy the coordinator's whole operator folder"
            ) from error
    return OperatorIdentity(config, parts["cert.pem"], parts["key.pem"], parts["root.pem"])


def operator_toml(config: OperatorConfig) -> str:
    """Returns the text of operator.toml."""
    return (
        "# The coordinator that this folder's certificate belongs to. The folder can be copied to another "
        f"machine.\nschema = 1\n# host:port of the federation port.\naddress = {_toml(config.address)}\n# The "
        f"same of the other coordinators; commands look for the active one.\nother_addresses = "
        f"{_toml(config.other_addresses)}\n# "
        f"SHA-256 of root.pem.\nfederation = {_toml(config.federation.hex())}\n"
    )


_TEMPLATE = """\
# The coordinator's configuration. An environment variable can override every key: TACIT_ and the key in
# capitals (TACIT_DATABASE_URL=postgresql+psycopg://...; commas separate list items). Paths are relative to
# this file's folder. An unknown key is an error, so that misspelt keys are noticed.
schema = 1

# Names and addresses under which members reach this coordinator. Join tokens carry the first one. The server's
# certificate has them all, and `coordinator serve` renews it when this list changes.
advertise = {advertise}

# Where to listen. Port 0 takes any free port.
listen_host = {listen_host}
# Enrolment with a token: TLS with the server's certificate. Members and future members must reach it.
enrolment_port = {enrolment_port}
# Members, operators and health: mutual TLS. Members must reach it.
federation_port = {federation_port}
# Prometheus metrics: plain HTTP without authentication. Keep it on loopback or on a network of your own.
metrics_host = {metrics_host}
metrics_port = {metrics_port}
# Spans of rounds: the gRPC port of an OpenTelemetry collector (http://HOST:4317, or https://). Empty: nowhere.
traces_to = {traces_to}

# How many processes end members' connections (TLS and gRPC), on Linux. 1: the coordinator's own process does. More
# spread that work over cores; see docs/operations.md before raising it.
workers = {workers}

# Maximum open connections to the enrolment port: in total, and from one address (IPv6: one /64). Behind a load
# balancer everybody has its address, so set both to the same number.
enrolment_connections = {enrolment_connections}
enrolment_connections_per_address = {enrolment_connections_per_address}
# Sustained limits for one member: messages of its session, and calls. It may send 20 seconds' worth at once.
member_messages_per_second = {member_messages_per_second}
member_calls_per_second = {member_calls_per_second}

# Whether the authority's key is on another machine. Requests then wait for `coordinator authority sign` there.
authority_elsewhere = {authority_elsewhere}
# Ed25519 keys of the witnesses that may sign heads of the roster log.
witnesses = {witnesses}

# Several coordinators may share one PostgreSQL: one is active, the others stand by. The host:port at which members
# reach this one; empty: the first name of `advertise` with federation_port.
replica_address = {replica_address}
# The federation addresses of all of them. Members get them when they enrol.
replicas = {replicas}

# Jobs, members, rounds, tokens. SQLite in this folder, or PostgreSQL if one machine is not enough.
database_url = {database_url}
# Weights and bundles: a folder, or s3://BUCKET/PREFIX. Credentials for S3 come from the environment, a profile or the
# machine's role, as AWS's libraries find them, and are never written here.
store_url = {store_url}
# For S3: another endpoint than AWS's (https://minio.example.org), the bucket's region, the authority of the endpoint's
# certificate, and whether the bucket's name is in the path of requests.
s3_endpoint = {s3_endpoint}
s3_region = {s3_region}
# A PEM file.
s3_ca_file = {s3_ca_file}
s3_path_style = {s3_path_style}
# How many GB of this machine's disk copies of S3 blobs may take, in store/cache.
store_cache_gb = {store_cache_gb}

# What `coordinator store prune` leaves of each job: the newest versions (0: all), the best evaluated one and the best
# by members' estimates, exported ones.
keep_versions = {keep_versions}
keep_best = {keep_best}
keep_exported = {keep_exported}
# And the version before each member's first sum, from which the job starts anew if that member withdraws.
keep_restarts = {keep_restarts}
# It also leaves these versions ("JOB/NUMBER").
keep_named = {keep_named}
# How many hours a blob stays that nothing names.
prune_grace_hours = {prune_grace_hours}

# console for people, json for collectors.
log_format = {log_format}

# How many KiB of each upload may be on its way or unread. More keeps longer and faster lines full.
upload_window_kib = {upload_window_kib}

# How many hours a join token is valid.
token_hours = {token_hours}
# How many days a member's certificate is valid. Members renew it by themselves when two thirds of that are over. A
# member that is off for longer than the rest must be invited again. Shorter is safer: this bounds how long a revoked
# certificate can be shown to other members.
member_days = {member_days}
"""


def write_config(path: Path, config: CoordinatorConfig) -> None:
    """Writes coordinator.toml with a comment over every key, after checking that it reads back as the same."""
    values = config.model_dump(mode="json", exclude={"schema_version"})
    text = _TEMPLATE.format(**{key: _toml(value) for key, value in values.items()})
    if CoordinatorConfig._from_content(toml_values(text.encode(), config.max_bytes, str(path)), str(path)) != config:
        raise AssertionError("the template of coordinator.toml lacks a key")
    durable_file(path, text.encode())


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as TOML")
