"""What the FedPrompt benchmarks train on: MiniLM as a frozen backbone, its fitted word head, SST-2, and prompted jobs.

Guarantees: the same seed gives the same rows, members, portions and head on one machine; test rows are SST-2's labelled
dev set, are in no training and in no choice; a validation row is a whole sentence of which no part is a training row.

    backbone_folder    MiniLM as save_pretrained writes it, as it is ("plain") or under a head for masked words ("mlm")
    prompted_bundle    a job over it, by the product's own `make_job_bundle`
    sst2, members_of   rows to train on, to choose by and to report on; who holds which
    portions           the rows that members go over in one round, so many local steps
    accuracy           a version of a job on rows, by the product's module

The head. MiniLM comes without one for masked words. `fit_head` trains BERT's own (dense, GELU, normalisation, and a
bias a word; the decoder is the table of words and stays as it is) over the frozen encoder on WikiText-103's prefix,
with every fifth piece masked, and keeps the step with the lowest loss on the held-back part `valid`; what it reports is
of `test`. It has read half a million words where BERT has read billions: a cloze over it is a weak one.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.minilm import minilm
from benchmarks.library.partitions import by_quantity, by_ratios
from benchmarks.library.record import ROOT, SHARED, NoData
from benchmarks.library.simulation import backbone_of
from learning.text.corpus import EncodedArrays, EncodedExamples
from learning.text.data import Example
from tacit.bundle import BACKBONE_FILE
from tacit.job import Aggregation, JobSpec, Precision, Rounds, Training
from tacit.mechanism import DpSgd, Mechanism, NoMechanism
from tacit.model import PromptedModel
from tacit.prompt import Cloze, Head, Injection, LoRA, PrefixTuning, PromptTuning, PTuning
from tacit.server_optimiser import FedAvgServer, ServerOptimiser

if TYPE_CHECKING:
    import torch
    from torch import nn

    from export.bundle import JobBundle

__all__ = [
    "BATCH",
    "CACHE",
    "LABELS",
    "HeadRecipe",
    "Kind",
    "Partitioned",
    "Portion",
    "Sst2",
    "accuracy",
    "backbone_folder",
    "dealt",
    "fit_head",
    "head_facts",
    "members_of",
    "minilm",
    "portion_rows",
    "portions",
    "prompted_bundle",
    "sst2",
]

Vector = NDArray[np.float32]
Kind = Literal["plain", "mlm"]
Partitioned = Literal["equal", "dirichlet"]

# Where backbones are kept from one run to the next.
CACHE = ROOT / "benchmarks" / ".cache"
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

LABELS = ("negative", "positive")
BATCH = 16
MAX_TOKENS = 64
# The paper's partition by quantity is "parameterized by alpha"; which one, its text does not say.
ALPHA = 1.0
VALIDATION = 872
# Of a place of the states, beside the middle one's: what varies less is not read by the head for masked words.
MIN_STD = 1e-3
# Fixed in advance; `--search` writes down how others do on validation rows, before any training.
TEMPLATE = "{text} It was {mask}."
WORDS: Mapping[str, tuple[str, ...]] = {"negative": ("bad",), "positive": ("good",)}
# Adam at 0.3 moves a coordinate by up to 0.3 a step; what lies beyond the bound would be cut.
_AGGREGATION = Aggregation(coordinate_bound=64.0, max_weight=65_536)


# ---- backbones ------------------------------------------------------------------------------------------------------


def backbone_folder(kind: Kind, cache: Path = CACHE, head: "HeadRecipe | None" = None) -> Path:
    """A folder of MiniLM under `cache`, made the first time: "mlm" then takes some ten minutes of one core.

    head: how the head of "mlm" is fitted, the usual way if None.

    Raises:
        NoData: the package, or for "mlm" WikiText, is not here.
    """
    if kind == "mlm":
        recipe = head or HeadRecipe()
        folder = cache / f"minilm-mlm-{recipe.name}"
        if not folder.is_dir():
            fit_head(backbone_folder("plain", cache), folder, recipe)
        return folder
    folder = cache / "minilm"
    if not folder.is_dir():
        source = minilm()
        with _Made(folder) as scratch:
            for name in ("model.safetensors", *_FILES):
                shutil.copyfile(source / name, scratch / name)
    return folder


class _Made:
    """A folder that is there whole or not at all, also if two processes make it at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}-", dir=self._folder.parent))
        return self._scratch

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self._folder.is_dir():
            self._scratch.rename(self._folder)
        shutil.rmtree(self._scratch, ignore_errors=True)


