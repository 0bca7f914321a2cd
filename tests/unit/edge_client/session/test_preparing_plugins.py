"""A member and a job whose model comes from a plugin: the policy first, the digest second, and only then its code."""

import asyncio
import hashlib
import json

import pytest

import secure_agg
from edge_client.approval.deciding import decide, put
from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.policy.plugins import allow_plugin
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import ApprovalMissing, PreparationRefused, Preparer
from export.bundle import make_job_bundle, read_job_bundle
from learning.plugins.installed import PluginUnusable
from learning.plugins.loading import loaded
from learning.text.examples import Example
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tacit.messages import Assignment
from tacit.reason import Reason
from tests.support import party
from tests.support.plugins import GOOD, forgotten, installed, model_of
from tests.support.stewards import MARY
from tests.support.tried_jobs import written_job, written_rows

DP_SGD = {"name": "dp-sgd", "noise_multiplier": 1.0, "clip": 1.0, "lot": 8, "steps": 2}


class Watcher:
    def training(self, *_):
        pass

    def reading(self, *_):
        pass

    def training_failing(self, *_):
        pass


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


class Town:
    """An operator that makes a bundle, and a member that gets it."""

    def __init__(self, folder, site, identity):
        self.folder, self.site, self.identity = folder, site, identity
        self.mark = folder / "imported"
        self.fetched = []

    def source(self, text=GOOD):
        return f"open({str(self.mark)!r}, 'a').write('x')\n{text}"

    def bundle(self, text=GOOD, mechanism=DP_SGD, **model):
        installed(self.site, {"tacit_own.py": self.source(text)})
        written, _ = written_job(self.folder / "job")
        table = JobSpec.from_toml(written).model_dump(mode="json", exclude_none=True)
        table |= {"model": model_of(**model).model_dump(mode="json"), "mechanism": mechanism}
        out = self.folder / "bundle"
        make_job_bundle(JobSpec.model_validate(table), self.folder / "job", out)
        forgotten()
        self.mark.unlink(missing_ok=True)
        return read_job_bundle(out)

    def prepare(self, bundle, *, desk=False, fresh=True, **policy):
        if fresh:
            # What the operator's side admitted is not what this member admits.
            forgotten()
        job = bundle.document
        served = {
            hashlib.sha256(data).digest(): data
            for data in (job.canonical(), bundle.manifest.canonical(), bundle.weights, bundle.tokenizer)
        }

        async def fetch(digest, into, limit):
            self.fetched.append(digest)
            into.parent.mkdir(exist_ok=True, parents=True)
            into.write_bytes(served[digest])

        rules = Policy(**policy)
        rows = [Example(row["text"], row["label"]) for row in written_rows(20)]
        with open_budget(self.folder, self.identity, rules, [row.text for row in rows]) as budget:
            preparer = Preparer(
                rows,
                self.identity.federation,
                self.identity.member,
                rules,
                budget,
                secure_agg.SystemRandom(),
                BlobCache(self.folder / "cache"),
                "cpu",
                Watcher(),
                Keeper(PrivateStore(self.folder, self.identity.federation, "data"), rows),
            )
            if desk:
                about = {"federation": self.identity.federation, "member": self.identity.member, "data": "data"}
                preparer._desk = Desk(self.folder, rules, budget, **about)
            assignment = Assignment(job.name, 1, job.digest(), bundle.document.weights, 0, 1000)
            try:
                return asyncio.run(preparer.prepare(assignment, fetch))
            finally:
                self.reserved = sum(each.steps for each in budget.statement(job.name).of_job)


@pytest.fixture
def town(tmp_path, site, identity):
    return Town(tmp_path, site, identity)


def allowing(bundle):
    return {"plugins": {"tacit-own": bundle.document.model.files}}


def refused(town, bundle, **policy):
    """The refusal, before which nothing was imported or reserved, and no weights were fetched."""
    with pytest.raises(PreparationRefused) as found:
        town.prepare(bundle, **policy)
    assert not town.mark.exists()
    assert town.reserved == 0
    assert bundle.document.weights not in town.fetched
    return found.value


def test_a_policy_that_allows_the_plugin_lets_the_member_train(town):
    bundle = town.bundle()
    made = town.prepare(bundle, **allowing(bundle))
    assert made.update.change.any()
    assert town.reserved == DP_SGD["steps"]
    assert town.mark.read_text() == "x"


@pytest.mark.parametrize(
    "plugins", [{}, {"tacit-own": "00" * 32}, {"tacit-other": None}], ids=["default", "files", "name"]
)
def test_nothing_is_imported_unless_the_policy_lists_these_files(town, plugins):
    bundle = town.bundle()
    plugins = {name: digest or bundle.document.model.files.hex() for name, digest in plugins.items()}
    found = refused(town, bundle, plugins=plugins)
    assert found.reason == Reason.REASON_POLICY_JOB_KIND
    assert found.detail.startswith("plugins: the job's model is code of the installed plugin tacit-own")
    assert "`edge_client models` prints the line" in found.detail


def test_nothing_is_imported_before_the_stewards_approve(town):
    bundle = town.bundle()
    asking = {"jobs": "ask", "stewards": {"mary": MARY.public}, **allowing(bundle)}
    with pytest.raises(ApprovalMissing):
        town.prepare(bundle, desk=True, **asking)
    assert not town.mark.exists()
    request = ApprovalFolder(town.folder, "data", bundle.document.name).request()
    put(town.folder, decide(request, "approve", MARY.key, known=[]))
    assert town.prepare(bundle, desk=True, **asking).update.change.any()
    assert town.mark.exists()


