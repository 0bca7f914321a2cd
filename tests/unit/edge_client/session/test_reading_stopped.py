"""A member that is stopped while a frozen backbone reads its rows goes on where it was: its real preparation."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.private_store.features import FeatureFile
from edge_client.private_store.sealing import StoreKey
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import Preparer
from export.bundle import make_job_bundle, read_job_bundle
from learning.prompts.features import FeatureStore
from learning.text.examples import Example
from tacit.job import JobSpec
from tacit.messages import Assignment
from tests.support import party
from tests.support.random_sources import Seeded
from tests.support.tiny_models import saved

LABELS = ["good", "bad"]
KEY = StoreKey("key-file", b"k" * 32)
# Rows of several lengths, so that there are many parts, and some that are equal.
WORDS = ["a", "great", "film", "it", "was", "good", "bad", "terrible", "movie", "and", "yes", "no"]
DRAWS = np.random.default_rng(0)
TEXTS = [" ".join(DRAWS.choice(WORDS, 4 + place % 15)) for place in range(250)]
ROWS = [Example(text, LABELS[place % 2]) for place, text in enumerate([*TEXTS, *TEXTS[:50]])]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    saved(folder / "base", "bert")
    model = {"architecture": "prompted", "base": "base", "max_tokens": 24, "injection": "none", "onnx": "float32"}
    whole = {"schema": 1, "name": "heads", "labels": LABELS, "model": model | {"task": {"name": "head"}}}
    make_job_bundle(JobSpec.model_validate(whole), folder, folder / "bundle")
    return folder / "bundle"


class Watcher:
    """Notes what is read, and calls `stop` once after so many parts."""

    def __init__(self, stop=None, after=0):
        self.seen, self._stop, self._after = [], stop, after

    def training(self, *_):
        pass

    def training_failing(self, *_):
        raise AssertionError("this training does not fail")

    def reading(self, job, round, done, rows):
        assert (job, round) == ("heads", 1)
        self.seen.append((done, rows))
        if len(self.seen) == self._after:
            self._stop()


def member(identity, folder, watcher, runtime, features):
    """What prepares the update of a member's first round, made anew as by a new process."""
    home = identity.home
    job = read_job_bundle(folder).document
    served = {hashlib.sha256(data).digest(): data for data in (each.read_bytes() for each in folder.iterdir())}

    async def fetch(digest, into, limit):
        assert len(served[digest]) <= limit
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(served[digest])

    async def prepare():
        policy = Policy(mechanisms=("none",), backbones=("disk", "coordinator"))
        with open_budget(home, identity, policy, [each.text for each in ROWS]) as budget:
            preparer = Preparer(
                ROWS,
                identity.federation,
                identity.member,
                policy,
                budget,
                Seeded(3),
                BlobCache(home / "cache"),
                "cpu",
                watcher,
                Keeper(PrivateStore(home, identity.federation, "data"), ROWS),
                features=features,
                runtime=runtime,
            )
            assignment = Assignment("heads", 1, job.digest(), bytes(job.weights), 0, 1000)
            return await preparer.prepare(assignment, fetch)

    return prepare


def kept(home, said=None, piece_seconds=0.0):
    told = [] if said is None else said
    return FeatureStore(keeper=FeatureFile(home, "data", KEY, told.append), piece_seconds=piece_seconds)


@pytest.mark.parametrize("runtime", ["torch", "device"])
def test_a_member_that_is_stopped_while_it_reads_computes_the_rest_alone(bundle, tmp_path, runtime):
    whole, identity = (party.member(tmp_path / name, "localhost:7441") for name in ("whole", "stopped"))
    home, undisturbed = identity.home, Watcher()
    expected = asyncio.run(member(whole, bundle, undisturbed, runtime, FeatureStore())())
    parts, rows = undisturbed.seen, undisturbed.seen[-1][1]
    assert (len(parts) > 5, rows, parts[-1][0]) == (True, len({each.text for each in ROWS}), rows)

    async def stopped():
        loop = asyncio.get_running_loop()

        async def cancel():
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)

        # The thread goes on only once the preparation has been told.
        watcher = Watcher(lambda: asyncio.run_coroutine_threadsafe(cancel(), loop).result(), after=4)
        task = asyncio.create_task(member(identity, bundle, watcher, runtime, kept(home))())
        with pytest.raises(asyncio.CancelledError):
            await task
        return watcher.seen

    seen = asyncio.run(stopped())
    # It ended at once, and the parts that it had read are on the disk.
    assert seen == parts[:4]
    read = seen[-1][0]
    assert len(list((home / "features").iterdir())) == 4

    said, again = [], Watcher()
    update = asyncio.run(member(identity, bundle, again, runtime, kept(home, said))())
    # What is left, in the parts of the training that nobody stopped.
    assert again.seen == [(done - read, rows - read) for done, _ in parts[4:]]
    assert update.update.change.tobytes() == expected.update.change.tobytes()
    # Now they are one file.
    assert len(list((home / "features").iterdir())) == 1
    last = Watcher()
    asyncio.run(member(identity, bundle, last, runtime, kept(home, said))())
    assert (last.seen, said) == ([], [])


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from edge_client.private_store.features import FeatureFile
from edge_client.private_store.sealing import StoreKey
from learning.prompts.features import FeatureStore
import toolkit.durable

home, part, point = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
file = FeatureFile(home, "data", StoreKey("key-file", b"k" * 32))
inner = os.fsync

def compute(places):
    for at in range(0, len(places), 2):
        if at // 2 == part:
            if point == "between":
                os.kill(os.getpid(), signal.SIGKILL)
            # Within the writing of the part: its bytes are in a file that has no name yet.
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        yield places[at:at + 2], np.array([[place, 0.5] for place in places[at:at + 2]], np.float32)

FeatureStore(keeper=file, piece_seconds=0.0).read(b"k" * 32, [bytes([n]) * 32 for n in range(10)], compute)
"""


@pytest.mark.parametrize("point", ["between", "within"])
def test_a_member_that_is_killed_while_it_reads_keeps_every_whole_part(tmp_path, point):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", KILLED, home, "3", point], cwd=root, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert any(name.endswith(".partial") for name in os.listdir(home / "features")) == (point == "within")
    said, asked = [], []

    def compute(places):
        asked.extend(places)
        yield places, np.array([[place, 0.5] for place in places], np.float32)

    found = kept(home, said).read(b"k" * 32, [bytes([n]) * 32 for n in range(10)], compute)
    assert found[:, 0].tolist() == list(range(10))
    assert (asked, said) == ([6, 7, 8, 9], [])
    assert len(os.listdir(home / "features")) == 1
