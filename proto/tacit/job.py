"""Jobs: what the operator writes (`JobSpec`, TOML) and what all members train under (`JobDocument`, canonical JSON).

`coordinator job bundle` turns the first into the second: files become digests, the seed becomes weights. A member
trains only under a job document, whose digest is part of every attempt's context.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from tacit.bundle import BACKBONE_FILE, ONNX_FILE, PIECES_FILE
from tacit.documents import Digest, DocumentInvalid
from tacit.job_body import JobBody
from tacit.job_checks import check_body, check_question
from tacit.job_parts import (
    MAX_GROUPS,
    NO_VOCABULARY,
    Aggregation,
    Audit,
    Average,
    BundledWeights,
    Combine,
    Deadlines,
    EarlierVersion,
    Precision,
    PublicStart,
    Rounds,
    Schedule,
    Start,
    Training,
    VocabularyFile,
    earlier_version,
)
from tacit.measurement import Measurement
from tacit.mechanism import OwnDiscreteGaussian
from tacit.method import FedVocab, OwnVocabulary, keeps_anything, private_parts
from tacit.model import NoModel, PromptedModel, RvaeModel, TransformerModel
from tacit.question import QuestionTable
from tacit.vector import check_layout

__all__ = [
    "MAX_GROUPS",
    "Aggregation",
    "Audit",
    "Average",
    "BundledWeights",
    "Combine",
    "Deadlines",
    "EarlierVersion",
    "JobDocument",
    "JobSpec",
    "Precision",
    "PublicStart",
    "Rounds",
    "Schedule",
    "Training",
    "VocabularyFile",
    "earlier_version",
]


class JobSpec(JobBody):
    """A job as the operator writes it: `coordinator job bundle job.toml`."""

    # Public text, or "job:version". Members get the resulting weights, not the text.
    start: Start | None = None

    @property
    def question(self) -> None:
        """A job file asks nothing: `coordinator survey` makes the documents of jobs that do."""
        return

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Reads a file like `Document.from_toml`.

        Raises:
            DocumentInvalid: also for a key that has no effect. Only a file is checked for that: a document states every
                key of its method, including those that nobody wrote.
        """
        spec = super().from_toml(path)
        if (wrong := spec._in_vain()) is not None:
            raise DocumentInvalid(f"{path}: {wrong}")
        return spec

    def _in_vain(self) -> str | None:
        """Says which key in the file has no effect, and why."""
        match self.method:
            case FedVocab(adaptive=True, embedding="frozen") if "adaptive" in self.method.model_fields_set:
                return (
                    'method.adaptive: has no effect, because embedding = "frozen" keeps the embedding as it is; leave '
                    'this key out, or set embedding = "trained"'
                )
            case _:
                return None

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if isinstance(self.model, NoModel) or isinstance(self.mechanism, OwnDiscreteGaussian):
            raise ValueError("model, mechanism: a job file trains; `coordinator survey new` writes a file that asks")
        check_body(self)
        if isinstance(self.start, PublicStart) and not isinstance(self.model, RvaeModel):
            raise ValueError("start: only an rvae learns from text without labels; leave this table out")
        if isinstance(self.model, PromptedModel):
            if self.model.base is None:
                raise ValueError(
                    "model.base: missing; name a folder that save_pretrained wrote, or owner/name on the hub"
                )
        elif self.vocabulary is None and not (isinstance(self.model, TransformerModel) and self.model.base is not None):
            missing = "missing; it has no default"
            raise ValueError(f"vocabulary: {NO_VOCABULARY if 'vocabulary' in self.model_fields_set else missing}")
        if isinstance(self.start, str) and keeps_anything(self.method):
            raise ValueError(
                f"start: with {self.method.name}, members keep a part of the model, which no version holds; leave this "
                "key out, or share the whole model"
            )
        self._check_base()
        # The model's size is known only when the bundle is made. If there is no room for one value, there is none for
        # more.
        check_layout(self, values=1)
        return self

    def _check_base(self) -> None:
        """A base's encoder reaches members in version 0, among the frozen values or, if they keep it private, as their
        private start. A member's own vocabulary with random rows has no such start.
        """
        based = isinstance(self.model, TransformerModel) and self.model.base is not None
        if based and self.whose_vocabulary == "own" and "encoder" in private_parts(self.method):
            raise ValueError(
                f"model.base: its weights would reach nobody: {self.method.name} keeps the encoder private, and with "
                'vocabulary.start = "random" all private parameters start at random; set start = "base", share the '
                'encoder (method fedvocab, or lg-fedavg with private = ["embedding"]), or name the base\'s vocab.txt '
                "as vocabulary.file"
            )


