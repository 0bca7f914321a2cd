"""What every Dockerfile must have, and the coordinator's build steps run without a container engine."""

import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.dockerfile import Dockerfile, moved, rehearse, sent
from tests.support.processes import ROOT, free_ports  # type: ignore[attr-defined]

FOLDER = ROOT / "deploy" / "docker"
IMAGES = ("coordinator", "edge")


@pytest.fixture(params=IMAGES)
def image(request) -> Dockerfile:
    return Dockerfile.read(FOLDER / f"{request.param}.Dockerfile")


def test_all_stages_have_one_base_with_an_exact_version(image):
    assert {stage.base for stage in image.stages} == {f"python:{image.arguments['PYTHON']}"}
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+", image.arguments["PYTHON"])


def test_it_runs_as_an_unprivileged_user_with_a_fixed_id(image):
    user = image.stages[-1].last("USER")
    assert user is not None
    assert re.fullmatch(r"(1\d{4}):\1", user.rest)
    number = user.rest.split(":")[0]
    made = [each.rest for each in image.stages[-1].instructions if each.word == "RUN"]
    assert any(f"useradd --system --uid {number}" in line and "nologin" in line for line in made)
    # It owns the folder that it writes to, and nobody else can read it.
    assert any(f"install -d -o {number} -g {number} -m 0700" in line for line in made)
    # No step runs after the user is set.
    words = [each.word for each in image.stages[-1].instructions]
    assert "RUN" not in words[words.index("USER") :]


def test_it_has_entrypoint_command_stop_signal_and_health_check(image):
    last = image.stages[-1]
    for word in ("ENTRYPOINT", "CMD"):
        instruction = last.last(word)
        assert instruction is not None
        # A shell would keep signals from the program.
        assert instruction.rest.startswith("[")
    assert last.last("STOPSIGNAL").rest == "SIGTERM"
    assert 'CMD ["' in last.last("HEALTHCHECK").rest


def test_only_pip_fetches_with_constraints_and_no_secret_is_built_in(image):
    for stage in image.stages:
        for each in stage.instructions:
            assert each.word not in ("ADD", "ONBUILD", "SHELL"), each
            assert not re.search(r"\b(curl|wget|apt-get|apt|git|sudo)\b", each.rest), each
            if "pip install" in each.rest:
                assert "-c constraints.txt" in each.rest, each
                assert "--no-cache-dir" in each.rest, each
            if each.word in ("ARG", "ENV"):
                assert not re.search(r"(?i)passw|secret|token|key", each.rest), each


def test_the_last_stage_has_the_environment_but_no_source(image):
    copied = [each.rest for each in image.stages[-1].instructions if each.word == "COPY"]
    assert copied == ["--from=build /opt/tacit /opt/tacit"]


def test_named_extras_exist_and_every_package_is_copied(image):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [each.rest for stage in image.stages for each in stage.instructions if each.word == "RUN"]
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", " ".join(named))
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    rooms = {each.split("/")[0] for each in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    copied = {
        word for stage in image.stages for each in stage.instructions if each.word == "COPY" for word in each.words()
    }
    assert rooms <= copied


def test_a_members_image_has_the_pinned_torch():
    text = (FOLDER / "edge.Dockerfile").read_text()
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert f" torch=={pinned}\n" in text
    assert "torch" not in "\n".join(
        line for line in (FOLDER / "coordinator.Dockerfile").read_text().splitlines() if not line.startswith("#")
    )


def test_the_build_context_has_no_secrets_or_data(tmp_path):
    for name in (
        "pyproject.toml",
        "coordinator/cli/job.py",
        "federation/authority/root.key",
        "deploy/secrets/pgpass",
        "tacit.db",
        ".git/config",
        "coordinator/__pycache__/x.pyc",
        "tests/x.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / ".dockerignore").write_text((ROOT / ".dockerignore").read_text())
    assert sent(tmp_path) == {"pyproject.toml", "coordinator/cli/job.py"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("RUN x\n", "before the first FROM"), ("FROM a AS b c\n", "line 1"), ("FROM a\nRUNN x\n", "not an instruction")],
    ids=["order", "from", "word"],
)
def test_an_invalid_dockerfile_is_refused(tmp_path, text, sentence):
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        Dockerfile.read(path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_coordinators_build_serves_and_has_no_torch(tmp_path: Path) -> None:
    image = Dockerfile.read(FOLDER / "coordinator.Dockerfile")
    root = tmp_path / "root"
    root.mkdir()
    passed = rehearse(image, ROOT, root)
    assert all(line.startswith(("groupadd", "install -d")) for line in passed)
    programs = moved("/opt/tacit/bin", root)
    last = image.stages[-1]
    environment = {
        name: value.replace("/opt/tacit", str(moved("/opt/tacit", root))) for name, value in last.environment().items()
    }
    environment["PATH"] = f"{programs}:/usr/bin:/bin"
    environment["TACIT_DIR"] = str(tmp_path / "federation")
    empty = tmp_path / "empty"
    empty.mkdir()

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, env=environment, cwd=empty, timeout=120, check=False
        )

    for absent in ("torch", "transformers", "onnxruntime", "pytest", "grpc_tools"):
        assert ran(str(programs / "python"), "-c", f"import {absent}").returncode != 0, absent
    assert ran(str(programs / "python"), "-c", "import psycopg").returncode == 0
    helped = ran("coordinator", "--help")
    assert helped.returncode == 0
    assert "Run a federation" in helped.stdout
    # The health check fails before it serves and passes while it serves.
    ports = zip(("enrolment", "federation", "metrics"), free_ports(3), strict=True)
    made = ran("coordinator", "init", environment["TACIT_DIR"], *(f"--{name}-port={port}" for name, port in ports))
    assert made.returncode == 0, made.stderr
    check = last.last("HEALTHCHECK").rest.partition("CMD ")[2]
    words = [word.strip('" ') for word in check.strip("[]").split(",")]
    assert ran(*words).returncode == 3
    started = [*last.last("ENTRYPOINT").words(), *last.last("CMD").words()]
    program = {**environment, "LANG": os.environ.get("LANG", "C.UTF-8")}
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True, env=program, cwd=empty) as process:
        try:
            assert process.stderr is not None
            assert any('"serving"' in line for line in process.stderr)
            assert ran(*words).returncode == 0
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
