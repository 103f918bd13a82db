"""Views, packed and padded forms, over a real segment in this process."""

import numpy as np
import pytest

import mprollout as mp
from mprollout import _native
from mprollout.batch import Batch, Group
from mprollout.generator import VersionSpan
from mprollout.ring import RolledSample, encode_group
from mprollout.schema import SCHEMA, Field, extra_of, schema_bytes


def sample(*ids, mask=None, versions=None, reason="stop"):
    n = len(ids)
    return RolledSample(
        token_ids=list(ids),
        logprobs=[-0.5 * i for i in range(n)],
        loss_mask=mask or [1] * n,
        finish_reason=reason,
        versions=versions if versions is not None else ([VersionSpan(7, 0, n)] if n else []),
    )


GROUPS = [
    (
        [1, 2],
        [sample(3, 4, 5, versions=[VersionSpan(7, 0, 2), VersionSpan(8, 2, 3)]), sample(), sample(6, reason="length")],
        [1.0, 0.0, -1.0],
    ),
    ([9], [sample(10, 11, mask=[0, 1])], [0.5]),
]


@pytest.fixture
def batch():
    segment = _native.Segment.create(
        workers=1,
        entries=4,
        cells=4,
        descriptors=8,
        arena_bytes=65536,
        max_group_bytes=8192,
        max_prompt_bytes=64,
        schema=schema_bytes(),
    )
    admitter, producer, consumer = _native.Admitter(segment), _native.Producer(segment, 0), _native.Consumer(segment)
    leases = []
    for ticket, (prompt, samples, rewards) in enumerate(GROUPS):
        assert admitter.admit(ticket, b"row")
        assert producer.publish(producer.claim(), encode_group([ticket, 7, 1, 2], prompt, samples, rewards))
        leases.append(consumer.take())
    consumer.deliver(leases)
    batch = Batch(leases)
    yield batch
    del leases
    batch.release()
    consumer.close()
    segment.close()


def test_samples_are_the_ones_published(batch):
    for group, (prompt, samples, rewards) in zip(batch, GROUPS, strict=True):
        assert group.prompt_ids.tolist() == prompt and group.rewards.tolist() == rewards
        for got, want, reward in zip(group.samples, samples, rewards, strict=True):
            assert got.token_ids.tolist() == want.token_ids and got.logprobs.tolist() == want.logprobs
            assert got.loss_mask.tolist() == want.loss_mask and got.versions == want.versions
            assert (got.reward, got.finish_reason) == (reward, want.finish_reason)


def test_token_versions_follow_the_runs_across_samples(batch):
    assert batch[0].token_versions.tolist() == [7, 7, 8, 7]
    assert batch[1].token_versions.tolist() == [7, 7]


def test_views_share_the_rings_memory_and_are_read_only(batch):
    """slime#1709, verl#2847: views, no copy until asked."""
    first, again = batch[0].field("token_ids"), batch[0].field("token_ids")
    assert np.shares_memory(first, again) and np.shares_memory(first, batch[0].samples[0].token_ids)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_packed_puts_prompt_then_completion_without_padding(batch):
    packed = batch.packed()
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 1, 2, 6, 9, 10, 11]
    assert packed.cu_seqlens.tolist() == [0, 5, 7, 10, 13]
    assert packed.prompt_lengths.tolist() == [2, 2, 2, 1]
    assert packed.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1]
    assert packed.versions.tolist() == [-1, -1, 7, 7, 8, -1, -1, -1, -1, 7, -1, 7, 7]
    assert packed.logprobs.tolist() == [0, 0, 0, -0.5, -1, 0, 0, 0, 0, 0, 0, 0, -0.5]
    assert packed.group_index.tolist() == [0, 0, 0, 1] and packed.rewards.tolist() == [1, 0, -1, 0.5]


def test_padded_is_packed_in_rows(batch):
    padded, packed = batch.padded(pad_token_id=99), batch.packed()
    assert padded.token_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 99, 99, 99], [1, 2, 6, 99, 99], [9, 10, 11, 99, 99]]
    for name in ("token_ids", "logprobs", "loss_mask", "versions"):
        assert getattr(padded, name)[padded.attention_mask == 1].tolist() == getattr(packed, name).tolist()