# ---- the head for masked words --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadRecipe:
    """How the head is fitted. length: pieces of a row, [CLS] and [SEP] with them. rows, held: of the training part and
    of each held-back part, at most. masked: share of pieces. batch: masked places a step. look: steps between two looks
    at `valid`.
    """

    seed: int = 0
    length: int = 64
    rows: int = 10_000
    held: int = 500
    masked: float = 0.2
    batch: int = 256
    steps: int = 1500
    look: int = 250
    learning_rate: float = 3e-3

    @property
    def name(self) -> str:
        """Eight hex digits; another recipe has another folder."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _Masked:
    """States (N, width) of the encoder at masked places, and the pieces (N,) that stood there."""

    states: "torch.Tensor"
    pieces: "torch.Tensor"


def fit_head(plain: Path, folder: Path, recipe: HeadRecipe) -> None:
    """Fits the head over the BERT in `plain` and writes both to `folder`, with `head.json` beside them.

    Raises:
        NoData: WikiText is not here.
    """
    import torch

    texts = {part: _wikitext(part) for part in ("train", "valid", "test")}
    torch.set_num_threads(1)
    began, spent = time.monotonic(), time.process_time()
    print(f"fitting a head for masked words over {recipe.rows:,} rows of WikiText, once for {folder}", flush=True)
    model, tokenizer = _with_head(plain, recipe.seed), _tokenizer(plain)
    parts = {}
    for place, (part, text) in enumerate(texts.items()):
        rows = _rows_of(text, tokenizer, recipe, recipe.rows if part == "train" else recipe.held)
        parts[part] = _masked_states(model, tokenizer, rows, recipe, place)
    head = model.cls.predictions
    with torch.no_grad():
        # The words' bias begins as their frequency: most of what can be known without reading the text.
        counts = torch.bincount(parts["train"].pieces, minlength=len(head.bias)).float() + 0.1
        head.bias.copy_((counts / counts.sum()).log())
    # States have a large mean, the same for all words, and little beside it. The head is trained on what is left,
    # standardised, and then made to take states as they are, which is the same function.
    mean, std = parts["train"].states.mean(dim=0), parts["train"].states.std(dim=0)
    # MiniLM has places that hardly move whatever the text (1e-33 beside 0.1): they are left out, not blown up to one.
    std = torch.where(std > MIN_STD * std.median(), std, torch.inf)
    even = {part: replace(parts[part], states=(parts[part].states - mean) / std) for part in ("train", "valid")}
    curve, best = _train_head(head, even["train"], even["valid"], recipe)
    weight = best["transform.dense.weight"] / std
    bias = best["transform.dense.bias"] - weight @ mean
    head.load_state_dict(best | {"transform.dense.weight": weight, "transform.dense.bias": bias}, strict=False)
    loss, correct = _score_head(head, parts["test"], recipe.batch)
    facts = {
        "recipe": asdict(recipe),
        "steps": min(curve, key=lambda each: each[1])[0],
        "curve": curve,
        "masked_accuracy": round(correct, 5),
        "masked_loss": round(loss, 5),
        "places": {part: len(each.pieces) for part, each in parts.items()},
        # What naming one word everywhere gets.
        "commonest_word": round(float((parts["test"].pieces == int(counts.argmax())).float().mean()), 5),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - spent, 1),
    }
    with _Made(folder) as scratch:
        model.save_pretrained(scratch)
        for name in _FILES[1:]:
            if (plain / name).is_file():
                shutil.copyfile(plain / name, scratch / name)
        (scratch / "head.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def head_facts(folder: Path) -> dict[str, Any]:
    """What `fit_head` wrote down about the head in this folder."""
    facts: dict[str, Any] = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    return facts


def _wikitext(part: str) -> list[str]:
    """Its paragraphs, without headings and with punctuation as people write it."""
    from learning.text.data import read_text

    path = SHARED / "wikitext103_small" / f"{part}.txt.gz"
    if not path.exists():
        raise NoData(f"{path} is not here: the head for masked words is fitted on WikiText-103; put it there")
    lines = (line.strip() for line in read_text(path).split("\n"))
    kept = (line for line in lines if line and not line.startswith("= "))
    return [re.sub(r" @(.)@ ", r"\1", line).replace("<unk>", "[UNK]") for line in kept]


def _with_head(plain: Path, seed: int) -> Any:
    """The BERT of this folder under a new head, drawn from the seed."""
    import torch
    from transformers import BertForMaskedLM
    from transformers.utils import logging

    # Says that the head is new, in many lines.
    logging.set_verbosity_error()
    model: Any = BertForMaskedLM.from_pretrained(plain)
    model.eval().requires_grad_(False)
    head = model.cls.predictions
    random = np.random.Generator(np.random.Philox(seed))
    with torch.no_grad():
        shape = tuple(head.transform.dense.weight.shape)
        head.transform.dense.weight.copy_(torch.from_numpy(0.05 * random.standard_normal(shape, dtype=np.float32)))
        head.transform.dense.bias.zero_()
        # Small: scores begin near the words' frequency.
        head.transform.LayerNorm.weight.fill_(0.1)
        head.transform.LayerNorm.bias.zero_()
    return model


def _tokenizer(plain: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _rows_of(texts: Sequence[str], tokenizer: Any, recipe: HeadRecipe, most: int) -> NDArray[np.int64]:
    """(rows, length): the paragraphs' pieces in a row, cut, each between [CLS] and [SEP]."""
    inside = recipe.length - 2
    pieces: list[int] = []
    for text in texts:
        pieces += tokenizer.encode(text, add_special_tokens=False).ids
        if len(pieces) >= most * inside:
            break
    rows = min(most, len(pieces) // inside)
    ids = np.full((rows, recipe.length), tokenizer.token_to_id("[SEP]"), dtype=np.int64)
    ids[:, 0] = tokenizer.token_to_id("[CLS]")
    ids[:, 1:-1] = np.array(pieces[: rows * inside], dtype=np.int64).reshape(rows, inside)
    return ids


def _masked_states(model: Any, tokenizer: Any, ids: NDArray[np.int64], recipe: HeadRecipe, part: int) -> _Masked:
    """Every n-th piece is masked, always by [MASK]: a cloze never asks for anything else."""
    import torch

    special = [tokenizer.token_to_id(name) for name in _SPECIAL]
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([recipe.seed, part])))
    hidden = (random.random(ids.shape) < recipe.masked) & ~np.isin(ids, special)
    seen = torch.from_numpy(np.where(hidden, tokenizer.token_to_id("[MASK]"), ids))
    places = torch.from_numpy(hidden)
    states = []
    with torch.inference_mode():
        for first in range(0, len(ids), 64):
            here = slice(first, first + 64)
            states.append(model.bert(seen[here]).last_hidden_state[places[here]])
    return _Masked(torch.cat(states).clone(), torch.from_numpy(ids)[places])


