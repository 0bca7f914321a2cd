"""Whether a process told the maker of onnxruntime what it did.

Its telemetry first keeps the identity of the session in a file, beside other temporary ones.
"""

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["has_reported", "where_it_reports"]

# Each of them switches telemetry off: in the tests of its maker, where CI runs, and by Tacit in this process.
_QUIET = {"CI", "GITHUB_ACTIONS", "TF_BUILD", "ORT_RUNNING_UNIT_TESTS", "ORT_DISABLE_TELEMETRY"}


def where_it_reports(folder: Path) -> Mapping[str, str]:
    """An environment in which a process reports unless it switches that off.

    Nothing is sent from it: its way out is a port where nobody listens.

    Args:
        folder: for its temporary files.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _QUIET}
    away = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return {**kept, **away, "TMPDIR": str(folder)}


def has_reported(folder: Path) -> bool:
    """Whether a process with that environment began to."""
    return (folder / ".ses").exists()
