"""`coordinator authority ...`: shows who certifies, and lets another authority take over.

The commands run on the coordinator's own machine and work on its folder, even while it serves. The server applies a
change within seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import Json, Yes, confirm, table
from coordinator.cli.machine import CoordinatorDir, Machine, on_machine
from coordinator.cli.offline import import_certificates, requests, sign
from coordinator.cli.user import os_user
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from datetime import datetime

    from coordinator.authority import AuthorityBook
    from coordinator.storage.chain import Value

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
app.command()(requests)
app.command()(sign)
app.command("import")(import_certificates)


@app.command()
def rotate(
    folder: CoordinatorDir = Path("federation"),
    *,
    authority_cert: Annotated[
        Path | None,
        typer.Option(help="Use your institution's next CA certificate (PEM), not a new one.", show_default=False),
    ] = None,
    authority_key: Annotated[
        Path | None, typer.Option(help="The key of --authority-cert (PEM).", show_default=False)
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Create the next authority, signed by the current one. It certifies from now on; both are trusted."""
    from datetime import UTC, datetime

    from coordinator import authority
    from coordinator.pki import Authority

    if (authority_cert is None) is not (authority_key is None):
        fail("--authority-cert and --authority-key belong together; pass both or neither", ExitCode.USAGE)
    confirm("Create the next authority? Members follow automatically and renew their certificates.", yes)
    now = datetime.now(UTC)
    with on_machine(folder, keys=True) as machine:
        own = None
        if authority_cert is not None and authority_key is not None:
            own = Authority.load(authority_cert, authority_key, now=now, passphrase=machine.passphrase)
        brought = own is not None

        def tell(following: bytes, before: bytes) -> None:
            _note(machine, now, "authority_rotated", following, before=before.hex(), brought=brought)

        book = authority.rotate(machine.folder, now=now, passphrase=machine.passphrase, own=own, tell=tell)
        _operator(machine, book, now)
    _say(book, as_json, "It certifies from now on. The previous one is trusted until `coordinator authority retire`.")


