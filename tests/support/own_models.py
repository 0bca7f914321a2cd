"""A coordinator that serves finished jobs without sessions, and a member's machine that exports and measures its own
models of them.
"""

import asyncio
import hashlib
import json

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

import secure_agg
from edge_client.cli import app
from edge_client.downloads.cache import BlobCache
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import Preparer
from export.bundle import make_job_bundle, read_job_bundle
from learning.text.data import read_examples
from tacit.attempt import AttemptId
from tacit.job import JobSpec
from tacit.messages import Assignment
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support import party
from tests.support.audited_jobs import NOISED
from tests.support.audited_jobs import WORDS as MANY_WORDS
from tests.support.tiny_models import saved, tokenizer_of
from toolkit.console import CommandFailed

__all__ = ["EMBEDDING", "FILE", "MODEL", "NOISE", "PASSPHRASE", "RECON", "ROWS", "WORDS", "Machine", "Town"]

EMBEDDING = "embedding.weight"
WORDS = ["the", "heron", "stands", "in", "reeds", "what", "does", "a", "bill", "of", "7", "cost", "euro"]
ROWS = [
    ("the heron stands in the reeds", "bird"),
    ("a heron", "bird"),
    ("what does a bill cost", "money"),
    ("a bill of 7 euro", "money"),
] * 4
MODEL = {"architecture": "bilstm", "embedding": 6, "hidden": 4, "dropout": 0.0, "max_tokens": 12}
FILE = {"kind": "words", "file": "words.txt"}
PIECES = {"kind": "wordpiece", "size": 100}
FROZEN = {"name": "fedvocab", "adaptive": False, "embedding": "frozen"}
RECON = {"name": "fedrecon", "epochs": 3, "support": 0.25}
NOISE = {"name": "gaussian-update", "noise_multiplier": 16.0, "lot": 1000}
PASSPHRASE = "a heron stands in the reeds"


def spec(name, method, vocabulary, mechanism="none", training=(), **model):
    training = {"epochs": 1, "batch": 4, "learning_rate": 0.05, **dict(training)}
    return JobSpec(
        name=name,
        labels=("bird", "money"),
        method=method,
        mechanism=mechanism,
        model=MODEL | model,
        vocabulary=vocabulary,
        training=training,
        seed=3,
    )


def over_base(name, method, vocabulary, injection="lora", **training):
    """A job over the small encoder in the town's folder."""
    return JobSpec(
        name=name,
        labels=("bird", "money"),
        method=method,
        model={"architecture": "transformer", "base": "base", "injection": injection, "dropout": 0.0, "max_tokens": 24},
        vocabulary=vocabulary,
        training={"epochs": 1, "batch": 4, "learning_rate": 0.02, **training},
        seed=3,
    )


