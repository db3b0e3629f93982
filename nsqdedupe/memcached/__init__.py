"""How claims and buckets lie in memcached, and how it is spoken to: what `stores.memcached` is made of."""
