"""`edge_client members` shows who is in the federation, from this member's own copy of the roster log."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_client.identity.home import MemberIdentity
    from edge_client.roster.book import RosterBook, Seen
    from tacit.roster_copy import Copy

__all__ = ["members"]

Export = Annotated[
    Path | None,
    typer.Option("--export", help="Write this member's copy of the log to a file, for others.", show_default=False),
]
Verify = Annotated[
    Path | None,
    typer.Option(
        "--verify",
        help="Verify a file that `--export` wrote, and compare it with this member's copy. Needs no connection.",
        show_default=False,
    ),
]
Against = Annotated[
    Path | None,
    typer.Option("--against", help="With --verify: compare with this file instead.", show_default=False),
]


def members(
    home: Home = None,
    offline: Annotated[bool, typer.Option("--offline", help="Show what is known without asking anybody.")] = False,
    export: Export = None,
    verify: Verify = None,
    against: Against = None,
    as_json: Json = False,
) -> None:
    """Show who has joined, since when, and what is new since you last looked.

    The list comes from the roster log, which every certificate is in. A log shows invented members, it does not prevent
    them: `peers` in the policy does. To find a coordinator that shows different logs to different members, send the
    file of `--export` to another member, which compares it with `--verify`.
    """
    if against is not None and verify is None:
        fail("--against needs --verify FILE", ExitCode.USAGE)
    from edge_client.identity.home import home_path

    folder = home_path(home)
    if verify is not None:
        _verify(folder, verify, against, as_json)
        return
    identity, book = _opened(folder)
    problem = None if offline else _follow(identity, book)
    if export is not None:
        _export(identity, book, export)
    _show(identity, book, as_json, problem)
    book.close()
    if problem is not None:
        raise typer.Exit(int(problem[1]))


def _opened(folder: Path) -> "tuple[MemberIdentity, RosterBook]":
    from edge_client.identity.home import HomeUnusable, MemberIdentity
    from edge_client.roster.book import RosterBook, RosterUnusable, book_path

    try:
        identity = MemberIdentity.load(folder)
        return identity, RosterBook(book_path(folder, identity.federation), identity.authorities.history)
    except (HomeUnusable, RosterUnusable) as error:
        fail(str(error), ExitCode.USAGE)


def _follow(identity: "MemberIdentity", book: "RosterBook") -> tuple[str, ExitCode] | None:
    """Follows to the newest head. Returns what went wrong, and the exit code."""
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()
    import asyncio
    import sqlite3

    from edge_client.identity.reaching import CallFailed, call_any
    from edge_client.policy.policy import Policy, PolicyRefusal
    from edge_client.roster.following import Follower
    from tacit.documents import DocumentInvalid

    async def ask() -> None:
        policy, _ = Policy.load(identity.home)
        follower = Follower(book, identity, tuple(policy.witnesses.values()))
        await call_any(identity, follower.follow)

    try:
        asyncio.run(ask())
    except PolicyRefusal as refusal:
        return refusal.detail, ExitCode.REFUSED
    except CallFailed as error:
        return f"{error.sentence}; shown is what this member knew before", error.code
    except DocumentInvalid as error:
        return str(error), ExitCode.USAGE
    except (sqlite3.Error, OSError) as error:
        return f"the copy of the roster log cannot be written ({error}); check free space", ExitCode.FAILED
    return None


def _export(identity: "MemberIdentity", book: "RosterBook", path: Path) -> None:
    from tacit.roster_copy import write_copy

    try:
        write_copy(path, _own(identity, book))
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; check the path and free space", ExitCode.FAILED)


def _own(identity: "MemberIdentity", book: "RosterBook") -> "Copy":
    from secure_agg.transparency import Tree
    from tacit.roster_copy import Copy

    entries = tuple(seen.entry for seen in book.entries())
    newest = book.newest()
    return Copy(
        f"the copy of {identity.member}",
        identity.authorities,
        entries,
        () if newest is None else (newest,),
        tuple(book.contradictions()),
        tuple(book.cosignatures()),
        Tree(entry.leaf for entry in entries),
    )


def _verify(folder: Path, path: Path, against: Path | None, as_json: bool) -> None:
    from edge_client.identity.home import HomeUnusable, MemberIdentity, NotEnrolled
    from tacit.roster_copy import CopyInvalid, NoCopy, Split, compare, read_copy

    own: Copy | None = None
    try:
        MemberIdentity.load(folder)
    except NotEnrolled:
        pass  # An auditor has no home.
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    else:
        identity, book = _opened(folder)
        own = _own(identity, book)
        book.close()
    try:
        found = read_copy(path)
        other = read_copy(against) if against is not None else own
        said = compare(found, other or found)
    except NoCopy as error:
        fail(str(error), ExitCode.USAGE)
    except CopyInvalid as error:
        fail(str(error), ExitCode.FAILED)
    except Split as split:
        if as_json:
            print_json({"split": True, "detail": str(split)})
            raise typer.Exit(int(ExitCode.REFUSED)) from split
        fail(str(split), ExitCode.REFUSED)
    if other is None:
        said = f"{found.what} holds: {found.size} entries, signed by a server of the federation"
    if as_json:
        print_json({"split": False, "detail": said, "federation": found.federation.hex(), "entries": found.size})
        return
    typer.echo(printable(f"{said}."))
    typer.echo(f"Federation: {found.federation.hex()} (compare with `edge_client policy show`)")


def _show(identity: "MemberIdentity", book: "RosterBook", as_json: bool, problem: tuple[str, ExitCode] | None) -> None:
    from datetime import UTC, datetime

    from edge_client.policy.rules import fingerprint
    from tacit.roster import Kind
    from tacit.verification import verifiers

    shown, newest = book.mark("shown"), book.newest()
    present = book.holders()
    new: list[Seen] = []
    revoked = 0
    for seen in book.entries():
        if seen.number > shown:
            new.append(seen)
        revoked += seen.entry.kind is Kind.REVOKED
    lines = [(name, keys, each) for name, keys in sorted(present.items()) for each in keys.values()]
    _, key_of = verifiers(identity.authorities.history)
    other_key = _others_key(present.get(identity.member, {}), fingerprint(key_of(identity.certificate)))
    if as_json:
        print_json(
            {
                "federation": identity.federation.hex(),
                "entries": book.size,
                "root": None if newest is None else newest.head.root.hex(),
                "head_at_ms": None if newest is None else newest.head.at_ms,
                "contradictions": len(book.contradictions()),
                "problem": None if problem is None else problem[0],
                "own_name_has_another_key": other_key,
                "members": [
                    {
                        "name": name,
                        "key": first.entry.key.hex(),
                        "joined_ms": first.entry.at_ms,
                        "seen_ms": first.seen_ms,
                        "new": first.number > shown,
                    }
                    for name, _, (first, _) in lines
                ],
                "new": [_json(seen) for seen in new],
            }
        )
    else:
        for name, keys, (first, last) in lines:
            joined = f"{datetime.fromtimestamp(first.entry.at_ms / 1000, UTC):%Y-%m-%d %H:%M}"
            seen_at = f"{datetime.fromtimestamp(first.seen_ms / 1000, UTC):%Y-%m-%d %H:%M}"
            marks = "  NEW" if first.number > shown else ("  renewed" if last.number > shown else "")
            marks += f"  ONE OF {len(keys)} KEYS" if len(keys) > 1 else ""
            line = f"{name:<24} key {first.entry.key.hex()[:16]}  joined {joined}  seen here {seen_at}{marks}"
            typer.echo(printable(line))
        at = "none" if newest is None else f"{newest.head.root.hex()[:16]} signed {newest.head.at:%Y-%m-%d %H:%M} UTC"
        typer.echo(f"{len(present)} members, {revoked} revocations, {book.size} entries; head {at}")
        if other_key:
            typer.echo(
                "WARNING: the log has another key under this member's own name: somebody else may act as this member. "
                "Ask the operator at once",
                err=True,
            )
        if book.contradictions():
            typer.echo(
                "WARNING: the coordinator has signed heads that contradict this log. Write the proof with --export "
                "FILE, and send it to the other members",
                err=True,
            )
        if problem is not None:
            typer.echo(printable(f"error: {problem[0]}"), err=True)
    if problem is None:
        book.set_shown(book.size)


def _others_key(keys: "Mapping[bytes, tuple[Seen, Seen]]", mine: bytes) -> bool:
    """Whether the log has a key under this member's name that is not its own, nor one from before `renew --new-key`."""
    if mine not in keys:
        return bool(keys)
    return any(first.number > keys[mine][0].number for first, _ in keys.values())


def _json(seen: "Seen") -> dict[str, Any]:
    entry = seen.entry
    return {
        "number": seen.number,
        "kind": entry.kind.value,
        "name": entry.name,
        "role": entry.role.value,
        "certificate": entry.certificate.hex(),
        "key": entry.key.hex(),
        "at_ms": entry.at_ms,
        "seen_ms": seen.seen_ms,
    }
