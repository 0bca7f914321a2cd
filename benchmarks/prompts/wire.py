"""Counts the bytes of prompts on the paper's backbones.

wire        BERT-base, RoBERTa-base and T5-base (v1.0) with random values. Three real members (`library.members`: real
            sessions, secure aggregation and uploads, no training) connect to a coordinator process over mutual TLS,
            each through its own counter. Jobs are real, with a real backbone's config and digest and the tensors that
            members would train. Each case has two jobs, of one round and of three. Half their difference is one round,
            without the bytes sent once a job. Above a million values there is only one job of one round, and its
            figure includes the bytes sent once a job (about 5 KB). No member downloads the backbone here. Full
            fine-tuning is computed: all values of the backbone, times the bytes a value of the largest method.
backbone    A coordinator (`coordinator serve`) and three members (`edge_client run`) train for one round. Two members
            have the backbone on their disk. The third downloads it from the coordinator, over mutual TLS, through a
            proxy that resets the connection twice and counts bytes. Seconds are from the first byte in the member's
            cache to the file under its digest's name. They include both reconnections, the check of the digest, and
            the proxy, which shares this machine's cores. Memory is the member's resident size, sampled while the file
            grows. Then the member joins a second job on the same backbone.

The paper is FedPrompt (Zhao et al. 2023): tables II and VI.
"""

import asyncio
import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.library.federation import BIN, Federation, MeasurementFailed, federation
from benchmarks.library.record import ROOT, Figure, Results, open_results, parser
from benchmarks.library.untrained import POLICY, member_names, start_members
from benchmarks.private_vocabularies.wire import Counter, dial, per_round
from learning.backbones.layout import checked_config, layout_of, library_config
from learning.backbones.stored import StoredBackbone, digest_of, read_backbone
from learning.text.cloze import ClozeEncoder
from learning.text.cloze_tokenizer import own_form
from learning.text.encoder import UNKNOWN
from secure_agg import packed_size
from tacit import prompt
from tacit.blobs import put_blob
from tacit.job import Deadlines, JobDocument, Rounds
from tacit.manifest import Manifest
from tacit.v1 import operator_pb2 as pb
from tacit.vector import layout_of as vector_layout
from tests.support.bad_network import BadNetwork, Fault, Way

__all__ = ["METHODS", "PARTS", "SHAPES", "Fetching", "full_values", "resumed_places", "run", "write_model"]

BENCH = "fedprompt_wire"
PARTS = ("wire", "backbone")

MEMBERS, ROUNDS = 3, (1, 3)
# Above this number of values there is only one job of one round.
LARGE = 1_000_000
JOB_SECONDS = 600.0
# All members share this machine's cores. A deadline only ends a round that fails.
_DEADLINES = dict.fromkeys(("training", "advertise", "share", "mask", "confirm", "unmask"), 600.0)
_SAMPLE_SECONDS = 0.005
# Number of times to wait for a federation's members.
_PATIENCE = 5

_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_WORDS = {"vocab_size": 30_522, "max_position_embeddings": 512, "type_vocab_size": 2, "masked_lm": True}

# Configs as in a job's document.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "bert-base": {"model_type": "bert", **_BERT, **_WORDS},
    "roberta-base": {
        "model_type": "roberta",
        **_BERT,
        "vocab_size": 50_265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "masked_lm": True,
    },
    "t5-base": {"model_type": "t5", **_T5, "vocab_size": 32_128, "lm_head": False, "scale_decoder_outputs": True},
    "minilm": {"model_type": "bert", **_MINILM, **_WORDS},
    "tiny-bert": {"model_type": "bert", **_TINY, **_WORDS},
}
WIRE_SHAPES, QUICK_SHAPE = ("bert-base", "roberta-base", "t5-base"), "tiny-bert"

# The prefix is the paper's. With a hidden layer, a network makes it.
METHODS: Mapping[str, prompt.Injection] = {
    "prompt-tuning": prompt.PromptTuning(tokens=20),
    "p-tuning-mlp": prompt.PTuning(tokens=20, encoder="mlp", hidden=768),
    "p-tuning-lstm": prompt.PTuning(tokens=20, encoder="lstm", hidden=768),
    "prefix-tuning": prompt.PrefixTuning(tokens=5),
    "prefix-tuning-mlp": prompt.PrefixTuning(tokens=5, hidden=512),
    "lora": prompt.LoRA(rank=8, alpha=16),
}
FULL = "fine-tuning"

