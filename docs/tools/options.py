"""What users' files accept, from the code: the tables of strategies, and the schemas that editors read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from hpcsched import config, jobfile
from hpcsched.contract.schema import Accepted, options_of, required, whole
from hpcsched.contract.strategies import KINDS, Strategy
from hpcsched.jobfile import matrix
from hpcsched.policy import POLICIES
from hpcsched.site_rules import LIMIT_KEYS
from hpcsched.tuning import command, search
from hpcsched.tuning.space import KINDS as AXES

_NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
_CHOICE = {
    "type": "array",
    "items": {"anyOf": [{"type": kind} for kind in ("number", "string", "boolean")]},
    "minItems": 1,
}


def strategies() -> str:
    """A table of all strategies, and one of their options."""
    rows = [
        f'| `"{kind}"` | {cls.about} | [{cls.guide.split(".md")[0]}]({cls.guide}) |'
        for kind, cls in KINDS.items()
    ]
    rows = ["| strategy | | more |", "|---|---|---|", *rows, ""]
    rows += ["| option | of | accepted | default | |", "|---|---|---|---|---|"]
    for kind, cls in KINDS.items():
        for each in fields(cls):  # type: ignore[arg-type]
            told = each.metadata
            default = (
                "required" if each.default is MISSING else told["unset"] or f"`{json.dumps(each.default)}`"
            )
            rows.append(
                f"| `{each.name}` | `{kind}` | {told['accepted'].words} | {default} | {told['about']} |"
            )
    return "\n".join(rows)


_WITH_VALUES = {"type": "string", "pattern": matrix.IN_BRACES}


def jobs() -> str:
    """The schema of job files."""
    job = {**_fields(jobfile.Job), "strategy": _strategy()}
    # What stands for values of a matrix goes into the name too.
    job["name"] = {"description": job["name"].pop("description"), "anyOf": [job["name"], _WITH_VALUES]}
    defaults = {key: value for key, value in job.items() if key != "name"}
    policy = {"name": {"type": "string", "enum": list(POLICIES), "description": "the name of a policy"}}
    return _file(
        "hpcsched job file",
        {
            "schema": {**whole("").schema, "maximum": 1},
            "policy": {
                "type": "object",
                "properties": policy,
                "description": "who gets GPUs, and its options",
            },
            "defaults": {**_table(defaults), "description": "keys of all jobs"},
            "job": {"type": "array", "minItems": 1, "items": _table(job, required(jobfile.Job))},
        },
        ["schema", "job"],
    )


def searches() -> str:
    """The schema of search files."""
    job = _properties(options_of(jobfile.Job))
    axes = {
        kind: {**(_CHOICE if kind == "choice" else _NUMBERS), "description": words}
        for kind, words in AXES.items()
    }
    axis = {"anyOf": [_table({kind: axes[kind]}, [kind]) for kind in axes]}
    keys = _properties(search.KEYS)
    keys["space"] = {**keys["space"], "additionalProperties": axis}
    named = (*search.DEFAULTS, *command.DEFAULTS)
    keys["defaults"] = {**keys["defaults"], **_table({key: job[key] for key in named})}
    return _file("hpcsched search file", keys, search.NEEDED)


def settings() -> str:
    """The schema of settings files."""
    script = _table(_properties(config.SCRIPT_KEYS))
    limit = _table(_properties(LIMIT_KEYS))
    keys = _properties(config.KEYS)
    keys["locked"] = {
        "type": "array",
        "items": {"type": "string", "enum": [key for key in config.KEYS if key not in ("dir", "script")]},
        "description": "in a site's file: settings that nobody sets otherwise",
    }
    keys["limits"] = {
        "type": "object",
        "additionalProperties": limit,
        "description": "in a site's file: limits of settings",
    }
    return _file("hpcsched settings", {**keys, "script": {**keys["script"], **script}}, [])


def _strategy() -> dict[str, Any]:
    names = {"type": "string", "enum": list(KINDS)}
    return {
        "description": "how it uses its GPUs or cores",
        "anyOf": [names, *map(_options, KINDS, KINDS.values())],
    }


def _options(kind: str, cls: type[Strategy]) -> dict[str, Any]:
    named = {"kind": {"type": "string", "enum": [kind], "description": cls.about}, **_fields(cls)}
    return {**_table(named, ["kind", *required(cls)]), "title": kind}


def _fields(cls: type[Any]) -> dict[str, dict[str, Any]]:
    keys = _properties(options_of(cls))
    for each in fields(cls):
        if each.metadata["about"]:
            keys[each.name]["description"] = each.metadata["about"]
        if each.default is not MISSING and each.default is not None:
            keys[each.name]["default"] = each.default
    return keys


def _properties(accepted: Mapping[str, Accepted]) -> dict[str, dict[str, Any]]:
    return {key: {**each.schema, "description": each.words} for key, each in accepted.items()}


def _table(properties: Mapping[str, Any], needed: Any = ()) -> dict[str, Any]:
    more = {"required": list(needed)} if needed else {}
    return {"type": "object", "properties": dict(properties), "additionalProperties": False, **more}


def _file(title: str, properties: Mapping[str, Any], needed: Any) -> str:
    table = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **_table(properties, needed),
    }
    return json.dumps(table, indent=1) + "\n"
