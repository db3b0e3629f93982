"""A pool of threads does the work; answers are handed to the loop, and an executor's future is awaited."""

import concurrent.futures

import nsq
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

pool = concurrent.futures.ThreadPoolExecutor(4)
loop = tornado.ioloop.IOLoop.current()


def handle(message):
    if int(message.body) % 2:
        return loop.run_in_executor(pool, work, message)
    message.enable_async()
    pool.submit(work, message).add_done_callback(lambda _: loop.add_callback(message.finish))
    return None


def work(message):
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