# The paper's millions of values, and why ours differ.
_ROWS = (
    "the paper's 0.016 M is 21 rows of 768; ours leaves out the row that no position uses, which would be noised and "
    "sent for nothing"
)
_BIASES = (
    "the paper's is ours plus the second biases of torch's LSTM (12,288 values with the same gradient as the first "
    "ones) and 21 rows of prompts"
)
_WITH_ROWS, _WITH_TWENTY = (f"the paper's is ours plus {rows} rows of prompts" for rows in (21, 20))
PAPER: Mapping[tuple[str, str], tuple[float, str]] = {
    ("prompt-tuning", "bert-base"): (0.016, _ROWS),
    ("prompt-tuning", "roberta-base"): (0.016, _ROWS),
    ("prompt-tuning", "t5-base"): (0.015, "the same"),
    **{("p-tuning-lstm", shape): (25.42, _BIASES) for shape in WIRE_SHAPES},
    ("prefix-tuning-mlp", "t5-base"): (9.853, "the same; without the network, 5 tokens are `prefix-tuning`"),
    (FULL, "bert-base"): (109.53, _WITH_ROWS),
    (FULL, "roberta-base"): (124.714, _WITH_ROWS),
    (FULL, "t5-base"): (222.919, _WITH_TWENTY),
}

# A cloze that every tokenizer below can encode: words of one letter, with nothing before them.
LABELS = ("a", "b", "c", "d", "e", "f")
TASK = prompt.Cloze(template="{text} ({mask}).", verbaliser={label: (label,) for label in LABELS})
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


# ---- backbones of random values ---------------------------------------------------------------------------------


def full_values(shape: str) -> int:
    """Return the number of values that full fine-tuning of the backbone with its word head would send."""
    layout = layout_of(checked_config(SHAPES[shape]))
    return (layout.size - len(layout.header)) // 4


def write_model(folder: Path, shape: str) -> Path:
    """Write a folder as save_pretrained does: config.json, random values and tokenizer.json.

    Returns:
        The path of the values' file, which is canonical.
    """
    folder.mkdir()
    config = checked_config(SHAPES[shape])
    layout = layout_of(config)
    random = np.random.default_rng(0)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(layout.header)
        for name, sizes in layout.shapes.items():
            values = random.standard_normal(sizes, dtype=np.float32) * np.float32(0.02)
            # Normalisation layers start at one.
            values += np.float32("orm.weight" in name)
            file.write(values.astype("<f4", copy=False).data)
    (folder / "config.json").write_text(json.dumps(library_config(config)))
    (folder / "tokenizer.json").write_bytes(_tokenizer(config["model_type"]))
    return path


