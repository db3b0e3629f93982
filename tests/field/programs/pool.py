"""A pool of threads does the work, and each thread answers its own message."""

import concurrent.futures

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

pool = concurrent.futures.ThreadPoolExecutor(4)
failed = set()


def handle(message):
    message.enable_async()
    pool.submit(work, message)


def work(message):
    message.touch()
    if message.body.endswith(b"7") and message.body not in failed:
        failed.add(message.body)
        effect("failed", message.body.decode())
        message.requeue(delay=0, backoff=False)
    else:
        effect("handled", message.body.decode())
        message.finish()


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
