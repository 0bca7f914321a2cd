"""Turns TLS 1.2 off in gRPC, which reads the setting once, when it is first imported."""

import os
import sys

__all__ = ["only_tls_13"]


def only_tls_13() -> None:
    """Sets it, if gRPC is not imported yet. The coordinator's ports speak TLS 1.3 alone in any case."""
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
