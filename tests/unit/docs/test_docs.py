"""The documents match the software: tables match the code, commands parse, and links and named files exist."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from coordinator.cli import app as coordinator_app
from coordinator.cli.passport import Group as PassportGroup
from coordinator.config import CoordinatorConfig, environment_name
from coordinator.rounds.counts import Count
from coordinator.storage import backup, open_blobs, open_database
from coordinator.storage.bucket import place_of
from edge_client.cli import app as edge_app
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.policy.verdicts import Outcome
from export.bundle import make_job_bundle
from secure_agg import COMPLETE_GRAPH_LIMIT
from tacit.context import promise_of
from tacit.corpus import CorpusOrder
from tacit.job import Aggregation, Audit, Average, Deadlines, JobSpec, PublicStart, Rounds, Training, VocabularyFile
from tacit.measurement_file import MeasurementNoise, MeasurementSpec
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    Mechanism,
    NoMechanism,
    OwnDiscreteGaussian,
    PersonRows,
)
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg, Local, Method, OwnVocabulary
from tacit.model import (
    BiLSTMModel,
    Model,
    NoModel,
    PluginModel,
    PromptedModel,
    RvaeModel,
    TextCNNModel,
    TransformerModel,
)
from tacit.prompt import PromptTuning
from tacit.reason import Reason, sentence, word
from tacit.server_optimiser import (
    FedAdagradServer,
    FedAdamServer,
    FedAvgMServer,
    FedAvgServer,
    FedYogiServer,
    ServerOptimiser,
)
from tacit.survey import Histogram
from tacit.survey_file import Asking, SurveySpec
from tacit.validation import NoisedMetrics
from tests.support.places import ROOT
from toolkit.console import ExitCode

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def slug(heading: str) -> str:
    """The anchor of a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def section(page: Path, heading: str) -> str:
    """The text under a heading, up to the next heading of any depth."""
    match = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", read(page), flags=re.DOTALL | re.MULTILINE)
    assert match is not None, f"{name_of(page)} has no section {heading!r}"
    return match[1]


