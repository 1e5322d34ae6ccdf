"""Compiles the kernels into the wheel if GROUPGRAD_BUILD_KERNELS=1 (`make wheel`). All else is in pyproject.toml.

Without it, as in `pip install .`, the wheel is pure Python, and the kernels are compiled on first use.
"""

import os
import runpy
import shutil
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildWithKernels(build_py):
    """Adds one library for each level of x86-64."""

    def run(self):
        super().run()
        build = runpy.run_path("src/groupgrad/kernels/build.py")
        for level in build["LEVELS"]:
            with tempfile.TemporaryDirectory() as folder:
                built = build["build"](next(build["compilers"]()), level, Path(folder))
                shutil.copy(built, Path(self.build_lib, "groupgrad/kernels", build["packaged"](level).name))


class PlatformWheel(bdist_wheel):
    """Names the wheel: ctypes calls the libraries, so it suits every Python 3 of its platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    """Goes to the folder for what a platform needs, not to that of pure Python."""

    def has_ext_modules(self):
        return True


if os.environ.get("GROUPGRAD_BUILD_KERNELS") == "1":
    setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
else:
    setup()
