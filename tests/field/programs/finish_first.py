"""The handler finishes its message, goes on working and then returns None, True, False, or breaks."""

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

RESULTS = (None, True, False)


def handle(message):
    number = int(message.body)
    message.finish()
    effect("handled", str(number), str(message.has_responded()))
    if number % 4 == 3:
        raise RuntimeError("too late to matter")
    return RESULTS[number % 4]


Reader(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=handle,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=20,
    output_buffer_timeout=25,
    **KEY,
)
nsq.run()
