"""Reconstructs a batch's tokens from one member's gradient.

The attacked member has 128 AG News test sentences with at least three digit tokens each, and 94 others: 222, a
hundredth of the training set here. It takes part in some rounds, each by its method's own phases over its own data (as
a simplification, no other member moves the encoder). Then it makes the step whose gradient the attacker sees: a single
step of plain SGD on one batch, without dropout, with labels and lengths known. `attack` describes the attacker and the
attacks.

**Models.** `bilstm-50` is that of the federated benchmarks: GloVe 50 wide and 150 states each way. `bilstm-300` has the
paper's sizes, 300 and 300; no GloVe of that width is available, so its public table is random. Both use a public word
list: GloVe's subset and every word that occurs at least five times in the AG News training set. `bert-2x128` is a BERT
of two layers, 128 wide, with random weights and BERT's word pieces (the paper uses trained DistilBERT and BERT-base).

**Attackers.** true: has the member's present table. public: has the table that members start from. unrelated: the
paper's attacker, which knows the words but not their vectors. With `own-vocabulary` the member chose to start from
GloVe, a table that everybody has, and the public table is GloVe. With `own-vocabulary-random`, the product's default,
its vectors start from its own seed. The public table is then what the job's seed would give, and the attacker is told
the member's words and their places, which it would not know.

**Secure aggregation.** Ten members train in the same rounds, each on its own 222 rows and with its own table. Their
shared parameters are averaged after each round. Then each makes its step on one batch, and the attacker sees the sum.

**Figures.** They cover all batches of a cell and seed; `value` is the mean over the seeds. A token counts as often as
it occurs in the batch. `rows` and `span` name a word once, so repeated words (here a dollar sign is "# 36 ;") cap their
recall and digit leakage near 0.7 even if they find everything. Under secure aggregation they count against one member's
tokens. Recall with little precision then means that the words of all ten are found, but not whose they are.

`dlg` has few sentences, the shortest, one start and a fixed number of steps. It shows what the paper's attack finds
within these limits, not what it could find. A zero says something about a method only if the same search finds the
words with the true table. Its steps, rates and whitening were chosen by what it finds with the true table, on six
(BiLSTM) and three (BERT) of the sentences.
"""

import copy
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.library.record import SHARED, Figure, NoData, open_results, parser, spread
from benchmarks.reconstruction.attack import (
    Batch,
    Gradient,
    Matching,
    Observed,
    Table,
    Tally,
    Values,
    has_digit,
    nearest_words,
    noised,
    shared_gradient,
    shared_words,
    summed,
    tally,
    tokens_by_positions,
    tokens_by_rows,
    tokens_by_span,
    tokens_by_states,
    vectors_by_matching,
)
from learning.methods import Setting, phases_of
from learning.models import TextClassifier, build, division_of
from learning.models.division import Division
from learning.text.encoder import TextEncoder, read_vocabulary, word_tokenizer, wordpiece_tokenizer
from learning.text.vocabulary import own_tokenizer
from learning.training.local import train
from tacit.job import Training
from tacit.method import FedAvg, FedRecon, FedVocab, Method
from tacit.model import BiLSTMModel, Model, TransformerModel

__all__ = ["Cell", "average_shared", "cells", "figures", "main", "measured_before"]

BENCH = "reconstruction"

SEEDS = (0, 1, 2)
SENTENCES, OWN, MIN_DIGITS = 128, 222, 3
LABELS = ("World", "Sports", "Business", "Sci/Tech")
GLOVE = SHARED / "glove" / "glove.6B.50d.subset.txt.gz"
PIECES = SHARED / "bert_vocab" / "bert-base-uncased-vocab.txt.gz"
AG_NEWS = SHARED / "ag_news"
# A word is in the public list if it occurs this often in the training set.
MIN_COUNT = 5
MAX_TOKENS = 128

# The paper's learning rates (appendix A.1), with one local epoch a round. Adam replaces its AdamW: the missing decay
# would move a table less than a hundredth as far as Adam does.
RECIPES = {
    "bilstm": Training(epochs=1, batch=32, optimiser="adam", learning_rate=5e-3),
    "bert": Training(epochs=1, batch=32, optimiser="adam", learning_rate=5e-5),
}
# With a tenth of the members in each of 50 rounds, a member takes part in about five.
ROUNDS = 5
CLIP = 1.0
COHORT = 10
UNRELATED, NOISE = 1_000, 2_000
# A seed that only the member knows, and the offset of the other members' seeds.
SECRET, OTHERS = 3_000_000, 100_000
# Largest own vocabulary. 222 texts have fewer words.
OWN_ENTRIES = 20_000

