"""The training set-up of the FedPrompt benchmarks: MiniLM as a frozen backbone, its word head, SST-2, prompted jobs.

Guarantees: the same seed gives the same rows, members, portions and head on one machine. Test rows are SST-2's labelled
dev set; no training and no choice uses them. A validation row is a whole sentence, and no part of it is a training row.

    backbone_folder    MiniLM as save_pretrained writes it, unchanged ("plain") or under a masked-word head ("mlm")
    prompted_bundle    a job over it, by the product's own `make_job_bundle`
    sst2, members_of   training, validation and test rows, and their partition among members
    portions           the rows of a number of local steps, which members train on in one round
    accuracy           the accuracy of a job's version on rows, by the product's module

MiniLM has no masked-word head. `fit_head` trains BERT's own (dense, GELU, normalisation, and a bias for each word; the
decoder is the word table and stays fixed) over the frozen encoder on a prefix of WikiText-103, with every fifth piece
masked. It keeps the step with the lowest loss on the held-back part `valid`, and reports on `test`. The head has read
half a million words, and BERT's billions, so a cloze over it is weak.
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
from benchmarks.library.record import ROOT, SHARED, NoData
from benchmarks.library.simulation import backbone_of
from learning.text.corpus import EncodedArrays, EncodedExamples
from learning.text.examples import Example
from simulation.partitions import by_quantity, by_ratios
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

# Folder of backbones that are kept between runs.
CACHE = ROOT / "benchmarks" / ".cache"
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

LABELS = ("negative", "positive")
BATCH = 16
MAX_TOKENS = 64
# The paper's partition by quantity is "parameterized by alpha", but its text does not give the value.
ALPHA = 1.0
VALIDATION = 872
# Share of the median standard deviation. The masked-word head ignores coordinates of the states that vary less.
MIN_STD = 1e-3
# Fixed in advance. `--search` records the accuracy of others on validation rows, before any training.
TEMPLATE = "{text} It was {mask}."
WORDS: Mapping[str, tuple[str, ...]] = {"negative": ("bad",), "positive": ("good",)}
# Adam at 0.3 moves a coordinate by up to 0.3 a step, and values beyond the bound would be clipped.
_AGGREGATION = Aggregation(coordinate_bound=64.0, max_weight=65_536)


# ---- backbones ------------------------------------------------------------------------------------------------------


def backbone_folder(kind: Kind, cache: Path = CACHE, head: "HeadRecipe | None" = None) -> Path:
    """Return a folder of MiniLM under `cache`. The first call makes it; "mlm" then takes ten minutes of one core.

    Args:
        head: recipe for the head of "mlm"; None takes the default.

    Raises:
        NoData: the package, or for "mlm" WikiText, is missing.
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
    """Makes a folder atomically, even if two processes make it at once."""

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
    """The recipe for fitting the head.

    Args:
        length: pieces in a row, including [CLS] and [SEP].
        rows, held: largest number of rows of the training part and of each held-back part.
        masked: share of pieces that are masked.
        batch: masked places in a step.
        look: steps between evaluations on `valid`.
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
        """Eight hex digits that name the recipe's folder."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _Masked:
    """The encoder's states at masked places, (N, width), and the masked pieces, (N,)."""

    states: "torch.Tensor"
    pieces: "torch.Tensor"


def fit_head(plain: Path, folder: Path, recipe: HeadRecipe) -> None:
    """Fit the head over the BERT in `plain`, and write both and `head.json` to `folder`.

    Raises:
        NoData: WikiText is missing.
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
        # The bias starts at the words' log frequency, most of what can be known without reading the text.
        counts = torch.bincount(parts["train"].pieces, minlength=len(head.bias)).float() + 0.1
        head.bias.copy_((counts / counts.sum()).log())
    # States have a large common mean and vary little around it. The head is trained on standardised states, and then
    # transformed to take raw states, which is the same function.
    mean, std = parts["train"].states.mean(dim=0), parts["train"].states.std(dim=0)
    # Some coordinates of MiniLM are almost constant (1e-33 against 0.1). They are dropped instead of scaled up.
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
        # Accuracy of always naming the most common word.
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
    """Return the facts that `fit_head` recorded about the head in this folder."""
    facts: dict[str, Any] = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    return facts


def _wikitext(part: str) -> list[str]:
    """Read the paragraphs of a part, without headings and with usual punctuation."""
    from learning.text.textual import read_text

    path = SHARED / "wikitext103_small" / f"{part}.txt.gz"
    if not path.exists():
        raise NoData(f"{path} is missing: the head for masked words is fitted on WikiText-103; put it there")
    lines = (line.strip() for line in read_text(path).split("\n"))
    kept = (line for line in lines if line and not line.startswith("= "))
    return [re.sub(r" @(.)@ ", r"\1", line).replace("<unk>", "[UNK]") for line in kept]


def _with_head(plain: Path, seed: int) -> Any:
    """Return the BERT of this folder under a new head, drawn from the seed."""
    import torch
    from transformers import BertForMaskedLM
    from transformers.utils import logging

    # Silences many lines about the new head.
    logging.set_verbosity_error()
    model: Any = BertForMaskedLM.from_pretrained(plain)
    model.eval().requires_grad_(False)
    head = model.cls.predictions
    random = np.random.Generator(np.random.Philox(seed))
    with torch.no_grad():
        shape = tuple(head.transform.dense.weight.shape)
        head.transform.dense.weight.copy_(torch.from_numpy(0.05 * random.standard_normal(shape, dtype=np.float32)))
        head.transform.dense.bias.zero_()
        # Small, so that scores start near the words' frequency.
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
    """Cut the paragraphs' pieces into rows between [CLS] and [SEP], (rows, length)."""
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
    """Mask a share of the pieces and return the states there. Always by [MASK], the only mark that a cloze uses."""
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
    """Train the head, with a rate that falls to zero.

    Returns:
        [step, loss on `valid`, accuracy there] at each evaluation, and the state with the lowest loss.
    """
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
    """Yield batches without end. Every place comes once before any comes again."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([recipe.seed, 99])))
    size = min(recipe.batch, places)
    while True:
        order = random.permutation(places)
        yield from (order[first : first + size] for first in range(0, places - size + 1, size))


def _score_head(head: "nn.Module", masked: _Masked, batch: int) -> tuple[float, float]:
    """Return the mean loss in nats, and the share of pieces named correctly."""
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
    """Make a prompted job over the folder `backbone`, and read it, by the product's own code.

    The backbone's canonical file is kept beside `backbone`, once for all jobs on it.

    Args:
        tokens: of an injection given by name.
        steps: local steps in a round. Only a job under `dp-sgd` states them, in its mechanism. In other jobs a member
            goes over all its rows once, and `portions` gives it rows for `steps` batches.
        dropout: of the frozen network. Zero makes a step cheaper; it was not searched.
        precision: of the frozen network during training. Scores are computed in float32.

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
            raise ValueError(f"{given} is not an injection; take prompt-tuning, p-tuning, prefix-tuning or lora")
        case _:
            return given


