"""A subclass with its own way to find nsqds, an eye on heartbeats, and a switch to disable it."""

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

alive = set()


class Discovering(Reader):
    def query_lookupd(self):
        for address in NSQDS:
            host, port = address.split(":")
            self.connect_to_nsqd(host, int(port))

    def heartbeat(self, conn):
        if conn.id not in alive:
            alive.add(conn.id)
            effect("alive", str(NSQDS.index(conn.id)))

    @classmethod
    def disabled(cls):
        return False


def handle(message):
    effect("handled", message.body.decode())
    return True


Discovering(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=handle,
    lookupd_http_addresses=["discovery.invalid:4161"],
    max_in_flight=20,
    heartbeat_interval=1,
    output_buffer_timeout=25,
    **KEY,
)
nsq.run()
