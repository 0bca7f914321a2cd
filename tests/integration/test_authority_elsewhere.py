"""The authority's key on another machine, with real processes: members wait, a person signs, the log gets entries."""

import json
import shutil

import pytest
from cryptography import x509

from tests.support.processes import command, running_federation, succeed

REFUSED = 4
NAMES = ("north", "east", "south")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A federation with north, whose authority's key has been moved to another machine."""
    with running_federation(tmp_path_factory.mktemp("elsewhere"), "north") as running:
        running.coordinator.stop()
        away = running.folder / "away"
        away.mkdir(mode=0o700)
        shutil.copy(running.dir / "authority" / "root.pem", away)
        shutil.move(running.dir / "authority" / "root.key", away)
        config = running.dir / "coordinator.toml"
        config.write_text(config.read_text().replace("authority_elsewhere = false", "authority_elsewhere = true"))
        running.serve()
        yield running


def asked(federation, out="requests.json"):
    """Writes the requests that wait, and returns their names."""
    return json.loads(federation.operator("authority", "requests", "--out", federation.folder / out, "--json"))[
        "requests"
    ]


def sign(federation, *more, requests="requests.json"):
    away = federation.folder / "away"
    words = ("--cert", away / "root.pem", "--key", away / "root.key", "--out", federation.folder / "signed.json", *more)
    return command("coordinator", "authority", "sign", federation.folder / requests, *words)


def test_members_join_and_train_while_the_key_is_elsewhere(federation):
    tokens = {name: federation.token(name) for name in NAMES[1:]}

    def enrol(name):
        return command("edge_client", "enrol", tokens[name], "--home", federation.home(name))

    for name in tokens:
        done = enrol(name)
        assert done.returncode == REFUSED
        assert "waits for the federation's authority" in done.stderr
    # Asking again changes nothing.
    enrol("east")
    assert asked(federation) == ["east", "south"]

    # On the machine with the key, each is shown before it is signed.
    assert "Confirm with --yes" in sign(federation).stderr
    done = sign(federation, "--yes")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in NAMES[1:])
    imported = json.loads(federation.operator("authority", "import", federation.folder / "signed.json", "--json"))
    assert imported == {"imported": ["east", "south"], "refused": []}
    assert asked(federation) == []

    for name, token in tokens.items():
        succeed("edge_client", "enrol", token, "--home", federation.home(name))
        shutil.copy(federation.home("north") / "policy.toml", federation.home(name))
    listed = json.loads(command("edge_client", "members", "--home", federation.home("east"), "--json").stdout)
    assert [(each["kind"], each["name"]) for each in listed["new"]] == [
        ("issued", "north"),
        ("issued", "east"),
        ("issued", "south"),
    ]
    federation.job("elsewhere", count=1)
    running = [federation.start(name, "--until-finished") for name in NAMES]
    federation.finished("elsewhere")
    assert [each.process.wait(timeout=60) for each in running] == [0, 0, 0]

    # What was imported before fits no request any more.
    done = command("coordinator", "authority", "import", federation.folder / "signed.json", "--dir", federation.dir)
    assert done.returncode == REFUSED
    assert "no open request" in done.stderr


def test_what_does_not_fit_is_not_signed(federation):
    west = federation.token("west")
    command("edge_client", "enrol", west, "--home", federation.home("west"))
    assert asked(federation, "more.json") == ["west"]
    path = federation.folder / "more.json"
    batch = json.loads(path.read_text())
    entry = batch["requests"][0]
    bent = {
        "another's key": [entry, {**entry, "member": "ghost"}],
        "one name twice": [entry, {**entry, "request": entry["request"][:-2] + "00"}],
        "a signature that does not match": [{**entry, "request": entry["request"][:-2] + "00"}],
    }
    for what, requests in bent.items():
        path.write_text(json.dumps({**batch, "requests": requests}))
        done = sign(federation, "--yes", "--json", requests="more.json")
        assert done.returncode == REFUSED, what
        assert json.loads(done.stdout)["signed"] == [], what
    # With a copy of the log, a renewal must be of a key in it, and nobody gets another's key.
    export = federation.folder / "log-north.jsonl"
    command("edge_client", "members", "--home", federation.home("north"), "--export", export)
    for kind, code in (("renew", REFUSED), ("enrol", 0)):
        path.write_text(json.dumps({**batch, "requests": [{**entry, "kind": kind}]}))
        assert sign(federation, "--yes", "--known", export, requests="more.json").returncode == code
    # Revoked in between: the certificate is signed, and nobody gets it.
    federation.operator("member", "revoke", "west", "--yes")
    done = command("coordinator", "authority", "import", federation.folder / "signed.json", "--dir", federation.dir)
    assert done.returncode == REFUSED
    assert "no open request" in done.stderr
    assert command("edge_client", "enrol", west, "--home", federation.home("west")).returncode == REFUSED


def test_each_mistake_gets_a_sentence(federation, tmp_path):
    away = federation.folder / "away"
    asked(federation)
    done = sign(federation, requests="none.json")
    assert (done.returncode, "cannot be read" in done.stderr) == (2, True)
    done = command("coordinator", "authority", "import", federation.folder / "requests.json", "--dir", federation.dir)
    assert done.returncode == 2
    assert "pass the file that the command before this one wrote" in done.stderr
    done = command("coordinator", "authority", "requests", "--out", "/proc/none", "--dir", federation.dir)
    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)
    done = command(
        "coordinator",
        "operator",
        "issue",
        "anna",
        "--role",
        "operator",
        "--out",
        tmp_path / "anna",
        "--dir",
        federation.dir,
    )
    assert done.returncode == REFUSED
    assert "on another machine" in done.stderr
    # The key must really be away.
    federation.coordinator.stop()
    shutil.copy(away / "root.key", federation.dir / "authority")
    done = command("coordinator", "serve", "--dir", federation.dir)
    assert done.returncode != 0
    assert "move the file there" in done.stderr
    (federation.dir / "authority" / "root.key").unlink()
    root = x509.load_pem_x509_certificate((away / "root.pem").read_bytes())
    assert root is not None
    federation.serve()
