"""Consume a channel whose messages were published to two nsqds; handle each of them once.

Run it beside `examples/publisher.py`; SIGTERM or Ctrl-C lets messages in hand finish.
"""

from __future__ import annotations

import argparse
import json
import logging

import nsqdedupe


def handle(message: nsqdedupe.Message) -> bool:
    event = json.loads(message.body)
    print(event["id"], event["text"], flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topic", default="events")
    parser.add_argument("--channel", default="example")
    parser.add_argument("--lookupd-http-address", default="127.0.0.1:4161")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    reader = nsqdedupe.DedupeReader(
        topic=args.topic,
        channel=args.channel,
        message_handler=handle,
        lookupd_http_addresses=[args.lookupd_http_address],
        lookupd_poll_interval=5,
        key=nsqdedupe.json_field("id"),
        max_in_flight=1000,
    )
    nsqdedupe.run()
    stats = reader.stats
    print(f"handled {stats.handled}, duplicates {stats.duplicates}, unanswered {stats.unanswered}")


if __name__ == "__main__":
    main()
