"""What an operator's table and a job document have in common: the keys, before they are checked together."""

from typing import Annotated, ClassVar

from pydantic import Field

from tacit.corpus import CorpusOrder
from tacit.documents import AtMost, Document, Label, table_of
from tacit.job_parts import Aggregation, Name, Rounds, Training, Vocabulary
from tacit.limits import MAX_LABELS
from tacit.mechanism import Mechanism, NoMechanism
from tacit.method import FedAvg, Method, OwnVocabulary, Protected, protected_by
from tacit.model import Model, TextCNNModel
from tacit.server_optimiser import FedAvgServer, ServerOptimiser

__all__ = ["JobBody"]


class JobBody(Document):
    """The keys. `job_checks.check_body` says whether they go together."""

    max_bytes: ClassVar[int] = 1024 * 1024

    name: Name
    labels: Annotated[tuple[Label, ...], AtMost(MAX_LABELS)] = Field(min_length=2)
    # A table without `architecture` describes a TextCNN.
    model: Annotated[Model, table_of(Model, "architecture", default="textcnn")] = TextCNNModel()
    # `local` is a method of simulations; `job_checks` refuses it.
    method: Annotated[Method, table_of(Method, "name", in_a_word=True, unsaid=("local",))] = FedAvg()
    training: Training = Training()
    mechanism: Annotated[Mechanism, table_of(Mechanism, "name", in_a_word=True)] = NoMechanism()
    rounds: Rounds = Rounds()
    aggregation: Aggregation = Aggregation()
    # What the coordinator does with the mean change.
    server: Annotated[ServerOptimiser, table_of(ServerOptimiser, "optimiser", default="fedavg", in_a_word=True)] = (
        FedAvgServer()
    )
    # The operator always names one; in the document it stands only where members build their own, and a tokenizer
    # otherwise.
    vocabulary: Vocabulary | None = None
    # Everything random in the starting weights and in local training comes from this and public numbers.
    seed: int = Field(default=0, ge=0, lt=2**63)
    # Of a model that makes text up, and only there.
    corpus: CorpusOrder | None = None

    @property
    def own_vocabulary(self) -> bool:
        """Whether every member builds its vocabulary itself."""
        return isinstance(self.vocabulary, OwnVocabulary)

    @property
    def protected(self) -> Protected | None:
        """How private parameters and noise go together; None where there is no noise, or nothing private."""
        return protected_by(self.method, self.mechanism, own_vocabulary=self.own_vocabulary)
