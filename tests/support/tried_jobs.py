"""Rows and a job written for trials: one word of each text decides its label, so that a model learns in seconds."""

import json
import random
from pathlib import Path

from tacit.job import JobSpec

__all__ = ["DIVERGES", "TOML", "WRITER", "written_job", "written_rows"]

_WORDS = {"day": ["sun", "noon", "light", "bright"], "night": ["moon", "dark", "star", "late"]}
_REST = ["the", "is", "was", "over", "a", "hill", "and", "we", "saw"]

TOML = """\
# What the job is for.
schema = 1
name = "tried"
labels = ["day", "night"]

[vocabulary]
kind = "words"
file = "words.txt"

[model]
embedding = 8
widths = [1]
maps = 4
dropout = 0.0

# Found by the operator.
[mechanism]
name = "dp-sgd"
noise_multiplier = 0.3  # little
clip = 1.0
lot = 20
steps = 6

[training]
optimiser = "sgd"
learning_rate = 2.0

[rounds]
count = 2
min_members = 3
"""

# The same without noise, by steps that no model survives.
DIVERGES = (
    TOML.partition("# Found by")[0]
    + """[mechanism]
name = "none"

[training]
optimiser = "sgd"
learning_rate = 1000
epochs = 30

[rounds]
count = 2
min_members = 3
"""
)

# With `saved_writer` in a folder `writer` beside it.
WRITER = """\
schema = 1
name = "tried"
seed = 5
[model]
architecture = "prompted"
base = "writer"
max_tokens = 48
injection = {name = "lora", rank = 2}
task = {name = "generate", template = "chatml", max_new_tokens = 16}
[mechanism]
name = "dp-sgd"
noise_multiplier = 2.0
lot = 4
steps = 2
[training]
optimiser = "sgd"
learning_rate = 0.1
[rounds]
count = 3
min_members = 3
"""


def written_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns rows with text, label, site, and person, of whom each has three rows. Labels are equally frequent."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        label = ("day", "night")[number % 2]
        words = [draw.choice(_WORDS[label]), *draw.choices(_REST, k=5), str(number)]
        draw.shuffle(words)
        rows.append(
            {
                "text": " ".join(words),
                "label": label,
                "site": f"site {number % 3}",
                "person": f"person {number % max(1, count // 3)}",
            }
        )
    return rows


def written_job(folder: Path, toml: str = TOML, rows: int = 120) -> tuple[Path, Path]:
    """Writes a job with its words, and rows; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.txt").write_text("\n".join([*_REST, *_WORDS["day"], *_WORDS["night"]]) + "\n")
    job, data = folder / "job.toml", folder / "rows.jsonl"
    job.write_text(toml)
    data.write_text("".join(json.dumps(row) + "\n" for row in written_rows(rows)))
    JobSpec.from_toml(job)
    return job, data
