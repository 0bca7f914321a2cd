"""Two coordinators over one PostgreSQL and one bucket, as real processes, each with its own network to the database.

Guarantees: both are started as an operator would, from two copies of one folder. Every process, server and network is
ended, however the measurement ends.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from benchmarks.library.federation import BIN, Federation, free_ports
from coordinator.config import CoordinatorFolder, OperatorConfig, load_config, operator_toml, write_config
from tests.support.bad_network import BadNetwork
from tests.support.postgres import running_postgres
from tests.support.s3_server import BUCKET, served

__all__ = ["NAMES", "Replicas", "replicas"]

NAMES = ("first", "second")
_MAX_RESTARTS = 20


class Replicas(Federation):
    """A federation with two coordinators, `first` and `second`, whose logs are FOLDER/NAME.log."""

    def __init__(self, folder: Path, policy: str, database_url: str, store: dict[str, Any]) -> None:
        """Make both folders.

        Args:
            folder: where everything is kept.
            policy: of the members.
            database_url: an empty PostgreSQL database.
            store: keys of coordinator.toml for the common store.
        """
        super().__init__(folder, policy, f"--database-url={database_url}")
        # How often one ended although it should not: on a crowded machine, one that was not run for too long.
        self.restarts = 0
        url = make_url(database_url)
        self.networks = {name: BadNetwork(url.port or 5432) for name in NAMES}
        self.dirs = {"first": self.dir, "second": folder / "second"}
        shutil.copytree(self.dir, self.dirs["second"])
        ports = {name: free_ports(3) for name in NAMES}
        addresses = [f"localhost:{federation}" for _, federation, _ in ports.values()]
        for (name, (enrolment, federation, metrics)), address in zip(ports.items(), addresses, strict=True):
            beside = url.set(port=self.networks[name].port).render_as_string(hide_password=False)
            config = load_config(self.dirs[name]).model_copy(
                update={
                    "advertise": ("localhost",),
                    "enrolment_port": enrolment,
                    "federation_port": federation,
                    "metrics_port": metrics,
                    "replicas": tuple(addresses),
                    "replica_address": address,
                    "database_url": beside,
                    **store,
                }
            )
            write_config(CoordinatorFolder(self.dirs[name]).config_toml, config)
        operator = self.dir / "operator" / "operator.toml"
        known = OperatorConfig.from_toml(operator)
        operator.write_text(
            operator_toml(known.model_copy(update={"address": addresses[0], "other_addresses": tuple(addresses[1:])}))
        )

    def run(self, name: str) -> None:
        """Start a coordinator. It logs `serving`, or `standing_by`."""
        self.spawn(name, [BIN / "coordinator", "serve", "--dir", self.dirs[name], "--log-format=json"])

    def check(self) -> None:
        """As of one coordinator; but as a supervisor would, start one again that ended by itself.

        Raises:
            MeasurementFailed: a member failed, or coordinators end again and again.
        """
        for name in NAMES:
            process = self._processes.get(name)
            if process is not None and name not in self._ending and process.poll() is not None:
                self.restarts += 1
                if self.restarts <= _MAX_RESTARTS:
                    self.run(name)
        super().check()

    def close(self) -> None:
        """End all processes and networks."""
        for network in self.networks.values():
            network.release()
        self.end()
        for network in self.networks.values():
            network.close()


@contextlib.contextmanager
def replicas(folder: Path, policy: str) -> Iterator[Replicas]:
    """Make a federation of two coordinators over a PostgreSQL server and an S3 server (moto) of its own.

    Neither coordinator runs yet.
    """
    with running_postgres() as postgres, served() as (_, proxy):
        store = {"store_url": f"s3://{BUCKET}/{int(time.time())}", "s3_endpoint": proxy.url, "s3_path_style": True}
        made = Replicas(folder, policy, postgres.database(), store)
        try:
            yield made
        finally:
            made.close()