@app.command()
def retire(
    folder: CoordinatorDir = Path("federation"),
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Retire it even if certificates of the earlier authority are in use.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """End trust in the earlier authority, and remove its key from this machine."""
    from datetime import UTC, datetime

    from coordinator import authority

    now = datetime.now(UTC)
    with on_machine(folder, keys=True) as machine:
        late_members, late_operators = _late(machine, machine.book, now)
        if (late_members or late_operators) and not force:
            parts = []
            if late_members:
                parts.append(f"members {', '.join(late_members)} renew theirs when they connect")
            if late_operators:
                parts.append(
                    f"for operators {', '.join(late_operators)} run `coordinator operator issue NAME --role ROLE "
                    "--out FOLDER` or revoke them"
                )
            fail(
                "certificates of the earlier authority are in use: " + "; ".join(parts) + ". Wait, or pass --force: "
                "these members then renew when they reconnect, and take part again from then on",
                ExitCode.REFUSED,
            )
        confirm("Retire the earlier authority? This removes its key here; remove it from backups, too.", yes)

        def tell(following: bytes, before: bytes) -> None:
            _note(machine, now, "authority_retired", before, following=following.hex(), force=force)

        book = authority.retire(machine.folder, now=now, passphrase=machine.passphrase, tell=tell)
        _operator(machine, book, now)
    _say(book, as_json, "The earlier one is no longer trusted, and its key is gone from this machine.")


@app.command()
def status(folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Show the authorities, and who still uses a certificate from an earlier one."""
    from datetime import UTC, datetime

    from coordinator.authority import read_authorities
    from coordinator.pki import ends_too_soon
    from tacit.identity import federation_of

    now = datetime.now(UTC)
    with on_machine(folder) as machine:
        known = read_authorities(machine.folder)
        members, operators = _late(machine, None, now)
    rows = []
    for number, root in enumerate(reversed(known.certificates), start=1):
        state = "certifies" if number == len(known.roots) else "trusted" if number > known.oldest else "retired"
        if state == "trusted" and ends_too_soon(root, now):
            state = "ended"
        left = (root.not_valid_after_utc - now).days
        rows.append((number, federation_of(root).hex(), state, f"{root.not_valid_after_utc:%Y-%m-%d}", left))
    if as_json:
        print_json(
            {
                "federation": known.federation.hex(),
                "authorities": [
                    {"number": number, "fingerprint": print_, "state": state, "until": until, "days_left": left}
                    for number, print_, state, until, left in rows
                ],
                "members_of_earlier": members,
                "operators_of_earlier": operators,
            }
        )
        return
    typer.echo(f"Federation {known.federation.hex()}")
    shown = [[str(number), print_[:16], state, until, str(left)] for number, print_, state, until, left in rows]
    typer.echo(table(["AUTHORITY", "FINGERPRINT", "STATE", "VALID UNTIL", "DAYS LEFT"], shown))
    if len(known.roots) > 1:
        typer.echo(f"Members with a certificate from an earlier one: {', '.join(members) or 'none'}")
        typer.echo(f"Operators with a certificate from an earlier one: {', '.join(operators) or 'none'}")


def _late(machine: Machine, book: "AuthorityBook | None", now: "datetime") -> tuple[list[str], list[str]]:
    """Members and operators whose valid certificate the newest authority did not issue."""
    from coordinator.authority import read_authorities
    from coordinator.storage import records
    from tacit.certificates import certificate_from_der
    from tacit.identity import issued_by

    known = book.authorities if book is not None else read_authorities(machine.folder)
    newest, now_ms = known.certificates[0], int(now.timestamp() * 1000)
    if len(known.roots) == 1:
        return [], []
    stored = machine.database.run_now(records.member_certificates)
    members = [
        name
        for name, (certificate, expires_ms) in stored.items()
        if expires_ms > now_ms and not issued_by(certificate_from_der(certificate), newest)
    ]
    good = {
        item.name
        for item in machine.database.run_now(records.operators)
        if item.revoked_ms is None and item.expires_ms > now_ms and item.issuer != known.newest
    }
    # An operator that also has a newer certificate is not late.
    moved = {
        item.name
        for item in machine.database.run_now(records.operators)
        if item.revoked_ms is None and item.issuer == known.newest
    }
    return members, sorted(good - moved)


def _operator(machine: Machine, book: "AuthorityBook", now: "datetime") -> None:
    """Gives the operator's folder in DIR, if there is one, a certificate from the newest authority and its roots."""
    from cryptography.hazmat.primitives import hashes

    from coordinator.operators import issue_operator
    from coordinator.storage import records
    from tacit.certificates import certificate_from_pem
    from tacit.identity import OPERATOR_ROLES, Identity, issued_by
    from toolkit.durable import durable_file

    folder = machine.folder.operator
    try:
        present = certificate_from_pem((folder / "cert.pem").read_bytes())
    except (OSError, ValueError):
        return
    if machine.database.run_now(lambda s: records.revoked_among(s, [present.fingerprint(hashes.SHA256())])):
        # This operator is revoked, and a new authority must not let it in again.
        return
    who = Identity.of(present)
    if who.role not in OPERATOR_ROLES:
        return
    if issued_by(present, book.issuing.certificate):
        durable_file(folder / "root.pem", book.trust.pem)
    else:
        issue_operator(folder, who.name, who.role, machine.config, book, machine.database, now=now, by=os_user())


def _note(machine: Machine, now: "datetime", kind: str, fingerprint: bytes, **fields: "Value") -> None:
    """Writes to the journal right before a change of authorities takes effect. `fingerprint` names the authority."""
    from coordinator.storage import records

    now_ms, by = int(now.timestamp() * 1000), os_user()
    told = {"fingerprint": fingerprint.hex(), **fields, "by": by}
    machine.database.run_now(lambda s: records.note(s, kind, "authority", now_ms, **told))


def _say(book: "AuthorityBook", as_json: bool, what: str) -> None:
    newest = book.issuing.certificate
    if as_json:
        print_json(
            {
                "federation": book.trust.federation.hex(),
                "fingerprint": book.issuing.fingerprint.hex(),
                "until": newest.not_valid_after_utc.isoformat(),
                "trusted": len(book.trust.roots),
            }
        )
        return
    number = len(book.authorities.roots)
    typer.echo(
        f"Authority {number} of the federation is {book.issuing.fingerprint.hex()[:16]}..., valid until "
        f"{newest.not_valid_after_utc:%Y-%m-%d}."
    )
    typer.echo(what)
    typer.echo("Back up the folder `authority/` now. If copies of the operator's folder are elsewhere, renew them with")
    typer.echo("`coordinator operator issue NAME --role ROLE --out FOLDER`.")
