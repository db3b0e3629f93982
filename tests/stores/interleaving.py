"""Every order in which the steps of several actors can happen, one schedule after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Actor(Protocol):
    """Something that takes a number of steps; when each happens is up to the scheduler."""

    def ready(self) -> bool:
        """Whether it can take a step now; only a step, its own or another's, changes that."""
        ...

    def coming(self) -> str:
        """What its next step is, for the record."""
        ...

    def step(self) -> str:
        """Take it, and say what came of it. Afterwards the actor stands before the one after it, or is at its end."""
        ...


class World(Protocol):
    """Where a schedule happens."""

    def actors(self) -> Sequence[Actor]:
        """All of them, each before its first step."""
        ...

    def judge(self) -> None:
        """Look at what the schedule left; an AssertionError says what is wrong."""
        ...


class _Choice(NamedTuple):
    chosen: int
    among: int


def explore(make: Callable[[], World]) -> int:
    """Run every schedule, depth first: each in a world of its own, from its start to where no actor is ready.

    What an actor does next must follow from what it was answered: else a schedule could not be played again up
    to the step where the next one differs.

    Returns:
        How many schedules there are.

    Raises:
        AssertionError: one of them went wrong; the note says which.
    """
    count = 0
    prefix: list[int] = []
    while True:
        path = _run(make(), prefix)
        count += 1
        while path and path[-1].chosen + 1 == path[-1].among:
            path.pop()
        if not path:
            return count
        prefix = [choice.chosen for choice in path]
        prefix[-1] += 1


def _run(world: World, prefix: list[int]) -> list[_Choice]:
    """Play one schedule: the first choices are given, at every later one the first actor goes on."""
    path: list[_Choice] = []
    record: list[str] = []
    try:
        actors = world.actors()
        while ready := [actor for actor in actors if actor.ready()]:
            chosen = prefix[len(path)] if len(path) < len(prefix) else 0
            path.append(_Choice(chosen, len(ready)))
            record.append(ready[chosen].coming())
            record[-1] += f" -> {ready[chosen].step()}"
        world.judge()
    except BaseException as error:
        error.add_note("\n  ".join(["in this order:", *record]))
        raise
    return path
