"""The page of small devices."""

from benchmarks.library.report import Page, Section

__all__ = ["PAGE"]

_MODULE = "device.costs"

PAGE = Page(
    "device",
    (
        Section("installation", "device", _MODULE, ("packages",), figures=("installed_bytes",)),
        Section("memory", "device", _MODULE, ("afterwards",), figures=("resident_bytes",)),
        Section(
            "time",
            "device",
            _MODULE,
            ("processor", "first", "first_processor", "rows"),
            figures=("start_seconds", "round_seconds"),
        ),
        Section("accuracy", "device", _MODULE, ("train", "test"), figures=("accuracy",)),
    ),
)