def test_nothing_is_imported_of_files_that_changed_on_this_machine(town):
    bundle = town.bundle()
    (town.site / "tacit_own.py").write_text(town.source() + "# more\n")
    found = refused(town, bundle, **allowing(bundle))
    assert found.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert "tacit_own.py is not the file that was installed" in found.detail


def test_a_file_that_changes_between_rounds_is_noticed_before_the_next(town):
    bundle = town.bundle()
    town.prepare(bundle, **allowing(bundle))
    (town.site / "tacit_own.py").write_text(town.source() + "# more\n")
    with pytest.raises(PreparationRefused, match="is not the file that was installed"):
        town.prepare(bundle, fresh=False, **allowing(bundle))


def test_a_members_own_command_asks_the_policy_too(town):
    """`edge_client export` and `evaluate` train for no job, so they ask for this key alone."""
    bundle = town.bundle()
    forgotten()
    for plugins in ({}, {"tacit-own": b"\1" * 32}):
        with pytest.raises(PluginUnusable, match="this member's policy does not allow the plugin tacit-own"):
            allow_plugin(Policy(plugins=plugins), bundle.document)
    with pytest.raises(PluginUnusable, match="was not allowed on this machine"):
        loaded(bundle.document.model)
    allow_plugin(Policy(**allowing(bundle)), bundle.document)
    loaded(bundle.document.model)


def test_nothing_is_imported_of_another_build_or_version(town):
    bundle = town.bundle()
    installed(town.site, {"tacit_own.py": town.source() + "# more\n"})
    assert "has other files here" in refused(town, bundle, **allowing(bundle)).detail
    (town.site / "tacit_own-1.0.dist-info" / "RECORD").unlink()
    (town.site / "tacit_own-1.0.dist-info" / "METADATA").unlink()
    (town.site / "tacit_own-1.0.dist-info").rename(town.site / "gone")
    installed(town.site, {"tacit_own.py": town.source()}, version="1.1")
    town.fetched.clear()
    assert "this machine has version 1.1" in refused(town, bundle, **allowing(bundle)).detail


def test_a_plugin_that_cannot_be_imported_here_costs_nothing_and_tells_nothing(town):
    bundle = town.bundle(f"import os\nif os.path.exists({str(town.folder / 'bad')!r}): raise OSError('a path')\n{GOOD}")
    (town.folder / "bad").touch()
    with pytest.raises(PreparationRefused) as found:
        town.prepare(bundle, **allowing(bundle))
    assert found.value.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert "raises OSError when it is imported" in found.value.detail
    assert ("a path" in found.value.private, "a path" in found.value.detail) == (True, False)
    assert town.reserved == 0


LEAK = GOOD.replace("# LATER", "x = x + LEAK * (x.mean(dim=0) - x.mean(dim=0).detach())")


def test_a_module_whose_gradients_leak_is_examined_here_too(town):
    """An operator that does not examine, or a plugin that behaves there, does not reach the data."""
    text = f"import os\nLEAK = float(os.path.exists({str(town.folder / 'bad')!r}))\n{LEAK}"
    bundle = town.bundle(text)
    (town.folder / "bad").touch()
    with pytest.raises(PreparationRefused, match="a text's gradient depends on the other texts") as found:
        town.prepare(bundle, **allowing(bundle))
    assert found.value.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert town.reserved == 0


@pytest.mark.parametrize("mechanism", [DP_SGD, {"name": "none"}, {"name": "gaussian-update", "noise_multiplier": 1.0}])
def test_the_operator_hears_of_a_leak_under_every_mechanism(town, mechanism):
    with pytest.raises(DocumentInvalid, match="model: a text's gradient depends on the other texts"):
        town.bundle(f"LEAK = 1.0\n{LEAK}", mechanism)


def test_the_operator_hears_what_dp_sgd_cannot_clip(town):
    text = GOOD.replace("# LATER", "x = x * self.output.weight.sum()")
    town.bundle(text, {"name": "none"})
    with pytest.raises(DocumentInvalid, match="dp-sgd cannot clip what plugin tacit-own trains"):
        town.bundle(text)


def test_the_operator_hears_of_an_error_with_its_text(town):
    with pytest.raises(DocumentInvalid, match=r"raises KeyError when it is imported.*KeyError: 'a reason'"):
        town.bundle("raise KeyError('a reason')\n")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "os:system"},
        {"name": "learning.models.textcnn"},
        {"distribution": "../somewhere"},
        {"distribution": "https://example.com/x"},
        {"distribution": "Tacit_Own"},
        {"version": "1.0; import os"},
        {"files": "00"},
        {"settings": {"__class__": 1}},
        {"settings": {"a": [1]}},
        {"settings": {str(number): 1 for number in range(65)}},
    ],
)
def test_a_document_has_no_place_for_a_path_of_code(town, change):
    bundle = town.bundle()
    content = json.loads(bundle.document.canonical())
    type(bundle.document).from_json(json.dumps(content).encode())
    content["model"] |= change
    with pytest.raises(DocumentInvalid, match="model"):
        type(bundle.document).from_json(json.dumps(content).encode())


def test_a_measurement_of_a_plugins_version_asks_the_same_rule(town):
    from edge_client.policy.rules import MEASUREMENT

    assert "plugins" in [rule.key for rule in MEASUREMENT]
    with pytest.raises(PolicyRefusal):
        Policy().check_job(town.bundle().document, federation=town.identity.federation)
