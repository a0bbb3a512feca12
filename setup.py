"""Installs Python and the C++ sources. Compiles only on request: Z3EXT_PREBUILD=1."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PREBUILD = os.environ.get("Z3EXT_PREBUILD") == "1"


class BuildPy(build_py):
    """Compiles the library into the package, after the Python files and the sources."""

    def run(self) -> None:
        """Copy the files, then compile where that is asked for."""
        if not self.editable_mode:
            # setuptools packs what an earlier build left there, also files that are gone by now.
            shutil.rmtree(Path(self.build_lib, "z3ext"), ignore_errors=True)
        super().run()
        if not PREBUILD:
            return
        try:
            import torch  # noqa: F401
        except ImportError as cause:
            raise SystemExit(
                "Z3EXT_PREBUILD=1 compiles against the torch of this environment, and there is "
                "none: install torch and run `pip install . --no-build-isolation`"
            ) from cause
        sys.path.insert(0, str(ROOT))
        from z3ext import _build

        if self.editable_mode:  # the package is the checkout: it stays clean, the cache serves
            _build.library_path()
        else:
            _build.prebuild(Path(self.build_lib, "z3ext", "_prebuilt"))


class Wheel(bdist_wheel):
    """Tags a wheel with a library by the platform alone: the library uses no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag's parts."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PREBUILD else (python, abi, platform)


class MaybeBinary(Distribution):
    """A distribution whose wheel is of one platform when it holds a library."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is of one platform."""
        return PREBUILD or bool(super().has_ext_modules())


setup(
    distclass=MaybeBinary,
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
)
