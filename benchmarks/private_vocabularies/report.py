"""The page of private vocabularies."""

from benchmarks.library.report import Page, Plot, Section
from benchmarks.private_vocabularies.embedding_divergence_tables import divergence_rows, draw_divergence
from benchmarks.private_vocabularies.round_variance_tables import draw_variance, variance_rows
from benchmarks.private_vocabularies.tables import (
    accuracy_rows,
    draw_accuracies,
    draw_kinds,
    draw_partitions,
    kind_rows,
    partition_rows,
    sent_rows,
)

__all__ = ["PAGE"]

_QUALITY = "private_vocabularies.quality"
_ACCURACIES = ("global_accuracy", "local_accuracy")

PAGE = Page(
    "private_vocabularies",
    (
        Section(
            "accuracy",
            "fedvocab",
            _QUALITY,
            where={"model": ("bilstm",)},
            figures=_ACCURACIES,
            rows=accuracy_rows,
            plots=(Plot("fedvocab.svg", "Global and local accuracy by method", draw_accuracies),),
        ),
        Section(
            "pretrained",
            "fedvocab",
            f"{_QUALITY} --model minilm",
            where={"model": ("minilm",)},
            figures=_ACCURACIES,
            rows=accuracy_rows,
        ),
        Section(
            "grid",
            "fedvocab_pretrained",
            "private_vocabularies.pretrained",
            figures=_ACCURACIES,
            rows=accuracy_rows,
        ),
        Section(
            "sent",
            "fedvocab",
            _QUALITY,
            where={"model": ("bilstm",)},
            figures=("values_per_round", "bytes_per_round", "seconds"),
            rows=sent_rows,
        ),
        Section(
            "wire",
            "fedvocab_wire",
            "private_vocabularies.wire",
            wide=("values_per_round", "sent_bytes_per_round", "received_bytes_per_round"),
        ),
        Section(
            "partitions",
            "fedvocab",
            _QUALITY,
            figures=("rows_per_member",),
            rows=partition_rows,
            plots=(Plot("fedvocab_partitions.svg", "Labels of each member", draw_partitions),),
        ),
        Section(
            "kinds",
            "partition_kinds",
            "private_vocabularies.partition_kinds",
            rows=kind_rows,
            plots=(Plot("partition_kinds.svg", "Labels and rows of each member, by kind of partition", draw_kinds),),
        ),
        Section(
            "variance",
            "round_variance",
            "private_vocabularies.round_variance",
            rows=variance_rows,
            plots=(Plot("round_variance.svg", "Accuracy by round, and members with one label", draw_variance),),
        ),
        Section(
            "divergence",
            "embedding_divergence",
            "private_vocabularies.embedding_divergence",
            rows=divergence_rows,
            plots=(
                Plot("embedding_divergence.svg", "Accuracy of one shared part behind four tables", draw_divergence),
            ),
        ),
        Section(
            "search",
            "fedvocab_search",
            f"{_QUALITY} --search",
            ("recipe",),
            figures=("validation_accuracy", "common_validation_accuracy"),
            wide=("validation_accuracy", "common_validation_accuracy"),
        ),
    ),
)
