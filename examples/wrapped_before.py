"""Prints each event. wrapped_after.py differs from wrapped_before.py by two lines, and prints each event once."""

from __future__ import annotations

import sys

import nsq


def handle(message: nsq.Message) -> bool:
    print(message.body.decode(), flush=True)
    return True


def main() -> None:
    nsq.Reader(
        topic="events",
        channel="example",
        message_handler=handle,
        lookupd_http_addresses=sys.argv[1:],
        max_in_flight=1000,
        max_tries=0,
    )
    nsq.run()


if __name__ == "__main__":
    main()
