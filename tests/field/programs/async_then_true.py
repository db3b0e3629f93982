"""enable_async() and then True returned all the same; listeners are added when the handler has long returned."""

import nsq
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


def handle(message):
    message.enable_async()
    tornado.ioloop.IOLoop.current().call_later(0.01, finish, message)
    return True


def finish(message):
    message.on("finish", log)
    message.finish()


def log(message):
    effect("finished", message.body.decode())


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