# Options of DLG's search: whitening, steps, and Adam's rate as a share of the table's standard deviation.
SEARCHES: Mapping[str, tuple[float | None, int, float]] = {"bilstm": (None, 600, 1 / 3), "bert": (3e-4, 800, 0.15)}

Attack = Literal["rows", "span", "states", "positions", "dlg"]
Attacker = Literal["true", "public", "unrelated"]
ATTACKERS: tuple[Attacker, ...] = ("true", "public", "unrelated")
Defence = Literal[
    "none", "frozen", "own-vocabulary", "own-vocabulary-random", "noise-0.001", "noise-1", "secure-aggregation"
]
# Defences that act after the gradient is taken.
LATER: tuple[Defence, ...] = ("noise-0.001", "noise-1", "secure-aggregation")

# Versions of attacks and defences that changed. A line without a version has version 1.
VERSIONS: Mapping[str, int] = {"dlg": 2, "positions": 2, "secure-aggregation": 2}

# The paper's table 2: shares of digit tokens recovered, by the family of our model.
PAPER = {
    "bilstm": {"fedavg": 0.876, "fedrecon": 0.021, "fedvocab": 0.012},
    "bert": {"fedavg": 0.882, "fedrecon": 0.024, "fedvocab": 0.013},
}
# The table of the paper's attacker for each method.
PAPER_ATTACKER = {"fedavg": "true", "fedrecon": "unrelated", "fedvocab": "unrelated"}

METHODS: Mapping[str, Method] = {"fedavg": FedAvg(), "fedrecon": FedRecon(), "fedvocab": FedVocab()}