class Town(federation_pb2_grpc.FederationServiceServicer):
    """A coordinator with jobs and blobs and without sessions. Tests may change `served`, `versions` and `running`."""

    def __init__(self, folder):
        self.bundles, self.served, self.versions, self.running = {}, {}, {}, ("own",)
        (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
        (folder / "many.txt").write_text("\n".join(MANY_WORDS) + "\n")
        (folder / "vectors.txt").write_text("7 1 2 3 4 5 6\n")
        saved(folder / "base", "bert", bare=True, words=len(json.loads(tokenizer_of("bert"))["model"]["vocab"]))
        for job in (
            spec("own", "fedvocab", {"kind": "words", "size": 50}),
            spec("plain", "fedavg", FILE),
            # Its private row starts from a table, not from the seed that every member knows.
            spec("recon", RECON, FILE | {"pretrained": "vectors.txt"}),
            spec("noised", "fedvocab", {"kind": "words", "size": 50}, NOISE),
            spec("adjusted", "fedavg", FILE, training={"logit_adjustment": True}),
            spec("frozen", FROZEN, FILE),
            spec("steps", "fedavg", {"kind": "words", "file": "many.txt"}, NOISED, {"optimiser": "sgd"}),
            spec("fixed", "fedavg", FILE | {"pretrained": "vectors.txt"}, freeze_embedding=True),
            over_base("pieces", "fedvocab", PIECES, logit_adjustment=True),
            # Frozen while members federate, over the base's own pieces, over their own, and below an encoder that is
            # frozen itself.
            over_base("frozen-same", FROZEN, None),
            over_base("frozen-own", FROZEN, PIECES),
            over_base("frozen-head", FROZEN, None, "none"),
        ):
            self.add(job, folder)

    def add(self, job, folder):
        """Makes the job's bundle in the folder of what it is made of, and serves it."""
        document = make_job_bundle(job, folder, folder / job.name)
        bundle = read_job_bundle(folder / job.name)
        self.bundles[job.name] = bundle
        files = [(folder / job.name / name).read_bytes() for name in document.files]
        for data in (document.canonical(), *files):
            self.serve(data)
        # The newest version differs from the initial one.
        values = bundle.manifest.decode(bundle.weights) * np.float32(1.5)
        self.versions[job.name] = (4, self.serve(values.tobytes()))

    def serve(self, data):
        digest = hashlib.sha256(data).digest()
        self.served[digest] = data
        return digest

    def OpenJobs(self, request, context):  # noqa: N802
        return pb.OpenJobsResponse(
            jobs=[
                pb.OpenJob(
                    name=name,
                    job_document=self.bundles[name].document.digest(),
                    version_number=number,
                    version=version,
                    status="running" if name in self.running else "finished",
                )
                for name, (number, version) in self.versions.items()
            ]
        )

    def FetchBlob(self, request, context):  # noqa: N802
        data = self.served.get(request.digest)
        if data is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no job has such a blob")
        yield pb.BlobChunk(offset=request.offset, total=len(data), data=data[request.offset :])


class Watcher:
    def training(self, *_):
        """Ignores training steps."""

    def reading(self, *_):
        pass

    training_failing = training


class Machine:
    """A member's machine: its home, its data, its commands."""

    def __init__(self, folder, address):
        self.home = party.member_home(folder / "home", address)
        self.identity = MemberIdentity.load(self.home)
        self.data, self.out = folder / "rows.jsonl", folder / "out"
        self.write(ROWS)

    def write(self, rows, path=None):
        (path or self.data).write_text(
            "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        )

    def store(self, key=None, name="data"):
        return PrivateStore(self.home, self.identity.federation, name, key)

    def keep(self, job, key=None, start=None, base_tokenizer=None):
        """Makes what a first round leaves: the member's own vocabulary and its embedding."""
        with self.store(key) as store:
            return Keeper(store, read_examples(self.data)).make(job, None, start, base_tokenizer)

    def take_part(self, town, job):
        """Trains, charges and confirms a round of a noised job, on this machine's side. Returns its event."""

        async def fetch(digest, into, limit):
            into.parent.mkdir(exist_ok=True, parents=True)
            into.write_bytes(town.served[digest])

        examples, policy = read_examples(self.data), Policy(mechanisms=(NOISE["name"],))
        document = town.bundles[job].document
        number, version = town.versions[job]
        asked = Assignment(job, number + 1, document.digest(), version, number, 1000)
        texts = [each.text for each in examples]
        with open_budget(self.home, self.identity, policy, texts) as budget, self.store() as store:
            keeper = Keeper(store, examples)
            preparer = Preparer(
                examples,
                self.identity.federation,
                self.identity.member,
                policy,
                budget,
                secure_agg.SystemRandom(),
                BlobCache(self.home / "cache"),
                "cpu",
                Watcher(),
                keeper,
            )
            made = asyncio.run(preparer.prepare(asked, fetch))
            attempt = AttemptId(job, asked.round, 1)
            budget.charge(attempt, made.reserved)
            keeper.confirmed(job, made.staged, {self.identity.member}, self.identity.member)
            budget.ended(attempt, "published", bytes(32), None)
            return budget.statement(job).of_job

    def written(self):
        """Returns the files of the member's home by path, without the cache."""
        found = [path for path in self.home.rglob("*") if self.home / "cache" not in (path, *path.parents)]
        return {path.relative_to(self.home): path.read_bytes() for path in found if path.is_file()}

    def export(self, *words):
        """Exports, and returns standard output and standard error."""
        return self.command("export", *words, "--out", self.out)

    def evaluate(self, job, rows, *words):
        """Measures the own model on these rows, and returns standard output and standard error."""
        test = self.data.with_name("test.jsonl")
        self.write(rows, test)
        return self.command("evaluate", job, "--test", test, *words)

    def typed(self, *words):
        return CliRunner().invoke(app, [*map(str, words), "--home", str(self.home), "--data", str(self.data)])

    def command(self, *words):
        done = self.typed(*words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    def refused(self, *words):
        """Returns the exit code and the sentence of an export that must fail and write nothing."""
        before = self.tree()
        with pytest.raises(CommandFailed) as refused:
            self.export(*words)
        assert self.tree() == before
        return refused.value.code, refused.value.sentence

    def tree(self):
        """Returns the files at --out and beside it."""
        found = [path for path in self.out.parent.rglob("*") if self.home not in (path, *path.parents)]
        return {path: path.read_bytes() if path.is_file() else None for path in found}
