"""The page of the simulation."""

from benchmarks.library.report import Page, Plot, Section
from benchmarks.simulation.drawings import draw_rates

__all__ = ["PAGE"]

_MODULE = "simulation.speed"

PAGE = Page(
    "simulation",
    (
        Section(
            "ratio",
            "simulation",
            _MODULE,
            ("target", "processor", "turns"),
            figures=("times_flower",),
        ),
        Section(
            "rate",
            "simulation",
            _MODULE,
            ("processor_seconds", "start_seconds", "rounds", "turns"),
            figures=("client_rounds_per_second",),
            plots=(Plot("simulation_rates.svg", "Client rounds a second by members, engine and model", draw_rates),),
        ),
        Section("memory", "simulation", _MODULE, figures=("resident_bytes",)),
        Section("accuracy", "simulation", _MODULE, ("runs",), figures=("accuracy",)),
    ),
)
