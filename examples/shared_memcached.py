"""One of several consumers on one channel, which share what they know in memcached.

Start it as often as you like, on as many machines: all with the same memcached servers, written alike. Run it beside
`examples/publisher.py`; SIGTERM or Ctrl-C lets messages in hand finish.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging

import nsqdedupe


async def handle(message: nsqdedupe.Message) -> bool:
    event = json.loads(message.body)
    await asyncio.sleep(0.005)  # a query, a request, ...
    print(event["id"], event["text"], flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topic", default="events")
    parser.add_argument("--channel", default="example")
    parser.add_argument("--lookupd-http-address", default="127.0.0.1:4161")
    parser.add_argument("--store", default="memcached://127.0.0.1:11211?window=1000000&recall=0.999&namespace=example")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    reader = nsqdedupe.DedupeReader(
        topic=args.topic,
        channel=args.channel,
        message_handler=handle,
        lookupd_http_addresses=[args.lookupd_http_address],
        lookupd_poll_interval=5,
        key=nsqdedupe.json_field("id"),
        # Window and recall must be the same for all who share the namespace: another number is refused.
        store=nsqdedupe.open_store(args.store),
        max_in_flight=200,
        on_store_error="process",  # while memcached is away: handle, maybe twice. "requeue" waits for it instead
    )
    nsqdedupe.run()
    stats = reader.stats
    print(f"handled {stats.handled}, duplicates {stats.duplicates}, outages {stats.outages}")


if __name__ == "__main__":
    main()
