"""Coordinators over one PostgreSQL, as real processes with folders and ports of their own, and light members."""

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coordinator.config import CoordinatorConfig, CoordinatorFolder, OperatorConfig, operator_toml, write_config
from tests.support.besieged import Besieged
from tests.support.processes import BIN, Process, free_ports, succeed

__all__ = ["MEMBERS", "Replica", "Replicas", "Town"]

MEMBERS = ("north", "east", "south", "west")


class Replica:
    """One coordinator: its folder, its ports, and its process while it runs."""

    def __init__(self, name: str, folder: Path, log: Path, config: CoordinatorConfig) -> None:
        self.name = name
        self.dir = folder
        self.config = config
        self.address = config.own_address
        self._log = log
        self.process: Process | None = None

    def start(self) -> Process:
        """Starts the process. It logs `serving` or `standing_by`."""
        words = [str(BIN / "coordinator"), "serve", "--dir", str(self.dir), "--log-format", "json"]
        self.process = Process(self.name, words, self._log)
        return self.process

    @property
    def running(self) -> Process:
        """The process, which must have been started."""
        assert self.process is not None
        return self.process

    def halt(self) -> None:
        """Stops the process as SIGSTOP does: it hangs, and its connections stay open."""
        self.running.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets a halted process go on."""
        self.running.process.send_signal(signal.SIGCONT)


class Replicas(Besieged):
    """A federation with two coordinators, `first` and `second`. The first one is active at the beginning."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        *,
        second_database_url: str | None = None,
        store: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Makes the federation and starts both coordinators.

        Args:
            folder: Where everything is kept.
            database_url: An empty PostgreSQL database.
            second_database_url: Another way to the same database, for the second coordinator.
            store: Keys of coordinator.toml that name the common store; by default, a folder.
        """
        self.folder = folder
        self.dir = folder / "federation"
        self.processes = []
        pairs = [free_ports(3) for _ in range(2)]
        addresses = tuple(f"localhost:{federation}" for _, federation, _ in pairs)
        succeed("coordinator", "init", self.dir, "--listen-host=127.0.0.1", "--database-url", database_url)
        urls = (database_url, second_database_url or database_url)
        shutil.copytree(self.dir, folder / "second")
        made = []
        for name, path, own, url in zip(("first", "second"), (self.dir, folder / "second"), pairs, urls, strict=True):
            enrolment, federation, metrics = own
            config = CoordinatorConfig(
                advertise=("localhost",),
                listen_host="127.0.0.1",
                enrolment_port=enrolment,
                federation_port=federation,
                metrics_port=metrics,
                replicas=addresses,
                database_url=url,
                **{"store_url": str(folder / "store"), **store},
            )
            write_config(CoordinatorFolder(path).config_toml, config)
            made.append(Replica(name, path, folder / f"{name}.log", config))
        self.first, self.second = made
        operator = self.dir / "operator" / "operator.toml"
        known = OperatorConfig.from_toml(operator)
        operator.write_text(
            operator_toml(known.model_copy(update={"address": addresses[0], "other_addresses": addresses[1:]}))
        )
        for replica, event in ((self.first, "serving"), (self.second, "standing_by")):
            self.run(replica, event)
        self.coordinator = self.first.running
        self.metrics_port = pairs[0][2]

    def run(self, replica: Replica, *events: str) -> Process:
        """Starts a coordinator, and waits until it logs one of these events."""
        process = replica.start()
        self.processes.append(process)
        process.wait_for(*events)
        return process

    def other(self, replica: Replica) -> Replica:
        """The one that is not this one."""
        return self.second if replica is self.first else self.first


class Town(Replicas):
    """Two coordinators and four light members. `active` serves."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.enrol(*MEMBERS)
        self.members = {name: self.light(name) for name in MEMBERS}
        self.active: Replica = self.first

    @property
    def standby(self) -> Replica:
        """The other one."""
        return self.other(self.active)

    def in_the_middle(self, job: str) -> None:
        """Returns in a round of a new job whose members have sent their vectors, and where one does not go on."""
        self.light_job(job, count=100_000, embedding=16)
        self.order("west", "halt", "confirm")
        self.members["west"].wait_for("halted")

    def taken_over(self, how: str) -> None:
        """Returns once the standby serves. The lease must have passed in this way."""
        before, self.active = self.active, self.standby
        self.active.running.wait_for("serving")
        found = self.takeovers()
        assert found[-1]["how"] == how
        assert (found[-1]["before"], found[-1]["address"]) == (before.address, self.active.address)
        assert [each["fence"] for each in found] == list(range(1, len(found) + 1))

    def takeovers(self) -> list[dict[str, Any]]:
        """The journal's entries of takeovers."""
        entries = map(json.loads, self.operator("audit", "show", "--json").splitlines())
        return [entry["fields"] for entry in entries if entry["kind"] == "lease_taken"]

    def goes_on_from_there(self, job: str) -> None:
        """Checks that the job goes on: no version lost, none made twice, no member counted twice."""
        self.order("west")
        self.goes_on(job, 1)
        self.abort(job)
        self.sound(job, MEMBERS)
        self.operator("audit", "verify")
