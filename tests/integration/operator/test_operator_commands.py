"""The operator's commands, each in a process of its own."""

import asyncio
import json
import os
import signal
import sys
from typing import Any

from tacit.bundle import write_bundle
from tacit.token import JoinToken
from tests.support.operator_house import House, created, fragile, make_job, one_round


def test_commands_manage_members_and_jobs(house):
    async def scenario(house: House) -> None:
        said = await house.cli("status")
        assert "No jobs" in said.out
        assert "coordinator member invite" in said.out

        said = await house.cli("member", "invite", "north", "--valid", "2h")
        assert JoinToken.parse(said.out).member == "north"
        assert "edge_client enrol" in said.err
        said = await house.cli("member", "invite", "south", "--json")
        assert JoinToken.parse(said.json["token"]).member == "south"
        said = await house.cli("member", "list", "--json")
        assert [member["name"] for member in said.json["members"]] == ["north", "south"]
        assert "north" in (await house.cli("member", "list")).out
        said = await house.cli("member", "revoke", "south", code=2)
        assert "--yes" in said.err
        assert (await house.cli("member", "revoke", "south", "--yes", "--json")).json["status"] == "revoked"

        job = make_job()
        bundle = house.tmp / "desk.bundle"
        write_bundle(bundle, "job", job.blobs)
        said = await house.cli("job", "create", "--bundle", str(bundle))
        assert "Job desk is running" in said.out
        said = await house.cli("job", "create", "--bundle", str(bundle), "--json", code=4)
        assert said.json["exit_code"] == 4
        assert "names are never used twice" in said.json["error"]
        await house.database.run(one_round(job))

        (shown,) = (await house.cli("job", "list", "--json")).json["jobs"]
        assert (shown["name"], shown["status"], shown["round"]) == ("desk", "running", 1)
        said = await house.cli("job", "show", "desk")
        assert "1 x mask phase_deadline" in said.out
        assert "2/3" in said.out
        detail = (await house.cli("job", "show", "desk", "--json")).json
        assert detail["rounds"][0]["attempts"][0]["dropouts"][0]["reason"] == "phase_deadline"
        assert detail["versions"][1]["digest"] == job.document.weights.hex()
        assert "paused" in (await house.cli("job", "pause", "desk")).out
        said = await house.cli("status")
        assert "The operator paused the job." in said.out
        assert "desk" in said.out
        assert (await house.cli("job", "resume", "desk", "--json")).json["status"] == "running"
        said = await house.cli("job", "abort", "desk", code=2)
        assert "--yes" in said.err
        assert (await house.cli("job", "abort", "desk", "--yes", "--json")).json["status"] == "aborted"
        said = await house.cli("status", "--json")
        assert said.json["jobs"][0]["reason"] == "job_aborted"

    house(scenario)


def test_a_failing_command_says_what_to_do(house):
    async def scenario(house: House) -> None:
        free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = free.sockets[0].getsockname()[1]
        free.close()
        await free.wait_closed()
        nowhere = house.tmp / "nowhere"
        for arguments, folder, code, words in (
            (("job", "show", "nobody"), None, 5, "there is no job named nobody"),
            (("member", "invite", "Not a name"), None, 2, "is not a valid member name"),
            (("member", "invite", "north", "--valid", "soon"), None, 2, "90m, 24h or 7d"),
            (("job", "create", "--bundle", str(nowhere)), None, 5, "coordinator job bundle"),
            (("job", "create", "--bundle", str(house.tmp)), None, 2, "bundle.json"),
            (("job", "bundle", str(nowhere)), None, 2, "does not exist"),
            (("status",), nowhere, 5, "TACIT_OPERATOR"),
            (("status",), house.operator_folder(port=port), 3, "coordinator serve"),
            (("status",), house.operator_folder(of=1), 3, "has no certificate from this operator folder's federation"),
        ):
            # A command silences gRPC before it imports it. Where the connection fails, gRPC has most to say.
            said = await house.cli(*arguments, folder=folder, code=code, cold=code == 3)
            assert words in said.err, (arguments, said)
            assert said.err.startswith("error: ")
            assert said.out == ""

    house(scenario)


def test_an_address_missing_from_the_certificate_is_explained(house):
    async def scenario(house: House) -> None:
        async with fragile(house.port, lasts=2**30, host="127.0.0.2") as (port, _):
            said = await house.cli("status", folder=house.operator_folder(port=port, host="127.0.0.2"), code=3)
            assert "add that name to `advertise`" in said.err

    house(scenario)


def test_a_rejected_operator_certificate_is_explained(house):
    async def scenario(house: House) -> None:
        # The operator calls the right coordinator with a certificate of another federation.
        folder = house.operator_folder()
        stranger = house.operator_folder(of=1)
        (folder / "cert.pem").write_bytes((stranger / "cert.pem").read_bytes())
        said = await house.cli("status", folder=folder, code=3)
        assert "closed the connection when it saw this operator's certificate" in said.err

    house(scenario)


def test_the_watch_command_follows_until_interrupted(house):
    async def scenario(house: House) -> None:
        environment = {**os.environ, "TACIT_OPERATOR": str(house.operator_folder())}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            # As in a terminal. A shell's background process ignores Ctrl-C, and this one would too. `preexec_fn` would
            # make Python fork this process: on a busy machine, gRPC's fork handlers aborted 24 of 300 children.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from coordinator.cli import main; main()",
            "status",
            "--watch",
            "--json",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )

        async def seen() -> Any:
            line = await process.stdout.readline()
            assert line, (await process.stderr.read()).decode()
            return json.loads(line)["jobs"]

        assert await seen() == []
        await created(house)
        assert (await seen())[0]["name"] == "desk"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130

    house(scenario)