def _train_head(
    head: "nn.Module", train: _Masked, valid: _Masked, recipe: HeadRecipe
) -> tuple[list[list[float]], dict[str, Any]]:
    """[step, loss on `valid`, accuracy there] by look, and the state of the lowest loss. The rate falls to zero."""
    import torch
    from torch.nn import functional

    decoder: Any = head.get_submodule("decoder")
    moving = [(name, each) for name, each in head.named_parameters() if each is not decoder.weight]
    for _, parameter in moving:
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam([each for _, each in moving], lr=recipe.learning_rate)
    curve: list[list[float]] = []
    best: dict[str, Any] = {}
    batches = _batches(len(train.pieces), recipe)
    for step in range(1, recipe.steps + 1):
        rows = torch.from_numpy(next(batches))
        optimiser.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(head(train.states[rows]), train.pieces[rows])
        torch.autograd.backward(loss)
        optimiser.step()
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * (1 - step / recipe.steps)
        if step % recipe.look == 0 or step == recipe.steps:
            value, correct = _score_head(head, valid, recipe.batch)
            if not curve or value < min(each[1] for each in curve):
                best = {name: each.detach().clone() for name, each in moving}
            curve.append([step, round(value, 5), round(correct, 5)])
            print(f"head: step {step} of {recipe.steps}, held-back loss {value:.3f}, {correct:.3f} right", flush=True)
    for _, parameter in moving:
        parameter.requires_grad_(False)
    return curve, best


