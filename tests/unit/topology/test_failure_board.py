"""The failure board, with two ranks in one process and a store in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from shardwright.errors import CommunicationTimeout, LostRankError, RemoteRankError
from shardwright.topology import failure
from shardwright.topology.bulletin import Bulletin, Event, StoreGoneError
from shardwright.topology.failure import FailureBoard

CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30084")
LATE = RuntimeError("[gloo/...] Timed out waiting 1000ms for recv operation to complete")


@pytest.fixture
def boards() -> Iterator[list[FailureBoard]]:
    store = dist.HashStore()
    made = [FailureBoard(rank, 2, timeout_s=5, startup_timeout_s=50) for rank in range(2)]
    for board in made:
        board.start(Bulletin(store))
    yield made
    for board in made:
        board.noticed = True  # nothing may interrupt the tests
        board.stop(linger=False)


def failed(name: str) -> ValueError:
    try:
        raise ValueError(name)
    except ValueError as error:
        return error


def wait_for_failure(board: FailureBoard) -> None:
    deadline = time.monotonic() + 3
    while board.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    board.noticed = True


def test_a_report_is_raised_elsewhere_with_module_microbatch_and_traceback(boards) -> None:
    first, second = boards
    second.raise_if_failed()
    first.report(failed("boom"), module="layers.3", microbatch=2)
    wait_for_failure(second)
    with pytest.raises(RemoteRankError) as caught:
        second.raise_if_failed()
    text = str(caught.value)
    assert text.startswith("rank 0 failed: ValueError: boom\n  | Traceback")
    assert "in failed" in text
    assert "at world rank 0, microbatch 2, module 'layers.3'" in text


def test_only_the_first_report_counts_and_remote_errors_are_not_reported_again(boards) -> None:
    first, second = boards
    second.report(RemoteRankError("rank 0 failed"))
    assert second.failure is None
    first.report(failed("one"))
    first.report(failed("two"))
    wait_for_failure(second)
    assert second.failure is not None
    assert second.failure.reason == "ValueError: one"


def test_a_broken_connection_waits_for_the_reason(boards) -> None:
    first, second = boards
    second.waiting("receive", (0,))
    first.report(failed("boom"))
    error = second.wrap_comm_error(CLOSED)
    assert isinstance(error, RemoteRankError)
    assert "boom" in str(error)


def test_a_broken_connection_without_a_reason_names_the_peer(boards, monkeypatch) -> None:
    monkeypatch.setattr(failure, "_NEWS_WAIT_S", 0.1)
    first, second = boards
    second.waiting("receive from rank 0", (0,))
    error = second.wrap_comm_error(CLOSED)
    assert isinstance(error, LostRankError)
    assert "rank 1 lost the connection to rank 0: receive from rank 0" in str(error)
    wait_for_failure(first)
    assert isinstance(first.error_of(first.failure), RemoteRankError)


def test_a_rank_that_left_is_not_lost(boards) -> None:
    first, second = boards
    first.stop(linger=False)
    second.waiting("receive", (0,))
    error = second.wrap_comm_error(CLOSED)
    assert "rank 0 has ended its script while rank 1 still waited for it: receive" in str(error)


def test_a_timeout_names_who_is_missing_and_what_it_did(boards) -> None:
    first, second = boards
    first.waiting("all_reduce over dp, call 7", (1,))
    first.answered()
    second.waiting("receive from rank 0, channel 3", (0,))
    error = second.wrap_comm_error(LATE)
    assert isinstance(error, CommunicationTimeout)
    assert "in vain: receive from rank 0, channel 3; missing: rank 0" in str(error)
    assert "rank 0 is alive but doesn't answer; it did last, " in str(error)
    assert "all_reduce over dp, call 7" in str(error)
    assert "raise `timeout_s` (now 5)" in str(error)
    wait_for_failure(first)
    assert "rank 1 failed: CommunicationTimeout" in str(first.error_of(first.failure))


def test_other_errors_pass_unchanged(boards) -> None:
    for error in (RuntimeError("Invalid scalar type"), ValueError("x"), KeyError("gloo")):
        assert boards[0].wrap_comm_error(error) is error
    assert boards[0].failure is None


def test_the_first_wait_may_take_longer(boards) -> None:
    board = boards[0]
    assert board.patience.total_seconds() == 50
    board.waiting("x", (1,))
    board.answered()
    assert board.patience.total_seconds() == 5
    with board.bounded(1):
        assert board.patience.total_seconds() == 1
    with board.bounded(None):
        assert board.patience.total_seconds() == 5


def test_a_world_of_one_knows_no_failures() -> None:
    board = FailureBoard(0, 1, timeout_s=1, startup_timeout_s=1)
    board.start(Bulletin(dist.HashStore()))
    board.report(failed("own"))
    board.raise_if_failed()
    board.stop()
    failure.board().raise_if_failed()


def test_events_are_read_once_and_even_if_a_writer_died_half_way() -> None:
    store = dist.HashStore()
    writer, reader = Bulletin(store), Bulletin(store)
    writer.post(Event("left", 0, 0))
    store.add("events", 1)  # counted, never written
    writer.post(Event("error", 1, 1, "boom"))
    assert [event.kind for event in reader.new_events()] == ["left", "error"]
    assert reader.new_events() == []
    store.set("event/2", '{"kind": "left", "rank": 2, "reporter": 2}')
    assert [event.rank for event in reader.new_events()] == [2]


def test_a_store_that_is_gone_is_not_asked_again() -> None:
    gone = False
    bulletin = Bulletin(dist.HashStore(), lambda: gone)
    assert bulletin.new_events() == []
    gone = True
    with pytest.raises(StoreGoneError):
        bulletin.new_events()
    gone = False
    with pytest.raises(StoreGoneError):
        bulletin.post(Event("left", 0, 0))
