"""Metadata is in pyproject.toml; here is what it cannot say: folders that are installed under another name."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
OURS = ("zipscape", "ds_zipccl", "ds_scape")

setup(
    packages=[
        *find_packages(str(ROOT), include=[pattern for name in OURS for pattern in (name, f"{name}.*")]),
        "zipscape.op_builder",
        "zipscape.csrc",
    ],
    package_dir={"zipscape.op_builder": "op_builder", "zipscape.csrc": "csrc"},
    package_data={"zipscape.csrc": ["**/*.cpp", "**/*.cu", "**/*.h", "**/*.cuh"]},
    include_package_data=False,
)
