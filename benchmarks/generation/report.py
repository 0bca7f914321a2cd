"""The page of models that write."""

from benchmarks.library.report import Page, Section

__all__ = ["PAGE"]

_MODULE = "generation.quality"

PAGE = Page(
    "generation",
    (
        Section(
            "loss",
            "generation",
            _MODULE,
            (
                "low",
                "high",
                "token_accuracy",
                "trained_values",
                "rows",
                "noise_multiplier",
                "noise_to_signal",
                "recipe",
            ),
            figures=("loss_per_token",),
        ),
        Section(
            "exposure",
            "generation",
            _MODULE,
            ("low", "high", "canaries", "each", "extrapolated"),
            figures=("exposure", "extracted"),
        ),
        Section("answers", "generation", _MODULE, ("low", "high"), figures=("bleu", "rouge_l", "tokens_per_second")),
        Section("search", "generation_search", _MODULE, figures=("validation_loss",)),
        Section("wire", "generation_wire", "generation.wire"),
    ),
)