def rows(text: str, at_least: int = 2) -> list[list[str]]:
    """The cells of the tables in a text, without header rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE):
        lines = block.strip().splitlines()
        assert re.fullmatch(r"\|( --- \|)+", lines[1]), f"no table: {lines[0]}"
        for line in lines[2:]:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) >= at_least, line
            found.append(cells)
    return found


def first_cells(text: str) -> list[str]:
    """The names in the first column. A cell may hold several."""
    return [name for cells in rows(text) for name in re.findall(r"`([^`]+)`", cells[0])]


# ---- tables ---------------------------------------------------------------------------------------


def test_the_reasons_page_lists_every_reason_with_its_sentence():
    written = {cells[1]: (int(cells[0]), cells[2]) for cells in rows(read(DOCS / "reasons.md"), at_least=3)}
    known = {f"`{word(number)}`": (int(number), sentence(number)) for number in Reason.values()}
    wrong = sorted(known.items() ^ written.items(), key=lambda item: item[1])
    assert not wrong, "docs/reasons.md should hold:\n" + "\n".join(
        f"| {number} | {name} | {text} |" for name, (number, text) in sorted(known.items(), key=lambda item: item[1])
    )


def default_of(model: type[BaseModel], key: str) -> object:
    return model.model_fields[key].default


def check_keys(table: str, model: type[BaseModel], but: frozenset[str] = frozenset()) -> None:
    """Checks that the table lists every key of the model and no other, with its default where that is a plain value."""
    keys = {"schema" if name == "schema_version" else name: name for name in model.model_fields if name not in but}
    written = {re.findall(r"`([^`]+)`", cells[0])[0]: cells[1] for cells in rows(table)}
    assert written.keys() == keys.keys()
    for key, name in keys.items():
        default = default_of(model, name)
        if key == "schema" or default is PydanticUndefined:
            assert written[key].startswith("("), f"{key}: required keys say so in brackets"
        elif default is None:
            assert written[key].startswith(("none", "not given")), f"{key} has no default"
        elif isinstance(default, TextCNNModel):
            assert written[key] == "TextCNN"
        else:
            shown = re.findall(r"`([^`]+)`", written[key])
            assert shown, f"{key}: the default is {default!r}"
            value = tomllib.loads(f"x = {shown[0]}")["x"]
            if isinstance(default, NoMechanism | FedAvg | PromptTuning):
                default = default.name  # The name alone stands for its table.
            elif isinstance(default, FedAvgServer):
                default = default.optimiser
            assert (tuple(value) if isinstance(value, list) else value) == default, key


JOB_TABLES: dict[str, type[BaseModel]] = {
    "Top level": JobSpec,
    "[vocabulary]": VocabularyFile,
    "[vocabulary] own": OwnVocabulary,
    "[model] textcnn": TextCNNModel,
    "[model] bilstm": BiLSTMModel,
    "[model] transformer": TransformerModel,
    "[model] prompted": PromptedModel,
    "[model] rvae": RvaeModel,
    "[model] plugin": PluginModel,
    "[start]": PublicStart,
    "[corpus]": CorpusOrder,
    "[method] fedprox": FedProx,
    "[method] lg-fedavg": LgFedAvg,
    "[method] fedrecon": FedRecon,
    "[method] fedvocab": FedVocab,
    "[training]": Training,
    "[mechanism] dp-sgd": DpSgd,
    "[mechanism.person]": PersonRows,
    "[mechanism] gaussian-update": GaussianUpdate,
    "[mechanism] laplace-update": LaplaceUpdate,
    "[mechanism] distributed-gaussian": DistributedGaussian,
    "[metrics]": NoisedMetrics,
    "[average]": Average,
    "[audit]": Audit,
    "[rounds]": Rounds,
    "[rounds.deadlines]": Deadlines,
    "[aggregation]": Aggregation,
    "[server]": FedAvgServer,
    "[server] fedavgm": FedAvgMServer,
    "[server] fedadagrad": FedAdagradServer,
    "[server] fedadam": FedAdamServer,
    "[server] fedyogi": FedYogiServer,
}


@pytest.mark.parametrize("heading", JOB_TABLES)
def test_the_jobs_page_lists_every_key_and_default(heading):
    model = JOB_TABLES[heading]
    tables = frozenset(
        name
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    )
    check_keys(section(DOCS / "jobs.md", heading), model, tables)


def test_the_jobs_page_has_a_section_for_every_table():
    def nested(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield model
        for field in model.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from nested(field.annotation)

    mechanisms = {DpSgd, GaussianUpdate, LaplaceUpdate, DistributedGaussian}
    models = {TextCNNModel, BiLSTMModel, TransformerModel, PromptedModel, RvaeModel, PluginModel}
    # Tables whose kind follows from their name or their keys. Some have no key but the name.
    methods = {FedProx, LgFedAvg, FedRecon, FedVocab}
    servers = {FedAvgServer, FedAvgMServer, FedAdagradServer, FedAdamServer, FedYogiServer}
    tagged = (
        mechanisms
        | models
        | methods
        | servers
        | {VocabularyFile, OwnVocabulary, PublicStart, CorpusOrder, NoisedMetrics, Average, Audit, PersonRows}
    )
    assert set(nested(JobSpec)) | tagged == set(JOB_TABLES.values())
    assert {*get_args(get_args(Mechanism)[0])} == mechanisms | {NoMechanism, OwnDiscreteGaussian}
    assert {*get_args(get_args(Model)[0])} == models | {NoModel}
    assert {*get_args(get_args(Method)[0])} == methods | {FedAvg, Local}
    assert {*get_args(get_args(ServerOptimiser)[0])} == servers


@pytest.mark.parametrize(
    ("heading", "model"),
    [("survey.toml", SurveySpec), ("Noise", OwnDiscreteGaussian), ("Rounds", Asking)],
)
def test_the_surveys_page_lists_every_key_and_default(heading, model):
    tables = frozenset(
        name
        for name, field in model.model_fields.items()
        if isinstance(field.default, BaseModel) and isinstance(field.annotation, type)
    )
    text = section(DOCS / "surveys.md", heading)
    listed = {re.findall(r"`([^`]+)`", cells[0])[0] for cells in rows(text)}
    assert tables <= listed
    check_keys(
        "".join(line for line in text.splitlines(True) if not any(f"| `{key}` |" in line for key in tables)),
        model,
        tables,
    )


@pytest.mark.parametrize(("heading", "model"), [("measurement.toml", MeasurementSpec), ("Noise", MeasurementNoise)])
def test_the_measurements_page_lists_every_key_and_default(heading, model):
    tables = frozenset({"rounds", "aggregation"} & model.model_fields.keys())
    text = section(DOCS / "measurements.md", heading)
    listed = {re.findall(r"`([^`]+)`", cells[0])[0] for cells in rows(text)}
    assert tables <= listed
    kept = (line for line in text.splitlines(True) if not any(f"| `{key}` |" in line for key in tables))
    check_keys("".join(kept), model, tables)


def test_the_surveys_page_lists_every_kind_of_histogram():
    told = [cells[0].strip('`"') for cells in rows(section(DOCS / "surveys.md", "Kinds of histograms"), at_least=3)]
    assert told == [each.model_fields["kind"].default for each in get_args(get_args(Histogram)[0])]


def test_the_jobs_page_lists_every_method():
    told = [cells[0].strip('`"') for cells in rows(section(DOCS / "jobs.md", "[method]"), at_least=3)]
    assert set(told) == {each.model_fields["name"].default for each in get_args(get_args(Method)[0])}


def test_the_policy_page_lists_every_key_and_default():
    text = read(DOCS / "policy.md")
    check_keys(text[: text.index("## What to choose")], Policy)


def test_the_configuration_page_lists_every_key_and_variable():
    check_keys(section(DOCS / "configuration.md", "coordinator.toml"), CoordinatorConfig, frozenset({"schema_version"}))
    sources = "".join(
        read(path)
        for room in ("coordinator", "edge_client", "learning", "proto", "toolkit")
        for path in sources_of(room)
    )
    known = {environment_name(key) for key in CoordinatorConfig.model_fields}
    for page in PAGES:
        for variable in re.findall(r"`(TACIT_[A-Z_]+)`", read(page)):
            # `TACIT_` alone introduces the rule for keys.
            assert variable in known or variable == "TACIT_" or f'"{variable}"' in sources, (name_of(page), variable)
    said = set(first_cells(section(DOCS / "configuration.md", "Environment variables")))
    read_by_us = set(re.findall(r'"(TACIT_[A-Z_]+)"', sources))
    assert read_by_us <= said


def test_the_operations_page_lists_every_exit_code():
    written = {cells[1].strip("`"): int(cells[0]) for cells in rows(section(DOCS / "operations.md", "Exit codes"))}
    assert written == {code.name: int(code) for code in ExitCode}


def test_the_runbook_quotes_what_a_coordinator_says_that_cannot_start():
    """The person on call searches the page for the log's last line."""
    text = "".join(read(path) for room in ("coordinator", "toolkit") for path in sources_of(room))
    said = re.sub(r'"\s*\n\s*f?"', "", text)
    for quoted in first_cells(section(DOCS / "operations.md", "The coordinator does not start")):
        pattern = ".{1,80}".join(map(re.escape, re.split(r" \.\.\.|(?<= )N(?= )", quoted)))
        assert re.search(pattern, said), quoted


