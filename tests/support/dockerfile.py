"""A reader of Dockerfiles, and a rehearsal of their steps without a container engine.

The reader knows the instructions that our files use: ARG, FROM, COPY, RUN, ENV and the rest, one logical line each. The
rehearsal performs COPY (respecting .dockerignore) and RUN below a folder that stands for `/`, and moves our absolute
paths there. It skips, by name, steps that only root can do or that only a container needs. All stages share that
folder, so a file that a later stage copies from an earlier one must have the same path in both, and must exist.
"""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Commands that create users or set owners.
_OF_ROOT = ("groupadd", "install -d -o")
_OURS = ("/opt/tacit", "/src", "/var/lib/tacit", "/var/backups/tacit")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its keyword in capitals, and the rest."""

    word: str
    rest: str
    line: int

    def words(self) -> list[str]:
        """The words of the exec form (a JSON list), or the rest split at spaces."""
        return json.loads(self.rest) if self.rest.startswith("[") else self.rest.split()


@dataclass
class Stage:
    """The instructions from one FROM to the next."""

    base: str
    name: str | None
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction | None:
        return next((each for each in reversed(self.instructions) if each.word == word), None)

    def environment(self) -> dict[str, str]:
        found = {}
        for each in self.instructions:
            if each.word == "ENV":
                found.update(dict(re.findall(r"(\w+)=(\S+)", each.rest)))
        return found


@dataclass
class Dockerfile:
    """The arguments before the first FROM, and the stages."""

    arguments: dict[str, str]
    stages: list[Stage]

    @classmethod
    def read(cls, path: Path) -> "Dockerfile":
        """Reads a Dockerfile.

        Raises:
            ValueError: the file holds an unknown or misplaced instruction.
        """
        made = cls({}, [])
        for each in _instructions(path.read_text(encoding="utf-8")):
            if each.word == "FROM":
                match = re.fullmatch(r"(\S+)(?:\s+AS\s+(\w+))?", each.rest)
                if match is None:
                    raise ValueError(f"line {each.line}: FROM {each.rest}")
                base = re.sub(r"\$\{(\w+)\}", lambda found: made.arguments[found[1]], match[1])
                made.stages.append(Stage(base, match[2]))
            elif not made.stages:
                if each.word != "ARG":
                    raise ValueError(f"line {each.line}: {each.word} before the first FROM")
                name, _, default = each.rest.partition("=")
                made.arguments[name] = default
            else:
                made.stages[-1].instructions.append(each)
        return made


_WORDS = re.compile(
    r"ADD|ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|LABEL|ONBUILD|RUN|SHELL|STOPSIGNAL|USER|VOLUME|WORKDIR"
)


def _instructions(text: str) -> list[Instruction]:
    found, open_line, start = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not open_line:
            start = number
        if line.lstrip().startswith("#"):
            continue
        open_line += line.rstrip()
        if open_line.endswith("\\"):
            open_line = open_line[:-1]
            continue
        if open_line.strip():
            word, _, rest = open_line.strip().partition(" ")
            if _WORDS.fullmatch(word) is None:
                raise ValueError(f"line {start}: {word!r} is not an instruction")
            found.append(Instruction(word, " ".join(rest.split()), start))
        open_line = ""
    return found


def sent(context: Path) -> set[str]:
    """The paths of a context's files that its .dockerignore lets through. The last line that matches a path, or a
    folder above it, decides."""
    lines = [line.strip() for line in (context / ".dockerignore").read_text().splitlines()]
    rules = [(line.lstrip("!"), line.startswith("!")) for line in lines if line and not line.startswith("#")]
    kept = set()
    for folder, _, names in os.walk(context):
        if Path(folder).name in (".git", ".venv"):
            continue
        for name in names:
            path = str(Path(folder, name).relative_to(context))
            parts = path.split("/")
            heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
            verdict = True
            for pattern, allows in rules:
                tails = heads if not pattern.startswith("**/") else parts
                if any(fnmatch.fnmatchcase(each, pattern.removeprefix("**/")) for each in tails):
                    verdict = allows
            if verdict:
                kept.add(path)
    return kept


def rehearse(file: Dockerfile, context: Path, root: Path) -> list[str]:
    """Performs the steps below `root`, and returns those that it skipped.

    Raises:
        AssertionError: a step failed, or copies a file that does not exist.
    """
    passed, inside = [], sent(context)
    for stage in file.stages:
        here = root
        arguments = dict(file.arguments)
        for each in stage.instructions:
            match each.word:
                case "WORKDIR":
                    here = moved(each.rest, root)
                    here.mkdir(parents=True, exist_ok=True)
                case "COPY" if each.rest.startswith("--from="):
                    _, source, target = each.rest.split()
                    assert source == target, f"line {each.line}: the rehearsal has one folder for all stages"
                    assert moved(source, root).exists(), f"line {each.line}: no {source} was made"
                case "COPY":
                    *sources, target = each.rest.split()
                    for source in sources:
                        _copy(context, inside, source, here / target if len(sources) == 1 else here / target / source)
                case "RUN" if any(each.rest.startswith(start) for start in _OF_ROOT):
                    passed.append(each.rest)
                case "RUN":
                    _run(each, here, root, arguments)
                case "ARG":
                    name, _, default = each.rest.partition("=")
                    arguments.setdefault(name, default)
    return passed


def moved(path: str, root: Path) -> Path:
    """The rehearsal's path for an absolute path of the image."""
    return root / path.lstrip("/")


def _copy(context: Path, inside: set[str], source: str, target: Path) -> None:
    found = sorted(path for path in inside if path == source or path.startswith(source + "/"))
    assert found, f"{source} is not in the repository, or .dockerignore keeps it out"
    for path in found:
        place = target / Path(path).relative_to(source) if path != source else target
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(context / path, place)


def _run(step: Instruction, here: Path, root: Path, arguments: dict[str, str]) -> None:
    line = step.rest
    for path in _OURS:
        line = line.replace(path, str(moved(path, root)))
    line = re.sub(r"^python ", f"{sys.executable} ", line)
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "http", "no_proxy"))}
    done = subprocess.run(
        ["sh", "-euc", line],
        cwd=here,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(root), **kept, **arguments},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"line {step.line}: {step.rest}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
