"""`edge_client models` shows the installed distributions that register models, with the digest of their files."""

from typing import TYPE_CHECKING, Any

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from edge_client.policy.document import PolicyDocument
    from learning.plugins.installed import Installed

__all__ = ["models"]


def models(home: Home = None, as_json: Json = False) -> None:
    """Show the plugins that are installed here, with the lines that name them in a job and in the policy.

    A plugin is a distribution that registers models. It is code that runs on this machine with your rights: read it
    before you allow it. Nothing of a plugin is imported here.
    """
    from edge_client.identity.home import home_path
    from edge_client.policy.policy import Policy
    from learning.plugins.installed import installed_plugins
    from tacit.documents import DocumentInvalid

    try:
        policy, _ = Policy.load(home_path(home))
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    found = installed_plugins()
    if as_json:
        print_json({"plugins": [_as_json(each, policy) for each in found]})
        return
    for each in found:
        _show(each, policy)
    if not found:
        typer.echo("No plugin is installed here. A plugin is a distribution with entry points in tacit.models.")


def _allowed(plugin: "Installed", policy: "PolicyDocument") -> bool:
    return plugin.digest is not None and policy.plugins.get(plugin.distribution) == plugin.digest


def _as_json(plugin: "Installed", policy: "PolicyDocument") -> dict[str, Any]:
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "files": None if plugin.digest is None else plugin.digest.hex(),
        "names": sorted(plugin.models),
        "allowed": _allowed(plugin, policy),
        "unusable": plugin.unusable or None,
    }


def _show(plugin: "Installed", policy: "PolicyDocument") -> None:
    def say(line: str) -> None:
        typer.echo(printable(line))

    say(f"{plugin.distribution} {plugin.version}: {', '.join(sorted(plugin.models))}")
    if plugin.digest is None:
        say(f"  cannot be used: {plugin.unusable}")
        return
    say("  in a job file:")
    for name in sorted(plugin.models):
        say("    [model]")
        say('    architecture = "plugin"')
        say(f'    distribution = "{plugin.distribution}"')
        say(f'    version = "{plugin.version}"')
        say(f'    files = "{plugin.digest.hex()}"')
        say(f'    name = "{name}"')
    if _allowed(plugin, policy):
        say("  this member's policy allows it")
        return
    say("  this member's policy does not allow it; once you have read its code, policy.toml may say:")
    say("    [plugins]")
    say(f'    {plugin.distribution} = "{plugin.digest.hex()}"')
