"""The handler is set after the reader was made: an object that is called, with the reader bound to it."""

import functools

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


class Handler:
    def __call__(self, message, reader):
        effect("handled", message.body.decode(), reader.name)
        return 1


reader = Reader(
    topic=TOPIC,
    channel=CHANNEL,
    name="later",
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=20,
    output_buffer_timeout=25,
    **KEY,
)
reader.set_message_handler(functools.partial(Handler(), reader=reader))
nsq.run()
