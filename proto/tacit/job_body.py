"""The keys that a job file and a job document share, before they are checked against each other."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from tacit.corpus import CorpusOrder
from tacit.documents import AtMost, Document, Label, table_of
from tacit.job_parts import Aggregation, Audit, Average, Name, Rounds, Training, Vocabulary
from tacit.limits import MAX_LABELS
from tacit.mechanism import Mechanism, NoMechanism
from tacit.method import FedAvg, Method, OwnVocabulary, Protected, protected_by
from tacit.model import Model, TextCNNModel, TransformerModel
from tacit.server_optimiser import FedAvgServer, ServerOptimiser
from tacit.validation import NoisedMetrics

__all__ = ["MAX_TAGS", "JobBody", "Whose", "distinct_tags"]

# Who knows which vector belongs to which word when training starts: everybody, the member alone, or the member alone
# except that each vector comes from those of a public base model.
Whose = Literal["public", "own", "own-from-base"]


# Tags of a job.
MAX_TAGS = 16


def distinct_tags(tags: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the tags if none is named twice. Raises ValueError otherwise."""
    if len(set(tags)) != len(tags):
        raise ValueError("names a tag twice; write each once")
    return tags


class JobBody(Document):
    """The shared keys. `job_checks.check_body` checks that they fit together."""

    max_bytes: ClassVar[int] = 1024 * 1024

    name: Name
    # Two or more, or none if the model writes.
    labels: Annotated[tuple[Label, ...], AtMost(MAX_LABELS)] = ()
    # A table without `architecture` describes a TextCNN.
    model: Annotated[Model, table_of(Model, "architecture", default="textcnn", unsaid=("none",))] = TextCNNModel()
    # `local` is for simulations only; `job_checks` refuses it.
    method: Annotated[Method, table_of(Method, "name", in_a_word=True, unsaid=("local",))] = FedAvg()
    training: Training = Training()
    mechanism: Annotated[Mechanism, table_of(Mechanism, "name", in_a_word=True, unsaid=("discrete-gaussian",))] = (
        NoMechanism()
    )
    rounds: Rounds = Rounds()
    aggregation: Aggregation = Aggregation()
    # How the coordinator applies the mean update.
    server: Annotated[ServerOptimiser, table_of(ServerOptimiser, "optimiser", default="fedavg", in_a_word=True)] = (
        FedAvgServer()
    )
    # A job file always has one, except for a prompted model. A job document has one only if members build their own;
    # otherwise it has a tokenizer.
    vocabulary: Vocabulary | None = None
    # Measures versions on data that members keep back, with noise. None: nothing is measured.
    metrics: NoisedMetrics | None = None
    # All randomness in the starting weights and in local training derives from this and public numbers.
    seed: int = Field(default=0, ge=0, lt=2**63)
    # Only for a model that generates text.
    corpus: CorpusOrder | None = None
    # What members' policies may admit or refuse by a word: a purpose, a department, a study.
    tags: Annotated[tuple[Name, ...], AtMost(MAX_TAGS), AfterValidator(distinct_tags)] = ()
    # What members are asked to audit, and `coordinator export` asks to see. None: nothing.
    audit: Audit | None = None
    # How commands make the version called `average`. None: the job has none.
    average: Average | None = None
    # Set by `coordinator job try` if it chose the numbers on private rows. No member's ledger counts that choice.
    tuned_on: Literal["own-private"] | None = None

    @property
    def own_vocabulary(self) -> bool:
        """Whether every member builds its own vocabulary."""
        return isinstance(self.vocabulary, OwnVocabulary)

    @property
    def whose_vocabulary(self) -> Whose:
        """Whose the words and their first vectors are."""
        if not isinstance(self.vocabulary, OwnVocabulary):
            return "public"
        # A job file that says nothing gets the base's rows, where the base has some.
        based = isinstance(self.model, TransformerModel) and self.model.base is not None
        started = self.vocabulary.start == "base" or (based and self.vocabulary.start is None)
        return "own-from-base" if started else "own"

    @property
    def protected(self) -> Protected | None:
        """How noise and private parameters combine soundly; None without noise or without private parameters."""
        return protected_by(self.method, self.mechanism, own_vocabulary=self.own_vocabulary)
