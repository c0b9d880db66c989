"""The package keeps its layers: who may import whom, no environment reads, bounded sizes.

The rules are checked on syntax trees, so nothing needs to be installed; one test starts a fresh
interpreter. Every rule is itself tested on a small made-up violation.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_bp"

ANY = "*"


@dataclass(frozen=True)
class Layer:
    """What a layer may import: other layers of the package, and packages beside the stdlib."""

    inside: frozenset[str]
    outside: frozenset[str]


def _layer(inside: str, outside: str) -> Layer:
    return Layer(frozenset(inside.split()), frozenset(outside.split()))


LAYERS = {
    "__init__": _layer("", ""),
    "config": _layer("", ""),
    "launch": _layer("mcore", ""),
    "layout": _layer("config layout", "numpy"),
    "comm": _layer("comm layout", "numpy torch"),
    "attention": _layer("attention comm layout", "numpy torch"),
    "objectives": _layer("objectives layout", "numpy torch"),
    "convert": _layer("convert", "numpy torch safetensors"),
    "data": _layer("data layout", "numpy pyarrow tokenizers transformers"),
    "planning": _layer("config layout planning", "numpy matplotlib"),
    "mcore": _layer("attention comm config convert data layout mcore objectives", ANY),
}

# Optional packages, and the modules that may import them beside the layers above.
OWNERS = {
    "triton": r"(attention/kernels/\w+|(attention|objectives)/triton_\w+)\.py",
    "transformer_engine": r"attention/kernels/te\w*\.py",
    "flash_attn": r"attention/(kernels/)?flash\w*\.py",
    "cutlass": r"attention/(kernels/)?flash\w*\.py",
}

MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION_LINES = 400, 600, 90


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, wherever they stand; relative ones start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from package import name` may bring in a module or a name of the package itself
            yield from (f"{module}.{alias.name}" for alias in node.names)


def import_problems(path: str, source: str) -> list[str]:
    """What `source`, the text of package file `path` (relative to the package), may not import."""
    layer = path.split("/")[0].removesuffix(".py")
    rules = LAYERS[layer]
    problems = []
    for name in imported(ast.parse(source)):
        top, *rest = name.split(".")
        if name.startswith("."):
            problems.append(f"{path}: relative import {name}")
        elif top == PACKAGE:
            target = rest[0] if rest and rest[0] in LAYERS else "__init__"
            if target not in {*rules.inside, "__init__"}:
                problems.append(f"{path}: {layer} must not import {target} ({name})")
            if is_kernel(path) and rest[:2] == ["attention", "kernels"]:
                problems.append(f"{path}: kernels must not import one another ({name})")
        elif top in {"tests", "tools", "examples"}:
            problems.append(f"{path}: the package must not import {name}")
        elif top in OWNERS and layer != "mcore":
            if not re.fullmatch(OWNERS[top], path):
                problems.append(f"{path}: {top} belongs to {OWNERS[top]}")
        elif top not in sys.stdlib_module_names and not {top, ANY} & rules.outside:
            problems.append(f"{path}: {layer} must not import {top} ({name})")
    return problems


def is_kernel(path: str) -> bool:
    """Whether a package file holds a kernel."""
    return path.startswith("attention/kernels/") and not path.endswith("__init__.py")


def state_problems(path: str, source: str) -> list[str]:
    """Reads of the environment and `global` statements in a package file."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        names = {"environ", "environb", "getenv", "putenv"}
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        if from_os and names & {alias.name for alias in node.names}:
            problems.append(f"{path}:{node.lineno}: environment read")
        if isinstance(node, ast.Attribute) and node.attr in names:
            problems.append(f"{path}:{node.lineno}: environment read")
        if isinstance(node, ast.Global):
            problems.append(f"{path}:{node.lineno}: global statement")
    return problems


def size_problems(path: str, source: str) -> list[str]:
    """Files and functions of a package file that are too long."""
    lines = len(source.splitlines())
    most = MAX_KERNEL_LINES if is_kernel(path) else MAX_LINES
    problems = [f"{path}: {lines} lines, at most {most}"] if lines > most else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(f"{path}: {node.name} has {length} lines")
    return problems


def package_files() -> list[tuple[str, str]]:
    """Path relative to the package, and text, of every module."""
    base = ROOT / PACKAGE
    return [(p.relative_to(base).as_posix(), p.read_text()) for p in sorted(base.rglob("*.py"))]


def problems_of(check: object) -> list[str]:
    """All problems that `check` finds in the package."""
    assert callable(check)
    files = package_files()
    assert len(files) > 20
    return [problem for path, source in files for problem in check(path, source)]


def test_every_module_imports_only_what_its_layer_may() -> None:
    assert problems_of(import_problems) == []


def test_no_module_reads_the_environment_or_keeps_global_state() -> None:
    assert problems_of(state_problems) == []


