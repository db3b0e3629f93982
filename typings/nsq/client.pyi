from nsq import Client as Client
