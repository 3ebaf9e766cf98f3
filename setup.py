"""Metadata is in pyproject.toml; here is what it cannot say: folders that are installed under another name, and libraries built ahead.

ZIPSCAPE_PREBUILD=1 builds the native libraries into the wheel: the C++ one, and the CUDA one where nvcc is found, for the GPUs that
TORCH_CUDA_ARCH_LIST names (else 8.0 and 9.0 with PTX). "cpu", "cuda" or "cpu,cuda" name what must be built.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
OURS = ("zipscape", "ds_zipccl", "ds_scape")
PREBUILD = os.environ.get("ZIPSCAPE_PREBUILD", "").strip() not in ("", "0")


class BuildPy(build_py):
    """Builds the libraries by the package itself, where it lies complete: sources, flags and names are then those it will look for."""

    def run(self):
        super().run()
        if self.editable_mode:
            return                      # a checkout compiles at first use
        package = Path(self.build_lib).absolute()
        shutil.rmtree(package / "zipscape" / "op_builder" / "prebuilt", ignore_errors=True)       # of an earlier build
        if PREBUILD:
            command = [sys.executable, "-m", "zipscape.op_builder.prebuilt", os.environ["ZIPSCAPE_PREBUILD"].strip()]
            if subprocess.run(command, cwd=package, env={**os.environ, "PYTHONPATH": str(package)}).returncode:
                raise SystemExit("ZIPSCAPE_PREBUILD: the libraries could not be built; the message is above")


class BuildWheel(bdist_wheel):
    """One wheel for every Python: the libraries have a C interface and go through ctypes."""

    def get_tag(self):
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if PREBUILD else tag


class OurDistribution(Distribution):
    def has_ext_modules(self):
        return PREBUILD or super().has_ext_modules()


setup(
    packages=[
        *find_packages(str(ROOT), include=[pattern for name in OURS for pattern in (name, f"{name}.*")]),
        "zipscape.op_builder",
        "zipscape.csrc",
    ],
    package_dir={"zipscape.op_builder": "op_builder", "zipscape.csrc": "csrc"},
    package_data={"zipscape.csrc": ["**/*.cpp", "**/*.cu", "**/*.h", "**/*.cuh"], "ds_zipccl.cli": ["*.cu"]},
    include_package_data=False,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BuildWheel},
    distclass=OurDistribution,
)
