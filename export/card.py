"""Writes the README of an exported folder: what the model is, where it comes from, and how to run it.

Guarantees: a card says only what the job document, the version and the exported files say, and name and licence of a
backbone whose digest this software knows. Its date is that of the
version, so the same export twice gives the same bytes. No text of a job (a label, a template) stands where a reader or
a program would take it for Markdown or code. The example for an ONNX file needs onnxruntime, tokenizers and numpy, and
for a prompt beside its backbone safetensors, and nothing of this software.

An epsilon is never stated: it depends on each member's data, and only the member's own ledger knows it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from learning.backbones.packaged import packaged_as
from learning.text.encoder import RowLayout
from tacit import __version__
from tacit.bundle import ModelFacts
from tacit.job import JobDocument
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, Mechanism, NoMechanism
from tacit.model import PromptedModel, described

__all__ = [
    "NO_TELEMETRY",
    "README",
    "UNKNOWN_ORIGIN",
    "Origin",
    "base_arguments",
    "file_lines",
    "metadata_of",
    "module_card",
    "onnx_card",
    "page",
    "privacy_lines",
    "provenance_lines",
    "row_lines",
    "trained_by",
    "transformers_card",
]

README = "README.md"


@dataclass(frozen=True, slots=True)
class Origin:
    """What the coordinator knows of a version besides its bytes. None: it did not say.

    Args:
        number: the version's number.
        round: the number of the round that made it; 0: it is the start.
        created_ms: when the coordinator stored it, in milliseconds since 1970.
        members: how many members' updates are in the sum of that round.
        withdrawn: how many members withdrew whose updates are in it, or in a version that it was made from.
        successors: jobs that started anew from a version that holds updates of fewer of them.
        averaged: numbers of the versions whose average it is, in order; the other numbers are then the newest one's.
        simulated: whether no member had a part in it: a simulation made it, with noise from a seed.
    """

    number: int | None = None
    round: int | None = None
    created_ms: int | None = None
    members: int | None = None
    withdrawn: int | None = None
    successors: tuple[str, ...] = ()
    averaged: tuple[int, ...] = ()
    simulated: bool = False


# What an export knows of a version if nobody says more.
UNKNOWN_ORIGIN = Origin()


class Rows(Protocol):
    """What a card needs of an encoder."""

    pad_id: int
    max_tokens: int
    min_tokens: int

    @property
    def layout(self) -> RowLayout: ...


# ---- what is in the model file ---------------------------------------------------------------------------------


def metadata_of(
    rows: Rows, *, job: str, labels: Sequence[str], version: bytes, document: bytes | None = None
) -> dict[str, str]:
    """The metadata of an ONNX file: what a runtime needs besides the tokenizer's file, and where the model comes from.

    Args:
        rows: the model's encoder.
        job: the job's name.
        labels: the meaning of the outputs, in their order.
        version: the digest of the weights.
        document: the digest of the job document, if the model is a version of a job.
    """
    facts = {
        "job": job,
        "labels": json.dumps(list(labels), ensure_ascii=False),
        "max_tokens": str(rows.max_tokens),
        "min_tokens": str(rows.min_tokens),
        "pad_id": str(rows.pad_id),
        "version": version.hex(),
    }
    return facts if document is None else facts | {"job_digest": document.hex()}


# ---- cards -----------------------------------------------------------------------------------------------------


def onnx_card(document: JobDocument, facts: ModelFacts, origin: Origin, rows: Rows, *, words: Sequence[int]) -> bytes:
    """The README of a version as ONNX.

    Args:
        document: the job document.
        facts: what bundle.json says of the model.
        origin: what the coordinator says of the version.
        rows: the model's encoder.
        words: for a prompt beside its backbone, how many of its rows belong to each label; otherwise unused.
    """
    split = facts.backbone is not None
    files = {
        "tokenizer.json": "the tokenizer, for the tokenizers library",
        "labels.json": "the labels, in the order of the outputs",
        "bundle.json": "each file's size and SHA-256, and the comparison with the trained model",
    }
    first = {"prompt.safetensors": "the prompt"} if split else {"model.onnx": "the model; its metadata has the labels"}
    if facts.backbone is not None:
        del files["tokenizer.json"]
        files[f"../backbone-{facts.backbone.hex()[:32]}"] = "the backbone and its tokenizer, which other prompts share"
    return page(
        document.name,
        "onnx",
        [
            *_job(document, origin),
            *_private(facts.private),
            *provenance_lines(document, facts.version, origin),
            *privacy_lines(document, origin),
            *_labels(document.labels),
            *file_lines(first | files),
            *_inputs(rows, document.model.template_text if isinstance(document.model, PromptedModel) else None),
            *_how_to_run(_prompt_example(rows.layout, facts, rows, words) if split else _example(rows.layout), rows),
            *_measured(facts),
        ],
    )


def module_card(facts: ModelFacts, labels: Sequence[str], rows: Rows) -> bytes:
    """The README of a classifier that was trained by the operator on synthetic text."""
    files = {
        "model.onnx": "the model; its metadata has the labels",
        "tokenizer.json": "the tokenizer, for the tokenizers library",
        "labels.json": "the labels, in the order of the outputs",
        "provenance.json": "the corpora, their promises, the settings and the figures",
        "bundle.json": "each file's size and SHA-256, and the comparison with the trained model",
    }
    return page(
        facts.job,
        "onnx",
        [
            f"A classifier of {_texts(rows.layout)} into {len(labels)} labels. The operator of job `{facts.job}` "
            "trained it on synthetic text; no member took part in this training.",
            "",
            *_table({"version": f"`{facts.version.hex()}`", "software": f"Tacit {__version__}"}),
            "## Privacy",
            "",
            "The model promises what the corpora that it was trained on promise; `provenance.json` lists them.",
            "",
            *_labels(labels),
            *file_lines(files),
            *_inputs(rows, None),
            *_how_to_run(_example(rows.layout), rows),
            *_measured(facts),
        ],
    )


def transformers_card(
    document: JobDocument,
    version: bytes,
    origin: Origin,
    *,
    library: Literal["transformers", "peft"],
    files: Mapping[str, str],
    run: Sequence[str],
    difference: float,
) -> bytes:
    """The README of a version for transformers or peft.

    Args:
        document: the job document.
        version: the digest of the version.
        origin: what the coordinator says of the version.
        library: what loads it.
        files: what each file is, by name.
        run: the lines that say how to run it.
        difference: the largest difference between its logits and the trained model's.
    """
    return page(
        document.name,
        library,
        [
            *_job(document, origin),
            *provenance_lines(document, version, origin),
            *privacy_lines(document, origin),
            *_labels(document.labels),
            *file_lines(files),
            *run,
            "",
            f"On the texts of the export, its logits differ from the trained model's by at most {difference:.2g}.",
        ],
    )


# ---- sections --------------------------------------------------------------------------------------------------


def page(name: str, library: str, lines: Sequence[str], task: str = "text-classification") -> bytes:
    """A README: what the hub reads, the title, and the lines."""
    head = ["---", f"pipeline_tag: {task}", f"library_name: {library}", "---", "", f"# {name}", ""]
    return ("\n".join([*head, *lines]).rstrip() + "\n").encode()


def trained_by(document: JobDocument, origin: Origin) -> str:
    """Who trained a version, up to the colon behind which a card says how."""
    if origin.simulated:
        return f"A simulation of the job `{document.name}` trained it on one machine:"
    return f"Members of a Tacit federation trained it together in the job `{document.name}`, each on its own data:"


def _job(document: JobDocument, origin: Origin) -> list[str]:
    model = document.model
    what = "a pair of texts" if isinstance(model, PromptedModel) and model.template.pairs else "a text"
    kind = f"`{described(model)}`"
    if isinstance(model, PromptedModel):
        kind += (
            f" (`{model.injection.name}` on a frozen `{(model.config or {}).get('model_type')}`, `{model.task.name}`)"
        )
    return [
        f"It labels {what} with one of {len(document.labels)} labels. {trained_by(document, origin)} method "
        f"`{document.method.name}`, model {kind}, {document.values:,} shared values.",
        "",
    ]


def _private(private: bool) -> list[str]:
    if not private:
        return []
    return [
        "**This folder holds private parameters of one member, made from its own data (or the frequencies of its "
        "labels): keep it on that member's machine.**",
        "",
    ]


def provenance_lines(document: JobDocument, version: bytes, origin: Origin) -> list[str]:
    """The table of where a version comes from."""
    table = {"job": f"`{document.name}`", "job document": f"`{document.digest().hex()}`"}
    number = "" if origin.number is None else f"{origin.number}, "
    table["version"] = f"{number}`{version.hex()}`"
    if origin.averaged:
        how = (
            "equal weights"
            if (average := document.average) is None or average.decay is None
            else (f"each weighs {average.decay:g} times the next newer one")
        )
        table["version"] = (
            f"the average of versions {origin.averaged[0]} to {origin.averaged[-1]} ({how}), `{version.hex()}`. "
            "It is computed from published versions, so it costs no member any privacy"
        )
    if origin.created_ms is not None:
        table["date of the version"] = f"{datetime.fromtimestamp(origin.created_ms / 1000, UTC):%Y-%m-%d}"
    if origin.round == 0:
        table["rounds"] = f"0 of {document.rounds.count}: it is the start, without any member's update"
    elif origin.round is not None:
        table["rounds"] = f"{origin.round} of {document.rounds.count}"
    else:
        table["rounds"] = f"at most {document.rounds.count}"
    virtual = "virtual ones, " if origin.simulated else ""
    table["members"] = f"{virtual}at least {document.rounds.min_members} in each round's sum"
    if origin.members is not None:
        table["members"] += f", {origin.members} in the last"
    if origin.withdrawn:
        table["withdrawn"] = (
            f"{origin.withdrawn} of the members whose updates are in it withdrew later. Their updates cannot be taken "
            "out of this version"
        )
        if origin.successors:
            named = ", ".join(f"`{name}`" for name in origin.successors)
            table["withdrawn"] += f". Started anew from a version with updates of fewer of them: {named}"
    if (earlier := document.earlier) is not None:
        table["started from"] = (
            f"version {earlier.number} of the job `{earlier.job}`, `{document.weights.hex()}`, job document "
            f"`{earlier.document.hex()}`. That job's rounds cost its members apart from this job's"
        )
    if isinstance(document.model, PromptedModel) and document.model.backbone is not None:
        table["backbone"] = _backbone(document.model, document.model.backbone)
    table["software"] = f"Tacit {__version__}"
    return _table(table)


def _backbone(model: PromptedModel, digest: bytes) -> str:
    """Name, licence and digest of the frozen network, or that name or licence are not known."""
    hub, _, commit = (model.hub or "").partition("@")
    if (known := packaged_as(digest)) is not None:
        named = f"{known.what}, out of the wheel `{known.package}` {known.version}; licence {known.licence}"
    elif hub:
        named = f"`{hub}` at commit `{commit}` on the hub; licence not known here, its page there states it"
    else:
        named = (
            f"a `{(model.config or {}).get('model_type')}`; name and licence not known here, ask the operator who made "
            "the job"
        )
    return f"{named}; SHA-256 `{digest.hex()}` of its canonical file"


def privacy_lines(document: JobDocument, origin: Origin) -> list[str]:
    """The section on what the job promises its members; of a simulated version, that it promises nothing."""
    mechanism = document.mechanism
    if origin.simulated:
        return [
            "## Privacy",
            "",
            f"None. Mechanism: `{mechanism.name}`, simulated: all noise follows from a public seed, so it protects "
            "nobody. The rows that the model was trained on must be public, or the operator's own.",
            "",
        ]
    return [
        "## Privacy",
        "",
        f"Mechanism: `{mechanism.name}`. {_protection(mechanism)}",
        "",
        *(
            []
            if isinstance(mechanism, NoMechanism)
            else [
                "What the job cost a member depends on that member's data. Each member's own ledger accounts for it on "
                "that member's machine, and `edge_client ledger show` prints it there. The coordinator does not know "
                "it, so no total epsilon is stated here.",
                "",
            ]
        ),
        *(
            []
            if document.tuned_on is None
            else [
                "The job's numbers were tuned on the operator's own private rows (`coordinator job try --force`). That "
                "tuning is in no epsilon.",
                "",
            ]
        ),
        "Secure aggregation showed the coordinator the members' sums, and no single update, under the assumptions of "
        "the threat model. It does not bound what the model itself reveals about its training texts.",
        "",
    ]


def _protection(mechanism: Mechanism) -> str:
    match mechanism:
        case DpSgd(noise_multiplier=noise, clip=clip, lot=lot, steps=steps, person=person):
            what = "example"
            if person is not None:
                what = f"person with all its rows, of whom a draw used at most {person.max_examples},"
            correlated = f" Its noise was correlated over {mechanism.band} steps." if mechanism.band > 1 else ""
            return (
                f"Each member ran DP-SGD for one {what} of its data: noise multiplier {noise:g}, clip {clip:g}, "
                f"expected lot {lot}, {steps} steps a round.{correlated}"
            )
        case GaussianUpdate(noise_multiplier=noise, clip=clip, lot=lot, sampling=sampling):
            return (
                f"Each member clipped its update to L2 norm {clip:g} and added Gaussian noise, for one example of its "
                f"data: noise multiplier {noise:g}, lot {lot}, sampling {sampling}."
            )
        case LaplaceUpdate(epsilon=epsilon, bound=bound):
            return (
                f"Each member clipped its update to L1 norm {bound:g} and added Laplace noise, for one example of its "
                f"data: the job sets {epsilon:g} as epsilon of one round."
            )
        case DistributedGaussian(noise_multiplier=noise, clip=clip, honest=honest, unit=unit):
            return (
                f"Each member clipped its update to L2 norm {clip:g} and added a share of discrete Gaussian noise, for "
                f"one {unit}: noise multiplier {noise:g} in the sum over {honest} honest members."
            )
        case _:
            return "Members added no noise, so this model has no differential privacy guarantee."


def _labels(labels: Sequence[str]) -> list[str]:
    return ["## Labels", "", "In the order of the outputs:", "", *_json(list(labels))]


def file_lines(files: Mapping[str, str]) -> list[str]:
    """The section on the folder's files."""
    return [
        "## Files",
        "",
        "| file | what it is |",
        "| --- | --- |",
        *(f"| `{n}` | {w} |" for n, w in files.items()),
        "",
    ]


