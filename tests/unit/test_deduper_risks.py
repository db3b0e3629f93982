"""What the state machine does not prevent, as docs/semantics.md says: limits that users should know of."""

from __future__ import annotations

from harness import LEASE, Consumer

from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.testing import ManualClock


def test_a_copy_that_comes_after_more_messages_than_the_table_holds_is_handled_again() -> None:
    clock = ManualClock()
    consumer = Consumer(clock, MemoryStore(slots=32, clock=clock))
    consumer.on_run = lambda _: True
    consumer.deliver("first/a", *(f"{number}/a" for number in range(31)))
    consumer.deliver("first/b")
    assert consumer.did()[-1] == ("FIN unrun", "first/b")
    consumer.deliver("one more/a")
    consumer.deliver("first/B")
    assert consumer.did()[-2:] == [("run", "first/B"), ("FIN", "first/B")]


def test_a_message_that_ends_its_process_is_never_given_up() -> None:
    """No run of it has failed: nobody was left to say so."""
    consumer = Consumer(max_tries=2)
    for number in range(1, 8):
        process = consumer.beside(max_tries=2)
        process.deliver(f"a{number}")
        assert process.did() == [("run", f"a{number}")]
        assert process.deliveries[f"a{number}"].tries == 0
        consumer.clock.advance(LEASE)
