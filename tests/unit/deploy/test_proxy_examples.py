"""The proxy examples in deploy/proxy pass TCP through. haproxy and nginx check them where installed."""

import re
import shutil
import subprocess

import pytest

from tests.support.processes import ROOT  # type: ignore[attr-defined]

FOLDER = ROOT / "deploy" / "proxy"


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
    # nginx resolves its upstreams when it reads the file, so the name must resolve here.
    text = (FOLDER / "nginx-stream.conf").read_text().replace("coordinator.internal", "127.0.0.1")
    whole = tmp_path / "nginx.conf"
    whole.write_text(
        f"include /etc/nginx/modules-enabled/*.conf;\npid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\n{text}"
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