def _inputs(rows: Rows, template: str | None) -> list[str]:
    layout = rows.layout
    shown = ", ".join(part if isinstance(part, str) else str(list(part)) for part in layout.parts if part)
    lines = ["## Inputs", ""]
    if template is not None and (template != "{text}"):
        lines += ["The template around the text:", "", *_json(template)]
    return [
        *lines,
        f"- `input_ids`: int64, (batch, sequence). A row is `{shown}`, where `text` stands for the ids of the text"
        + (" and `text_b` for those of the second text." if len(layout.slots) == 2 else "."),
        "- The tokenizer adds no special tokens by itself, and recognises none in a text.",
        f"- A row has at most {rows.max_tokens} ids (`max_tokens`), so the text has at most {layout.room}. Longer "
        "texts are cut at the end" + ("; of a pair, the longer one first." if len(layout.slots) == 2 else "."),
        f"- Shorter rows are padded at the end with {rows.pad_id} (`pad_id`), each batch to at least {rows.min_tokens} "
        "ids (`min_tokens`).",
        "",
    ]


def _how_to_run(example: str, rows: Rows) -> list[str]:
    given = '"a text" "another text"' if len(rows.layout.slots) == 2 else '"a text"'
    packages = "onnxruntime tokenizers" + (" safetensors" if "safetensors" in example else "")
    return [
        "## How to run it",
        "",
        f"`pip install {packages}`, save this as `classify.py` in this folder, and run `python classify.py {given}`:",
        "",
        "```python",
        *example.splitlines(),
        "```",
        "",
        "`edge_client predict --bundle FOLDER` does the same, and checks each file's digest first.",
        "",
    ]