def test_a_batch_that_nobody_looked_at_is_released_all_the_same(batch):
    """Its groups are made when they are asked for."""
    assert len(batch) == 2 and batch.tickets == [0, 1]
    batch.release()
    with pytest.raises(mp.BatchReleased, match="ticket 1"):
        batch[1].field("token_ids")


def test_torch_forms_share_memory_with_numpy(batch):
    packed = batch.packed()
    tensors = packed.torch()
    tensors["rewards"][0] = 42
    assert packed.rewards[0] == 42 and tensors["token_ids"].shape == (13,)


def test_a_view_kept_past_release_never_changes_and_release_says_so(batch):
    """spdl#1636, dora#1833."""
    kept = batch[0].samples[0].token_ids
    with pytest.warns(mp.LeaseWarning, match="1 views of tickets"):
        batch.release()
    assert kept.tolist() == [3, 4, 5]
    with pytest.raises(mp.BatchReleased, match="ticket 0"):
        batch[0].rewards  # noqa: B018


def test_lengths_that_do_not_match_are_an_error_never_padded():
    bad = sample(1, 2)
    bad.logprobs.pop()
    with pytest.raises(ValueError, match="sample 0: 2 token ids, 1 logprobs"):
        encode_group([0, 0, 0, 0], [1], [bad], [0.0])


def test_the_schema_in_the_segment_names_every_field():
    assert [field.name for field in SCHEMA][:3] == ["meta", "prompt_ids", "lengths"] and b'"logprobs"' in schema_bytes()


EXTRA = (
    Field("values", "<f4", "token"),
    Field("experts", "|u1", "token", (3, 2)),
    Field("image", "<f2", "sample", (2, 2)),
)


def with_extra(tokens: int, **changes) -> RolledSample:
    made = sample(*range(tokens))
    made.extra = {
        "values": [i / 2 for i in range(tokens)],
        "experts": np.arange(tokens * 6).reshape(tokens, 3, 2),
        "image": np.full((2, 2), tokens),
    } | changes
    return made


def test_extra_fields_of_any_shape_travel_like_the_others():
    segment = _native.Segment.create(
        workers=1, entries=1, cells=1, descriptors=1, arena_bytes=65536, max_group_bytes=8192, max_prompt_bytes=64, schema=schema_bytes(EXTRA)
    )  # fmt: skip
    assert extra_of(segment.schema) == EXTRA and extra_of(schema_bytes()) == ()
    producer, consumer = _native.Producer(segment, 0), _native.Consumer(segment)
    assert _native.Admitter(segment).admit(0, b"row")
    fields = encode_group([0, 0, 0, 0], [1], [with_extra(3), with_extra(0), with_extra(2)], [1.0] * 3, EXTRA)
    assert producer.publish(producer.claim(), fields)
    [lease] = consumer.try_take(1)
    consumer.deliver([lease])
    with Batch([lease], lambda lease: Group(lease, extra_of(segment.schema))) as batch:
        assert batch[0].field("values").tolist() == [0, 0.5, 1, 0, 0.5]
        experts, image = batch[0].field("experts"), batch[0].field("image")
        assert experts.shape == (5, 3, 2) and experts[3:].reshape(-1).tolist() == [*range(12)]
        assert image.dtype == np.float16 and image[:, 0, 0].tolist() == [3, 0, 2]
        del experts, image, lease
    consumer.close()


IMAGES = Field("images", "<f4", "item", (2, 3), max_items=3)


