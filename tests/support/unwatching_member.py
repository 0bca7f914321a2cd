"""`edge_client` whose members do not look into the roster log: the unprotected baseline of its attacks.

python -m tests.support.unwatching_member run --data FILE ...
"""

from edge_client.roster.book import RosterBook

__all__: list[str] = []


def main() -> None:
    """Runs the command without the checks."""
    from edge_client.cli import main as edge_client

    RosterBook.check_head = lambda *_, **__: None
    RosterBook.check_roster = lambda *_, **__: None
    edge_client()


if __name__ == "__main__":
    main()