def test_files_and_functions_are_short() -> None:
    assert problems_of(size_problems) == []


def test_source_is_ascii() -> None:
    assert [path for path, source in package_files() if not source.isascii()] == []


def test_nothing_outside_tests_imports_tests() -> None:
    files = [p for folder in ("tools", "examples") for p in (ROOT / folder).rglob("*.py")]
    assert files
    for path in files:
        names = imported(ast.parse(path.read_text()))
        assert not [name for name in names if name.split(".")[0] == "tests"], path


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("layout/plan.py", "import torch", "layout must not import torch"),
        ("layout/plan.py", "from torch import nn", "layout must not import torch"),
        ("layout/plan.py", "from megatron_bp.comm import groups", "layout must not import comm"),
        ("layout/plan.py", "from megatron_bp import comm", "layout must not import comm"),
        ("layout/plan.py", "def f():\n    import torch", "layout must not import torch"),
        ("layout/plan.py", "from .blocks import make_blocks", "relative import .blocks"),
        ("config.py", "import numpy", "config must not import numpy"),
        ("config.py", "from megatron_bp.layout.plan import x", "config must not import layout"),
        ("__init__.py", "import megatron_bp.layout", "__init__ must not import layout"),
        ("comm/groups.py", "from megatron.core import x", "comm must not import megatron"),
        ("comm/groups.py", "import megatron_bp.attention", "comm must not import attention"),
        ("attention/native.py", "import megatron.core", "attention must not import megatron"),
        ("attention/native.py", "import flash_attn", "flash_attn belongs to"),
        ("attention/kernels/te.py", "import flash_attn.cute", "flash_attn belongs to"),
        ("attention/native.py", "import triton", "triton belongs to"),
        (
            "attention/kernels/te.py",
            "from megatron_bp.attention.kernels.dense import DenseKernel",
            "kernels must not import one another",
        ),
        (
            "attention/kernels/te.py",
            "from megatron_bp.attention.kernels import dense",
            "kernels must not import one another",
        ),
        ("objectives/loss.py", "import megatron_bp.comm.groups", "must not import comm"),
        ("convert/plan.py", "import megatron_bp.layout.plan", "convert must not import layout"),
        ("convert/plan.py", "import transformers", "convert must not import transformers"),
        ("mcore/model.py", "import tests.distributed", "must not import tests.distributed"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str, problem: str) -> None:
    found = import_problems(path, source)
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layout/plan.py", "import numpy as np\nfrom megatron_bp.layout.blocks import make_blocks"),
        ("comm/groups.py", "import torch.distributed as dist\nfrom megatron_bp import __version__"),
        ("attention/kernels/flash4.py", "def f():\n    import flash_attn.cute"),
        ("attention/kernels/te.py", "from megatron_bp.attention.contract import Saved"),
        ("mcore/model.py", "import megatron.core, transformer_engine, megatron_bp.attention"),
        ("convert/plan.py", "import safetensors, torch, json"),
    ],
)
def test_an_allowed_import_is_not_reported(path: str, source: str) -> None:
    assert import_problems(path, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "from os import environ",
        "def f():\n    global x\n    x = 1",
    ],
)
def test_state_and_environment_reads_are_found(source: str) -> None:
    assert len(state_problems("layout/plan.py", source)) == 1


def test_long_files_and_functions_are_found() -> None:
    assert size_problems("layout/plan.py", "x = 1\n" * 400) == []
    assert len(size_problems("layout/plan.py", "x = 1\n" * 401)) == 1
    assert size_problems("attention/kernels/te.py", "x = 1\n" * 600) == []
    assert len(size_problems("attention/kernels/te.py", "x = 1\n" * 601)) == 1
    assert size_problems("layout/plan.py", "def f():\n" + "    x = 1\n" * 89) == []
    assert len(size_problems("layout/plan.py", "def f():\n" + "    x = 1\n" * 90)) == 1


HEAVY = ("torch", "megatron", "transformer_engine", "flash_attn", "triton", "numpy", "safetensors")


def loaded_by(module: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, {module}; print(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("megatron_bp", HEAVY),
        ("megatron_bp.config", HEAVY),
        ("megatron_bp.launch", HEAVY),
        ("megatron_bp.layout.cost", tuple(n for n in HEAVY if n != "numpy")),
        (
            "megatron_bp.attention.block_parallel",
            ("megatron", "transformer_engine", "flash_attn", "safetensors"),
        ),
    ],
)
def test_a_fresh_import_loads_nothing_optional(module: str, forbidden: tuple[str, ...]) -> None:
    assert loaded_by(module, forbidden) == []


def test_the_fresh_interpreter_sees_what_is_loaded() -> None:
    assert loaded_by("json", ("json", "torch")) == ["json"]
