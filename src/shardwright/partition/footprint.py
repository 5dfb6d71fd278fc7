"""What a microbatch holds in memory while it goes through the model, and the peak of any part of the model. Pure.

`meter` watches one microbatch and writes down stretches: what runs between two changes of module. A stretch knows only
how high memory rises above its start, and where it ends. Stretches played one after the other give back the peak of
what was watched, byte for byte; those of some modules only give the peak of a stage with these modules.

Three corrections apply to a part of a model:
- Where a stage begins, what crosses the border is a copy: the stage has it, and the one before lets go of it (unless its
  backward needs it).   Its gradient comes back the same way.
- A checkpointed block runs without keeping anything but its inputs; its backward begins with its forward.
- With several microbatches, parameters have gradients from the second on: new ones are added and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.partition.shorten import Run


@dataclass(frozen=True)
class Stretch:
    """What ran between two changes of module.

    running: the module whose code ran.   home: the module it counts with, as in `records` (where it would run).
    peak_bytes, end_bytes: live memory at most and at the end, less that at the start.
    gradient_bytes: made here and left in parameters' `.grad`; in `end_bytes` too.
    """

    running: str
    home: str
    peak_bytes: int
    end_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class Border:
    """What crosses if a stage begins here, how much of it the modules before keep for their backward anyway, and how much
    no module at all keeps."""

    crossing_bytes: int
    kept_bytes: int
    unsaved_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """One microbatch of a model.

    forward, backward: with autograd.   light: forward that keeps nothing for it.   borders: by module, at its first call.
    """

    forward: tuple[Stretch, ...]
    light: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    borders: Mapping[str, Border]

    def lengthened(self, runs: Sequence[Run]) -> Footprint:
        """The footprint of the full model, of one of a model cut short."""
        forward, light, backward, borders = self.forward, self.light, self.backward, dict(self.borders)
        for run in runs:
            forward = _repeated(forward, run, run.left_out)
            light = _repeated(light, run, run.left_out)
            backward = _repeated(backward, run, tuple(reversed(run.left_out)), before=True)
            for name, border in list(borders.items()):
                borders.update(dict.fromkeys(run.clones(name), border))
        return Footprint(forward, light, backward, borders)

    def enlarged(self, times: int) -> Footprint:
        """For a microbatch `times` as large: what is not a gradient of a parameter grows with it."""

        def stretch(one: Stretch) -> Stretch:
            fixed = one.gradient_bytes
            return replace(
                one,
                peak_bytes=min(fixed, one.peak_bytes) + times * max(0, one.peak_bytes - fixed),
                end_bytes=fixed + times * (one.end_bytes - fixed),
            )

        borders = {
            name: Border(times * border.crossing_bytes, times * border.kept_bytes, times * border.unsaved_bytes)
            for name, border in self.borders.items()
        }
        forward, light, backward = (tuple(map(stretch, part)) for part in (self.forward, self.light, self.backward))
        return Footprint(forward, light, backward, borders)


@dataclass(frozen=True)
class Peaks:
    """What a stage needs for one microbatch beyond what is there all the time.

    kept_bytes: between its forward and its backward.   waiting_bytes: before it comes to `last_entry`.   forward_bytes, backward_bytes: at most during these, what is kept
    included; in backward parameters have gradients already.
    first_backward_bytes: at most during a backward in which gradients grow from nothing; they are in the number.
    checkpoint_bytes: what is kept of checkpointed blocks.   block_bytes: of the largest of them.
    """

    kept_bytes: int
    waiting_bytes: int
    forward_bytes: int
    first_backward_bytes: int
    backward_bytes: int
    checkpoint_bytes: int = 0
    block_bytes: int = 0


def peaks(
    footprint: Footprint,
    is_here: Callable[[str], bool] = lambda home: True,
    *,
    checkpointed: Collection[str] = (),
    entries: Sequence[str] = (),
    exits: Sequence[str] = (),
    last_entry: str | None = None,
    gradient_share: float = 1.0,
    transit_bytes: int = 0,
) -> Peaks:
    """Play one microbatch through the modules of a stage.

    checkpointed: blocks that are run anew in backward; none inside another.
    entries: modules at which execution comes to this stage.   exits: modules elsewhere at which it leaves it.
    last_entry: of the entries the one to the model's end, if it comes to this stage again for it.
    gradient_share: how much of the gradients of a first backward stays, as they are reduced to their owners meanwhile; less
        than 0 where all are there from the start, and go.   transit_bytes: most that the reduction itself holds.
    """
    play = _Play(footprint, is_here, tuple(checkpointed), set(entries), list(exits))
    kept, forward, waiting = play.forward(last_entry)
    blocks = play.block_inputs()
    return Peaks(
        kept_bytes=kept,
        waiting_bytes=waiting,
        forward_bytes=forward,
        first_backward_bytes=play.backward(kept, gradient_share, transit_bytes),
        backward_bytes=play.backward(kept, 0.0),
        checkpoint_bytes=sum(blocks),
        block_bytes=max(blocks, default=0),
    )


class _Play:
    def __init__(
        self,
        footprint: Footprint,
        is_here: Callable[[str], bool],
        checkpointed: tuple[str, ...],
        entries: set[str],
        exits: list[str],
    ) -> None:
        self._footprint = footprint
        self._checkpointed = checkpointed
        self._marked = frozenset(checkpointed)
        self._blocks: dict[str, str | None] = {}
        self._forward = [s for s in footprint.forward if is_here(s.home)]
        self._light = [s for s in footprint.light if is_here(s.home)]
        self._backward = [s for s in footprint.backward if is_here(s.home)]
        borders = footprint.borders
        self._received = sum(borders[name].crossing_bytes for name in entries if name in borders)
        self._sent = sum(borders[name].crossing_bytes for name in exits if name in borders)
        self._let_go = self._sent - sum(borders[name].kept_bytes for name in exits if name in borders)

    def _block(self, name: str) -> str | None:
        """The checkpointed block that a module is in."""
        if name not in self._blocks:
            above = name
            while above and above not in self._marked:
                above = above.rpartition(".")[0]
            self._blocks[name] = above or None
        return self._blocks[name]

    def _inputs(self, block: str) -> int:
        border = self._footprint.borders.get(block)
        return 0 if border is None else border.crossing_bytes

    def _by_block(self, stretches: Sequence[Stretch]) -> dict[str, list[Stretch]]:
        """Stretches of each checkpointed block."""
        found: dict[str, list[Stretch]] = {}
        for stretch in stretches:
            block = self._block(stretch.running)
            if block is not None:
                found.setdefault(block, []).append(stretch)
        return found

    def block_inputs(self) -> list[int]:
        """What each checkpointed block of the stage keeps."""
        here = {self._block(stretch.running) for stretch in self._light}
        return [self._inputs(block) for block in self._checkpointed if block in here]

    def forward(self, last_entry: str | None) -> tuple[int, int, int]:
        """(what is kept, the most at one time, what is kept before the last entry)."""
        waiting: int | None = None
        live = most = self._received
        done: set[str] = set()
        plain = [s for s in self._forward if self._block(s.running) is None]
        light = self._by_block(self._light)
        for stretch in self._merged(plain, done):
            if isinstance(stretch, str):
                for inner in light.get(stretch, ()):
                    most = max(most, live + inner.peak_bytes)
                    live += inner.end_bytes
                border = self._footprint.borders.get(stretch)
                if border is not None:  # its caller was seen to let go of inputs that nobody keeps; now they are kept
                    live += border.unsaved_bytes
                continue
            if waiting is None and stretch.running == last_entry:
                waiting = live - self._inputs(stretch.running)
            most = max(most, live + stretch.peak_bytes)
            live += stretch.end_bytes
        kept = max(0, live - self._let_go)
        return kept, most, kept if waiting is None else max(0, waiting - self._let_go)

    def _merged(self, plain: list[Stretch], done: set[str]) -> list[Stretch | str]:
        """Stretches in order, with a checkpointed block's name where it runs."""
        if not self._checkpointed:
            return list(plain)
        order: list[Stretch | str] = []
        for stretch in self._forward:
            block = self._block(stretch.running)
            if block is None:
                order.append(stretch)
            elif block not in done:
                done.add(block)
                order.append(block)
        return order

    def backward(self, kept: int, gradient_share: float, transit_bytes: int = 0) -> int:
        """The most at one time. gradient_share: how much stays of the gradients that it makes."""
        live = most = float(kept + self._sent)
        made = 0
        again = self._by_block(self._forward)
        at = 0
        while at < len(self._backward):
            block = self._block(self._backward[at].running)
            stop = at + 1
            while stop < len(self._backward) and self._block(self._backward[stop].running) == block:
                stop += 1
            before = live
            if block is not None:
                for stretch in again.get(block, ()):
                    most = max(most, live + stretch.peak_bytes)
                    live += stretch.end_bytes
            for stretch in self._backward[at:stop]:
                made += stretch.gradient_bytes
                most = max(most, live + stretch.peak_bytes + min(transit_bytes, 2 * made))
                live += stretch.end_bytes - (1 - gradient_share) * stretch.gradient_bytes
            if block is not None:
                gradients = sum(stretch.gradient_bytes for stretch in self._backward[at:stop])
                live = before - self._inputs(block) + gradient_share * gradients
            at = stop
        return round(most)


def _repeated(
    stretches: Sequence[Stretch], run: Run, blocks: Sequence[str], *, before: bool = False
) -> tuple[Stretch, ...]:
    """Insert the stretches of the block that stands for others once more for each of them."""
    places = [place for place, stretch in enumerate(stretches) if run.holds(stretch.home)]
    if not places:
        return tuple(stretches)
    first, last = places[0], places[-1] + 1
    inside = [stretches[place] for place in places]
    more = [
        replace(stretch, running=_moved(stretch.running, run, block), home=_moved(stretch.home, run, block))
        for block in blocks
        for stretch in inside
    ]
    at = first if before else last
    return (*stretches[:at], *more, *stretches[at:])


def _moved(name: str, run: Run, block: str) -> str:
    return block + name[len(run.model) :] if run.holds(name) else name
