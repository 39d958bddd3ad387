"""Rules of structure that a reviewer would otherwise have to remember."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_real"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
MAX_LINES = 450


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.AST) -> set[str]:
    """Top-level names of every import, those inside functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_flow_one_way(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_top_level_module_has_a_layer() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    layers = parser["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    names = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    modules = {
        name
        for name in names
        if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()
    }
    assert modules - {"__init__"} == set(layers)


@pytest.mark.parametrize("path", MODULES, ids=_dotted)
def test_a_module_is_short_and_says_what_it_does(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MAX_LINES, f"{_dotted(path)} has {lines} lines; split it by what changes together"
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{_dotted(path)} has no docstring"
    assert path.stem not in ("utils", "helpers", "misc", "common"), "name the module after what is in it"


def test_only_hooks_imports_megatron() -> None:
    offenders = [
        _dotted(path)
        for path in MODULES
        if "megatron" in _imports(ast.parse(path.read_text()))
        and path.relative_to(PACKAGE).parts[0] != "hooks"
    ]
    assert offenders == []


def test_nothing_prints_outside_the_command_line() -> None:
    offenders = []
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0] == "cli":
            continue
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        offenders += [
            f"{_dotted(path)}:{call.lineno}"
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id == "print"
        ]
    assert offenders == []


def test_omegaconf_stays_at_the_edge() -> None:
    offenders = [
        _dotted(path)
        for path in MODULES
        if {"omegaconf", "hydra"} & _imports(ast.parse(path.read_text()))
        and path.relative_to(PACKAGE).parts[0] not in ("cli", "config.py")
    ]
    assert offenders == []


_WITHOUT_TORCH = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())
import megatron_real
import megatron_real.algorithms.graphs
import megatron_real.config
import megatron_real.data_plan
import megatron_real.plan
import megatron_real.plan_search.presets
import megatron_real.program
import megatron_real.realloc_ops.planning.plan
import megatron_real.timeline
import megatron_real.trace
import megatron_real.cli.train
from megatron_real.cli.main import main

assert main(["plan", "split", "--devices-per-node", "4", "-o", sys.argv[1]]) == 0
assert main(["show", sys.argv[1]]) == 0
"""


def test_plans_are_made_and_shown_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "actor_gen" in done.stdout


def test_public_names_are_in_all_and_documented() -> None:
    problems = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        if not tree.body or path.stem in ("__init__", "__main__"):
            continue
        public = {
            node.name: node
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        }
        exported = next(
            (
                {element.value for element in node.value.elts if isinstance(element, ast.Constant)}
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(node.value, ast.List | ast.Tuple)
                and any(
                    isinstance(target, ast.Name) and target.id == "__all__"
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                )
            ),
            None,
        )
        if exported is None:
            problems.append(f"{_dotted(path)}: no __all__")
            continue
        problems += [
            f"{_dotted(path)}: {name} is public and not in __all__" for name in public.keys() - exported
        ]
        problems += [
            f"{_dotted(path)}: {name} has no docstring"
            for name, node in public.items()
            if name in exported and ast.get_docstring(node) is None
        ]
    assert problems == []


def test_every_option_of_a_run_is_read_somewhere() -> None:
    from megatron_real import config

    owners = (
        *(config.RunOptions, config.ModelOptions, config.DataOptions, config.LivenessOptions),
        config.RewardOptions,
    )
    read: set[str] = set()
    for path in MODULES:
        if path.name != "config.py":
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {"model", "algorithm"}  # through RunOptions.role and RunOptions.algorithm_config
    assert {"role", "algorithm_config"} <= read
    unread = {
        f"{owner.__name__}.{name}" for owner in owners for name in owner.model_fields if name not in read
    }
    assert unread == set()