def test_as_many_items_as_a_sample_has_travel_and_are_packed():
    """Multimodal tensors: 2, 0 and 1 images a sample, and a group of one sample with 3."""
    with pytest.raises(mp.ConfigError, match="max_items >= 1 goes with per='item'"):
        mp.RingConfig(extra_fields=(Field("images", "<f4", "item"),))
    own = mp.RingConfig(extra_fields=(EXTRA[0], IMAGES, EXTRA[2])).stored_fields
    assert [field.name for field in own] == ["values", "images", "images.counts", "image"]
    segment = _native.Segment.create(
        workers=1, entries=2, cells=2, descriptors=2, arena_bytes=65536, max_group_bytes=8192, max_prompt_bytes=64, schema=schema_bytes(own)
    )  # fmt: skip
    producer, consumer, admitter = _native.Producer(segment, 0), _native.Consumer(segment), _native.Admitter(segment)
    for ticket, counts in enumerate([(2, 0, 1), (3,)]):
        assert admitter.admit(ticket, b"row")
        made = [with_extra(i + 1, images=[np.full((2, 3), 10 * ticket + i)] * n) for i, n in enumerate(counts)]
        fields = encode_group([0] * 9, [1], made, [1.0] * len(counts), own)
        assert producer.publish(producer.claim(), fields)
    leases = consumer.try_take(2)
    consumer.deliver(leases)
    with Batch(leases, lambda lease: Group(lease, extra_of(segment.schema))) as batch:
        assert batch[0].field("images.counts").tolist() == [2, 0, 1]
        assert batch[0].field("images")[:, 0, 0].tolist() == [0, 0, 2]
        packed, padded = batch.packed(), batch.padded()
    del leases
    assert packed.extra["images"].shape == (6, 2, 3) and packed.extra["images.counts"].tolist() == [2, 0, 1, 3]
    assert packed.extra["image"].shape == (4, 2, 2) and packed.extra["values"].shape == packed.token_ids.shape
    assert packed.extra["values"][packed.versions >= 0].tolist() == [0, 0, 0.5, 0, 0.5, 1, 0]
    assert padded.extra["values"].shape == padded.token_ids.shape
    assert padded.extra["values"][2].tolist() == [0, 0, 0.5, 1]
    assert padded.extra["images"].tolist() == packed.extra["images"].tolist()
    assert padded.torch()["images"].shape == (6, 2, 3)
    consumer.close()
    with pytest.raises(ValueError, match="has 4 items, at most max_items=3"):
        encode_group([0] * 9, [1], [with_extra(1, images=np.zeros((4, 2, 3)))], [1.0], own)
    with pytest.raises(ValueError, match=r"has shape \(1, 3, 2\), expected \(1, 2, 3\)"):
        encode_group([0] * 9, [1], [with_extra(1, images=np.zeros((1, 3, 2)))], [1.0], own)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"values": [0.0]}, r"sample 0: extra\['values'\] has shape \(1,\), expected \(3,\)"),
        ({"experts": np.zeros((3, 2, 3))}, r"extra\['experts'\] has shape \(3, 2, 3\), expected \(3, 3, 2\)"),
        ({"image": None}, r"set no extra\['image'\]"),
    ],
)
def test_extra_fields_that_do_not_fit_are_an_error_never_padded(changes, says):
    with pytest.raises(ValueError, match=says):
        encode_group([0, 0, 0, 0], [1], [with_extra(3, **changes)], [1.0], EXTRA)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (Field("x", "float32", "token"), "dtype 'float32'"),
        (Field("x", "<f4", "group"), "'sample', 'token' or 'item'"),
        (Field("x", "<f4", "token", (0,)), "dimension below 1"),
        (Field("logprobs", "<f4", "token"), "a field already"),
    ],
)
def test_unusable_extra_fields_are_refused_by_the_config(field, says):
    with pytest.raises(mp.ConfigError, match=says):
        mp.RingConfig(extra_fields=(field,))
    with pytest.raises(mp.ConfigError, match="twice"):
        mp.RingConfig(extra_fields=(EXTRA[0], EXTRA[0]))


async def rollout_with_values(session, prompt):
    await session.generate()
    session.sample.extra["values"] = session.sample.logprobs


def test_extra_fields_come_from_the_rollout_function_to_the_batch():
    from engines import config

    extra = mp.RingConfig(extra_fields=(EXTRA[0],))
    with (
        mp.RolloutEngine(config(rollout=rollout_with_values, ring=extra)) as engine,
        engine.get(3, timeout=20) as batch,
    ):
        for group in batch:
            assert group.field("values").tolist() == group.field("logprobs").tolist() != []
