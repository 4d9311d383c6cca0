"""The help of commands with many options: these in groups."""

from __future__ import annotations

import click

from hpcsched.cli.run.handed_on import remember

RUN = {
    "A command in the place of a job file": ("name", "each", "array", "at_once"),
    "Devices and hosts": (
        *("devices", "device_type", "hosts", "launcher", "interface", "joinable"),
        *("cpus_per_gpu", "warm", "monitor"),
    ),
    "Policy": ("policy", "policy_option", "profiles", "packing", "compare"),
    "Batch job": (
        *("batch", "margin", "grace", "requeue", "chain", "chain_script", "max_restarts"),
        *("release_idle_nodes", "pyslurm"),
    ),
    "Python of the jobs": ("python", "venv", "conda"),
    "An agent that stays": ("stay", "idle_timeout", "detach"),
    "Other people": ("share", "notify", "notify_command", "notify_webhook"),
    "Files": ("checkpoints", "gantt", "learning_curves", "metrics_file", "database"),
}
"""The groups of `run` and `tune`: names of their parameters by title."""


class GroupedOptions(click.Command):
    """A command whose options stand in the groups of `RUN`, those of none first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, which forgets what was written."""
        remember(ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        grouped = {name: title for title, names in RUN.items() for name in names}
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *RUN)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                found[grouped.get(str(parameter.name), "Options")].append(record)
        # The same width for all of them.
        width = min(30, max(len(names) for rows in found.values() for names, _ in rows))
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(names.ljust(width), words) for names, words in rows])
