"""`hpcsched completion`: what a shell needs to complete commands, options, jobs and policies."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what completes hpcsched's commands, options, jobs and policies in a SHELL.

    \b
    eval "$(hpcsched completion bash)"     in ~/.bashrc (bash 4.4 or later)
    eval "$(hpcsched completion zsh)"      in ~/.zshrc, after compinit
    hpcsched completion fish | source      in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "hpcsched", "_HPCSCHED_COMPLETE").source())
