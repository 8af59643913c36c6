"""Imports go one way: app -> speculation -> batching -> llama_cpp."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "tools": {"tools", "app", "speculation", "batching", "llama_cpp"},
    "app": {"app", "speculation", "batching"},
    "speculation": {"speculation", "batching"},
    "batching": {"batching", "llama_cpp"},
}
OURS = {"app", "speculation", "batching", "llama_cpp", "tests", "tools"}


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides the direction"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else module for name in names)


def is_module(name: str) -> bool:
    """Whether a name is that of a module of ours."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for module in imported(path):
            top = module.split(".")[0]
            assert top not in OURS or top in MAY_IMPORT[package], f"{path.name} imports {module}"


def test_methods_do_not_import_each_other() -> None:
    folder = ROOT / "speculation" / "methods"
    every = [path for path in folder.glob("*.py") if path.stem not in ("__init__", "table")]
    assert len(every) > 10
    for path in every:
        for module in imported(path):
            assert not module.startswith("speculation.methods"), f"{path.name} imports {module}"


def test_no_module_of_the_app_imports_itself_through_others() -> None:
    """Also not inside functions: then neither of two is the lower one."""
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "app").rglob("*.py")
    }
    left = {name: {one for one in imported(path) if one in found} for name, path in found.items()}
    while lowest := {name for name, below in left.items() if not below & left.keys()}:
        left = {name: below for name, below in left.items() if name not in lowest}
    assert not left, f"a circle among {sorted(left)}"


def test_trees_rows_and_the_cache_do_not_need_llama_cpp() -> None:
    pure = "tree rows logits target cache slots together draft_context errors clock".split()
    for name in pure:
        for module in imported(ROOT / "batching" / f"{name}.py"):
            if module.startswith(("batching", "llama_cpp")):
                assert module in {f"batching.{other}" for other in pure}, f"{name}: {module}"


def test_only_batching_llama_imports_llama_cpp_and_gguf_does_not_need_it() -> None:
    edge = ROOT / "batching" / "llama"
    for path in (ROOT / "batching").rglob("*.py"):
        if edge in path.parents:
            continue
        for module in imported(path):
            assert not module.startswith("llama_cpp"), f"{path.name} imports {module}"
            if path.parent.name == "gguf":
                assert not module.startswith("batching.llama"), f"{path.name} imports {module}"


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("3", "3")])
def test_numpy_gets_one_thread_unless_told(given: str | None, expected: str) -> None:
    """More would compete with llama.cpp's threads for the cores."""
    env = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    if given is not None:
        env["OPENBLAS_NUM_THREADS"] = given
    code = "import speculation, os; print(os.environ['OPENBLAS_NUM_THREADS'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
