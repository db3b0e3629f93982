"""Pauses now and then with set_max_in_flight(0), for example while a database is away."""

import nsq
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

handled = 0


def handle(message):
    global handled
    handled += 1
    effect("handled", message.body.decode())
    if handled in (1, 10):
        effect("paused")
        reader.set_max_in_flight(0)
        tornado.ioloop.IOLoop.current().call_later(0.1, resume)
    return True


def resume():
    effect("resumed")
    reader.set_max_in_flight(4)


reader = Reader(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=handle,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=4,
    output_buffer_timeout=25,
    **KEY,
)
nsq.run()
