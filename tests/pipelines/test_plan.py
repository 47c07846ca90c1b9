"""Plans of epochs, and refusals to go on over a hole in the log."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipelines.plan import Extent, GapError, LostTailError, check_log, end_within, in_batches, plan_ranges, width

SPANS = st.dictionaries(st.integers(0, 7), st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1)


@given(SPANS, st.integers(1, 10**5))
def test_a_plan_begins_at_the_starts_and_stays_inside(spans: dict[int, tuple[int, int]], most: int):
    starts = {partition: start for partition, (start, _) in spans.items()}
    ends = {partition: start + length for partition, (start, length) in spans.items()}
    plan = plan_ranges(starts, ends, most)
    assert {partition: start for partition, (start, _) in plan.items()} == starts
    assert all(start <= end <= ends[partition] for partition, (start, end) in plan.items())
    assert width(plan) <= most + len(spans)
    for partition, (start, end) in plan.items():
        assert (start < end) == (start < ends[partition]), "no partition with a backlog starves"


@given(SPANS, st.integers(1, 1000))
def test_plan_after_plan_reaches_the_ends(spans: dict[int, tuple[int, int]], share: int):
    starts = {partition: start for partition, (start, _) in spans.items()}
    ends = {partition: start + length for partition, (start, length) in spans.items()}
    most = 1 + sum(length for _, length in spans.values()) // share
    for _ in range(share + 1):
        starts = {partition: end for partition, (_, end) in plan_ranges(starts, ends, most).items()}
    assert starts == ends


def test_an_end_before_the_start_is_an_empty_range():
    assert plan_ranges({0: 10, 1: 0}, {0: 5, 1: 3}, 100) == {0: (10, 10), 1: (0, 3)}


def test_the_bound_is_shared_by_backlog():
    assert plan_ranges({0: 0, 1: 0}, {0: 900, 1: 100}, 100) == {0: (0, 90), 1: (0, 10)}


def test_a_log_without_holes_is_fine():
    check_log("a", {0: 0, 1: 5}, {0: (0, 0), 1: (5, 9)}, set())
    check_log("a", {0: 3}, {0: (1, 3)}, {"a", "b"})


def test_a_removed_prefix_is_named_in_every_partition():
    with pytest.raises(
        GapError, match=r"partition 0: offsets \[3, 7\), partition 2: offsets \[0, 1\) were removed"
    ) as found:
        check_log("a", {0: 3, 1: 3, 2: 0}, {0: (7, 9), 1: (3, 9), 2: (1, 9)}, {"a"})
    assert "--accept-gap" in str(found.value)
    assert not isinstance(found.value, LostTailError)


def test_a_lost_tail_is_named_even_beside_a_removed_prefix():
    with pytest.raises(LostTailError, match=r"partition 1: offsets \[4, 9\) were ingested, but the log ends before"):
        check_log("a", {0: 3, 1: 9}, {0: (7, 9), 1: (0, 4)}, {"a"})


def test_another_log_is_named_with_what_it_lacks():
    with pytest.raises(GapError, match=r"recreated: it has the id b, the lake was ingested from a, c; ") as found:
        check_log("b", {0: 0}, {0: (0, 4)}, {"c", "a"})
    assert "partition" not in str(found.value)
    with pytest.raises(GapError, match=r"recreated.*partition 0: offsets \[0, 2\) of the new one were removed"):
        check_log("b", {0: 0}, {0: (2, 4)}, {"a"})


@given(st.lists(st.integers()), st.integers(1, 10))
def test_batches_are_bounded_and_in_order(items: list[int], size: int):
    batches = list(in_batches(items, size))
    assert [item for batch in batches for item in batch] == items
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(batches)


FILES = [Extent(0, 100, 1000), Extent(100, 200, 1000), Extent(200, 300, 4000)]


@pytest.mark.parametrize(
    ("start", "end", "max_bytes", "expected"),
    [
        (0, 300, 6000, 300),
        (0, 300, 5999, 200),  # between files
        (0, 300, 1500, 100),
        (0, 300, 500, 50),  # inside a file that is larger than the bound
        (250, 300, 400, 260),
        (50, 150, 1000, 150),  # parts of files count in part
        (50, 150, 999, 100),
        (0, 300, 1, 1),  # a record that is larger than the bound passes, alone
        (7, 7, 1000, 7),
    ],
)
def test_a_range_ends_where_it_holds_the_most_bytes_allowed(start, end, max_bytes, expected):
    assert end_within(start, end, FILES, max_bytes) == expected


def test_files_beyond_the_bound_are_not_looked_at():
    def files():
        yield FILES[0]
        yield FILES[1]
        raise AssertionError("asked for more")

    assert end_within(0, 300, files(), 1200) == 100
