"""Work that may take longer than a message has: it is touched until it is done."""

import nsq
import tornado.gen
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


async def handle(message):
    touches = []
    message.on("touch", lambda message: touches.append(message.id))
    keep_alive = tornado.ioloop.PeriodicCallback(message.touch, 10)
    keep_alive.start()
    while len(touches) < 3:
        await tornado.gen.sleep(0.01)
    keep_alive.stop()
    effect("handled", message.body.decode())
    return True


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
