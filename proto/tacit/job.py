"""Jobs: what the operator writes (`JobSpec`, TOML) and what everyone trains under (`JobDocument`, canonical JSON).

`coordinator job bundle` turns the first into the second: files become digests, a seed becomes weights. A member
trains under a job document and nothing else; its digest is part of every round's context.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from tacit.bundle import BACKBONE_FILE
from tacit.documents import Digest, DocumentInvalid
from tacit.job_body import JobBody
from tacit.job_checks import check_body
from tacit.job_parts import (
    MAX_GROUPS,
    NO_VOCABULARY,
    Aggregation,
    BundledWeights,
    Combine,
    Deadlines,
    Precision,
    PublicStart,
    Rounds,
    Training,
    VocabularyFile,
)
from tacit.method import FedVocab, OwnVocabulary, keeps_anything, private_parts
from tacit.model import PromptedModel, RvaeModel, TransformerModel
from tacit.vector import check_layout

__all__ = [
    "MAX_GROUPS",
    "Aggregation",
    "BundledWeights",
    "Combine",
    "Deadlines",
    "JobDocument",
    "JobSpec",
    "Precision",
    "PublicStart",
    "Rounds",
    "Training",
    "VocabularyFile",
]


class JobSpec(JobBody):
    """A job as the operator writes it: `coordinator job bundle job.toml`."""

    # Members get the weights that come of it, and not the text.
    start: PublicStart | None = None

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """As `Document.from_toml`.

        Raises:
            DocumentInvalid: also for a key that was written in vain. Only here: a document says every key of its
                method, whoever wrote none of them, and has to be read as it is.
        """
        spec = super().from_toml(path)
        if (wrong := spec._in_vain()) is not None:
            raise DocumentInvalid(f"{path}: {wrong}")
        return spec

    def _in_vain(self) -> str | None:
        """A key that was written and does nothing."""
        match self.method:
            case FedVocab(adaptive=True, embedding="frozen") if "adaptive" in self.method.model_fields_set:
                return (
                    'method.adaptive: there is nothing to adapt where embedding = "frozen" keeps the embedding as it '
                    'is; leave this key out, or say embedding = "trained"'
                )
            case _:
                return None

    @model_validator(mode="after")
    def _checks(self) -> Self:
        check_body(self)
        if self.start is not None and not isinstance(self.model, RvaeModel):
            raise ValueError("start: only a model of architecture rvae learns from text without labels; leave it out")
        if isinstance(self.model, PromptedModel):
            if self.model.base is None:
                raise ValueError(
                    "model.base: missing; name a folder that save_pretrained wrote, or owner/name on the hub"
                )
        elif self.vocabulary is None:
            missing = "missing; it has no default"
            raise ValueError(f"vocabulary: {NO_VOCABULARY if 'vocabulary' in self.model_fields_set else missing}")
        self._check_base()
        # How many values the model has shows when the bundle is made; what one of them has no room for, none has.
        check_layout(self, values=1)
        return self

    def _check_base(self) -> None:
        """A base's encoder reaches members in version 0, or as their private start where they keep it; with
        vocabularies of their own, embeddings of different sizes, there is no such start.
        """
        based = isinstance(self.model, TransformerModel) and self.model.base is not None
        if based and self.own_vocabulary and "encoder" in private_parts(self.method):
            raise ValueError(
                f"model.base: {self.method.name} keeps the encoder with each member, and beside vocabularies of their "
                "own what members keep starts at random: the base's weights would reach nobody; share the encoder "
                '(method fedvocab, or lg-fedavg with private = ["embedding"]), or name the base\'s vocab.txt as '
                "vocabulary.file"
            )


class JobDocument(JobBody):
    """A job as it is run: digests in place of files."""

    manifest: Digest
    weights: Digest
    values: int = Field(ge=1)
    vocabulary: OwnVocabulary | None = None
    # None where members build their own.
    tokenizer: Digest | None = None
    # What private parameters start from, where the vocabulary is public.
    private: BundledWeights | None = None
    # What no member trains: fetched once, and no part of a version or an update.
    frozen: BundledWeights | None = None

    @model_validator(mode="after")
    def _checks(self) -> Self:
        check_body(self)
        if (self.vocabulary is None) == (self.tokenizer is None):
            raise ValueError("a job has either a tokenizer or a vocabulary that its members build")
        if isinstance(self.model, PromptedModel) and self.model.backbone is None:
            raise ValueError("model.backbone: missing; make the bundle with `coordinator job bundle`")
        keeps = keeps_anything(self.method)
        if (self.private is not None) != (keeps and self.tokenizer is not None):
            raise ValueError(f"private: what {self.method.name} keeps and what this job has to start it from differ")
        self._check_frozen()
        check_layout(self, self.values)
        return self

    def _check_frozen(self) -> None:
        if self.frozen is None and self.model.freeze_embedding:
            raise ValueError(
                "frozen: missing; model.freeze_embedding keeps the embedding out of versions and updates, so its "
                "values stand apart; make the bundle again with `coordinator job bundle`"
            )
        if self.frozen is not None and not self.model.freeze_embedding:
            raise ValueError(
                "frozen: this job freezes nothing (model.freeze_embedding is false); make the bundle again with "
                "`coordinator job bundle`"
            )

    @property
    def files(self) -> dict[str, bytes]:
        """What the document names by digest, by its file's name in the bundle."""
        named = {"manifest.json": self.manifest, "weights.bin": self.weights}
        if self.tokenizer is not None:
            named["tokenizer.json"] = self.tokenizer
        if self.private is not None:
            named |= {"private.json": self.private.manifest, "private.bin": self.private.weights}
        if self.frozen is not None:
            named |= {"frozen.json": self.frozen.manifest, "frozen.bin": self.frozen.weights}
        if isinstance(self.model, PromptedModel) and self.model.backbone is not None:
            named[BACKBONE_FILE] = self.model.backbone
        return named

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """Digests of everything a member fetches besides the document itself."""
        return tuple(self.files.values())

    @property
    def complete(self) -> bool:
        """Whether what is published is a whole model, which runs without a member's private parameters."""
        return not keeps_anything(self.method)