class JobDocument(JobBody):
    """A job as it is run: with digests instead of files."""

    # What the job asks its members instead of training with them. None: it trains.
    question: QuestionTable | None = None
    manifest: Digest
    weights: Digest
    values: int = Field(ge=1)
    vocabulary: OwnVocabulary | None = None
    # None if members build their own vocabularies.
    tokenizer: Digest | None = None
    # The base model's word pieces, if the rows of members' own vocabularies start from the base's rows, which are in
    # `private`.
    base_tokenizer: Digest | None = None
    # Present if some parameters are private and start from public numbers.
    private: BundledWeights | None = None
    # Present if the job starts from a version of an earlier job, whose bytes are `weights`.
    earlier: EarlierVersion | None = None
    # Present if the job freezes parameters: fetched once, and no part of a version or an update.
    frozen: BundledWeights | None = None

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if self.question is not None:
            check_question(self, self.question, self.values, tokenizer=self.tokenizer is not None)
            if self.private is not None or self.earlier is not None or self.base_tokenizer is not None:
                raise ValueError(
                    "private, base_tokenizer, earlier: a job with a question trains nothing; leave these keys out"
                )
            if isinstance(self.model, PromptedModel) and self.model.backbone is None:
                raise ValueError("model.backbone: missing; make the measurement with `coordinator measure`")
            self._check_frozen()
            check_layout(self, self.values)
            return self
        if isinstance(self.model, NoModel) or isinstance(self.mechanism, OwnDiscreteGaussian):
            raise ValueError("question: missing; a job without one trains a model, and has a mechanism for training")
        check_body(self)
        if (self.vocabulary is None) == (self.tokenizer is None):
            raise ValueError("a job has either a tokenizer or a vocabulary that its members build")
        if isinstance(self.model, PromptedModel) and self.model.backbone is None:
            raise ValueError("model.backbone: missing; make the bundle with `coordinator job bundle`")
        if (self.base_tokenizer is not None) != (self.whose_vocabulary == "own-from-base"):
            raise ValueError(
                'base_tokenizer: a job has it exactly if vocabulary.start is "base"; make the bundle with `coordinator '
                "job bundle`"
            )
        keeps, public = keeps_anything(self.method), self.tokenizer is not None or self.base_tokenizer is not None
        if (self.private is not None) != (keeps and public):
            raise ValueError(
                f"private: a job has it exactly if its method ({self.method.name}) keeps parameters private that start "
                "from public numbers; make the bundle with `coordinator job bundle`"
            )
        self._check_frozen()
        check_layout(self, self.values)
        return self

    def _check_frozen(self) -> None:
        centred = isinstance(self.model, PromptedModel) and self.model.centred
        adapters = isinstance(self.model, PromptedModel) and self.model.fixes_adapters
        encoder = isinstance(self.model, TransformerModel) and self.model.freezes_encoder
        if self.frozen is None and centred:
            raise ValueError(
                "frozen: missing; model.task centres features with numbers in files of their own; make the bundle "
                "again with `coordinator job bundle`"
            )
        if self.frozen is None and self.model.freeze_embedding:
            raise ValueError(
                "frozen: missing; model.freeze_embedding keeps the embedding out of versions and updates, so its "
                "values have files of their own; make the bundle again with `coordinator job bundle`"
            )
        if self.frozen is None and adapters and self.question is None:
            raise ValueError(
                'frozen: missing; with train = "up" one matrix of each adapter has files of its own; make the bundle '
                "again with `coordinator job bundle`"
            )
        if self.frozen is None and encoder:
            raise ValueError(
                "frozen: missing; model.injection freezes the encoder, so its values have files of their own; make the "
                "bundle again with `coordinator job bundle`"
            )
        if self.frozen is not None and not (self.model.freeze_embedding or centred or adapters or encoder):
            raise ValueError(
                "frozen: this job freezes nothing (model.freeze_embedding is false); make the bundle again with "
                "`coordinator job bundle`"
            )

    @property
    def files(self) -> dict[str, bytes]:
        """The digests that the document names, by the file's name in the bundle."""
        named = {"manifest.json": self.manifest, "weights.bin": self.weights}
        if isinstance(self.question, Measurement):
            named |= {"version.json": self.question.manifest, "version.bin": self.question.weights}
        if self.tokenizer is not None:
            named["tokenizer.json"] = self.tokenizer
        if self.base_tokenizer is not None:
            named["base_tokenizer.json"] = self.base_tokenizer
        if self.private is not None:
            named |= {"private.json": self.private.manifest, "private.bin": self.private.weights}
        if self.frozen is not None:
            named |= {"frozen.json": self.frozen.manifest, "frozen.bin": self.frozen.weights}
        if isinstance(self.model, PromptedModel) and self.model.backbone is not None:
            named[BACKBONE_FILE] = self.model.backbone
            if self.model.pieces is not None:
                named[PIECES_FILE] = self.model.pieces
            if self.model.onnx is not None and self.model.onnx.digest is not None:
                named[ONNX_FILE] = self.model.onnx.digest
        return named

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """Digests of everything a member fetches besides the document itself."""
        return tuple(self.files.values())

    @property
    def complete(self) -> bool:
        """Whether the published model is whole, i.e. runs without a member's private parameters."""
        return not keeps_anything(self.method)
