"""The plan of flat buckets: every tensor once, in a fixed order, below the cap."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data_parallel.buckets import TensorInfo, dense_strides, flat_memory, is_dense, plan_buckets

CPU = torch.device("cpu")


def info(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo.of(name, torch.empty(shape, dtype=dtype))


infos = st.lists(
    st.builds(
        lambda shape, dtype: info("p", *shape, dtype=dtype),
        st.lists(st.integers(0, 7), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(infos, st.integers(1, 400), st.one_of(st.none(), st.integers(1, 50)), st.booleans())
def test_every_tensor_lies_in_exactly_one_place(
    tensors: list[TensorInfo], cap: int, first: int | None, reverse: bool
) -> None:
    plan = plan_buckets(tensors, cap_bytes=cap, first_cap_bytes=first, reverse=reverse)
    assert plan == plan_buckets(tensors, cap_bytes=cap, first_cap_bytes=first, reverse=reverse)
    assert sorted(s.position for b in plan for s in b.slots) == list(range(len(tensors)))
    seen = set()
    for index, bucket in enumerate(plan):
        assert bucket.index == index
        key = (bucket.dtype, bucket.device)
        limit = cap if key in seen or first is None else min(first, cap)
        seen.add(key)
        assert bucket.num_bytes <= limit or len([s for s in bucket.slots if s.num_elements]) == 1
        end = 0
        for slot in bucket.slots:
            assert tensors[slot.position].dtype == bucket.dtype
            assert slot.offset == end
            end += slot.num_elements
        assert bucket.num_elements == end


@settings(deadline=None)
@given(infos, st.integers(1, 400))
def test_buckets_fill_up_in_order(tensors: list[TensorInfo], cap: int) -> None:
    """If gradients become ready from last to first, each bucket is full before the one after it."""
    plan = plan_buckets(tensors, cap_bytes=cap, reverse=True)
    full_at = [max(len(tensors) - s.position for s in b.slots) for b in plan]
    assert full_at == sorted(full_at)
    for bucket in plan:
        positions = [s.position for s in bucket.slots]
        assert positions == sorted(positions, reverse=True)


def test_first_bucket_is_smaller() -> None:
    tensors = [info(f"p{i}", 10) for i in range(7)]
    plan = plan_buckets(tensors, cap_bytes=120, first_cap_bytes=40, reverse=True)
    assert [[s.name for s in b.slots] for b in plan] == [["p6"], ["p5", "p4", "p3"], ["p2", "p1", "p0"]]


def test_large_tensor_has_a_bucket_of_its_own() -> None:
    plan = plan_buckets([info("a", 2), info("big", 100), info("b", 2)], cap_bytes=40)
    assert [[s.name for s in b.slots] for b in plan] == [["a"], ["big"], ["b"]]


def test_views_have_the_shape_and_strides_of_their_tensor() -> None:
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = [TensorInfo.of("x", torch.empty(3)), TensorInfo.of("w", image)]
    (bucket,) = plan_buckets(tensors, cap_bytes=1 << 20)
    flat = torch.arange(float(bucket.num_elements))
    x, w = (slot.view_of(flat) for slot in bucket.slots)
    assert x.tolist() == [0, 1, 2]
    assert w.stride() == image.stride()
    assert sorted(w.flatten().tolist()) == list(range(3, 123))


def test_views_of_a_part_of_a_larger_buffer() -> None:
    (bucket,) = plan_buckets([info("x", 2), info("y", 2)], cap_bytes=1 << 20)
    part = torch.arange(10.0)[5:]
    assert bucket.slots[1].view_of(part).tolist() == [7, 8]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.randoms())
def test_dense_strides_match_torch(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    assert list(tensor.shape) == shape
    if tensor.numel():
        assert is_dense(tensor)
    gaps = torch.empty(*shape, 3)[..., 1]
    if gaps.numel() > 1:
        assert not is_dense(gaps)
        assert dense_strides(tuple(gaps.shape), gaps.stride()) == torch.empty(shape).stride()


def test_expanded_tensor_is_not_dense() -> None:
    expanded = torch.empty(3, 1).expand(3, 4)
    assert not is_dense(expanded)
    assert dense_strides((3, 4), expanded.stride()) == (4, 1)


def test_flat_memory_is_the_memory_itself() -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    flat = flat_memory(x)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    flat.zero_()
    assert not x.any()


def test_plan_of_many_tensors_is_fast() -> None:
    tensors = [info(f"p{i}", 3) for i in range(10_000)]
    assert len(plan_buckets(tensors, cap_bytes=120, reverse=True)) == 1000
