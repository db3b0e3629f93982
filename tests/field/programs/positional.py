"""Topic, channel and handler by position; the reader is kept in no variable."""

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


def handle(message):
    effect("handled", message.body.decode())
    return True


Reader(TOPIC, CHANNEL, handle, "positional", NSQDS, max_in_flight=20, output_buffer_timeout=25, **KEY)
nsq.run()