def _tokenizer(kind: str) -> bytes:
    """Return a tokenizer of letters in the backbone's form. Its ids are rows of any word table."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    marks = list("().,?!'")
    if kind == "t5":
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
        pieces += [(each, -4.0) for each in [*_LETTERS, *marks]] + [("<extra_id_0>", 0.0)]
        made = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "roberta":
        entries = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "<mask>"]
        made = Tokenizer(models.BPE(vocab={entry: at for at, entry in enumerate(entries)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{each}" for each in _LETTERS), *marks]
        made = Tokenizer(models.WordPiece({entry: at for at, entry in enumerate(entries)}, unk_token=UNKNOWN))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text: str = made.to_str()
    return text.encode()


# ---- wire -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Base:
    """A backbone on the coordinator."""

    shape: str
    digest: bytes
    stored: StoredBackbone
    tokenizer: bytes


@dataclass(frozen=True)
class _Parts:
    """The start of a job."""

    model: prompt.PromptedModel
    manifest: Manifest
    weights: bytes


def _parts(base: _Base, method: str, seed: int) -> _Parts:
    """Make the tensors that members would train, as `coordinator job bundle` does.

    Args:
        seed: differs between jobs, so that no version 0 is in a member's cache.
    """
    from learning.prompts.assembly import build_prompted

    model = prompt.PromptedModel(
        config=checked_config(SHAPES[base.shape]),
        backbone=base.digest,
        injection=METHODS[method],
        task=TASK,
        max_tokens=32,
    )
    module = build_prompted(model, LABELS, ClozeEncoder.of(model, base.tokenizer), base.stored, seed=seed)
    tensors = {name: values.detach().numpy() for name, values in module.named_parameters()}
    manifest = Manifest.of(tensors)
    return _Parts(model, manifest, manifest.encode(manifest.flatten(tensors)))


async def _job(
    running: Federation, counters: Sequence[Counter], base: _Base, parts: _Parts, name: str, rounds: int
) -> tuple[JobDocument, int, int]:
    """Run a job, and return its document and the bytes that a member sent and received, as means over the members."""
    document = JobDocument(
        name=name,
        labels=LABELS,
        model=parts.model,
        rounds=Rounds(
            count=rounds, min_members=MEMBERS, target_members=MEMBERS, max_attempts=1, deadlines=Deadlines(**_DEADLINES)
        ),
        manifest=parts.manifest.digest(),
        weights=hashlib.sha256(parts.weights).digest(),
        tokenizer=hashlib.sha256(base.tokenizer).digest(),
        values=parts.manifest.values,
    )
    before = await _quiet(counters)

    async def create(stub: Any) -> None:
        for blob in (parts.manifest.canonical(), parts.weights, base.tokenizer):
            await put_blob(stub, blob)
        await stub.CreateJob(pb.CreateJobRequest(document=await put_blob(stub, document.canonical())))

    await running.ask(create)
    detail = await running.finished(name, JOB_SECONDS)
    if any(len(each.attempts) != 1 or len(each.attempts[0].survivors) != MEMBERS for each in detail.rounds):
        raise MeasurementFailed(f"job {name}: a round was not one attempt of all members")
    after = await _quiet(counters)
    sent, received = (sum(new[at] - old[at] for new, old in zip(after, before, strict=True)) for at in (0, 1))
    return document, sent // MEMBERS, received // MEMBERS


async def _quiet(counters: Sequence[Counter]) -> list[tuple[int, int]]:
    """Wait until no bytes pass for a while, and return the counts. Messages after a job belong to it."""
    last: list[tuple[int, int]] = []
    while True:
        now = [(each.sent, each.received) for each in counters]
        if now == last:
            return now
        last = now
        await asyncio.sleep(0.7)


async def _wire_cell(
    running: Federation, counters: Sequence[Counter], base: _Base, method: str, seeds: Iterator[int]
) -> list[Figure]:
    jobs: dict[int, list[int]] = {}
    values = 0
    for rounds in ROUNDS:
        if values > LARGE:
            break
        parts = await asyncio.to_thread(_parts, base, method, next(seeds))
        values = parts.manifest.values
        name = f"{base.shape}-{method}-{rounds}"
        document, *jobs[rounds] = await _job(running, counters, base, parts, name, rounds)
    short, *longer = jobs.values()
    sent, received = (per_round(short[at], longer[0][at]) if longer else float(short[at]) for at in (0, 1))
    layout = vector_layout(document, MEMBERS)
    more = {
        "measured": True,
        "bits": layout.bits,
        "packed_bytes": packed_size(layout.values, layout.bits),
        "jobs": {str(rounds): each for rounds, each in jobs.items()},
    }
    return [
        _values_figure(base.shape, method, values),
        Figure("sent_bytes_per_round", sent, "B", more),
        Figure("received_bytes_per_round", received, "B"),
    ]


def _values_figure(shape: str, method: str, values: int) -> Figure:
    whole = full_values(shape)
    more: dict[str, Any] = {"percent_of_full": round(100 * values / whole, 4), "full_values": whole}
    if (found := PAPER.get((method, shape))) is not None:
        more |= {"paper_million": found[0], "million": round(values / 1e6, 3), "difference": found[1]}
    return Figure("values_per_round", values, more=more)


def _full_cell(shape: str, bytes_per_value: float, of: str) -> list[Figure]:
    """Compute what full fine-tuning would send, without making a model of that size."""
    values = full_values(shape)
    more = {"measured": False, "computed_from": f"bytes a value of {of}, {bytes_per_value:.4f}"}
    return [
        _values_figure(shape, FULL, values),
        Figure("sent_bytes_per_round", round(values * bytes_per_value), "B", more),
    ]


def _case(method: str, shape: str) -> dict[str, Any]:
    found = {"part": "wire", "method": method, "backbone": shape}
    tokens = getattr(METHODS.get(method), "tokens", None)
    return found if tokens is None else found | {"tokens": tokens}


async def _wire(results: Results, shapes: Sequence[str], methods: Sequence[str], until: float | None) -> None:
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            names = member_names(MEMBERS)
            running = await stack.enter_async_context(federation(Path(scratch), POLICY, names))
            counters = [Counter(running.port) for _ in names]
            for name, counter in zip(names, counters, strict=True):
                dial(running.home(name), await stack.enter_async_context(counter.listening()))
            start_members(running, names, 1)
            await _connected(running)
            seeds = count(1)
            for shape in shapes:
                await _wire_of(results, running, counters, shape, methods, seeds, until)


async def _wire_of(
    results: Results,
    running: Federation,
    counters: Sequence[Counter],
    shape: str,
    methods: Sequence[str],
    seeds: Iterator[int],
    until: float | None,
) -> None:
    """Measure all missing cells of a backbone."""
    due = [method for method in methods if not results.done(_case(method, shape))]
    if not due and results.done(_case(FULL, shape)):
        return
    base: _Base | None = None
    for method in due:
        if _over(until):
            return
        if base is None:
            base = await _uploaded(running, shape)
            # An uncounted job, in which members download each other's certificates.
            first = await asyncio.to_thread(_parts, base, method, next(seeds))
            await _job(running, counters, base, first, f"{shape}-first", 1)
        results.open([0])
        results.add(_case(method, shape), await _wire_cell(running, counters, base, method, seeds))
    measured = [line for method in methods for line in results.done(_case(method, shape))]
    if not results.done(_case(FULL, shape)) and measured:
        # By the largest method, in which the bytes besides the values count least.
        sent = {line["case"]["method"]: line for line in measured if line["figure"] == "sent_bytes_per_round"}
        values = {line["case"]["method"]: line["value"] for line in measured if line["figure"] == "values_per_round"}
        largest = max(values, key=lambda method: float(values[method]))
        results.open([0])
        results.add(_case(FULL, shape), _full_cell(shape, sent[largest]["value"] / values[largest], largest))


async def _uploaded(running: Federation, shape: str) -> _Base:
    folder = running.folder / shape
    path = await asyncio.to_thread(write_model, folder, shape)
    digest = await asyncio.to_thread(digest_of, path)
    await running.ask(lambda stub: put_blob(stub, path))
    stored = await asyncio.to_thread(read_backbone, path, SHAPES[shape])
    return _Base(shape, digest, stored, own_form((folder / "tokenizer.json").read_bytes()))


# ---- backbone ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """One observation of a download.

    Args:
        at: time in seconds, monotonic.
        arrived: bytes that have arrived; None if none have, or if the file is complete.
        whole: whether the file is complete.
        resident, anonymous: memory of the process, in bytes.
        connections: number of connections made so far.
    """

    at: float
    arrived: int | None
    whole: bool
    resident: int
    anonymous: int
    connections: int


@dataclass
class Fetching:
    """Samples a member's cache and memory until its file is complete. For one use."""

    path: Path
    process: int
    network: BadNetwork
    samples: list[_Sample] = field(default_factory=list)
    whole: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def looking(self) -> Iterator["Fetching"]:
        """Sample in a thread inside the `with` block."""
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _look(self) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        while not self._stop.wait(_SAMPLE_SECONDS) and not self.whole.is_set():
            connections = self.network.connections
            try:
                arrived: int | None = partial.stat().st_size
            except FileNotFoundError:
                arrived = None
            resident, anonymous = _memory(self.process)
            whole = arrived is None and self.path.exists()
            self.samples.append(_Sample(time.monotonic(), arrived, whole, resident, anonymous, connections))
            if whole:
                self.whole.set()

    @property
    def seconds(self) -> float:
        """Seconds from the first byte to the complete file, which is checked before it gets its name."""
        return self.samples[-1].at - next(each.at for each in self.samples if each.arrived is not None)

    def highest(self) -> tuple[int, int]:
        """Return the largest resident and anonymous bytes while the file grew."""
        growing = [each for each in self.samples if each.arrived is not None]
        return max(each.resident for each in growing), max(each.anonymous for each in growing)


