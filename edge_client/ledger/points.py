"""The points at which tests kill a process that writes a ledger, a receipt or a corpus."""

from toolkit.durable import FILE_STEPS

__all__ = ["CORPUS_POINTS", "POINTS"]

# All points, in the order in which a first start with one charge and one receipt passes them.
POINTS = (
    "open.locking",
    "open.locked",
    "open.touched",
    "open.connected",
    "open.replayed",
    "open.checked",
    "open.wal",
    "create.begun",
    "create.tables",
    "append.beginning",
    "append.begun",
    "append.inserted",
    "append.committed",
    "append.believed",
    *(f"pin.{step}" for step in FILE_STEPS),
    "open.done",
    *(f"certificate.{step}" for step in FILE_STEPS),
    # The two files are flushed, then renamed, then their folder is flushed.
    *(f"{file}.{step}" for file in ("signature", "receipt") for step in FILE_STEPS[:-2]),
    *(f"{file}.{step}" for step in FILE_STEPS[-2:] for file in ("signature", "receipt")),
    "close.closing",
    "close.closed",
)

# Further points of a job that orders synthetic text, from its last charge to the coordinator's receipt for the file.
CORPUS_POINTS = (
    "model.charged",
    *(f"model.{step}" for step in FILE_STEPS),
    "histogram.charging",
    "histogram.charged",
    *(f"histogram.{step}" for step in FILE_STEPS),
    *(f"corpus.{step}" for step in FILE_STEPS),
    *(f"statement.{step}" for step in FILE_STEPS),
    *(f"corpus-state.{step}" for step in FILE_STEPS),
    "corpus.sending",
    "corpus.sent",
)
