"""Generates the Python code of proto/tacit/v1. With `--check` it only compares the committed code with that.

grpcio-tools is pinned to the release that stamps protobuf 6.33.5, because newer ones make code that older runtimes
refuse.
"""

import argparse
import importlib.resources
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `out`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tacit" / "v1").glob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *flags, *sources])
    if status:
        sys.exit(f"protoc failed with status {status}")
    # The generator writes a grpc file for every source; those without a service are empty.
    for path in (out / "tacit" / "v1").glob("*_pb2_grpc.py"):
        if "Stub" not in path.read_text():
            path.unlink()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed code, change nothing")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "tacit" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "tacit" / "v1").glob("*_pb2*")}
    if fresh != committed:
        differing = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
        sys.exit(f"generated code is not up to date: {', '.join(differing)}; run `make gen` and commit")


if __name__ == "__main__":
    main()