def sources_of(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name)


def events_of(room: str, *patterns: str) -> set[str]:
    text = "".join(read(path) for path in sources_of(room))
    return {event for pattern in patterns for event in re.findall(pattern, text)}


# One of two event names, chosen on the line before.
_CHOSEN = (r'\bevent = "(\w+)" if ', r'\bevent = "\w+" if .* else "(\w+)"')
_LOGGED = r'log\.(?:debug|info|warning|error)\(\s*"(\w+)"'


def test_the_logs_page_lists_every_event():
    coordinator, member = (section(DOCS / "logs.md", f"Events of {side}") for side in ("the coordinator", "a member"))
    counted = {kind.what for kind in Count.__subclasses__()}
    assert set(first_cells(coordinator)) == events_of("coordinator", _LOGGED, *_CHOSEN) | counted
    assert set(first_cells(member)) == events_of("edge_client", _LOGGED, r'Note\(\s*"(\w+)"')


def test_the_logs_page_lists_every_kind_of_journal_entry():
    text = section(DOCS / "logs.md", "The journal")
    # Includes commands on the coordinator's machine, which open the transaction in their own helper.
    kinds = events_of(
        "coordinator", r'\bnote(?:_seldom)?\(\s*s(?:ession)?,\s*"(\w+)"', r'\b_note\(\s*machine,\s*\w+,\s*"(\w+)"'
    )
    said = re.search(r"Kinds:\n\n(.*?)\.\n\n", text, flags=re.DOTALL)
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) == kinds