@dataclass(frozen=True)
class Cell:
    """One row of the results.

    Args:
        sentences: number of the 128 sentences that are attacked.
        shortest: attack the shortest ones.
    """

    method: str
    model: str
    attacker: Attacker
    attack: Attack
    batch: int
    defence: Defence = "none"
    rounds: int = ROUNDS
    sentences: int = SENTENCES
    shortest: bool = False

    @property
    def case(self) -> dict[str, Any]:
        """The keys of the case in the results."""
        return {
            "method": self.method,
            "model": self.model,
            "attacker": self.attacker,
            "attack": self.attack,
            "batch": self.batch,
            "defence": self.defence,
            "rounds": self.rounds,
        }

    @property
    def version(self) -> int:
        """Version of the attack or the defence, whichever is newer."""
        return max(VERSIONS.get(self.attack, 1), VERSIONS.get(self.defence, 1))

    @property
    def attacked(self) -> int:
        """Number of sentences attacked in each seed: whole batches, at least one."""
        return self.batch * max(1, self.sentences // self.batch)

    @property
    def family(self) -> str:
        """bilstm or bert."""
        return self.model.split("-", 1)[0]

    @property
    def paper(self) -> float | None:
        """The paper's figure for digit tokens, if the attack and the attacker are the paper's."""
        asked = self.attack == "dlg" and self.defence == "none" and self.batch == 1
        return PAPER[self.family][self.method] if asked and self.attacker == PAPER_ATTACKER[self.method] else None


# ---- data ----------------------------------------------------------------------------------------------------


@cache
def news(split: str) -> tuple[tuple[str, int], ...]:
    """Read the texts and labels of AG News, in the file's order."""
    path = AG_NEWS / f"{split}.jsonl.gz"
    if not path.exists():
        raise NoData(f"{path} is missing; put AG News there (shared/data/README.md)")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return tuple((row["text"], LABELS.index(row["label"])) for row in rows)


@cache
def glove() -> Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Read GloVe's words and their vectors, (50,) each."""
    if not GLOVE.exists():
        raise NoData(f"{GLOVE} is missing; put the GloVe subset there (shared/data/README.md)")
    with gzip.open(GLOVE, "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split(" ") for line in file]
    return {word: np.array(numbers, dtype=np.float32) for word, *numbers in lines}


@cache
def public_words() -> tuple[str, ...]:
    """Return the public word list: GloVe's words, then the training set's frequent ones."""
    counts = Counter(word for text, _ in news("train") for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    return (*glove(), *(word for word, count in counts.most_common() if count >= MIN_COUNT and word not in glove()))


@cache
def encoder(model: str) -> TextEncoder:
    """Return the public tokenizer of a model."""
    if model.startswith("bert"):
        if not PIECES.exists():
            raise NoData(f"{PIECES} is missing; put BERT's word pieces there (shared/data/README.md)")
        return TextEncoder(wordpiece_tokenizer(read_vocabulary(PIECES)), MAX_TOKENS, 3, frame=True)
    return TextEncoder(word_tokenizer(public_words()), MAX_TOKENS, 1)


@cache
def own_encoder(texts: tuple[str, ...], defence: Defence) -> TextEncoder:
    """Return a tokenizer of the member's own words."""
    if defence == "own-vocabulary-random":
        return TextEncoder(own_tokenizer(texts, "words", OWN_ENTRIES), MAX_TOKENS, 1)
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    return TextEncoder(word_tokenizer(words), MAX_TOKENS, 1)


def model_table(model: str) -> Model:
    """Return the job's model."""
    match model:
        case "bilstm-50":
            return BiLSTMModel(embedding=50, hidden=150)
        case "bilstm-300":
            return BiLSTMModel(embedding=300, hidden=300)
        case "bert-2x128":
            config = {
                "model_type": "bert",
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 512,
                "max_position_embeddings": 512,
            }
            return TransformerModel(config=config)
        case _:
            raise ValueError(f"this benchmark has no model {model!r}")


@cache
def member_texts(model: str) -> tuple[tuple[str, int], ...]:
    """Return the member's 222 texts.

    The first 128 are attacked, and have at least three digit tokens each in this model's tokenizer.
    """
    cut = encoder(model)
    words = cut.words()
    chosen: list[tuple[str, int]] = []
    others: list[tuple[str, int]] = []
    for row in news("test"):
        digits = sum(has_digit(words[place] or "") for place in cut.encode([row[0]])[0])
        if digits >= MIN_DIGITS and len(chosen) < SENTENCES:
            chosen.append(row)
        elif len(others) < OWN - SENTENCES:
            others.append(row)
        elif len(chosen) == SENTENCES:
            break
    return (*chosen, *others)


@cache
def others_texts(model: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return 222 texts for each other member of a cohort: the next rows that the member does not have."""
    taken = set(member_texts(model))
    left = (row for row in news("test") if row not in taken)
    return tuple(tuple(islice(left, OWN)) for _ in range(COHORT - 1))


def batch_of(texts: Sequence[tuple[str, int]], cut: TextEncoder) -> Batch:
    """Return texts as the member trains on them."""
    words = tuple(word or "" for word in cut.words())
    return Batch(cut.encode([text for text, _ in texts]), np.array([label for _, label in texts]), words, cut.pad_id)


# ---- the member ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A member at the attacked step. table: its own. public: what an outsider knows of its start."""

    module: TextClassifier
    cut: TextEncoder
    division: Division
    table: Table
    public: Table


@lru_cache(maxsize=6)
def member(model: str, method: str, defence: Defence, rounds: int, seed: int) -> Member:
    """Return the member after its rounds and the phases before the step. Noise and sums come later."""
    (alone,) = trained(model, method, defence, rounds, seed, (member_texts(model),))
    return alone


@lru_cache(maxsize=1)
def cohort(model: str, method: str, rounds: int, seed: int) -> tuple[Member, ...]:
    """Return ten members after their common rounds; the first is attacked."""
    return trained(model, method, "none", rounds, seed, (member_texts(model), *others_texts(model)))


def trained(
    model: str, method: str, defence: Defence, rounds: int, seed: int, rows: Sequence[Sequence[tuple[str, int]]]
) -> tuple[Member, ...]:
    """Train members with these rows in common rounds.

    Shared parameters are averaged after each round; the others stay each member's own. A single member keeps what it
    trained.
    """
    described = model_table(model)
    own = defence.startswith("own-vocabulary")
    cut = own_encoder(tuple(text for text, _ in rows[0]), defence) if own else encoder(model)
    words = tuple(word or "" for word in cut.words())
    first = build(described, cut.vocabulary_size, len(LABELS), cut.pad_id, seed=seed)
    start = _table(words, first)
    if defence == "own-vocabulary-random":
        secret = build(described, cut.vocabulary_size, len(LABELS), cut.pad_id, seed=SECRET + seed)
        first.embedding.load_state_dict(secret.embedding.state_dict())
    elif model == "bilstm-50":
        with torch.no_grad():
            for place, word in enumerate(words):
                if word in glove():
                    first.embedding.weight[place] = torch.from_numpy(glove()[word])
        start = _table(words, first)
    public = start
    if defence == "own-vocabulary":
        public = Table(tuple(glove()), np.stack(list(glove().values())))
    chosen = METHODS[method] if defence != "frozen" else FedVocab(embedding="frozen")
    division = division_of(chosen, first, words)
    names = frozenset(name for name, _ in first.named_parameters())
    setting = Setting(names, division, len(rows[0]), 1, len(words), defence != "frozen", seed)
    phases = phases_of(chosen, setting)
    recipe = RECIPES[model.split("-", 1)[0]]
    modules = [copy.deepcopy(first) for _ in rows]
    examples = [batch_of(each, cut) for each in rows]
    for turn in range(rounds):
        for place, (module, each) in enumerate(zip(modules, examples, strict=True)):
            train(module, each.ids, each.labels, recipe, seed=OTHERS * place + 1_000 * seed + turn, phases=phases)
            if isinstance(chosen, FedRecon):
                _put_rows(module, start, division)
        if len(modules) > 1:
            average_shared(modules, division)
    if phases[:-1]:
        for place, (module, each) in enumerate(zip(modules, examples, strict=True)):
            seeded = OTHERS * place + 1_000 * seed + rounds
            train(module, each.ids, each.labels, recipe, seed=seeded, phases=phases[:-1])
    return tuple(Member(module, cut, division, _table(words, module), public) for module in modules)


def average_shared(modules: Sequence[TextClassifier], division: Division) -> None:
    """Replace the shared values by their mean over the members, which have equally many examples."""
    shared = [division.shared(module) for module in modules]
    mean = {name: np.stack([each[name] for each in shared]).mean(axis=0) for name in shared[0]}
    for module in modules:
        division.load_shared(module, mean)


def _put_rows(module: TextClassifier, table: Table, division: Division) -> None:
    """Reset fedrecon's private rows to their public start, as in every round."""
    with torch.no_grad():
        module.embedding.weight[torch.from_numpy(division.rows)] = torch.from_numpy(table.rows[division.rows])


def _table(words: tuple[str, ...], module: TextClassifier) -> Table:
    return Table(words, module.embedding.weight.detach().numpy().copy())


def attackers_table(cell: Cell, who: Member, seed: int) -> Table:
    """Return the table in which the attacker looks up words. It knows the shared rows of fedrecon."""
    if cell.attacker == "true":
        return who.table
    table = who.public if cell.attacker == "public" else who.public.unrelated(UNRELATED + seed)
    if cell.method != "fedrecon":
        return table
    return who.table.with_rows_of(table, frozenset(filter(has_digit, who.table.words)))


# ---- a cell --------------------------------------------------------------------------------------------------


def observed(cell: Cell, who: Member, batches: Sequence[Batch], at: int, seed: int) -> tuple[Gradient, tuple[int, ...]]:
    """Return the gradient of batch `at` that the attacker sees, and the lengths that it is told."""
    gradient = shared_gradient(who.module, batches[at], who.division)
    match cell.defence:
        case "noise-0.001" | "noise-1":
            multiplier = float(cell.defence.split("-")[1])
            return noised(gradient, CLIP, multiplier, NOISE + 1_000 * seed + at), batches[at].lengths
        case "secure-aggregation":
            gradients, lengths = [gradient], list(batches[at].lengths)
            others = cohort(cell.model, cell.method, cell.rounds, seed)[1:]
            for other, rows in zip(others, others_texts(cell.model), strict=True):
                batch = batch_of([rows[(at * cell.batch + step) % OWN] for step in range(cell.batch)], other.cut)
                gradients.append(shared_gradient(other.module, batch, other.division))
                lengths += batch.lengths
            return summed(gradients), tuple(lengths)
        case _:
            return gradient, batches[at].lengths


@lru_cache(maxsize=1)
def matched(cell: Cell, seed: int) -> list[Values]:
    """Return the vectors that the paper's attack finds in each batch.

    They do not depend on the table, so cells that differ only in the attacker share them.
    """
    who, batches = attacked(cell, seed)
    std = float(who.table.rows.std())
    whitening, steps, rate = SEARCHES[cell.family]
    how = Matching(steps, rate * std, std, whitening=whitening)
    seen = [observed(cell, who, batches, at, seed)[0] for at in range(len(batches))]
    cases = [Observed(gradient, batch.labels, batch.seen) for gradient, batch in zip(seen, batches, strict=True)]
    return vectors_by_matching(who.module, cases, how)


def said(
    cell: Cell, who: Member, batches: Sequence[Batch], at: int, seen: tuple[Gradient, tuple[int, ...]], table: Table
) -> list[str]:
    """Return the attacker's answer for batch `at`."""
    gradient, lengths = seen
    match cell.attack:
        case "rows":
            return tokens_by_rows(gradient, shared_words(who.division, batches[at].words))
        case "span":
            return tokens_by_span(gradient, table, lengths)
        case "states":
            parameters = {name: value.detach() for name, value in who.module.named_parameters()}
            return tokens_by_states(gradient, parameters, table, lengths)
        case "positions":
            return tokens_by_positions(who.module, gradient, table, lengths)
        case "dlg":
            raise ValueError("vectors of all batches are fitted at once; use `matched`")


def attacked(cell: Cell, seed: int) -> tuple[Member, list[Batch]]:
    """Return the attacked member and its attacked batches."""
    if cell.defence == "secure-aggregation":
        who = cohort(cell.model, cell.method, cell.rounds, seed)[0]
    else:
        who = member(cell.model, cell.method, _training_defence(cell.defence), cell.rounds, seed)
    texts = list(member_texts(cell.model)[:SENTENCES])
    if cell.shortest:
        texts.sort(key=lambda row: len(row[0]))
    else:
        order = np.random.Generator(np.random.Philox(seed)).permutation(len(texts))
        texts = [texts[place] for place in order]
    texts = texts[: cell.attacked]
    return who, [batch_of(texts[first : first + cell.batch], who.cut) for first in range(0, len(texts), cell.batch)]


def measured(cell: Cell, seed: int) -> Tally:
    """Attack a cell's batches and count the tokens."""
    who, batches = attacked(cell, seed)
    table, total = attackers_table(cell, who, seed), Tally()
    found = matched(replace(cell, attacker="true"), seed) if cell.attack == "dlg" else []
    for at, batch in enumerate(batches):
        if cell.attack == "dlg":
            answer = nearest_words(found[at], batch.seen, table)
        else:
            answer = said(cell, who, batches, at, observed(cell, who, batches, at, seed), table)
        total += tally(batch.tokens(), answer)
    return total


def _training_defence(defence: Defence) -> Defence:
    """Return the part of a defence that acts while the member trains."""
    return "none" if defence in LATER else defence


def figures(cell: Cell, tallies: Sequence[Tally]) -> list[Figure]:
    """Return the cell's figures from one tally for each seed.

    Their field `sentences` counts one seed; `tokens` and `digits` count all seeds.
    """
    beside: dict[str, Any] = {
        "sentences": cell.attacked,
        "tokens": sum(each.reference for each in tallies),
        "digits": sum(each.reference_digits for each in tallies),
        "version": cell.version,
    }
    found = []
    for name in ("precision", "recall", "f1", "digit_leakage"):
        values = [round(float(getattr(each, name)), 4) for each in tallies]
        more: dict[str, Any] = (spread(values) if len(values) > 1 else {}) | beside
        if name == "digit_leakage" and cell.paper is not None:
            more |= {"paper": cell.paper}
        label = name if name == "digit_leakage" else f"token_{name}"
        found.append(Figure(label, round(sum(values) / len(values), 4), more=more))
    return found


def measured_before(lines: Sequence[Mapping[str, Any]], cell: Cell) -> bool:
    """Tell whether the case has lines, all of the present version of its attack and defence."""
    return bool(lines) and all(line.get("version", 1) == cell.version for line in lines)


def cells() -> Iterator[Cell]:
    """Yield all cells, cheap ones first."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    # A shared embedding reveals its rows to everyone.
    for model in ("bilstm-50", "bilstm-300", "bert-2x128"):
        base = Cell("fedavg", model, "true", "rows", 1, rounds=0, sentences=SENTENCES // 2)
        for size in sizes:
            yield replace(base, batch=size)
        yield replace(base, method="fedrecon")
    for model, sentences in (("bilstm-50", SENTENCES), ("bilstm-300", SENTENCES // 4)):
        base = Cell("fedvocab", model, "true", "span", 1, sentences=sentences)
        for size in sizes:
            for attacker in ATTACKERS:
                yield replace(base, attacker=attacker, batch=size)
        for attacker in ATTACKERS:
            yield replace(base, method="fedrecon", attacker=attacker)
        # By how far the table has moved.
        for rounds in (0, 1):
            yield replace(base, attacker="public", rounds=rounds)
        for defence in ("frozen", *LATER[:2]):
            for attacker in ATTACKERS[:2]:
                yield replace(base, attacker=attacker, defence=defence)
    for attacker in ATTACKERS:
        yield Cell("fedvocab", "bilstm-50", attacker, "span", 1, "own-vocabulary")
    for model, sentences in (("bilstm-50", SENTENCES), ("bilstm-300", SENTENCES // 4)):
        for attacker in ATTACKERS[:2]:
            yield Cell("fedvocab", model, attacker, "span", 1, "own-vocabulary-random", sentences=sentences)
    for base in (
        Cell("fedvocab", "bilstm-50", "true", "span", 1, "secure-aggregation"),
        Cell("fedvocab", "bert-2x128", "true", "positions", 1, "secure-aggregation", sentences=4),
        Cell("fedvocab", "bilstm-300", "true", "span", 1, "secure-aggregation", sentences=SENTENCES // 4),
    ):
        for attacker in ATTACKERS[:2]:
            yield replace(base, attacker=attacker)
    for model, tried in (("bilstm-300", (1, 2, 4)), ("bilstm-50", (1, 2))):
        for size in tried:
            for attacker in ATTACKERS:
                yield Cell("fedvocab", model, attacker, "states", size, sentences=8 if model == "bilstm-300" else 2)
    # The paper's attack, limited to minutes on one core. Before the first round the public table is the present one.
    fitted = [
        Cell("fedavg", model, "true", "dlg", 1, rounds=0, sentences=8, shortest=True)
        for model in ("bilstm-50", "bert-2x128", "bilstm-300")
    ]
    for base in fitted:
        yield base
        yield replace(base, method="fedrecon", attacker="unrelated")
        for attacker in ("true", "unrelated"):
            yield replace(base, method="fedvocab", attacker=attacker)
        for attacker in ATTACKERS:
            yield replace(base, method="fedvocab", attacker=attacker, rounds=ROUNDS)
    for base in fitted[:2]:
        for attacker in ("true", "unrelated"):
            yield replace(base, method="fedvocab", attacker=attacker, batch=8)
    # From batches of four on there are more tokens than model dimensions.
    for size in sizes:
        for attacker in ATTACKERS if size <= 4 else ATTACKERS[:2]:
            yield Cell("fedvocab", "bert-2x128", attacker, "positions", size, sentences=8 if size < 4 else 4)
    for defence in LATER[:2]:
        yield Cell("fedvocab", "bert-2x128", "public", "positions", 1, defence, sentences=4)


def seeds_of(cell: Cell) -> tuple[int, ...]:
    """Return the seeds of a cell: only one if a seed takes minutes."""
    slow = cell.attack == "dlg" or (cell.attack == "positions" and cell.batch > 4)
    return SEEDS[:1] if slow or cell.defence == "secure-aggregation" else SEEDS


def quick_cells() -> Iterator[Cell]:
    """Yield a few cells that take less than a minute."""
    base = Cell("fedvocab", "bilstm-50", "true", "span", 1, rounds=0, sentences=16)
    yield replace(base, method="fedavg", attack="rows")
    for attacker in ATTACKERS:
        yield replace(base, attacker=attacker)
    yield replace(base, defence="noise-1")
    yield replace(base, model="bilstm-300", attack="states", sentences=1)


def main() -> None:
    """Command line."""
    chosen = parser("reconstruction.tokens").parse_args()
    torch.set_num_threads(1)
    results = open_results(BENCH, quick=chosen.quick)
    seeds = SEEDS[:1] if chosen.quick else SEEDS
    for cell in quick_cells() if chosen.quick else cells():
        if measured_before(results.done(cell.case), cell):
            continue
        results.open(seeds)
        tallies = [measured(cell, seed) for seed in seeds_of(cell) if seed in seeds]
        results.add(cell.case, figures(cell, tallies))


if __name__ == "__main__":
    main()
