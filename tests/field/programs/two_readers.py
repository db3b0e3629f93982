"""Several readers in one process: each channel of the topic has one."""

import functools

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


def handle(name, message):
    effect("handled", name, message.body.decode())
    return True


for name in ("archive", "billing"):
    Reader(
        topic=TOPIC,
        channel=f"{CHANNEL}-{name}",
        message_handler=functools.partial(handle, name),
        nsqd_tcp_addresses=NSQDS,
        max_in_flight=20,
        output_buffer_timeout=25,
        **KEY,
    )
nsq.run()