# ---- commands ---------------------------------------------------------------------------------------

PROGRAMS = {"coordinator": coordinator_app, "edge_client": edge_app}


def commands_in(page: Path) -> Iterator[list[str]]:
    """The words of every command line in the page's sh blocks."""
    for block in re.findall(r"^```sh$\n(.*?)^```$", read(page), flags=re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[-1] == "&":
                words.pop()
            if words:
                yield words


def inline_commands_in(page: Path) -> Iterator[list[str]]:
    for line in re.findall(r"`((?:coordinator|edge_client) [^`]+)`", without_code(read(page)).replace("\n", " ")):
        yield shlex.split(line)


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words after its name."""
    command: Any = typer.main.get_command(PROGRAMS[words[0]])
    rest = words[1:]
    while rest and getattr(command, "commands", None) and not rest[0].startswith("-"):
        if isinstance(command, PassportGroup) and rest[0] not in command.commands:
            rest = ["make", *rest]
        assert rest[0] in command.commands, f"`{' '.join(words)}`: there is no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_code_blocks_parse(page, monkeypatch):
    monkeypatch.delenv("TACIT_DIR", raising=False)
    monkeypatch.delenv("TACIT_OPERATOR", raising=False)
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), flags=re.MULTILINE))
    for words in commands_in(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] in PROGRAMS:
            command, rest = resolve(words)
            # Parses as the command line would, and runs nothing: fails on unknown or missing options and wrong numbers.
            command.make_context(" ".join(words[:2]), rest)
        else:
            assert words[0] in ("cp", "python"), words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_exist_with_their_options(page):
    for words in inline_commands_in(page):
        command, rest = resolve(words)
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for given in rest:
            if given.startswith("-"):
                assert given.split("=")[0] in options | {"--help"}, f"`{' '.join(words)}`: no option {given}"


def test_nobody_is_told_to_type_a_token_where_others_can_read_it():
    """A join token in a command's arguments is in the shell's history and in the list of processes."""
    rooms = ("coordinator", "edge_client", "proto", "toolkit")
    for path in [*PAGES, *(path for room in rooms for path in sources_of(room))]:
        assert not re.search(r"edge_client enrol\s+TOKEN", read(path)), name_of(path)


def test_the_command_list_cuts_off_no_sentence():
    """Checks the coordinator's list. That of `edge_client` has room for more than one line."""
    group = typer.main.get_command(coordinator_app)
    longest = max(map(len, group.commands))  # type: ignore[attr-defined]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        # The width that the list leaves on a terminal of 80 columns.
        assert not command.get_short_help_str(78 - 6 - longest).endswith("..."), name


def test_make_runs_every_test_that_is_marked_alone():
    (named,) = re.findall(r"^ALONE := (.*)$", read(ROOT / "Makefile"), flags=re.MULTILINE)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "alone" in read(path)}
    assert marked == {ROOT / each for each in named.split()}


