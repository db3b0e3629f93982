"""Messages are kept and finished many at a time: when the reader is starved, and now and then."""

import nsq
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

kept = []


def keep(message):
    message.enable_async()
    kept.append(message)
    if reader.is_starved():
        write_all()


def write_all():
    batch, kept[:] = kept[:], []
    for message in batch:
        effect("written", message.body.decode())
        message.finish()


reader = Reader(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=keep,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=10,
    output_buffer_timeout=25,
    **KEY,
)
tornado.ioloop.PeriodicCallback(write_all, 100).start()
nsq.run()
