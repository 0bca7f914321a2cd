"""The page of the benchmarks on TREC."""

from benchmarks.institutional.drawings import draw_by_epsilon, draw_grid, draw_learning_curves
from benchmarks.library.report import Page, Plot, Section

__all__ = ["PAGE"]

PAGE = Page(
    "institutional",
    (
        Section(
            "accuracy",
            "institutional",
            "institutional.accuracy",
            ("paper", "spread", "values"),
            plots=(Plot("institutional.svg", "Test accuracy after each round", draw_learning_curves),),
        ),
        Section(
            "paper_noise",
            "institutional_dp",
            "institutional.dp",
            ("paper", "spread"),
            wide=("test_accuracy", "rounds", "epsilon_paper", "epsilon_sound", "noise_to_signal"),
            where={"mechanism": ("gaussian-update",)},
            plots=(Plot("institutional_dp.svg", "Test accuracy under gaussian-update and in the paper", draw_grid),),
        ),
        Section(
            "dp_sgd",
            "institutional_dp",
            "institutional.dp",
            ("values", "recipe"),
            wide=("test_accuracy", "rounds", "epsilon_sound", "noise_to_signal"),
            where={"mechanism": ("dp-sgd", "none")},
            plots=(Plot("dp_sgd.svg", "Test accuracy of dp-sgd by epsilon", draw_by_epsilon),),
        ),
    ),
)
