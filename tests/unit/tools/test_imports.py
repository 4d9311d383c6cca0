"""What import-linter does not see, as it looks at folders: circles of files, planning that no run reaches."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

RUNS = ("hpcsched.agent", "hpcsched.policy", "hpcsched.tuning", "hpcsched.worker", "hpcsched.cli.run.run")
"""Where a run begins, on the agent's side and on the worker's."""

PLAN_ONLY = {"hpcsched.planning.packing.planner"}
"""What `plan pack` shows: a run has rules of its own."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All imports, those for types and those inside of functions among them."""
    return grimp.build_graph("hpcsched", cache_dir=None, exclude_type_checking_imports=True)


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules that import each other in this order, the first one again at the end; empty if none do."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def test_no_modules_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    assert circle(graph) == []


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("agent", "store"), ("store", "core"), ("agent", "core")):
        graph.add_import(importer=importer, imported=imported)
    assert circle(graph) == []
    graph.add_import(importer="core", imported="agent")
    assert {"agent", "core"} <= set(circle(graph))


def test_planning_that_no_run_reaches_is_named_what_if(graph: grimp.ImportGraph) -> None:
    reached = {
        module
        for start in sorted(graph.modules)
        if start.startswith(RUNS)
        for module in graph.find_upstream_modules(start)
    }
    planning = {
        module
        for module in graph.modules
        if module.startswith("hpcsched.planning") and not graph.find_children(module)
    }
    assert {m for m in planning - reached if "whatif" not in m} == PLAN_ONLY
    assert not {m for m in planning & reached if "whatif" in m}