def resumed_places(samples: Sequence[_Sample]) -> list[int]:
    """Return the bytes present at each new connection after the first byte."""
    found = []
    for before, now in pairwise(samples):
        if before.arrived is not None and now.arrived is not None and now.connections > before.connections:
            found.append(before.arrived)
    return found


def _memory(process: int) -> tuple[int, int]:
    """Return the resident and anonymous bytes of a process."""
    found = {"VmRSS": 0, "RssAnon": 0}
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return psutil.Process(process).memory_info().rss, 0
    for line in lines:
        name, _, value = line.partition(":")
        if name in found:
            found[name] = 1024 * int(value.split()[0])
    return found["VmRSS"], found["RssAnon"]


def _spec(name: str, base: Path, seed: int) -> str:
    """Return a job file. seed: differs between jobs, so that each has its own version 0."""
    words = "".join(f'{label} = "{label}"\n' for label in LABELS)
    return (
        f'schema = 1\nname = "{name}"\nseed = {seed}\nlabels = {json.dumps(LABELS)}\n'
        f'[model]\narchitecture = "prompted"\nbase = {json.dumps(str(base))}\nmax_tokens = 32\n'
        f'[model.task]\nname = "cloze"\ntemplate = {json.dumps(TASK.template)}\n[model.task.verbaliser]\n{words}'
        f"[training]\nbatch = 4\nlearning_rate = 0.3\n"
        f"[rounds]\ncount = 1\nmin_members = {MEMBERS}\ntarget_members = {MEMBERS}\n"
        "[rounds.deadlines]\nreconnect = 60\n" + "".join(f"{phase} = {each}\n" for phase, each in _DEADLINES.items())
    )


