"""Starts a job from a version of an earlier job: checks that the two fit, and takes the earlier job's numbers.

Guarantees: a job takes another job's values only if each means the same in both: same model, tokenizer, labels in their
order, and tensors. The sentence of a refusal names the first difference. Frozen values come along, since the shared
ones were trained on top of them.

Leaves to others: fetching the earlier job (`coordinator.cli.continuing`), and whether its version exists as stated
(the coordinator checks that when the job is created).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tacit.documents import DocumentInvalid
from tacit.job import EarlierVersion, JobDocument
from tacit.manifest import Manifest
from tacit.model import Model

__all__ = ["Earlier", "check_continues"]

# Keys of a model that its values do not depend on.
_FREE = frozenset({"dropout", "max_tokens", "hub"})


@dataclass(frozen=True, slots=True)
class Earlier:
    """A version of an earlier job.

    Attributes:
        document: The earlier job's document.
        manifest: Its shared tensors.
        number: The version's number.
        weights: The version's bytes.
        frozen: The bytes of what the earlier job froze, if anything.
    """

    document: JobDocument
    manifest: Manifest
    number: int
    weights: bytes
    frozen: bytes | None

    @property
    def origin(self) -> EarlierVersion:
        """How the new document names it. The version's digest is the document's `weights`."""
        return EarlierVersion(job=self.document.name, number=self.number, document=self.document.digest())


def check_continues(
    labels: Sequence[str], model: Model, tokenizer: bytes | None, manifest: Manifest, earlier: Earlier
) -> None:
    """Checks that a job can start from an earlier job's version.

    Args:
        labels: The new job's labels.
        model: Its model, as members build it.
        tokenizer: SHA-256 of its tokenizer; None if members build their own vocabularies.
        manifest: Its shared tensors.
        earlier: The version to start from.

    Raises:
        DocumentInvalid: They differ; the sentence names the key.
    """
    name, document = earlier.document.name, earlier.document
    if not document.complete:
        raise DocumentInvalid(
            f"start: members keep a part of {name} ({document.method.name}), so a version alone is no model to start "
            "from; start from a job that shares its whole model"
        )
    ours, theirs = (
        {key: value for key, value in each.model_dump(mode="json").items() if key not in _FREE}
        for each in (model, document.model)
    )
    if ours != theirs:
        key, here, there = _difference("model", ours, theirs)
        raise DocumentInvalid(f"start: {key} is {_shown(here)} here and {_shown(there)} in {name}; use the same model")
    if list(labels) != list(document.labels):
        raise DocumentInvalid(
            f"start: the labels are {_listed(labels)} here and {_listed(document.labels)} in {name}; use the same "
            "labels in the same order"
        )
    if tokenizer != document.tokenizer:
        raise DocumentInvalid(
            f"start: the vocabulary differs from that of {name}, so the same row would be another word; use the same "
            "file"
        )
    shapes = {each.name: each.shape for each in earlier.manifest.tensors}
    for tensor in manifest.tensors:
        if shapes.get(tensor.name) != tensor.shape:
            there = shapes.get(tensor.name)
            raise DocumentInvalid(
                f"start: {tensor.name} has the shape {list(tensor.shape)} here and "
                f"{'is not shared' if there is None else list(there)} in {name}; use the same model and method"
            )
    if manifest.digest() != earlier.manifest.digest():
        more = min(shapes.keys() - {each.name for each in manifest.tensors}, default="its order")
        raise DocumentInvalid(f"start: {name} also shares {more}; use the same method")


def _difference(key: str, ours: object, theirs: object) -> tuple[str, object, object]:
    """The first key under which two unlike values differ, with its two values. Tables of one kind are looked into."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return key, ours, theirs
    unlike = sorted(each for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each))
    # These two decide which other keys there are.
    first = next((each for each in ("architecture", "name") if each in unlike), unlike[0])
    return _difference(f"{key}.{first}", ours.get(first), theirs.get(first))


def _shown(value: object) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _listed(labels: Sequence[str]) -> str:
    return f"{', '.join(labels[:5])}{f' and {len(labels) - 5} more' if len(labels) > 5 else ''}"