def _measured(facts: ModelFacts) -> list[str]:
    texts = "one text" if facts.texts == 1 else f"{facts.texts} texts, alone and in batches"
    return [f"On {texts}, its logits differ from the trained model's by at most {facts.parity:.2g}."]


def _texts(layout: RowLayout) -> str:
    return "pairs of texts" if len(layout.slots) == 2 else "texts"


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items()), ""]


def _json(value: Any) -> list[str]:
    # One line that begins with a quote or a bracket cannot end the block.
    return ["```json", json.dumps(value, ensure_ascii=False), "```", ""]


# ---- the example -----------------------------------------------------------------------------------------------


def _example(layout: RowLayout) -> str:
    return "\n".join(
        [
            *_imports(),
            "",
            'session = InferenceSession("model.onnx")',
            'tokenizer = Tokenizer.from_file("tokenizer.json")',
            "facts = session.get_modelmeta().custom_metadata_map",
            'labels, pad = json.loads(facts["labels"]), int(facts["pad_id"])',
            "",
            *row_lines(layout),
            'ids = ids + [pad] * (int(facts["min_tokens"]) - len(ids))',
            '(logits,) = session.run(["logits"], {"input_ids": np.array([ids], dtype=np.int64)})',
            *_answer(),
        ]
    )


def _prompt_example(layout: RowLayout, facts: ModelFacts, rows: Rows, words: Sequence[int]) -> str:
    if facts.backbone is None:
        raise ValueError("only a prompt beside its backbone is run so")
    folder = f"../backbone-{facts.backbone.hex()[:32]}"
    starts = [sum(words[:at]) for at in range(len(words))]
    return "\n".join(
        [
            *_imports("from safetensors.numpy import load_file"),
            "",
            f'session = InferenceSession("{folder}/backbone.onnx")',
            f'tokenizer = Tokenizer.from_file("{folder}/tokenizer.json")',
            'labels = json.load(open("labels.json", encoding="utf-8"))["labels"]',
            'prompt = load_file("prompt.safetensors")',
            "",
            *row_lines(layout),
            f"ids = ids + [{rows.pad_id}] * ({rows.min_tokens} - len(ids))",
            'given = {"input_ids": np.array([ids], dtype=np.int64), "prompt": prompt["prompt"]}',
            '(features,) = session.run(["features"], given)',
            'scores = (features @ prompt["rows"].T + prompt["bias"])[0].astype(np.float64)',
            f"logits = (np.logaddexp.reduceat(scores, {starts}) - np.log({list(words)}))[None]",
            *_answer(),
        ]
    )


