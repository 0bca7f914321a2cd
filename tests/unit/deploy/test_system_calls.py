"""Coordinator and member work under the system call filters of their units, set on real processes.

`systemd-analyze` lists systemd's own groups of system calls. libseccomp, which comes with systemd, sets the filter.
"""

import ctypes.util
import re
import shutil
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from tests.support.processes import BIN, ROOT, free_ports  # type: ignore[attr-defined]

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or ctypes.util.find_library("seccomp") is None,
    reason="systemd-analyze or libseccomp is not installed: install Debian's package systemd",
)

# Allows the calls in its first argument, refuses others with EPERM as the units do, and executes the other arguments.
LAUNCHER = """
import ctypes, os, sys
library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
library.seccomp_init.restype = ctypes.c_void_p
ERRNO_EPERM, ALLOW = 0x00050000 | 1, 0x7FFF0000
context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ERRNO_EPERM)))
for name in sys.argv[1].split(","):
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        library.seccomp_rule_add(context, ctypes.c_uint32(ALLOW), number, 0)
if library.seccomp_load(context) != 0:
    sys.exit("no filter was set")
os.execv(sys.argv[2], sys.argv[2:])
"""


def group(name: str) -> set[str]:
    """Return the system calls of one of systemd's groups, including those of nested groups."""
    told = subprocess.run(
        ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
    ).stdout
    found = set()
    for line in told.splitlines()[1:]:
        word = line.strip()
        if word.startswith("@"):
            found |= group(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return found


def allowed(unit: str) -> str:
    """Return the calls that a unit's SystemCallFilter lines allow."""
    left: set[str] = set()
    for value in re.findall(r"^SystemCallFilter=(.*)$", (ROOT / "deploy" / "systemd" / unit).read_text(), re.MULTILINE):
        named = set().union(*(group(word) for word in value.lstrip("~").split()))
        left = left - named if value.startswith("~") else left | named
    return ",".join(sorted(left))


def under(unit: str, *words: object) -> list[str]:
    program, *rest = map(str, words)
    return [sys.executable, "-c", LAUNCHER, allowed(unit), str(BIN / program), *rest]


def test_a_call_outside_the_filter_is_refused():
    words = under("coordinator.service", "python", "-c", "import os; os.nice(1)")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    # Without the filter anybody may call it.
    subprocess.run([str(BIN / "python"), "-c", "import os; os.nice(1)"], check=True)


def test_init_serve_backup_and_witness_work_under_the_filters(tmp_path):
    folder = tmp_path / "federation"
    ports = dict(zip(("enrolment", "federation", "metrics"), free_ports(3), strict=True))
    made = under(
        "coordinator.service", "coordinator", "init", folder, *(f"--{name}-port={port}" for name, port in ports.items())
    )
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    serving = under("coordinator.service", "coordinator", "serve", "--dir", folder, "--log-format", "json")
    with subprocess.Popen(serving, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any('"serving"' in line for line in process.stderr)
            for words in (["member", "invite", "aster", "--dir", folder], ["health", "--dir", folder]):
                subprocess.run(
                    under("coordinator.service", "coordinator", *words), check=True, capture_output=True, timeout=60
                )
            backup = under("coordinator-backup.service", "coordinator", "backup", tmp_path / "backup", "--dir", folder)
            done = subprocess.run(backup, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
            root = x509.load_pem_x509_certificate((folder / "authority" / "root.pem").read_bytes())
            look = ["witness", "run", "--folder", tmp_path / "witness", "--address", f"localhost:{ports['enrolment']}"]
            look += ["--federation", root.fingerprint(hashes.SHA256()).hex(), "--once"]
            witness = under("edge_client-witness@.service", "edge_client", *look)
            done = subprocess.run(witness, capture_output=True, text=True, timeout=60, check=False)
            # It stores the head and signs it. The coordinator does not know its key.
            assert "no witness with this key is known" in done.stderr
            assert (tmp_path / "witness" / "log.jsonl").exists()
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def test_a_member_trains_under_its_filter():
    """Includes threads, their affinity and oneDNN's generated code. A round otherwise uses files and sockets."""
    code = (
        "import torch; torch.manual_seed(0); layer = torch.nn.Conv1d(8, 8, 3)\n"
        "layer(torch.randn(4, 8, 50)).sum().backward(); print(float(layer.weight.grad.abs().sum()) > 0)\n"
        "import onnxruntime, grpc.aio, sqlite3, cryptography"
    )
    done = subprocess.run(
        under("edge_client@.service", "python", "-c", code), capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
