"""Simulates a federation from Python: `tacit.simulate`, which `coordinator simulate` is with options."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tacit.job import JobSpec
from tacit.prompt import writes
from tacit_api.jobs import read_job
from tacit_api.rows import Data, rows_of
from tacit_api.torch_threads import threads_kept
from toolkit.install import naming_extra
from toolkit.whole import whole

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from simulation.simulate import Played
    from simulation.trial import Rows

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """What a simulation made.

    Attributes:
        job: the job.
        folder: `rounds.jsonl`, `versions/`, and the job's `bundle/`.
        rounds: one for each round.
        members: rows of each member.
    """

    job: JobSpec
    folder: Path
    rounds: tuple["Played", ...]
    members: tuple[int, ...]
    # Removed with this object, if nobody named a folder.
    _kept: Any = field(default=None, repr=False, compare=False)

    @property
    def accuracy(self) -> float | None:
        """The last version's accuracy on rows that no member has; None if members keep a part of the model."""
        return self.rounds[-1].accuracy

    @property
    def history(self) -> "pandas.DataFrame":
        """The rounds as a table, with the round as its index. Needs pandas."""
        with naming_extra("history", "notebook"):
            import pandas

        return pandas.DataFrame([vars(each) for each in self.rounds]).set_index("round")

    def version(self, number: int | None = None) -> NDArray[np.float32]:
        """A version's values, (d,): by default the last one's; 0 is the start.

        Raises:
            ValueError: there is no such version.
        """
        from export.bundle import read_job_bundle

        bundle = read_job_bundle(self.folder / "bundle")
        return bundle.manifest.decode(self._bytes(number)).copy()

    def export(self, out: str | Path, number: int | None = None) -> Path:
        """Writes a version as ONNX with its tokenizer, for `tacit.load` and `edge_client predict`.

        Its README says that it is simulated and promises nothing.

        Args:
            out: the folder to create.
            number: of the version; None: the last.

        Returns:
            The folder.

        Raises:
            ValueError: there is no such version, members keep a part of the model, or it cannot be exported.
        """
        from export.bundle import read_job_bundle
        from export.card import Origin
        from simulation.rounds import backbone_of

        number = len(self.rounds) if number is None else number
        bundle = read_job_bundle(self.folder / "bundle")
        if not bundle.document.complete:
            raise ValueError(
                f"members of job {self.job.name} keep a part of the model ({self.job.method.name}), so a version is no "
                "whole model to export"
            )
        parts = bundle.document, bundle.manifest, self._bytes(number), bundle.public_tokenizer, Path(out)
        # Each round makes one version.
        more: dict[str, Any] = {"origin": Origin(number, round=number, simulated=True)}
        if (backbone := backbone_of(bundle)) is not None:
            more["backbone"] = backbone
        if writes(self.job.model):
            from export.generator import export_generator
            from learning.text.turns import Dialogue

            export_generator(*parts, [Dialogue.of(f"What is {self.job.name}?")], frozen=bundle.frozen, **more)
        else:
            from export.onnx import export_model

            export_model(*parts, _samples(self.job), frozen=bundle.frozen, **more)
        return Path(out)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draws accuracy over rounds beside the members that sent. Needs matplotlib.

        Args:
            path: a file to write, by its ending (.png, .svg); None writes none.
        """
        with naming_extra("plot", "notebook"):
            from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        scored = [each for each in self.rounds if each.accuracy is not None]
        above.plot([each.round for each in scored], [100 * (each.accuracy or 0) for each in scored], marker=".")
        above.set_ylabel("accuracy, %")
        above.set_title(self.job.name)
        numbers = [each.round for each in self.rounds]
        below.bar(numbers, [each.cohort - each.lost for each in self.rounds], label="sent")
        below.bar(
            numbers,
            [each.lost for each in self.rounds],
            bottom=[each.cohort - each.lost for each in self.rounds],
            label="lost",
        )
        below.set_ylabel("members")
        below.set_xlabel("round")
        below.legend(loc="lower right")
        if path is not None:
            figure.savefig(path)
        return figure

    def _bytes(self, number: int | None) -> bytes:
        from export.bundle import read_job_bundle

        number = len(self.rounds) if number is None else number
        if number == 0:
            return read_job_bundle(self.folder / "bundle").weights
        if not 0 < number <= len(self.rounds):
            raise ValueError(f"there is no version {number}; the last is {len(self.rounds)}")
        return (self.folder / "versions" / f"{number}.bin").read_bytes()


def simulate(
    job: str | Path | JobSpec | Mapping[str, Any],
    data: Data,
    *,
    members: int = 10,
    partition: str = "even",
    alpha: float = 1.0,
    column: str | None = None,
    test: float | Data = 0.2,
    cohort: int | None = None,
    dropout: str = "none",
    secure: bool = False,
    seed: int = 0,
    engine: Literal["local", "ray"] = "local",
    workers: int = 1,
    ray_address: str | None = None,
    gpus: float = 0.0,
    device: str = "cpu",
    text: str = "text",
    label: str = "label",
    text_b: str | None = None,
    person: str | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    folder: str | Path | None = None,
    backbones: str | Path | None = None,
    progress: Callable[["Played"], None] = lambda _: None,
) -> Simulated:
    """Plays a whole job over virtual members: real training, clipping, noise, encoding and sums, and no network.

    With several workers, a script calls this below `if __name__ == "__main__":`, since every worker imports the script.

    The rows must be public, or the operator's own: the noise comes from the seed and protects nobody, and numbers that
    somebody chooses by these rows are in no epsilon.

    >>> import tacit
    >>> rows = [(f"the {word} rose over hill {number}", label)
    ...         for word, label in (("sun", "day"), ("moon", "night")) for number in range(60)]
    >>> job = {"schema": 1, "name": "sky", "labels": ["day", "night"], "model": {"embedding": 8, "maps": 4},
    ...        "vocabulary": {"kind": "words", "file": "words.txt"}, "mechanism": {"name": "none"},
    ...        "training": {"learning_rate": 0.05, "epochs": 5}, "rounds": {"count": 3}}
    >>> found = tacit.simulate(job, rows, members=4)
    >>> found.accuracy
    1.0
    >>> tacit.load(found.export("sky")).predict(["the moon rose"])[0].label
    'night'

    Args:
        job: a job file, its content as a mapping, or a `JobSpec`. Paths in it are relative to the file, or to the
            current folder.
        data: labelled rows: a file, a pandas DataFrame, a `datasets` Dataset, or a list of mappings or (text, label).
            For a job that writes, rows with `prompt` and `response`, or `messages`.
        members: how many members share the rows.
        partition: `even`; `label` or `quantity`, in shares from Dir(alpha); `ratios:1,1,3`; `column`.
        alpha: of the draws; small makes members unlike.
        column: with `column`: its values are the members.
        test: the share of rows that no member gets, or rows to score versions on.
        cohort: members of a round; None: the job's `rounds.target_members`.
        dropout: members that send nothing: `none`, `random:0.1` in each round, or `fixed:0.1`.
        secure: adds vectors by the real protocol, with its keys, masks, losses and unmasking.
        seed: of everything that is drawn.
        engine: `local`: processes of this machine; `ray`: actors of a Ray cluster.
        workers: processes or actors.
        ray_address: of a cluster; None starts Ray here.
        gpus: share of a GPU of each actor.
        device: where members train.
        text: the column of the text.
        label: the column of the label.
        text_b: the column of a pair's second text.
        person: the column that says whose row it is. A person's rows then go to one member, or to the test.
        prompt: of a job that writes, the column of the prompt; None: `prompt`.
        response: the column of the response; None: `response`.
        messages: the column of a dialogue's turns; None: `messages`.
        folder: of the results; one that holds the same simulation goes on. None: a temporary one, which goes with the
            result.
        backbones: the operator's folder of backbones, which `model.base` may name.
        progress: called after each round.

    Returns:
        The rounds, the versions, a data frame, a plot, an export.

    Raises:
        ValueError: job, rows and options do not fit each other; the text says what to do.
    """
    with naming_extra("tacit.simulate", "notebook"):
        from coordinator.rounds.in_memory import InMemory
        from learning.backbones.collection import Collection
        from learning.training.device import pick_device
        from simulation.preparing import Engines, Shares, opened, parts_of, prepared
        from simulation.simulate import Losses, Plan, check_simulated

    # The smallest numbers are those of `coordinator simulate`.
    members, seed, workers = whole(members, "members", 2), whole(seed, "seed", 0), whole(workers, "workers", 1)
    cohort = None if cohort is None else whole(cohort, "cohort", 2)
    spec, base = read_job(job)
    check_simulated(spec)
    if (partition == "column") != (column is not None):
        raise ValueError('partition="column" and column="NAME" go together')
    kept = None
    if folder is None:
        kept = tempfile.TemporaryDirectory(prefix="tacit-simulation-")
        folder = kept.name
    target = Path(folder)

    more: dict[str, Any] = {"text_b": text_b, "prompt": prompt, "response": response, "messages": messages}

    def read(given: Data, which: str | None = None, whose: str | None = None) -> "Rows":
        if isinstance(given, str | Path):
            from simulation.home import in_a_members_home
            from simulation.trying import read_rows

            if (home := in_a_members_home(Path(given))) is not None:
                raise ValueError(
                    f"{given} lies in a member's home ({home}), so its rows are not public; use public rows"
                )
            return read_rows(Path(given), spec, text=text, label=label, person=whose, column=which, **more)
        labelled = None if writes(spec.model) else label
        return rows_of(given, text=text, label=labelled, person=whose, column=which, **more)

    rows = read(data, column, person)
    if isinstance(test, int | float):
        if not 0.01 <= test <= 0.9:
            raise ValueError(f"test={test} is no share of the rows; give one from 0.01 to 0.9, or rows")
        rows, apart = parts_of(rows, test=test, seed=seed)
    else:
        apart = read(test).examples
    plan = Plan(seed=seed, cohort=cohort, losses=Losses.read(dropout))
    collection = None if backbones is None else Collection(Path(backbones))
    shares = Shares.read(partition, members, alpha)
    made = prepared(spec, base, rows, apart, shares, target, seed=seed, collection=collection)
    engines = Engines(engine, workers, ray_address, gpus, pick_device(device))
    with (
        threads_kept(),
        opened(made, plan, engines, InMemory(), target, summing=_masked if secure else None) as simulation,
    ):
        for played in simulation.run():
            progress(played)
        return Simulated(spec, target, tuple(simulation.played), made.sizes, kept)


def _masked(cohort: int) -> Any:
    from coordinator.rounds.masked_sum import MaskedSums

    return MaskedSums(cohort)


def _samples(job: JobSpec) -> Sequence[Any]:
    """Texts on which the exported model is compared with the trained one: the labels' names, of several lengths."""
    from tacit.prompt import reads_pairs

    words = [" ".join(job.labels[: count + 1]) for count in range(len(job.labels))]
    return list(zip(words, words[::-1], strict=True)) if reads_pairs(job.model) else words
