"""Hooks set on the instance after it was made; preprocessing puts a dict in the place of the body."""

import json

import nsq
from surroundings import CHANNEL, JSON_ID, NSQDS, TOPIC, Reader, effect


def parse(message):
    message.body = json.loads(message.body)
    return message


def is_wanted(message):
    return message.body["kind"] != "unwanted"


def handle(message):
    effect("handled", str(message.body["id"]), message.body["kind"])
    return True


reader = Reader(TOPIC, CHANNEL, handle, nsqd_tcp_addresses=NSQDS, max_in_flight=20, output_buffer_timeout=25, **JSON_ID)
reader.preprocess_message = parse
reader.validate_message = is_wanted
nsq.run()
