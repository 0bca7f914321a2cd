"""`coordinator` that seats every certificate of the authority, whatever the roster log says of it: it lies.

python -m tests.support.seating_coordinator serve --dir DIR
"""

from coordinator.rounds import attempt

__all__: list[str] = []


def main() -> None:
    """Runs the command without the check."""
    from coordinator.cli import main as coordinator

    attempt._unseated = lambda *_: None
    coordinator()


if __name__ == "__main__":
    main()