async def _backbone_cell(shape: str, cuts: int) -> list[Figure]:
    """Measure a member's first and second job on this backbone."""
    policy = POLICY + 'backbones = ["disk", "coordinator"]\n'
    size = layout_of(checked_config(SHAPES[shape])).size
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            names = member_names(MEMBERS)
            fetching, others = names[0], names[1:]
            running = await stack.enter_async_context(federation(Path(scratch), policy, names))
            network = BadNetwork(running.port)
            stack.callback(network.close)
            dial(running.home(fetching), network.port)
            base = running.folder / "base"
            path = await asyncio.to_thread(write_model, base, shape)
            digest = await asyncio.to_thread(digest_of, path)
            for seed, name in enumerate(("first", "second"), start=1):
                (running.folder / f"{name}.toml").write_text(_spec(name, base, seed))
            await asyncio.to_thread(_bundle, running, "first")
            processes = {name: _run_member(running, name, base if name in others else None) for name in names}
            await _connected(running)
            before, opened = _memory(processes[fetching])[0], dict(network.carried)
            cached = running.home(fetching) / "cache" / digest.hex()
            looking = stack.enter_context(Fetching(cached, processes[fetching], network).looking())
            for at in range(1, cuts + 1):
                network.plan(Fault.CUT, Way.DOWN, after=at * size // (cuts + 1))
            await asyncio.to_thread(_create, running, "first")
            await running.finished("first", JOB_SECONDS)
            if not looking.whole.wait(_SAMPLE_SECONDS * 100):
                raise MeasurementFailed(f"the job has ended, but {cached.name} is not in the member's cache")
            first = {way: network.carried[way] - opened[way] for way in Way}
            places = resumed_places(looking.samples)
            if len(places) != cuts:
                raise MeasurementFailed(f"the connection was cut {cuts} times, but resumed at {places}")
            await asyncio.to_thread(_bundle, running, "second")
            opened = dict(network.carried)
            await asyncio.to_thread(_create, running, "second")
            await running.finished("second", JOB_SECONDS)
            second = {way: network.carried[way] - opened[way] for way in Way}
            # Members end before the network between them does.
            running.end(*names)
    resident, anonymous = looking.highest()
    return [
        Figure(
            "backbone_bytes",
            first[Way.DOWN],
            "B",
            {"file_bytes": size, "over_file_percent": round(100 * (first[Way.DOWN] / size - 1), 3)}
            | {"sent_bytes": first[Way.UP], "resumed_at_bytes": places},
        ),
        Figure(
            "backbone_seconds",
            round(looking.seconds, 2),
            "s",
            {"megabytes_per_second": round(size / 1e6 / looking.seconds, 1)},
        ),
        Figure("second_job_bytes", second[Way.DOWN], "B", {"sent_bytes": second[Way.UP]}),
        Figure("fetching_peak_rss_bytes", resident, "B", {"before_bytes": before, "anonymous_bytes": anonymous}),
    ]


async def _connected(running: Federation) -> None:
    """Wait until all have a session. On a busy machine a member's imports take longer than a federation waits."""
    for _ in range(_PATIENCE):
        with contextlib.suppress(TimeoutError):
            await running.connected(MEMBERS)
            return
    raise MeasurementFailed(f"{MEMBERS} members did not connect")


def _run_member(running: Federation, name: str, backbone: Path | None) -> int:
    rows = (ROOT / "examples" / "desk" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    data = running.folder / f"{name}.jsonl"
    texts = [json.loads(row)["text"] for row in rows[: 2 * len(LABELS)]]
    lines = (json.dumps({"text": text, "label": LABELS[at % len(LABELS)]}) for at, text in enumerate(texts))
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    words: list[str | Path] = [BIN / "edge_client", "run", "--log-format", "json", "--device", "cpu"]
    words += ["--home", running.home(name), "--data", data]
    return running.spawn(name, [*words, "--backbone", backbone] if backbone else words)


def _bundle(running: Federation, name: str) -> None:
    spec, bundle = running.folder / f"{name}.toml", running.folder / f"bundle-{name}"
    running.command("coordinator", "job", "bundle", spec, "--out", bundle)


def _create(running: Federation, name: str) -> None:
    bundle = running.folder / f"bundle-{name}"
    running.command("coordinator", "job", "create", "--bundle", bundle, "--operator", running.dir / "operator")


# ---- all of it --------------------------------------------------------------------------------------------------

# (backbone, number of times that the connection is cut).
BACKBONE_CELLS: Sequence[tuple[str, int]] = (("minilm", 2), ("minilm", 0), ("t5-base", 2))


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() > until


def run(
    results: Results,
    *,
    seeds: Sequence[int],
    quick: bool,
    until: float | None,
    parts: Collection[str] = PARTS,
) -> None:
    """Measure every cell that is not measured yet.

    Args:
        seeds: not used, because nothing here is random.
        quick: measure small cells.
        until: latest start of a cell (monotonic); None sets no limit.

    Raises:
        MeasurementFailed: a federation failed.
    """
    del seeds
    if "wire" in parts and not _over(until):
        shapes, methods = ((QUICK_SHAPE,), ("prompt-tuning", "lora")) if quick else (WIRE_SHAPES, tuple(METHODS))
        if any(not results.done(_case(method, shape)) for shape in shapes for method in (*methods, FULL)):
            asyncio.run(_wire(results, shapes, methods, until))
    if "backbone" in parts:
        for shape, cuts in [(QUICK_SHAPE, 2)] if quick else BACKBONE_CELLS:
            case = {"part": "backbone", "backbone": shape, "cuts": cuts}
            if results.done(case) or _over(until):
                continue
            results.open([0])
            results.add(case, asyncio.run(_backbone_cell(shape, cuts)))


def main() -> None:
    """Command line."""
    options = parser("prompts.wire")
    options.add_argument("--part", nargs="+", default=PARTS, choices=PARTS, help="cells to measure")
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    run(results, seeds=[0], quick=chosen.quick, until=None, parts=chosen.part)


if __name__ == "__main__":
    main()
