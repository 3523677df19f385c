"""The rules of the house, each with a message that tells the fix."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support import parsed
from support.parsed import ROOT

import hapi

PACKAGE = ROOT / "hapi"

FLOORS = (
    "ground",
    "process",
    "codecs",
    "wire",
    "config|store",
    "cache|models",
    "repository",
    "data",
    "ingest|profiler",
    "server|client|figures|offload",
    "train|cluster",
    "api",
    "cli",
    "face",
)
"""From left to right: a room may import what is to its left, and itself."""
FLOOR_OF = {room: index for index, floor in enumerate(FLOORS) for room in floor.split("|")}

FACE = ("__init__.py", "__main__.py")
"""Names what the rooms offer, and imports it when it is used; ``hapi.__version__`` may be used from every floor."""

HEAVY = ("torch", "torchvision", "aiohttp")
LIGHT_ROOMS = ("ground", "process", "codecs", "wire", "config")
LAZY_LOADERS = {"lazy_torchvision.py"}
"""Imports heavy libraries when they are first needed, for rooms that may not."""
PLANNERS = (
    "cluster/scaling.py",
    "codecs/choose.py",
    "data/epoch_order.py",
    "repository/loading/plan.py",
    "data/transforms/random_params.py",
    "server/batching/policies.py",
    "server/batching/throughput_curve.py",
    "offload/pass_memory.py",
    "offload/pieces.py",
    "offload/planner.py",
    "profiler/cost.py",
    "profiler/offload_costs.py",
    "profiler/stages/alternation.py",
    "profiler/stages/pipeline.py",
    "profiler/reuse/choose.py",
    "profiler/reuse/facts.py",
    "profiler/reuse/job_cost.py",
    "profiler/strategies.py",
    "server/scheduling/fair_queue.py",
    "server/scheduling/costs.py",
    "server/batching/memory_shares.py",
    "server/batching/forward_memory.py",
)
"""Pure functions (design of the project): the predictor runs the very code that production runs."""

GENERATED_CODE = {"models/graph/segment.py"}
"""May call exec: torch.fx hands out a slice of a graph as source text, made by fx from the graph's own nodes."""


@cache
def modules() -> tuple[Path, ...]:
    """All source files of the package, relative to it."""
    return tuple(path.relative_to(PACKAGE) for path in parsed.modules_of("hapi"))


def room_of(module: Path) -> str:
    """The folder of a module; modules directly in the package are the ground floor, but for its face."""
    if str(module) in FACE:
        return "face"
    return module.parts[0] if len(module.parts) > 1 else "ground"


def tree_of(module: Path) -> ast.Module:
    return parsed.tree_of(PACKAGE / module)


def nodes_of(module: Path) -> tuple[ast.AST, ...]:
    return parsed.nodes_of(PACKAGE / module)


@cache
def imports_of(module: Path) -> tuple[tuple[str, int], ...]:
    """Dotted names that ``module`` imports, anywhere in it, with the line."""
    return tuple(_imports_of(module))


