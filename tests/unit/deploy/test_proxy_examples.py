"""The proxy examples in deploy/proxy pass TCP through. haproxy and nginx check them where installed."""

import re
import shutil
import subprocess

import pytest

from tests.support.processes import ROOT  # type: ignore[attr-defined]

FOLDER = ROOT / "deploy" / "proxy"
# What the docs promise. After a break, a member's old connection may live on beside its new
# one, and strangers enrol.
MEMBERS = 10_000
CONNECTIONS = 2 * MEMBERS + 512
# A line that belongs into nginx.conf itself, so the example has it in a comment.
_EVENTS = "events { worker_connections 50000; }"


def test_haproxy_accepts_its_file():
    program = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("haproxy is not installed: install Debian's package haproxy")
    done = subprocess.run([program, "-c", "-f", FOLDER / "haproxy.cfg"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nginx_accepts_its_file(tmp_path):
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("nginx is not installed: install Debian's packages nginx and libnginx-mod-stream")
    assert _EVENTS in (FOLDER / "nginx-stream.conf").read_text()
    # nginx resolves its upstreams when it reads the file, so the name must resolve here.
    text = (FOLDER / "nginx-stream.conf").read_text().replace("coordinator.internal", "127.0.0.1")
    whole = tmp_path / "nginx.conf"
    whole.write_text(
        f"include /etc/nginx/modules-enabled/*.conf;\npid {tmp_path}/pid;\nerror_log stderr;\n{_EVENTS}\n{text}"
    )
    done = subprocess.run([program, "-t", "-c", whole], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["haproxy.cfg", "nginx-stream.conf"])
def test_tls_stays_closed_and_silent_sessions_outlast_pings(name):
    text = "\n".join(line.partition("#")[0] for line in (FOLDER / name).read_text().splitlines())
    assert not re.search(r"\b(ssl|crt|ssl_certificate|http2|send-proxy|proxy_protocol)\b", text)
    assert {"7440", "7441"} <= set(re.findall(r"\b744\d\b", text))
    minutes = [int(each) for each in re.findall(r"(?:timeout client|timeout server|proxy_timeout)\s+(\d+)m", text)]
    # Both sides ping at least once a minute.
    assert minutes
    assert min(minutes) > 2


def _number(name, pattern):
    (found,) = re.findall(pattern, (FOLDER / name).read_text(), flags=re.MULTILINE)
    return int(found)


def test_haproxy_has_room_for_the_members_that_the_docs_promise():
    # The limit of a frontend is the global one. haproxy raises its limit of open files by itself.
    assert _number("haproxy.cfg", r"^    maxconn (\d+)$") >= CONNECTIONS
    # Towards the coordinator each connection takes one of the kernel's 28,232 ports.
    assert _number("haproxy.cfg", r"^    maxconn (\d+)$") < 28_232


def test_nginx_has_room_for_the_members_that_the_docs_promise():
    # One worker may get all connections, and counts both sides of each.
    connections = _number("nginx-stream.conf", r"worker_connections (\d+)")
    assert connections >= 2 * CONNECTIONS
    assert connections < _number("nginx-stream.conf", r"^worker_rlimit_nofile (\d+);$")
