"""The architecture: imports run one way, one module knows Orbax, and the losses stand alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "surprisal_jax"

# From the bottom up: a module may import from its own row and from rows above its own in this list.
LAYERS = (
    ("losses", "allocator", "config", "files", "sequences"),
    ("tasks",),
    ("data",),
    ("dataset", "models"),
    ("training",),
    ("evaluation",),
    ("run",),
    ("study",),
    ("cli",),
)

# The tasks' lookup and the data's protocol know each other's types, the config asks the tasks for their names.
TYPE_OR_LATE = {("config", "tasks"), ("tasks", "data")}


def imported_names(path: Path, top_level_only: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward_only(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    own_layer = layer_of(own)
    assert own_layer is not None, f"{own} is in no layer"
    for name in imported_names(path, top_level_only=False):
        parts = name.split(".")
        if parts[0] != "surprisal_jax" or len(parts) == 1 or parts[1].startswith("__"):
            continue
        layer = layer_of(parts[1])
        assert layer is not None, f"{path}: {name} is in no layer"
        assert layer <= own_layer or (own, parts[1]) in TYPE_OR_LATE, f"{path} imports {name}, which is above it"


def test_losses_import_jax_chex_and_the_standard_library_alone() -> None:
    allowed = {"jax", "chex", "surprisal_jax", *sys.stdlib_module_names}
    for path in (PACKAGE / "losses").glob("*.py"):
        for name in imported_names(path, top_level_only=True):
            assert name.split(".")[0] in allowed, f"{path}: {name}"
            assert not name.startswith("surprisal_jax") or name.startswith("surprisal_jax.losses"), f"{path}: {name}"


def test_models_never_import_losses() -> None:
    for path in (PACKAGE / "models").glob("*.py"):
        assert not any("losses" in name for name in imported_names(path, top_level_only=False)), path


def test_one_module_imports_orbax() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if any(name.split(".")[0] == "orbax" for name in imported_names(path, top_level_only=False))
    }
    assert users == {"training/checkpoint.py"}


def test_importing_the_losses_imports_neither_flax_nor_orbax() -> None:
    program = "import sys, surprisal_jax.losses; print(*(m for m in ('flax', 'orbax', 'optax') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_nothing_unpickles_or_evaluates() -> None:
    """No pickle and no eval, and arrays are loaded without either."""
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", f"{path}:{node.value.lineno}"
        assert not any(name.split(".")[0] in ("pickle", "dill", "shelve") for name in imported_names(path, False)), path