def test_every_named_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), flags=re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", read(page)):
            assert target in targets, (name_of(page), target)


def test_every_named_extra_exists():
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for page in PAGES:
        for named in re.findall(r"'\.\[([a-z,]+)\]'", read(page)):
            assert set(named.split(",")) <= extras.keys(), (name_of(page), named)


def test_the_first_federation_takes_fewer_than_fifteen_lines():
    assert 0 < len(list(commands_in(DOCS / "first-federation.md"))) < 15


def test_ten_commands_lead_from_rows_to_a_model_and_the_example_types_the_same():
    page = read(DOCS / "recipes.md").partition("## From rows to a model")[2]
    block = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert block is not None
    shown = block[1].splitlines()
    assert len(shown) == 10
    script = read(ROOT / "examples" / "medquad" / "run.sh").replace("\\\n", " ")
    script = script.replace('"${text[@]}"', re.findall(r"^text=\((.*)\)$", script, re.MULTILINE)[0])
    # A command that is typed for every member, or stays in the background, is a function.
    bodies = dict(re.findall(r"^(\w+)\(\) \{(.*?) ?\}$", script, re.DOTALL | re.MULTILINE))
    typed = [bodies.get(step, step) for step in re.findall(r"^step (.*)$", script, re.MULTILINE)]

    def words(line):
        return re.findall(r"(?:coordinator|edge_client)(?: [a-z]+)+", line), set(re.findall(r"--[a-z][a-z-]+", line))

    for line, step in zip(shown, typed, strict=True):
        # The script may have the wheel in a file.
        assert words(line) == words(step.replace("${MINILM:+--file", "")), (line, step)


def test_the_readme_is_short():
    assert len(read(ROOT / "README.md").splitlines()) <= 80


def test_the_jobs_and_policies_shown_are_valid():
    """Every TOML block is a valid job or policy, and both sides accept the two-member exception."""
    blocks = {
        page.name: re.findall(r"^```toml$\n(.*?)^```$", read(page), flags=re.DOTALL | re.MULTILINE)
        for page in (DOCS / "jobs.md", DOCS / "policy.md")
    }
    (smallest,) = blocks["jobs.md"]
    JobSpec.model_validate(tomllib.loads(smallest))
    short, pair, job = blocks["policy.md"]
    Policy.model_validate(tomllib.loads(short))
    exception = Policy.model_validate(tomllib.loads(pair))
    assert exception.allow_two_party_sums
    two = JobSpec.model_validate(tomllib.loads(smallest) | tomllib.loads(job))
    assert two.rounds.min_members == exception.min_cohort == 2


def test_the_large_example_job_is_made_and_its_policy_accepts_it(tmp_path):
    folder = ROOT / "examples" / "large"
    spec = JobSpec.from_toml(folder / "job.toml")
    document = make_job_bundle(spec, folder, tmp_path / "bundle")
    assert spec.rounds.min_members > COMPLETE_GRAPH_LIMIT
    policy = Policy.from_toml(folder / "policy.toml")
    policy.check_job(document)
    for members in (spec.rounds.min_members, spec.rounds.target_members):
        policy.check_attempt(promise_of(document, members))
    # The policy is needed: without it, a member declines the job.
    with pytest.raises(PolicyRefusal, match="mechanisms"):
        Policy().check_job(document)


