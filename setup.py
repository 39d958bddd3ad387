"""Packaging of megatron_real; settings of tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
PTH = "megatron_real.pth"

PLANNING = [
    "hydra-core>=1.3.2",
    "networkx>=3.2",
    "numpy>=1.26",
    "omegaconf>=2.3",
    "ortools>=9.10",
    "pydantic>=2.7",
    "pyyaml>=6.0",
    "rich>=13.7",
]
"""Enough for plans: making, checking, pricing and showing them needs no torch."""

MEGATRON = [
    "jinja2>=3.1",  # chat templates
    "torch>=2.6",
    "megatron-core>=0.19,<0.20",
    # What `megatron.training` imports, or uses where it saves and logs; its wheel does not ask for them.
    "einops>=0.8",
    "psutil>=5.9",
    "sentencepiece>=0.2",
    "tensorboard>=2.16",
    "tqdm>=4.66",
]
DEV = [
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "jsonschema>=4.21",
    "mypy>=1.11",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
]
HF = ["datasets>=2.20", "transformers>=4.44"]
"""Data sets and tokenizers of Hugging Face."""
TRL = ["trl>=1.16,<1.17"]
"""What `make cross-check` compares losses with. It calls methods that TRL does not promise to keep."""
TE = ["transformer-engine[pytorch]>=2.0"]
"""GPU machines only: its metapackage breaks Megatron's imports where there is no CUDA."""


class build_py_with_pth(build_py):  # noqa: N801 (setuptools' naming)
    """Put `megatron_real.pth` beside the package, where Python reads it at start-up; editable installs included."""

    def run(self) -> None:
        super().run()
        target = Path(
            self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        )
        target.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(HERE / PTH), str(target / PTH), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, str(Path(self.build_lib) / PTH)]


def version() -> str:
    """The version that the package says it has."""
    found = re.search(
        r'^__version__ = "(.+)"$', (HERE / "megatron_real" / "__init__.py").read_text(), re.MULTILINE
    )
    assert found is not None, "megatron_real/__init__.py has a line __version__ = ..."
    return found[1]


readme = HERE / "README.md"
setup(
    name="megatron_real",
    version=version(),
    description="ReaL for Megatron-Core: every call of an RLHF iteration on its own mesh, in its own parallel layout",
    long_description=readme.read_text() if readme.is_file() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    packages=[*find_packages(include=["megatron_real", "megatron_real.*"]), "megatron_real.conf"],
    package_dir={"megatron_real.conf": "conf"},
    package_data={
        "megatron_real": ["plan_schema.json", "py.typed"],
        "megatron_real.conf": ["*.yaml", "**/*.yaml"],
        "megatron_real.plan_search": ["devices/*.json"],
    },
    install_requires=PLANNING,
    extras_require={"megatron": MEGATRON, "hf": HF, "trl": TRL, "te": TE, "dev": DEV},
    entry_points={"console_scripts": ["megatron-real = megatron_real.cli.main:main"]},
    cmdclass={"build_py": build_py_with_pth},
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