def _imports_of(module: Path) -> Iterator[tuple[str, int]]:
    package = ("hapi", *module.parts[:-1])
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{name}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _name_of(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if (
                isinstance(first, ast.JoinedStr)
                and first.values
                and isinstance(first.values[0], ast.Constant)
            ):
                first = first.values[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno


def _name_of(node: ast.expr) -> str:
    """``"torch.load"`` of a dotted expression, else ``""``."""
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def room_of_import(name: str) -> str | None:
    """The room that a dotted import lands in; None for other packages."""
    parts = name.split(".")
    if parts[0] != "hapi":
        return None
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "ground"


MOST_MODULES = 15
"""A folder with more is a folder that was not divided."""


def folders() -> list[Path]:
    """Every folder with modules, of the package and of the benchmarks, relative to the checkout."""
    found = {path.parent for room in (PACKAGE, ROOT / "benchmarks") for path in room.rglob("*.py")}
    return sorted(folder.relative_to(ROOT) for folder in found)


def test_folders_are_divided() -> None:
    wrong = []
    for folder in folders():
        count = sum(path.name != "__init__.py" for path in (ROOT / folder).glob("*.py"))
        if count > MOST_MODULES:
            wrong.append(f"{folder} has {count} modules, at most {MOST_MODULES}: divide it by concern")
    assert not wrong, "\n".join(wrong)


MOST_TEST_LINES = 500


def test_files_of_tests_are_divided() -> None:
    wrong = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MOST_TEST_LINES:
            wrong.append(
                f"{file.name} has {lines} lines, at most {MOST_TEST_LINES}: divide it by subject; "
                "helpers go to tests/support"
            )
    assert not wrong, "\n".join(wrong)


@cache
def helpers_of_tests() -> dict[str, list[str]]:
    """Classes at the top of test files by their text, without their names and docstrings; and where each stands."""
    alike: dict[tuple[str, ...], list[tuple[str, list[ast.stmt]]]] = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "\nclass " in text else ():
            if isinstance(node, ast.ClassDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                parts = tuple(getattr(part, "name", type(part).__name__) for part in body)
                alike.setdefault(parts, []).append((f"{file.name}: {node.name}", body))
    found: dict[str, list[str]] = {}
    for classes in alike.values():
        for place, body in classes if len(classes) > 1 else ():  # text is made only of what may be the same
            content = "\n".join(ast.unparse(part) for part in body)
            if content.count("\n") >= 3:
                found.setdefault(content, []).append(place)
    return found


def test_no_class_of_the_tests_is_written_twice() -> None:
    twice = [places for places in helpers_of_tests().values() if len(places) > 1]
    assert not twice, f"{twice}: write it once, in tests/support"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports at the top of modules; those inside of functions are there to break circles or to be lazy."""
    graph = {_dotted(module): _imported_at_the_top(module) for module in modules()}
    settled: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        circle = " -> ".join([*path[path.index(name) :], name]) if name in path else ""
        assert not circle, f"a circle of imports: {circle}; move what both need"
        if name not in settled:
            for target in sorted(graph.get(name, ())):
                visit(target, (*path, name))
            settled.add(name)

    for name in sorted(graph):
        visit(name, ())


def _dotted(module: Path) -> str:
    parts = module.parts[:-1] if module.name == "__init__.py" else module.with_suffix("").parts
    return ".".join(("hapi", *parts))


@cache
def module_names() -> frozenset[str]:
    """Dotted names of all modules of the package."""
    return frozenset(map(_dotted, modules()))


def _imported_at_the_top(module: Path) -> set[str]:
    """Modules of the package that ``module`` imports when it is imported; its own packages are not counted."""
    names = module_names()
    found = set()
    for node in tree_of(module).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & names or {node.module}
    return {name for name in found & names if name != _dotted(module)}


def test_private_parts_stay_in_their_room() -> None:
    wrong = []
    for module in modules():
        for name, line in imports_of(module):
            parts = name.split(".")
            private = [part for part in parts[1:] if part.startswith("_") and not part.startswith("__")]
            if parts[0] == "hapi" and private and room_of_import(name) != room_of(module):
                wrong.append(f"hapi/{module}:{line} imports {name}: give it a public name, or move it")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_benchmarks() -> None:
    wrong = [
        f"hapi/{module}:{line}" for module in modules() for name, line in imports_of(module)
        if name.split(".")[0] == "benchmarks"
    ]  # fmt: skip
    assert not wrong, f"{wrong}: the package is installed without the benchmarks; move what both need into it"


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module) for module in modules()}
    unknown = sorted(rooms - set(FLOOR_OF))
    assert not unknown, f"put {unknown} on a floor: FLOORS here and the line in docs/architecture.md"


def test_imports_run_one_way() -> None:
    wrong = []
    for module in modules():
        room = room_of(module)
        for name, line in imports_of(module):
            target = room_of_import(name)
            if target is None or target == room:
                continue
            if FLOOR_OF[target] >= FLOOR_OF[room]:
                wrong.append(
                    f"hapi/{module}:{line} imports {name}: {room} may import only {FLOORS[: FLOOR_OF[room]]}; "
                    "move what both need left"
                )
    assert not wrong, "\n".join(wrong)


def test_light_rooms_import_no_heavy_library() -> None:
    wrong = [
        f"hapi/{module}:{line} imports {name}: move it to a room that may import it"
        for module in modules() if room_of(module) in LIGHT_ROOMS and module.name not in LAZY_LOADERS
        for name, line in imports_of(module) if name.split(".")[0] in HEAVY
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_planners_are_pure() -> None:
    missing = [planner for planner in PLANNERS if not (PACKAGE / planner).exists()]
    assert not missing, f"{missing} have moved: say their new places in PLANNERS"
    forbidden = (*HEAVY, "obstore", "random", "time", "os", "socket", "asyncio", "threading")
    wrong = [
        f"hapi/{planner}:{line} imports {name}: a planner takes all it needs as arguments"
        for planner in PLANNERS
        for name, line in imports_of(Path(planner)) if name.split(".")[0] in forbidden
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_every_public_module_has_a_docstring() -> None:
    bare = [
        f"hapi/{module}" for module in modules()
        if (not module.name.startswith("_") or module.name == "__init__.py")
        and not ast.get_docstring(tree_of(module))
    ]  # fmt: skip
    assert not bare, f"{bare}: begin each with what it is for, in one line"


def test_importing_a_room_imports_nothing() -> None:
    wrong = []
    for room in (m for m in modules() if m.name == "__init__.py" and len(m.parts) in (2, 3)):
        body = tree_of(room).body
        if len(body) != 1 or not isinstance(body[0], ast.Expr):
            wrong.append(f"hapi/{room}")
    assert not wrong, (
        f"{wrong}: a docstring and nothing else; names that users need are listed in hapi/__init__.py"
    )


def test_nothing_runs_code_from_data() -> None:
    wrong = [f"hapi/{module}, {what}" for module in modules() for what in _code_from_data(module)]
    assert not wrong, "data must never run code; use safetensors or JSON:\n" + "\n".join(wrong)


def _code_from_data(module: Path) -> list[str]:
    """Lines of a module that could run code out of what they read."""
    pickles = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
    wrong = [f"line {line}: import {n}" for n, line in imports_of(module) if n.split(".")[0] in pickles]
    for node in nodes_of(module):
        if not isinstance(node, ast.Call):
            continue
        name = _name_of(node.func)
        if name in ("eval", "exec", "__import__") and not (name == "exec" and str(module) in GENERATED_CODE):
            wrong.append(f"line {node.lineno}: {name}()")
        if name.split(".")[-1] == "load" and name.split(".")[0] == "torch":
            safe = [k.value for k in node.keywords if k.arg == "weights_only"]
            if not (safe and isinstance(safe[0], ast.Constant) and safe[0].value is True):
                wrong.append(f"line {node.lineno}: torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and any(k.arg == "allow_pickle" for k in node.keywords):
            allowed = next(k.value for k in node.keywords if k.arg == "allow_pickle")
            if not (isinstance(allowed, ast.Constant) and allowed.value is False):
                wrong.append(f"line {node.lineno}: numpy.load with allow_pickle")
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            wrong.append(f"line {node.lineno}: {name}; use yaml.safe_load")
    return wrong


OWN_JSON = {
    "wire/documents.py": "the one reader",
    "server/decoding/process.py": "answers of processes that it has started",
    "server/decoding/worker.py": "orders of the process that has started it",
    "store/remote.py": "marks that it has made itself",
}
"""Modules that may call json's reader, and what they read with it."""


def test_there_is_one_reader_of_json() -> None:
    readers = ("json.loads", "json.load", "json.JSONDecoder", "loads", "JSONDecoder")
    wrong = [
        f"hapi/{module}:{node.lineno}: read it with hapi.wire.documents.parse_document"
        for module in modules() if str(module) not in OWN_JSON
        for node in nodes_of(module) if isinstance(node, ast.Call) and _name_of(node.func) in readers
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_input_is_not_checked_by_assert() -> None:
    wrong = [
        f"hapi/{module}:{node.lineno}: python -O removes assert; raise an error of hapi.errors"
        for module in modules()
        for node in nodes_of(module) if isinstance(node, ast.Assert)
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, object] = tomllib.load(file)["project"]
    return found


def test_the_version_is_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+\S*?)\]?(\s|$)", changelog, re.MULTILINE)
    assert newest is not None, "CHANGELOG.md: add a heading '## X.Y.Z (date)'"
    versions = {
        "pyproject.toml": project()["version"],
        "hapi.__version__": hapi.__version__,
        "CHANGELOG.md": newest[1],
    }
    assert len(set(versions.values())) == 1, f"set one version in all three: {versions}"


def console_scripts() -> dict[str, str]:
    scripts = project()["scripts"]
    return dict(scripts) if isinstance(scripts, dict) else {}


def test_console_scripts_resolve() -> None:
    assert console_scripts()
    for script, target in console_scripts().items():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function, None)), (
            f"pyproject.toml: {script} = {module}:{function} does not exist; write it or repair the entry"
        )


def test_sub_commands_resolve() -> None:
    from hapi.cli.main import COMMANDS, module_of

    for name in COMMANDS:
        module = module_of(name)
        assert callable(module.configure) and callable(module.run), (
            f"{module.__name__} needs configure and run"
        )


def test_scripts_can_be_run() -> None:
    scripts = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix == "")
    wrong = [f"chmod +x scripts/{path.name}" for path in scripts if not path.stat().st_mode & 0o111]
    wrong += [
        f"scripts/{path.name}: begin it with #!/usr/bin/env bash" for path in scripts
        if not path.read_text(encoding="utf-8").startswith("#!")
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_every_configuration_is_read() -> None:
    from hapi.config.settings import load
    from hapi.train.settings import TrainSettings

    paths = sorted((ROOT / "configs").rglob("*.yaml"))
    assert len(paths) >= 7, "configs/ holds one runnable experiment for each family"
    for path in paths:
        load(TrainSettings, path)
