"""The page of prompts."""

from typing import Any

from benchmarks.library.report import Page, Plot, Section
from benchmarks.prompts.tables import curve_name, draw_rounds, laplace_rows, quality_rows, sweep_rows

__all__ = ["PAGE"]

_QUALITY = "prompts.quality"
_SWEEP: dict[str, tuple[Any, ...]] = {
    "method": ("prompt-tuning",),
    "partition": ("equal",),
    "mechanism": (None,),
    "server": (None,),
}

PAGE = Page(
    "prompts",
    (
        Section(
            "quality",
            "fedprompt",
            _QUALITY,
            where={"tokens": (20, None), "steps": (40,), "mechanism": (None,), "backbone": ("minilm",)},
            figures=("test_accuracy", "values_per_round", "bytes_per_round", "seconds"),
            rows=quality_rows,
            plots=(
                Plot(
                    "fedprompt.svg", "Test accuracy after each round, by method and partition", draw_rounds(curve_name)
                ),
            ),
        ),
        Section("search", "fedprompt_search", f"{_QUALITY} --search", figures=("validation_accuracy",)),
        Section(
            "tokens",
            "fedprompt",
            _QUALITY,
            where={**_SWEEP, "steps": (40,), "tokens": (1, 5, 10, 20)},
            figures=("test_accuracy", "values_per_round"),
            rows=sweep_rows("tokens"),
            plots=(
                Plot(
                    "fedprompt_tokens.svg",
                    "Test accuracy after each round, by tokens of the prompt",
                    draw_rounds(lambda line: f"{line['case']['tokens']} tokens"),
                ),
            ),
        ),
        Section(
            "steps",
            "fedprompt",
            _QUALITY,
            where={**_SWEEP, "tokens": (20,), "steps": (10, 40, 100)},
            figures=("test_accuracy", "values_per_round"),
            rows=sweep_rows("steps"),
            plots=(
                Plot(
                    "fedprompt_steps.svg",
                    "Test accuracy after each round, by local steps",
                    draw_rounds(lambda line: f"{line['case']['steps']} steps"),
                ),
            ),
        ),
        Section(
            "laplace",
            "fedprompt",
            _QUALITY,
            where={"mechanism": ("laplace-update",)},
            figures=("test_accuracy", "epsilon_sound"),
            rows=laplace_rows,
        ),
        Section(
            "backdoor",
            "fedprompt_backdoor",
            "prompts.backdoor",
            ("mistaken", "control", "target"),
            figures=("clean_accuracy", "attack_success"),
        ),
        Section(
            "wire",
            "fedprompt_wire",
            "prompts.wire",
            ("percent_of_full", "million", "paper_million", "difference"),
            wide=("values_per_round", "sent_bytes_per_round", "received_bytes_per_round"),
            where={"part": ("wire",)},
        ),
        Section(
            "head_rounds",
            "head_rounds",
            "prompts.head_rounds",
            ("target", "computing_seconds", "cached_seconds"),
        ),
        Section(
            "joining",
            "fedprompt_wire",
            "prompts.wire",
            ("megabytes_per_second",),
            wide=("backbone_seconds", "backbone_bytes", "second_job_bytes", "fetching_peak_rss_bytes"),
            where={"part": ("backbone",)},
        ),
        Section(
            "head",
            "fedprompt",
            _QUALITY,
            ("commonest_word", "masked_loss", "steps"),
            figures=("masked_accuracy",),
        ),
    ),
)
