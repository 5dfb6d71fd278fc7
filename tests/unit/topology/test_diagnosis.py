"""The words that say who is missing."""

from __future__ import annotations

from shardwright.topology.bulletin import Sign
from shardwright.topology.diagnosis import Heard, describe_break, describe_timeout, is_timeout


def heard(doing: str, waits_for: tuple[int, ...] = (), *, alive: bool = True) -> Heard:
    return Heard(Sign(count=5, doing=doing, waits_for=waits_for, seconds=12.0, seen=0), alive)


def test_the_chain_of_waits_leads_to_who_is_missing() -> None:
    text = describe_timeout(
        0, "receive from rank 1", (1,), 20.0, {1: heard("send", (2,)), 2: heard("step 7")}
    )
    assert text.splitlines() == [
        "rank 0 waited 20 s in vain: receive from rank 1; missing: rank 2",
        "  rank 1 waits for rank 2 since 12 s: send",
        "  rank 2 is alive but doesn't answer; it did last, 12 s ago: step 7",
    ]


def test_a_silent_rank_is_missing_even_if_it_waited() -> None:
    text = describe_timeout(
        0, "barrier", (1, 2), 20.0, {1: heard("x", (0,), alive=False), 2: heard("y", (1,))}
    )
    assert "missing: rank 1\n" in text
    assert "rank 1 gives no sign of life any more; it waited in: x" in text


def test_a_circle_of_waits_is_called_one() -> None:
    text = describe_timeout(0, "send", (1,), 20.0, {1: heard("send", (0,)), 0: heard("send", (1,))})
    assert "all ranks wait for each other" in text


def test_ranks_never_heard_of_are_missing() -> None:
    text = describe_timeout(0, "barrier", (1, 2), 20.0, {})
    assert "missing: ranks 1, 2" in text
    assert "rank 1 has never given a sign of life" in text


def test_broken_connections() -> None:
    error = RuntimeError("Connection closed by peer [1.2.3.4]:5\nmore")
    assert describe_break(0, "send", (1,), {1}, error) == (
        "rank 1 has ended its script while rank 0 still waited for it: send"
    )
    assert describe_break(0, "send", (1,), set(), error) == (
        "rank 0 lost the connection to rank 1: send (Connection closed by peer [1.2.3.4]:5)"
    )


def test_timeouts_are_told_from_other_errors() -> None:
    assert is_timeout(RuntimeError("Timed out waiting 1000ms for recv operation to complete"))
    assert is_timeout(RuntimeError("Operation timed out!"))
    assert not is_timeout(RuntimeError("Connection closed by peer"))