def test_toml_is_shown_only_on_pages_whose_toml_is_checked():
    shown = {page.name for page in PAGES if re.search(r"^ *```toml$", read(page), flags=re.MULTILINE)}
    assert shown == {
        "jobs.md",
        "object-storage.md",
        "policy.md",
        "pretrained-vocabularies.md",
        "private-parameters.md",
    }


def test_the_settings_of_a_bucket_that_are_shown_are_keys_of_the_configuration():
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", read(DOCS / "object-storage.md"), re.DOTALL | re.MULTILINE)
    keys = tomllib.loads(shown)
    config = CoordinatorConfig.model_validate({"schema": 1, "advertise": ["localhost"]} | keys)
    assert set(keys) == {key for key in CoordinatorConfig.model_fields if key.startswith(("s3_", "store_"))}
    assert place_of(config.store_url).prefix


def test_the_job_over_a_base_is_ten_lines_and_keeps_own_words():
    page = read(DOCS / "pretrained-vocabularies.md")
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len([line for line in shown.splitlines() if line]) == 10
    job = JobSpec.model_validate(tomllib.loads(shown))
    assert job.whose_vocabulary == "own-from-base"
    assert job.model.freezes_encoder


def test_the_policy_shown_keeps_the_embedding_private():
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", read(DOCS / "private-parameters.md"), re.DOTALL | re.MULTILINE)
    policy = Policy.model_validate(tomllib.loads(shown))
    assert policy.shared_parameters == ("encoder.*", "output.*")
    # Leaving noise aside, the policy accepts the page's job, and refuses one with a public vocabulary.
    example = JobSpec.from_toml(ROOT / "examples" / "fedvocab.toml")
    public = JobSpec.model_validate(
        example.model_dump() | {"vocabulary": {"kind": "words", "file": "words.txt", "pretrained": "table.txt"}}
    )
    for job, refused in ((example, []), (public, ["vocabularies"])):
        told = policy.model_copy(update={"mechanisms": ("none",)}).explain(job)
        assert [each.rule for each in told if each.outcome is Outcome.REFUSED] == refused


# ---- links and names ---------------------------------------------------------------------------------------


def test_the_pages_name_a_backup_as_it_is_named(tmp_path):
    url, store = f"sqlite:///{tmp_path / 'one.db'}", open_blobs(f"file://{tmp_path / 'store'}")
    open_database(url).close()
    folder = tmp_path / "backup"
    backup.make(url, store, folder, federation=bytes(32), software="0.1.0", now_ms=1_800_000_000_000)
    number, time, digest = r"[0-9]{6}", r"[0-9]{8}T[0-9]{6}\.[0-9]{3}Z", r"[0-9a-f]{16}"
    assert any(re.fullmatch(rf"snapshot-{number}-{time}-{digest}\.json", path.name) for path in folder.iterdir())
    for page, heading in (("backup.md", "What a backup holds"), ("operations.md", "Restore from a backup")):
        named = re.findall(r"`(snapshot[^`]*)`", section(DOCS / page, heading))
        assert named == ["snapshot-NUMBER-TIME-DIGEST.json"], page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_project_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(read(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            headings = {slug(text) for text in re.findall(r"^#+ (.+)$", without_code(read(file)), flags=re.MULTILINE)}
            assert anchor in headings, f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_named_file_exists(page):
    rooms = "coordinator|edge_client|secure_agg|export|learning|toolkit|examples|tests|docs|proto|deploy|benchmarks"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]+)`", read(page)):
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}"


def test_every_decision_is_listed_and_numbered_once():
    pages = sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", read(DOCS / "decisions" / "README.md"))
    assert listed == pages
    for name in pages:
        text = read(DOCS / "decisions" / name)
        assert text.startswith(f"# {int(name[:4])}. ")
        headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
        assert headings == ["Context", "Decision", "Not chosen", "Consequences"], name


def test_every_page_is_reachable_from_the_readme():
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", without_code(read(page)))
        waiting += [(page.parent / link).resolve() for link in links]
    assert set(PAGES) <= reached
