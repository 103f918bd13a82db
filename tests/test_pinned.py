"""The ring registered with CUDA: once, unregistered on close, and a plain "no" where there is no CUDA."""

import logging
import warnings
from typing import Any

import pytest
import torch
from engines import config
from played import played

import mprollout as mp
from mprollout import _native, pinned


class Cudart:
    """torch.cuda.cudart(), recorded."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.calls = error, []

    def cudaHostRegister(self, *args: int) -> int:  # noqa: N802
        self.calls.append(("register", *args))
        return self.error

    def cudaHostUnregister(self, *args: int) -> int:  # noqa: N802
        self.calls.append(("unregister", *args))
        return 0


def with_cuda(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)


def test_without_cuda_the_ring_stays_unpinned_and_says_so(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with played() as on, caplog.at_level(logging.WARNING, "mprollout"):
        assert on.engine.register_pinned() is False
        assert "not pinned: torch sees no CUDA device" in caplog.text
        on.publish(2)
        with on.engine.get(2, timeout=20) as batch:
            assert len(batch) == 2


def test_the_whole_mapping_is_registered_once_and_unregistered_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    with_cuda(monkeypatch, cudart)
    with played() as on:
        engine = on.engine
        assert engine.register_pinned() is engine.register_pinned() is True
        segment = on.keeper.segment
        want = ("register", segment.address, segment.size_bytes, 0)
        assert cudart.calls == [want]
        on.publish(2)
        batch = engine.get(2, timeout=20)
    assert cudart.calls == [want, ("unregister", want[1])]
    assert batch.rewards.size  # the views outlive it
    engine.close()
    assert len(cudart.calls) == 2


def test_a_refused_registration_is_no_error(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with_cuda(monkeypatch, Cudart(error=2))
    segment = _native.Segment.create(
        workers=1, entries=1, cells=1, descriptors=1, arena_bytes=4096, max_group_bytes=64, max_prompt_bytes=1, schema=b""
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "mprollout"):
        assert pinned.register(segment) is None
    assert "error 2" in caplog.text


@pytest.mark.gpu
def test_copies_from_views_to_the_gpu_are_pinned_and_right() -> None:
    with mp.RolloutEngine(config()) as engine:
        assert engine.register_pinned()
        batch = engine.get(4, timeout=60)
        for group in batch:
            view = group.field("logprobs")
            with warnings.catch_warnings(action="ignore"):  # torch has no read-only tensors
                on_host = torch.from_numpy(view)
            assert on_host.is_pinned()
            on_device = on_host.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert torch.equal(on_device.cpu(), on_host)
        del group, view, on_host
        batch.release()
