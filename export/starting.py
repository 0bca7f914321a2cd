"""Trains the weights that a job starts from on public text, on the operator's machine.

Guarantees: only the job's own file and list of words are read; the same file and seed give the same weights on the same
machine. That the text is public rests on the operator's word, as it does for the list of words.
"""

import gzip
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tacit.documents import DocumentInvalid
from tacit.job import JobSpec, PublicStart, Training
from tacit.model import RvaeModel

if TYPE_CHECKING:
    from learning.models.classifier import TextClassifier

__all__ = ["train_start"]


def train_start(
    module: "TextClassifier", spec: JobSpec, tokenizer: bytes, file: Path, report: Callable[[str], None]
) -> None:
    """Trains an autoencoder in place as `spec.start` says.

    The texts have no labels. Each gets one drawn with the job's seed, so the meaning of a label is learnt only from
    members.

    Args:
        module: the autoencoder.
        spec: the job's specification.
        tokenizer: bytes of the job's tokenizer.json.
        file: the texts, one a line.
        report: called with sentences about what was found.

    Raises:
        DocumentInvalid: the file cannot be read or has no texts, or the list of words is not valid.
    """
    from learning.synthesis.model import Rvae
    from learning.synthesis.training import measure, train_plain
    from learning.synthesis.words import public_words
    from learning.text.encoder import TokenizerInvalid

    model, start = spec.model, spec.start
    if not isinstance(start, PublicStart) or not isinstance(model, RvaeModel) or not isinstance(module, Rvae):
        raise TypeError("only a job of an rvae that names a start has one")
    texts = list(itertools.islice(_lines(file), start.texts))
    if not texts:
        raise DocumentInvalid(f"start.file: {file} has no line of text; name a file with one public text on each line")
    try:
        digest = hashlib.sha256(tokenizer).digest()
        words = public_words(tokenizer, digest, labels=len(spec.labels), max_tokens=model.max_tokens, most=model.words)
    except TokenizerInvalid as error:
        raise DocumentInvalid(f"vocabulary: {error}") from error
    places = np.random.default_rng(spec.seed).integers(len(spec.labels), size=len(texts))
    ids = words.encode(texts, places)
    # The words between the label and the end. Nothing can be learnt from a text without known words.
    inner = ids[:, 1:]
    known = ((inner > 1) & (inner < words.end_id)).sum()
    read = ((inner != 0) & (inner != words.end_id)).sum()
    if not known:
        raise DocumentInvalid(f"start.file: {file} has no word of the job's list; is it text of the same language?")
    recipe = Training(epochs=start.epochs, batch=start.batch, learning_rate=start.learning_rate)
    report(
        f"start: {len(texts):,} public texts from {file.name}, with {known / max(read, 1):.0%} of their words in the "
        "list"
    )
    # The embedding is trained here even if members freeze it: it is learnt once, from public text. The labels' bias on
    # the states is frozen, because it would learn the noise of drawn labels.
    module.label_bias.weight.requires_grad_(False)
    try:
        train_plain(module, ids, recipe, seed=spec.seed, free_embedding=True)
    finally:
        module.label_bias.weight.requires_grad_(True)
    found = measure(module, ids[:512], seed=spec.seed)
    report(f"start: perplexity {found.prior_perplexity:.1f} from the prior, on texts it was trained on")


def _lines(file: Path) -> Iterator[str]:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                if text := line.strip():
                    yield text
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DocumentInvalid(f"start.file: {file} cannot be read as lines of UTF-8 text ({error})") from error
