"""Publishes what it reads to another topic, and finishes each message when nsqd has its successor."""

import functools

import nsq
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


def handle(message):
    message.enable_async()
    publish(message)


def publish(message):
    writer.pub(f"{TOPIC}-out", message.body.upper(), callback=functools.partial(on_published, message))


def on_published(message, conn, data):
    if isinstance(data, nsq.Error):
        tornado.ioloop.IOLoop.current().call_later(0.05, publish, message)
    else:
        effect("published", message.body.decode())
        message.finish()


writer = nsq.Writer(NSQDS[:1])
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
