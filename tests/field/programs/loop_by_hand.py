"""The loop started by hand and stopped by a signal; the reader is closed when nothing runs any more."""

import signal

import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


def handle(message):
    effect("handled", message.body.decode())
    return True


def stop(number, frame):
    loop.add_callback_from_signal(loop.stop)


loop = tornado.ioloop.IOLoop.instance()
reader = Reader(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=handle,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=20,
    output_buffer_timeout=25,
    **KEY,
)
signal.signal(signal.SIGTERM, stop)
loop.start()
reader.close()
