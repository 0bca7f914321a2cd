"""The catalogue of benchmarks, in the order of `make bench`, with the text of `--help` and `python -m benchmarks`."""

__all__ = ["BENCHMARKS", "TOOLS", "summary"]

# By module below `benchmarks`. `python -m benchmarks` prints the first sentence.
BENCHMARKS: dict[str, str] = {
    "secure_aggregation.costs": """Measures what secure aggregation costs, in seven parts.

rounds: a round over the services beside the same round in the clear.
peer:   the same cohort under this project's protocol and under Flower's SecAgg+.
limit:  the distance to the cipher's own speed, large cohorts, and the server's memory.
cost:   time of a member and of the server, by members and length of the vector.
groups: a round of thousands in groups, with a worker for each group at a time.""",
    "secure_aggregation.memory": """Measures the coordinator's peak memory in a round.

Idle means that all members are connected and have finished a small job. The result is the peak above idle, in vectors
of the job.""",
    "secure_aggregation.bounds.costs": """Measures proofs that masked vectors are short, in a prototype.

cost: time and bytes of a member and of the coordinator, by length of the vector.
lies: what the coordinator accepts, and the longest vector that it may accept.
reach: how far one liar moves a cohort's mean, in one sum, in groups, and with proofs.""",
    "operations.ledger_faults": """Kills a ledger thousands of times and checks that it loses nothing.

Each process is killed (kill -9) at a random point of a release, or by a timer, and started again. The benchmark counts
lost charges, failed starts, broken chains and ledgers over their limit. It does not test a loss of power.""",
    "operations.load": """Measures a coordinator under many members.

round:   time, memory and processor time of a secure round with a thousand members.
idle:    memory with thousands of sessions that do nothing.
vectors: peak memory with few members and large vectors.""",
    "operations.prune": """Measures the pruning of a store with a hundred versions of a million values.

Each version has two more vectors of the server optimiser's state. The newest version and the start stay.""",
    "operations.transfer": """Measures how fast a member downloads a large backbone, in pieces and in one stream.

Each way is a process of its own, over mutual TLS on loopback. Seconds include all checks and the write to the disk.""",
    "operations.strangers": """Measures rounds while strangers flood the enrolment port.

Ten members run rounds, first undisturbed and then under five thousand connections from fifty addresses. The results
are the ratio of the two median rounds, and the time of an honest enrolment under the flood.""",
    "operations.soak": """Runs rounds with random kills and checks every version and receipt.

Members and the coordinator are killed (kill -9) and started again. At the end, each version is computed again from the
vectors that the members wrote to files before they masked them.""",
    "operations.failover": """Runs rounds over two coordinators and lets one fail again and again.

It is killed, stopped, or cut off from PostgreSQL, which they share as they share a bucket. The results are the seconds
until the next attempt, and what a soak checks.""",
    "privacy.step_cost": """Measures the time of a DP-SGD step beside a plain step, and beside Opacus.

Both steps use the same model, optimiser and batch size. They take turns in one run, and the result is a ratio of
medians.""",
    "privacy.precision": """Measures a step of prompt tuning in bfloat16 beside float32.

Each case is a process that may use only some instructions of this processor.""",
    "privacy.audit": """Attacks each mechanism and proves a lower bound on epsilon.

The bound must stay below the claim. The audit is repeated with noise and clipping broken on purpose; then the
bound must exceed the claim.""",
    "audit.jobs": """Audits jobs as they are, without noise, and without clipping, on three architectures.

The figures are the lower bound on epsilon beside the claim, seconds, and memory.""",
    "metrics.coverage": """Measures how often estimates from noised metrics lie within their stated error.

coverage: the share of estimates within 1.96 standard errors of the truth, by members and epsilon.
stopping: the accuracy of the version that early stopping chose, beside the best in hindsight.""",
    "institutional.accuracy": """Measures TextCNN's accuracy on TREC with 1 to 4 members, without noise.

One member is plain training. Two to four members train through the services. The paper is Zhu et al. 2020, table 1.""",
    "institutional.dp": """Measures accuracy on TREC under differential privacy.

grid:   the paper's own mechanism (Zhu et al. 2020, algorithm 1), with its epsilon and a sound one.
dp-sgd: the best recipe found at epsilon 1, 2, 4 and 8.""",
    "frontier.accuracy": """Measures accuracy over epsilon of heads, LoRA, BitFit and prompts in a frozen encoder.

TREC, SST-2 sentences, AG News, banking77 and CSAbstruct, with 3 and 10 equal members and with centralised training.""",
    "frontier.suggested": """Measures what `job try --suggest` proposes to a head, beside the best of the search.

The cells are those of the search of frontier.accuracy, with heads and noise. Validation rows score both.""",
    "device.costs": """Measures a member without torch beside one with it: bytes, memory, time and accuracy.

The case `device` runs in a fresh environment without torch, and `device-int8` with weights of one byte.""",
    "private_vocabularies.quality": """Measures the accuracy of FedVocab and its peers with 100 members.

--model minilm starts from a pretrained encoder. --rates chooses learning rates other than the paper's. --search tries
recipes on validation rows and reads no test rows.""",
    "private_vocabularies.pretrained": """Measures FedVocab and its peers over the pretrained encoder MiniLM.

The whole encoder or LoRA is shared, with word pieces of the encoder or of the members. --device trains on a GPU.""",
    "private_vocabularies.wire": """Counts the bytes that a member of a FedVocab federation sends and receives.

Three members train on TREC in the paper's sizes. The bytes include TLS.""",
    "private_vocabularies.partition_kinds": """Draws the members' labels and rows under four kinds of partitions.

It deals TREC's questions and trains nothing.""",
    "private_vocabularies.round_variance": """Measures how much FedAvg's accuracy moves from round to round.

It trains on SST-2 and reads 2,000 validation rows after every round, with and without adjusted logits.""",
    "private_vocabularies.embedding_divergence": """Measures how far private embeddings diverge, and what it costs.

It reads FedVocab's shared part behind each member's own table, the mean of all tables, the common start and another
member's table.""",
    "generation.quality": """Measures language models that write, trained with federated LoRA, with and without noise.

SmolLM2-135M-Instruct on E2E NLG (ten equal members) and MedQuAD (nine by source), beside one member alone and all rows
in one place. --backbone names its folder.""",
    "generation.wire": """Measures a round of two real members that train SmolLM2: memory, bytes and seconds.

--backbone names the folder of SmolLM2-135M-Instruct.""",
    "prompts.quality": """Measures the accuracy of prompts over a frozen language model.

head:     the head for masked words, and how well it names a word.
quality:  prompts of 20 tokens, beside centralised prompts, the head alone, and fine-tuning.
tokens:   1, 5, 10 and 20 tokens.
steps:    10, 40 and 100 local steps.
laplace:  Laplace noise on every change.
methods:  P-tuning, prefixes and LoRA.
momentum: server momentum (FedAvgM).""",
    "prompts.wire": """Counts the bytes of prompts on the paper's backbones.

wire:     what a member sends in a round.
backbone: a member that joins a job on a backbone and fetches it.""",
    "prompts.head_rounds": """Measures a round of a head whose features are cached beside a round that computes them.

The head is over a frozen encoder of MiniLM's shape.""",
    "prompts.backdoor": """Attacks a prompt with a backdoor, on one sum and on groups.

One of ten members, or three of thirty, poison their data or scale their updates.""",
    "reconstruction.tokens": """Reconstructs a batch's tokens from one member's gradient.

It runs five attacks against FedAvg, FedRecon and FedVocab, with and without defences.""",
    "synthesis.quality": """Measures classifiers trained on synthetic text beside private training.

It also measures how near the synthetic texts are to the real ones.""",
    "synthesis.cost": """Measures what a member spends on synthetic text: processor seconds and bytes.""",
    "synthesis.attack": """Attacks released classifiers with keyword inference.

It trains the classifiers that are not stored yet, as `synthesis.quality` does.""",
    "simulation.speed": """Measures client rounds a second and the memory of a simulation, beside Flower's.

TextCNN and a head on cached features, 100 to 10,000 virtual members, on processes and on Ray, with one and two workers.
Flower has a Python of its own; with --quick it is left out.""",
}

# Not part of `make bench`.
TOOLS: dict[str, str] = {
    "synthesis.search": """Tries recipes for synthetic text on validation rows.

With --quick it reads earlier trials and starts none.""",
    "operations.dashboard": """Draws the coordinator's dashboard from a real run (two minutes).""",
    "report": """Writes docs/benchmarks.md and docs/benchmarks/ from the results.""",
}


def summary(text: str) -> str:
    """Return the first paragraph, which is one sentence."""
    return text.partition("\n\n")[0]