def _batches(places: int, recipe: HeadRecipe) -> Iterator[NDArray[np.int64]]:
    """Without end; every place once before any comes again."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([recipe.seed, 99])))
    size = min(recipe.batch, places)
    while True:
        order = random.permutation(places)
        yield from (order[first : first + size] for first in range(0, places - size + 1, size))


def _score_head(head: "nn.Module", masked: _Masked, batch: int) -> tuple[float, float]:
    """Mean loss in nats, and the share of pieces that it names."""
    import torch
    from torch.nn import functional

    loss, correct = 0.0, 0
    with torch.inference_mode():
        for first in range(0, len(masked.pieces), batch):
            wanted = masked.pieces[first : first + batch]
            scores = head(masked.states[first : first + batch])
            loss += functional.cross_entropy(scores, wanted, reduction="sum").item()
            correct += int((scores.argmax(dim=1) == wanted).sum())
    return loss / len(masked.pieces), correct / len(masked.pieces)


# ---- jobs -----------------------------------------------------------------------------------------------------------


def prompted_bundle(
    backbone: Path,
    *,
    task: Literal["classification", "cloze"],
    injection: Injection | Literal["prompt-tuning", "p-tuning", "prefix-tuning", "lora"] = "prompt-tuning",
    tokens: int = 20,
    steps: int = 40,
    rounds: int = 15,
    learning_rate: float,
    mechanism: Mechanism | None = None,
    aggregation: Aggregation | None = None,
    labels: Sequence[str] = LABELS,
    members: int = 10,
    optimiser: Literal["adam", "sgd", "adafactor"] = "adam",
    dropout: float = 0.0,
    precision: Precision = "float32",
    server: ServerOptimiser | None = None,
    template: str = TEMPLATE,
    words: Mapping[str, Sequence[str]] = WORDS,
    seed: int = 0,
) -> "JobBundle":
    """A prompted job over the folder `backbone`, made and read again by the product's own code.

    tokens: of an injection given by name. steps: local steps of a round. A job states them under `dp-sgd` alone, whose
    mechanism gets this number; elsewhere a member goes over all its rows once, and `portions` gives it so many that
    this takes `steps` batches. dropout: of the frozen network; none makes a step cheaper, and was not searched.
    precision: of the frozen network while members train; whatever is scored is scored in float32. The canonical file of
    the backbone is kept beside `backbone`, once for all jobs on it.

    Raises:
        DocumentInvalid: a word that the backbone does not have, or sizes that do not fit.
    """
    from export.bundle import make_job_bundle, read_job_bundle

    if isinstance(mechanism, DpSgd):
        mechanism = mechanism.model_copy(update={"steps": steps})
    verbaliser = {label: tuple(words[label]) for label in labels} if task == "cloze" else {}
    spec = JobSpec(
        name="fedprompt",
        labels=tuple(labels),
        model=PromptedModel(
            base=str(backbone.resolve()),
            injection=_injection(injection, tokens),
            task=Cloze(template=template, verbaliser=verbaliser) if task == "cloze" else Head(),
            dropout=dropout,
            max_tokens=MAX_TOKENS,
        ),
        training=Training(batch=BATCH, learning_rate=learning_rate, optimiser=optimiser, precision=precision),
        mechanism=mechanism or NoMechanism(),
        rounds=Rounds(count=rounds, min_members=members, target_members=members),
        aggregation=aggregation or _AGGREGATION,
        server=server or FedAvgServer(),
        seed=seed,
    )
    with tempfile.TemporaryDirectory(prefix="tacit-bench-", dir=backbone.parent) as scratch:
        make_job_bundle(spec, Path(scratch), Path(scratch) / "bundle")
        bundle = read_job_bundle(Path(scratch) / "bundle")
        model = bundle.document.model
        if not isinstance(model, PromptedModel) or model.backbone is None or bundle.backbone is None:
            raise TypeError("a prompted job has a backbone")
        kept = backbone.parent / "canonical" / model.backbone.hex()
        if not (kept / BACKBONE_FILE).is_file():
            with _Made(kept) as whole:
                bundle.backbone.rename(whole / BACKBONE_FILE)
    return replace(bundle, backbone=kept / BACKBONE_FILE)


def _injection(given: Injection | str, tokens: int) -> Injection:
    match given:
        case "prompt-tuning":
            return PromptTuning(tokens=tokens)
        case "p-tuning":
            return PTuning(tokens=tokens)
        case "prefix-tuning":
            return PrefixTuning(tokens=tokens)
        case "lora":
            return LoRA()
        case str():
            raise ValueError(f"{given} is no injection; take prompt-tuning, p-tuning, prefix-tuning or lora")
        case _:
            return given


# ---- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sst2:
    """train: phrases, for members. validation: whole sentences, for choices. test: the labelled dev set, to report."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]