# A line of a README's program: it runs without Tacit, which switches this off for itself (`tacit`).
NO_TELEMETRY = 'os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # else onnxruntime tells its maker of this model'


def _imports(more: str | None = None) -> list[str]:
    return [
        "import json, os, sys",
        NO_TELEMETRY,
        "import numpy as np",
        "from onnxruntime import InferenceSession",
        *([] if more is None else [more]),
        "from tokenizers import Tokenizer",
    ]


def base_arguments(commit: str) -> str:
    """What a README's program gives to `from_pretrained` for the base of an adapter.

    transformers would compute in the stored precision, and take a hub's newest commit. The comparison
    with the trained model is in float32.

    Args:
        commit: of the base on the hub; empty if it is not known.
    """
    return ", ".join(["sys.argv[1]", *([f'revision="{commit}"'] if commit else []), "dtype=torch.float32"])


def row_lines(layout: RowLayout, *, first: int = 1) -> list[str]:
    """Lines of Python that make `ids`, a row without padding, from the arguments of a command.

    Args:
        layout: how the row is put together.
        first: the number of the argument with the first text.
    """
    lines, slots = [], ("text", "text_b") if len(layout.slots) == 2 else ("text",)
    for number, slot in enumerate(slots, start=first):
        text = f"sys.argv[{number}]"
        if layout.forbidden:
            # White space changes the tokens of these families.
            text = f"{text}.strip()"
        if slot in layout.spaced:
            text = f'f" {{{text}}}".rstrip()'
        lines.append(f"{slot} = tokenizer.encode({text}, add_special_tokens=False).ids")
        if layout.forbidden:
            never = sorted(layout.forbidden)
            lines.append(f"{slot} = [{layout.unknown} if each in {never} else each for each in {slot}]")
    if len(slots) == 2:
        lines.append(f"text = text[: max({layout.room} - len(text_b), {(layout.room + 1) // 2})]")
        lines.append(f"text_b = text_b[: {layout.room} - len(text)]")
    else:
        lines.append(f"text = text[:{layout.room}]")
    joined = " + ".join(part if isinstance(part, str) else str(list(part)) for part in layout.parts if part)
    return [*lines, f"ids = {joined}"]


def _answer() -> list[str]:
    return [
        "odds = np.exp(logits[0].astype(np.float64) - logits[0].max())",
        "best = int(odds.argmax())",
        "print(json.dumps([labels[best], odds[best] / odds.sum()]))",
    ]
