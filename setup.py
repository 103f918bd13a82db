"""The extension alone; all else is in setup.cfg and pyproject.toml."""

import os
from glob import glob

import nanobind
import numpy
from setuptools import Extension, setup

root = os.path.dirname(nanobind.include_dir())
# For `make sanitize-python`; vptr wants type information that the hidden symbols of nanobind do not share.
sanitized = [
    "-fno-lto",
    "-g",
    "-O1",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
]
sanitize = os.environ.get("MPROLLOUT_SANITIZE") == "1"

setup(
    ext_modules=[
        Extension(
            "mprollout._native",
            sources=["native/binding.cpp", "native/nanobind.cpp"],
            depends=sorted(glob("native/*.h")),
            include_dirs=[
                nanobind.include_dir(),
                nanobind.source_dir(),
                numpy.get_include(),
                os.path.join(root, "ext", "robin_map", "include"),
            ],
            define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
            # As nanobind's CMake module does: its tables alias types, and its symbols must not meet another extension's.
            extra_compile_args=[
                "-std=c++20",
                "-O2",
                "-flto=auto",
                "-fno-stack-protector",
                "-g0",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
                "-ffunction-sections",
                "-fdata-sections",
                "-Wall",
                "-Wextra",
                *(sanitized if sanitize else []),
            ],
            extra_link_args=["-Wl,--gc-sections", *(sanitized if sanitize else ["-O2", "-flto=auto", "-s"])],
            language="c++",
        )
    ]
)
