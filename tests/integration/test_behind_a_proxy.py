"""Members that reach the coordinator only through an HTTP proxy, by a name that their own machines cannot resolve."""

import json

from tests.support.connect_proxy import ConnectProxy
from tests.support.processes import Federation, command

# Reserved for documentation (RFC 6761): no resolver knows it.
NAME = "coordinator.invalid"
MEMBERS = ("aster", "birch", "cedar")


def test_members_enrol_and_train_through_the_proxy_only(tmp_path, monkeypatch):
    with ConnectProxy({NAME: "127.0.0.1"}, "ward:three") as proxy:
        way = f"http://ward:three@127.0.0.1:{proxy.port}"
        for name in ("grpc_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        # The coordinator itself has no proxy. Everybody who dials it has one, including the operator.
        federation = Federation(tmp_path, host=NAME)
        try:
            monkeypatch.setenv("https_proxy", way)
            federation.enrol(*MEMBERS)

            examined = command("edge_client", "doctor", "--home", federation.home("aster"), "--json")
            checks = {each["check"]: each for each in json.loads(examined.stdout)["checks"]}
            assert examined.returncode == 0, examined.stdout
            assert checks["name"]["status"] == checks["session"]["status"] == "ok"
            assert f"is reached through the proxy 127.0.0.1:{proxy.port}" in checks["name"]["what"]
            assert "three" not in examined.stdout

            federation.job("through", count=1)
            for name in MEMBERS:
                federation.start(name, "--until-finished")
            detail = federation.finished("through")
            assert [len(each.attempts[-1].survivors) for each in detail.rounds] == [len(MEMBERS)]
            # Every session of a member is a tunnel to the federation port of this host.
            assert sum(target == f"{NAME}:{federation.port}" for target in proxy.opened) >= 2 * len(MEMBERS)
            assert {target.rpartition(":")[0] for target in proxy.opened} == {NAME}

            # A proxy that rejects the password, and a proxy that does not exist.
            for wrong, sentence in (
                (way.replace("three", "four"), "wants a user and a password"),
                ("http://127.0.0.1:1", "does not answer"),
            ):
                monkeypatch.setenv("https_proxy", wrong)
                examined = command("edge_client", "doctor", "--home", federation.home("aster"))
                assert examined.returncode == 3
                assert sentence in examined.stdout
                assert "four" not in examined.stdout + examined.stderr
            monkeypatch.setenv("https_proxy", way.replace("three", "four"))
            looked = command(
                "edge_client",
                "run",
                "--home",
                federation.home("aster"),
                "--data",
                federation.data("aster"),
                "--dry-run",
            )
            assert looked.returncode == 3
            assert "did not open a tunnel" in looked.stderr
            assert "four" not in looked.stderr
        finally:
            federation.close()
