"""The spin model of the ring: no configuration has an error, every mutation has one. native/model/check.py does the work."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECK = Path(__file__).parents[1] / "native/model/check.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_check", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


model = load()
pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole set
needs_spin = pytest.mark.skipif(shutil.which("spin") is None, reason=model.MISSING)


@pytest.fixture(scope="module")
def small() -> Any:
    """The default set, checked whole before the first test looks, two at a time: most of the time goes to gcc."""
    jobs = {name: model.defines(switches) for name, switches in model.CONFIGURATIONS.items()}
    jobs |= {name: model.defines(switches, name) for name, (switches, _) in model.MUTATIONS.items()}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(model.check, jobs.values()), strict=True))


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("name", model.CONFIGURATIONS)
def test_the_model_has_no_error(small: dict[str, Any], name: str) -> None:
    result = small[name]
    assert result.errors == 0, f"{name}: {result.what}\n{result.trail}"


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("name", model.MUTATIONS)
def test_a_mutation_breaks_the_model(small: dict[str, Any], name: str) -> None:
    assert small[name].errors >= 1, f"{name}: expected an error ({model.MUTATIONS[name][1]}), got none"


@needs_spin
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", model.LONG)
def test_the_model_has_no_error_within_larger_bounds(name: str) -> None:
    result = model.check(model.defines(model.LONG[name]), "-O2")
    assert result.errors == 0, f"{name}: {result.what}\n{result.trail}"


def test_model_and_code_label_the_same_steps() -> None:
    """B1..B4, the admitter's, stand in table.h without labels."""
    in_model = {
        label
        for comment in re.findall(r"/\* ((?:[A-Z]\d ?)+)(?::|,|\*/)", model.MODEL.read_text())
        for label in comment.split()
    }
    headers = "".join((CHECK.parents[1] / name).read_text() for name in ("ring.h", "producer.h", "consumer.h"))
    assert in_model - {"B1", "B2", "B3", "B4"} == set(re.findall(r"\[([A-Z]\d)\]", headers))
