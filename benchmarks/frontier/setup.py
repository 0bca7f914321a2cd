"""The data sets, methods and jobs of the frontier, and features of their rows that are kept between runs.

Guarantees: validation rows decide between recipes, and test rows are read by chosen recipes alone. A data set without a
validation file holds some training rows back while recipes are tried; the chosen recipe trains on all of them. Features
are those of the product (`learning.prompts.features`), under the product's own keys.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.minilm import minilm
from benchmarks.library.record import SHARED, NoData
from benchmarks.library.simulation import backbone_of
from learning.prompts.features import Compute, FeatureStore, features_of, kind_of
from learning.prompts.model import PromptedModel as PromptedModule
from learning.text.corpus import EncodedExamples
from learning.text.data import read_data as read_rows
from learning.text.examples import Example
from tacit.bundle import BACKBONE_FILE
from tacit.job import Aggregation, JobSpec, VocabularyFile
from tacit.model import PromptedModel, TransformerModel
from tacit.prompt import BitFit, Head, Injection, LoRA, NoInjection, PromptTuning

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.models.classifier import TextClassifier

__all__ = [
    "DATASETS",
    "METHODS",
    "Data",
    "Dataset",
    "KeptFeatures",
    "Method",
    "Start",
    "authored",
    "job_of",
    "module_of",
    "read_data",
]

Features = NDArray[np.float32]
Start = Literal["labels", "random"]

MAX_TOKENS = 64


@dataclass(frozen=True)
class Method:
    """What is trained besides the head, and the layers that the head reads (None: the last one's mean as it is).

    short: whether a head takes more and shorter steps, with noise.
    whole: whether all of the encoder is trained, without noise.
    """

    layers: tuple[int, ...] | None
    injection: Injection = field(default_factory=NoInjection)
    short: bool = False
    whole: bool = False

    @property
    def cached(self) -> bool:
        """Whether features never change, so that they are computed once."""
        return isinstance(self.injection, NoInjection) and not self.whole


# A head reads the last layer, or the layers that the product takes by default (docs/heads.md).
METHODS: Mapping[str, Method] = {
    "head": Method((6,)),
    "head-layers": Method((2, 4, 6)),
    "head-layers, short steps": Method((2, 4, 6), short=True),
    "lora": Method(None, LoRA()),
    "bitfit": Method(None, BitFit()),
    "prompt": Method(None, PromptTuning(tokens=10)),
    "fine-tuning": Method(None, whole=True),
}
_SPLIT_SEED = 20200
# Members of a few deals of the rows.
_KEPT_CORPORA = 40
# A head's rows grow to several times 10 over centred features.
_AGGREGATION = Aggregation(coordinate_bound=64.0)


@dataclass(frozen=True)
class Dataset:
    """A public data set.

    Args:
        train, test: names of its files.
        validation: name of the file that decides between recipes, or a number of training rows.
        names: what the file's labels are called; empty keeps them.
        descriptions: text for a label whose name says too little.
        person: what names whose row it is, if the files say so: a column, or "author" (a post's, which is in it).
    """

    train: str = "train"
    test: str = "test"
    validation: str | int = 1000
    names: Mapping[str, str] = field(default_factory=dict)
    descriptions: Mapping[str, str] = field(default_factory=dict)
    person: str | None = None


# In the order of a run. Descriptions are ours, written before any training.
DATASETS: Mapping[str, Dataset] = {
    "trec": Dataset(
        validation=500,
        descriptions={
            "ABBR": "abbreviation, acronym, what it stands for",
            "DESC": "definition, description, reason, how and why",
            "ENTY": "entity, animal, food, product, term, thing",
            "HUM": "human, person, who, name of a group",
            "LOC": "location, city, country, where",
            "NUM": "number, count, date, how many, when",
        },
    ),
    "banking77": Dataset(),
    "sst2": Dataset(
        train="train_sentences",
        validation="dev",
        names={"0": "negative", "1": "positive"},
        descriptions={"negative": "a bad, boring film", "positive": "a good, moving film"},
    ),
    "ag_news": Dataset(descriptions={"Sci/Tech": "science and technology", "World": "world politics"}),
    # An abstract is one author's: its sentences belong together.
    "csabstruct": Dataset(validation="dev", person="doc"),
    "20newsgroups": Dataset(
        person="author",
        descriptions={
            "alt.atheism": "atheism, religion, belief, morality",
            "comp.graphics": "computer graphics, images, rendering",
            "comp.os.ms-windows.misc": "Microsoft Windows, drivers, files",
            "comp.sys.ibm.pc.hardware": "PC hardware, drives, cards, boards",
            "comp.sys.mac.hardware": "Macintosh, Apple hardware",
            "comp.windows.x": "X Window System, X11, widgets",
            "misc.forsale": "for sale, price, shipping, offer",
            "rec.autos": "cars, engines, dealers, driving",
            "rec.motorcycles": "motorcycles, bikes, riding",
            "rec.sport.baseball": "baseball, pitchers, games, teams",
            "rec.sport.hockey": "ice hockey, NHL, players, playoffs",
            "sci.crypt": "cryptography, encryption, keys, Clipper chip",
            "sci.electronics": "electronics, circuits, voltage, chips",
            "sci.med": "medicine, doctors, disease, treatment",
            "sci.space": "space, NASA, orbit, launch, moon",
            "soc.religion.christian": "Christianity, God, Jesus, church, Bible",
            "talk.politics.guns": "guns, firearms, weapons law",
            "talk.politics.mideast": "Middle East, Israel, Arabs, Turks, Armenians",
            "talk.politics.misc": "politics, government, society",
            "talk.religion.misc": "religion, Christians, Mormons, cults",
        },
    ),
}

# Lines of a post that are another author's, or name one.
_QUOTED = re.compile(r"^\s*[>|:]|(writes|wrote|says|said) ?:\s*$|(writes|wrote) in |^In article|^In <|^Quoted from")
_AUTHOR = re.compile(r"^From:[ \t]*(.*)$", re.MULTILINE)
_ADDRESS = re.compile(r"[^\s<>()\"]+@[^\s<>()\"]+")


def authored(post: Example) -> Example | None:
    """Return a post without its header and what it quotes, as a row of its author; None if nothing is left.

    The author is the address in `From:`, in small letters, or all of that line if it has no address. The text names
    neither the author nor the group.

    Raises:
        ValueError: the post has no `From:`.
    """
    header, _, body = post.text.partition("\n\n")
    found = _AUTHOR.search(header)
    if found is None:
        raise ValueError("a post has no line From:, so nobody can tell whose it is")
    address = _ADDRESS.search(found[1])
    text = "\n".join(line for line in body.splitlines() if not _QUOTED.search(line)).strip()
    author = (found[1].strip() if address is None else address[0]).lower()
    return Example(text, post.label, None, author) if text else None


@dataclass(frozen=True)
class Data:
    """A data set's rows. `held_in` are the training rows of a trial, `train` those of a chosen recipe."""

    name: str
    labels: tuple[str, ...]
    train: Sequence[Example]
    held_in: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]

    @property
    def majority(self) -> float:
        """The accuracy on the test rows of the most common training label."""
        counts = {label: sum(each.label == label for each in self.train) for label in self.labels}
        most = max(counts, key=lambda label: counts[label])
        return sum(each.label == most for each in self.test) / len(self.test)


@cache
def read_data(name: str) -> Data:
    """Read a data set of DATASETS.

    Raises:
        NoData: a file is missing.
    """
    known = DATASETS[name]
    train, test = _rows(name, known.train), _rows(name, known.test)
    labels = tuple(sorted({str(each.label) for each in train}))
    if isinstance(known.validation, str):
        return Data(name, labels, train, train, _rows(name, known.validation), test)
    order = np.random.Generator(np.random.Philox(_SPLIT_SEED)).permutation(len(train))
    held_back, rest = np.split(order, [known.validation])
    return Data(name, labels, train, [train[at] for at in sorted(rest)], [train[at] for at in held_back], test)


def _rows(name: str, part: str) -> list[Example]:
    path = SHARED / name / f"{part}.jsonl.gz"
    if not path.exists():
        raise NoData(f"{path} is missing: this benchmark reads {name}; put it there")
    names, person = DATASETS[name].names, DATASETS[name].person
    if person == "author":
        return [row for row in map(authored, read_rows(path).examples) if row is not None]
    rows = read_rows(path, person=person).examples
    return [Example(each.text, names.get(str(each.label), str(each.label)), None, each.person) for each in rows]


class KeptFeatures(FeatureStore):
    """Features of all rows that were ever read, in memory and in a file for each kind.

    The product's store keeps the rows of one member. Here members are dealt anew for each seed, and their rows are
    computed once for all.

    Args:
        folder: of the files. None keeps them in memory alone.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._kinds: dict[bytes, dict[bytes, Features]] = {}
        self._corpora: dict[tuple[Example, ...], EncodedExamples] = {}
        self._whole: WeakKeyDictionary[EncodedExamples, tuple[bytes, Features]] = WeakKeyDictionary()

    def corpus(self, bundle: "JobBundle", rows: Sequence[Example]) -> EncodedExamples:
        """Return rows as a job reads them. The trials of a recipe's rate and steps share their members' rows."""
        key = tuple(rows)
        found = self._corpora.get(key)
        if found is None or not found.serves(bundle.document, bundle.public_tokenizer):
            if len(self._corpora) >= _KEPT_CORPORA:
                self._corpora.clear()
            found = EncodedExamples(rows, bundle.document, bundle.public_tokenizer, self)
            self._corpora[key] = found
        return found

    def of(self, bundle: "JobBundle", corpus: EncodedExamples, device: str = "cpu") -> Features:
        """Return the features (N, width) of a corpus, kept as one array as long as the corpus is."""
        kind = kind_of(bundle.document)
        if (found := self._whole.get(corpus)) is not None and found[0] == kind:
            return found[1]
        # The features are those of every version: a head changes nothing before itself.
        module = module_of(bundle, bundle.manifest.decode(bundle.weights))
        if not isinstance(module, PromptedModule):
            raise TypeError("a prompted job has a prompted module")
        features = features_of(module, corpus.read().ids, kind, self, device)
        self._whole[corpus] = kind, features
        return features

    def read(self, kind: bytes, keys: Sequence[bytes], compute: Compute) -> Features:
        """Return the features of the rows with these keys, as `FeatureStore.read`."""
        if kind not in self._kinds:
            self._kinds[kind] = self._load(kind)
        rows = self._kinds[kind]
        missing = {key: place for place, key in enumerate(keys) if key not in rows}
        if missing:
            for at, made in compute(list(missing.values())):
                rows.update((keys[place], row) for place, row in zip(at, made, strict=True))
            self.save(kind)
        return np.stack([rows[key] for key in keys])

    def save(self, kind: bytes) -> None:
        """Write the rows of a kind to its file."""
        if (path := self._file(kind)) is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._kinds[kind]
        keys = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1)
        # Renamed, so that a run that is stopped leaves a whole file.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez(file, keys=keys, rows=np.stack(list(rows.values())))
        Path(file.name).rename(path)

    def _load(self, kind: bytes) -> dict[bytes, Features]:
        if (path := self._file(kind)) is None or not path.exists():
            return {}
        with np.load(path) as found:
            return dict(zip((each.tobytes() for each in found["keys"]), found["rows"], strict=True))

    def _file(self, kind: bytes) -> Path | None:
        return None if self._folder is None else self._folder / f"{kind.hex()}.npz"


@cache
def job_of(dataset: str, method: str, start: Start, folder: Path) -> "JobBundle":
    """Make a job without a mechanism over MiniLM, and read it, by the product's own code.

    Trainings differ in mechanism, recipe and rounds, which change neither the start nor the centre. So they share it.

    Args:
        folder: must exist as long as the bundle is used. All jobs in it share the backbone's file.
    """
    from export.bundle import make_job_bundle, read_job_bundle

    labels, base, how = read_data(dataset).labels, minilm().resolve(), METHODS[method]
    if how.whole:
        spec = JobSpec(
            name="frontier",
            labels=labels,
            model=TransformerModel(base=str(base), max_tokens=MAX_TOKENS),
            vocabulary=VocabularyFile(kind="wordpiece", file=str(base / "vocab.txt")),
        )
    else:
        model = _prompted(dataset, how, start, base)
        spec = JobSpec(name="frontier", labels=labels, model=model, aggregation=_AGGREGATION)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        make_job_bundle(spec, folder, Path(scratch) / "bundle")
        bundle = read_job_bundle(Path(scratch) / "bundle")
        if bundle.backbone is None:
            return bundle
        kept = folder / BACKBONE_FILE
        if not kept.exists():
            bundle.backbone.rename(kept)
    return replace(bundle, backbone=kept)


def _prompted(dataset: str, how: Method, start: Start, base: Path) -> PromptedModel:
    told = dict(DATASETS[dataset].descriptions) if start == "labels" else {}
    return PromptedModel(
        base=str(base),
        injection=how.injection,
        task=Head(layers=how.layers, start=start, descriptions=told),
        dropout=0.0,
        max_tokens=MAX_TOKENS,
    )


def module_of(bundle: "JobBundle", values: Features) -> "TextClassifier":
    """Return the module that answers with a version's values."""
    from learning.models.assembly import whole_model

    module, _ = whole_model(
        bundle.document,
        bundle.manifest,
        bundle.manifest.encode(values),
        bundle.public_tokenizer,
        backbone=backbone_of(bundle),
        frozen=bundle.frozen,
    )
    return module
