"""What a run leaves out is part of its result."""

from __future__ import annotations

from typing import Any

from rivals import RIVALS, missing


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    output_json["skipped"] = [why for kind in RIVALS if (why := missing(kind)) is not None]