@cache
def sst2(seed: int = 0) -> Sst2:
    """SST-2. The seed draws which sentences are held out of the training phrases, with every part of theirs.

    Raises:
        NoData: a file is missing.
    """
    phrases, sentences = _rows("train"), _rows("train_sentences")
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *b"validation"])))
    chosen = [sentences[at] for at in order.permutation(len(sentences))[:VALIDATION]]
    parts = {part for each in chosen for part in _parts(each.text)}
    return Sst2([each for each in phrases if each.text not in parts], chosen, _rows("dev"))


def _rows(part: str) -> list[Example]:
    from learning.text.data import read_examples

    path = SHARED / "sst2" / f"{part}.jsonl.gz"
    if not path.exists():
        raise NoData(f"{path} is not here: this benchmark trains on SST-2; put it there")
    # One spelling of white space: phrases are looked for in sentences.
    return [Example(" ".join(each.text.split()), LABELS[int(each.label or 0)]) for each in read_examples(path)]


def _parts(sentence: str) -> Iterator[str]:
    """All runs of its words."""
    words = sentence.split()
    for first in range(len(words)):
        for end in range(first + 1, len(words) + 1):
            yield " ".join(words[first:end])


def dealt(rows: int, count: int, partition: Partitioned, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Which rows each member holds, ascending: equally many (to within one), or by quantity, a batch at least."""
    if partition == "equal":
        return by_ratios(rows, [1.0] * count, seed).members
    return by_quantity(rows, count, ALPHA, seed, least=BATCH).members


def members_of(count: int, partition: Partitioned, seed: int) -> list[list[Example]]:
    """The training phrases of `sst2(seed)`, dealt to so many members."""
    train = sst2(seed).train
    return [[train[at] for at in rows] for rows in dealt(len(train), count, partition, seed)]


# ---- rounds ---------------------------------------------------------------------------------------------------------


class Portion(EncodedExamples):
    """A member's examples of which one round goes over some. N stays the number of all: the member's weight."""

    def __init__(self, whole: EncodedExamples, rows: NDArray[np.int64]) -> None:
        # All of the other but for what `read` gives: nothing is read or cut into tokens again.
        vars(self).update(vars(whole))
        self._whole, self._rows = whole, rows

    def read(self) -> EncodedArrays:
        """Some rows of the whole, in the order in which they come."""
        read = self._whole.read()
        # No wider than the longest of them.
        ids = read.ids[self._rows]
        width = int((ids != self.pad_id).sum(axis=1).max())
        return EncodedArrays(ids[:, :width], read.labels[self._rows], read.usable[self._rows])


def portions(corpora: Sequence[EncodedExamples], number: int, steps: int, seed: int) -> list[EncodedExamples]:
    """What members go over in round `number` (from 1): the next `steps` batches of rows of each, in an order that the
    seed draws; who has gone over all of its rows begins anew in another order. So every member takes as many steps.
    """
    return [
        Portion(corpus, portion_rows(len(corpus.read().labels), place, number, steps, seed))
        for place, corpus in enumerate(corpora)
    ]


def portion_rows(size: int, place: int, number: int, steps: int, seed: int) -> NDArray[np.int64]:
    """Which of its `size` rows the member at this place goes over in round `number`, in this order."""
    wanted = steps * BATCH
    first = (number - 1) * wanted
    turns = range(first // size, math.ceil((first + wanted) / size))
    order = np.concatenate([_turn(seed, place, turn, size) for turn in turns])
    begin = first - turns.start * size
    return order[begin : begin + wanted]


def _turn(seed: int, place: int, turn: int, size: int) -> NDArray[np.int64]:
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, place, turn, *b"order"])))
    return random.permutation(size)


def accuracy(bundle: "JobBundle", values: Vector, corpus: EncodedExamples) -> float:
    """Share of the corpus's rows whose label a version, (d,), of this job names, by the product's module; 0 to 1."""
    import torch

    from learning.models.assembly import assembled
    from learning.training.local import evaluate

    torch.set_num_threads(1)
    module, _ = assembled(bundle.document, corpus, bundle.manifest, values, {}, backbone_of(bundle))
    read = corpus.read()
    return evaluate(module, read.ids, read.labels, batch=64).accuracy
