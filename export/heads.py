"""Prepares a head on the operator's machine: its layers, what centres its features, and where it starts.

Guarantees: only public text has a part in these numbers: the text that this software brings or a file that the operator
names, and the labels' names with their descriptions. The document names the text by its digest. The same texts and
backbone give the same numbers on the same machine.

That a file is public rests on the operator's word, as it does for the start of an rvae.
"""

import gzip
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit.documents import DocumentInvalid
from tacit.prompt import Centre, Head, NoInjection, PromptedModel

if TYPE_CHECKING:
    import torch

    from learning.prompts.model import PromptedModel as PromptedModule
    from learning.text.cloze import ClozeEncoder
    from learning.text.examples import TextRow

__all__ = ["START_LENGTH", "centre_texts", "chosen_layers", "start_head"]

# Lines of a file that are read. A mean over more texts would be the same to three digits.
MAX_READ = 4000
# Length of a label's row at a start at the labels, in units of its features. Chosen on validation rows (docs/heads.md).
START_LENGTH = 8.0
_BATCH = 32


def chosen_layers(model: PromptedModel, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers of the model's head: the job's own or, for a head alone, those at a third, two thirds and the end."""
    from learning.prompts.backbone import FAMILIES

    if not isinstance(model.task, Head) or model.task.layers is not None:
        return None if not isinstance(model.task, Head) else model.task.layers
    if not isinstance(model.injection, NoInjection) or config["model_type"] not in FAMILIES:
        return None
    count: int = config[FAMILIES[config["model_type"]].layers]
    return tuple(sorted({max(1, count * part // 3) for part in (1, 2, 3)}))


def centre_texts(centre: Centre, folder: Path, report: Callable[[str], None]) -> tuple[tuple[str, ...], Centre]:
    """The public texts that centre features, and how the document names them.

    Args:
        centre: as the operator wrote it.
        folder: base of a relative path.
        report: called with sentences about what was found.

    Raises:
        DocumentInvalid: the file cannot be read, or has no text.
    """
    if centre.file is None:
        from learning.prompts.common_text import NAME, common_text

        texts, name = common_text(), NAME
    else:
        path = folder / centre.file
        texts, name = tuple(itertools.islice(_lines(path), MAX_READ)), path.name[:200]
        if not texts:
            raise DocumentInvalid(
                f"model.task.centre: {path} has no line of text; name a file with one public text on each line"
            )
    digest = hashlib.sha256("".join(f"{text}\n" for text in texts).encode(errors="replace")).digest()
    report(f"centre: the mean of {len(texts):,} public texts, {name}, {digest.hex()[:16]}")
    return texts, Centre(name=name, digest=digest, texts=len(texts))


def start_head(
    module: "PromptedModule",
    model: PromptedModel,
    labels: Sequence[str],
    encoder: "ClozeEncoder",
    texts: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Sets what centres the module's features, and its head's start, in place.

    Args:
        module: the seeded module.
        model: the document's model.
        labels: the job's labels.
        encoder: of the module.
        texts: the public texts. For a head over pairs, each text and the one that follows it are a pair.
        report: called with sentences about what was set.

    Raises:
        DocumentInvalid: a description is of no label of the job.
    """
    import torch

    task = model.task
    if not isinstance(task, Head):
        return
    if task.layers is not None:
        rows: Sequence[TextRow] = texts
        if encoder.pairs:
            rows = [(text, texts[(place + 1) % len(texts)]) for place, text in enumerate(texts)]
        total = torch.zeros(module.centre.shape, dtype=torch.float64)
        for means in _by_batch(module, encoder, rows, module.uncentred):
            total += means.double().sum(dim=0)
        with torch.no_grad():
            module.centre.copy_((total / len(rows)).float())
    if unknown := [label for label in task.descriptions if label not in labels]:
        raise DocumentInvalid(
            f"model.task.descriptions: {unknown[0]!r} is not a label of this job; remove it, or add the label"
        )
    if task.start == "labels":
        told = [task.descriptions.get(label, _as_words(label)) for label in labels]
        found = torch.cat(
            list(_by_batch(module, encoder, told, lambda ids: module.features(ids, module.prompt_values(len(ids)))))
        )
        # A head over plain means starts with rows as long as those over centred ones.
        found = found - found.mean(dim=0) if task.layers is None else found
        length = found.norm(dim=1, keepdim=True).clamp(min=1e-6)
        with torch.no_grad():
            module.output.weight.copy_(found / length * START_LENGTH)
            module.output.bias.zero_()
        report(f"head: starts at the features of the {len(labels)} labels, such as {told[0]!r}")


def _by_batch(
    module: "PromptedModule",
    encoder: "ClozeEncoder",
    rows: "Sequence[TextRow]",
    compute: "Callable[[torch.Tensor], torch.Tensor]",
) -> "Iterator[torch.Tensor]":
    import torch

    for first in range(0, len(rows), _BATCH):
        ids = torch.from_numpy(np.ascontiguousarray(encoder.encode(rows[first : first + _BATCH])))
        with torch.no_grad():
            yield compute(ids)


def _as_words(label: str) -> str:
    return " ".join(label.replace("_", " ").replace("-", " ").split()) or label


def _lines(file: Path) -> Iterator[str]:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                if text := line.strip():
                    yield text
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DocumentInvalid(f"model.task.centre: {file} cannot be read as lines of UTF-8 text ({error})") from error
