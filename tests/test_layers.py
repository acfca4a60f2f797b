"""The architecture as a table: which module may import which. Every import counts, lazy and typing-only ones too."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "specdist"

# Layer → (its modules and packages, the layers that it may import besides itself)
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "L0": (
        (
            "errors",
            "record",
            "schema",
            "schema_heads",
            "schema_costs",
            "schema_quality",
            "schema_reload",
            "metrics",
            "config",
            "provenance",
            "redaction",
            "tracking",
            "progress",
            "consistency",
            "gate_policy",
            "prompt_policy",
            "objective",
            "drafter_config",
            "safetensors_file",
            "export_record",
            "outbox",
            "child_process",
        ),
        (),
    ),
    "L1": (("losses", "fused_losses", "verify", "tree", "replay"), ("L0",)),
    "L2": (("weights", "target", "in_place", "demo", "drafters"), ("L0", "L1")),
    "L3 generation": (("generation",), ("L0", "L1", "L2")),
    # a dataset is made by generating it, so dataset may import generation, never the reverse
    "L3 dataset": (("dataset",), ("L0", "L1", "L2", "L3 generation")),
    "L4": (("decoding",), ("L0", "L1", "L2")),
    "L5 training": (("training",), ("L0", "L1", "L2", "L3 generation", "L3 dataset", "L4")),
    "L5 evaluation": (("evaluation",), ("L0", "L1", "L2", "L3 generation", "L3 dataset", "L4")),
    "L6 gate": (("gate", "gate_check", "gate_statistics"), ("L0",)),
    "L6 registry": (("registry",), ("L0",)),
    "L6 export": (("export",), ("L0", "L1", "L2")),
}
BELOW_TOP = tuple(LAYERS)
# what recipes are made of may import everything below, and the command that as well
LAYERS["L7 stages"] = (("stages",), BELOW_TOP)
LAYERS["L7 cli"] = (("cli", "cli_registry", "cli_arguments"), (*BELOW_TOP, "L7 stages"))

# Package → the only modules that may import it; an empty tuple means none
ONLY_IN = {
    "mlflow": ("registry.mlflow", "registry.mirror"),
    "vllm": ("generation.vllm",),
    "wandb": ("tracking", "stages.send"),
    "recipes": (),
}
NEVER_IN_L0 = ("torch", "transformers")


def sources() -> dict[str, str]:
    """Source text of every module below specdist/, by its name without the package's."""
    files = sorted((ROOT / LIBRARY).rglob("*.py"))
    names = [".".join(f.relative_to(ROOT / LIBRARY).with_suffix("").parts).removesuffix("__init__") for f in files]
    return {name.rstrip("."): f.read_text(encoding="utf-8") for name, f in zip(names, files, strict=True)}


def imports(source: str, modules: set[str]) -> set[str]:
    """Absolute names of what a source imports; `from package import submodule` counts as the submodule."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = {f"{base}.{alias.name}" for alias in node.names}
            submodules = {n for n in names if n.removeprefix(f"{LIBRARY}.") in modules}
            found |= submodules if len(submodules) == len(names) else submodules | {base}
    return found


def layer(module: str) -> str | None:
    """The layer of a module, None where the table does not name it."""
    return next((name for name, (prefixes, _) in LAYERS.items() if module.split(".")[0] in prefixes), None)


def faults(code: dict[str, str]) -> list[str]:
    """What breaks the table, in words."""
    found, graph = [], {}
    for module, source in code.items():
        mine = layer(module)
        if mine is None and module:
            found.append(f"{module}: in no layer; name it in LAYERS")
        edges = imports(source, set(code))
        inner = {e.removeprefix(f"{LIBRARY}.") for e in edges if e.startswith(f"{LIBRARY}.")}
        graph[module] = inner & set(code) - {module}
        for other in sorted(inner):
            theirs = layer(other)
            if mine and theirs != mine and theirs not in LAYERS[mine][1]:
                found.append(f"{module} ({mine}) imports {other} ({theirs})")
        for edge in sorted(edges):
            package = edge.split(".")[0]
            if edge.startswith("."):
                found.append(f"{module} imports {edge} relatively")
            if package in ONLY_IN and module not in ONLY_IN[package]:
                found.append(f"{module} imports {package}; allowed in {ONLY_IN[package] or 'no module'}")
            if mine == "L0" and package in NEVER_IN_L0:
                found.append(f"{module} (L0) imports {package}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"cycle: {' → '.join(error.args[1])}")
    return found


def test_library_keeps_to_the_layers() -> None:
    code = sources()
    assert {"errors", "target", "gate", "registry.mlflow"} <= code.keys()
    assert len(code) > 20
    assert faults(code) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("replay", "def f():\n    from specdist.target import open_target", "replay (L1) imports target (L2)"),
        ("replay", "from specdist import errors, target", "replay (L1) imports target (L2)"),
        ("training.x", "import specdist.evaluation.speed", "training.x (L5 training) imports evaluation.speed"),
        ("generation.x", "from specdist.dataset import prompts", "generation.x (L3 generation) imports dataset"),
        ("gate", "from specdist.verify import sample", "gate (L6 gate) imports verify (L1)"),
        ("schema", "if TYPE_CHECKING:\n    import torch", "schema (L0) imports torch"),
        ("registry.store", "import mlflow.tracking", "registry.store imports mlflow"),
        ("generation.server", "def f():\n    import vllm", "generation.server imports vllm"),
        ("cli", "from recipes.train_medusa import main", "cli imports recipes"),
        ("errors", "from specdist.schema import Record", "cycle: "),
        ("target", "from .demo import demo_target", "relatively"),
        ("helpers", "", "helpers: in no layer"),
    ],
)
def test_checker_sees_a_bad_import(module: str, source: str, fault: str) -> None:
    assert any(fault in found for found in faults(sources() | {module: source}))


def test_l0_imports_no_torch_at_run_time() -> None:
    """Importing a contract must stay cheap, also through what it imports."""
    names = [name for name in sources() if layer(name) == "L0"]
    check = f"import sys, {', '.join(f'{LIBRARY}.{n}' for n in names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