# ---- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sst2:
    """SST-2: training phrases for members, whole validation sentences for choices, and the labelled dev set as test."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]


@cache
def sst2(seed: int = 0) -> Sst2:
    """Read SST-2. The seed draws the sentences that are held out of the training phrases, with all their parts.

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
        raise NoData(f"{path} is missing: this benchmark trains on SST-2; put it there")
    # White space is normalised, because phrases are searched in sentences.
    return [Example(" ".join(each.text.split()), LABELS[int(each.label or 0)]) for each in read_examples(path)]


def _parts(sentence: str) -> Iterator[str]:
    """Yield all runs of a sentence's words."""
    words = sentence.split()
    for first in range(len(words)):
        for end in range(first + 1, len(words) + 1):
            yield " ".join(words[first:end])


def dealt(rows: int, count: int, partition: Partitioned, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Deal rows to members, ascending: equally many (to within one), or by quantity with at least a batch each."""
    if partition == "equal":
        return by_ratios(rows, [1.0] * count, seed).members
    return by_quantity(rows, count, ALPHA, seed, least=BATCH).members


def members_of(count: int, partition: Partitioned, seed: int) -> list[list[Example]]:
    """Deal the training phrases of `sst2(seed)` to `count` members."""
    train = sst2(seed).train
    return [[train[at] for at in rows] for rows in dealt(len(train), count, partition, seed)]


# ---- rounds ---------------------------------------------------------------------------------------------------------


class Portion(EncodedExamples):
    """The part of a member's examples that it trains on in a round. N stays the number of all, the member's weight."""

    def __init__(self, whole: EncodedExamples, rows: NDArray[np.int64]) -> None:
        # Shares everything with `whole` except the rows of `read`, so nothing is read or tokenised again.
        vars(self).update(vars(whole))
        self._whole, self._rows = whole, rows

    def read(self) -> EncodedArrays:
        """Return the portion's rows of the whole, in their order."""
        read = self._whole.read()
        # Cut to the longest of these rows.
        ids = read.ids[self._rows]
        width = int((ids != self.pad_id).sum(axis=1).max())
        return EncodedArrays(ids[:, :width], read.labels[self._rows], read.usable[self._rows])


def portions(corpora: Sequence[EncodedExamples], number: int, steps: int, seed: int) -> list[EncodedExamples]:
    """Return the members' portions in round `number` (from 1): the next `steps` batches of rows of each.

    The seed draws the order. A member that has used all of its rows starts again in another order, so all members make
    the same number of steps.
    """
    return [
        Portion(corpus, portion_rows(len(corpus.read().labels), place, number, steps, seed))
        for place, corpus in enumerate(corpora)
    ]


def portion_rows(size: int, place: int, number: int, steps: int, seed: int) -> NDArray[np.int64]:
    """Return the rows, of `size`, that the member at this place trains on in round `number`, in order."""
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
    """Return the accuracy of a version, (d,), of this job on the corpus, by the product's module; 0 to 1."""
    import torch

    from learning.models.assembly import assembled
    from learning.training.local import evaluate

    torch.set_num_threads(1)
    module, _ = assembled(bundle.document, corpus, bundle.manifest, values, {}, backbone_of(bundle))
    read = corpus.read()
    return evaluate(module, read.ids, read.labels, batch=64).accuracy
