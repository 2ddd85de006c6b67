"""libzmq as the server of CURVE, in the hands of a test: says where it is, and echoes."""

import json
import sys
import threading

import zmq
from zmq.utils import z85

context = zmq.Context()
public, secret = zmq.curve_keypair()
status = sys.argv[1].encode()  # of whoever asks to come in


def zap(asked: zmq.Socket) -> None:
    """Let everybody in, or nobody."""
    while True:
        _, question, *_ = asked.recv_multipart()
        asked.send_multipart([b"1.0", question, status, b"", b"somebody", b""])


asked = context.socket(zmq.REP)
asked.bind("inproc://zeromq.zap.01")
threading.Thread(target=zap, args=(asked,), daemon=True).start()
router = context.socket(zmq.ROUTER)
router.setsockopt(zmq.CURVE_SERVER, 1)
router.setsockopt(zmq.CURVE_SECRETKEY, secret)
router.setsockopt(zmq.ZAP_DOMAIN, b"test")
router.setsockopt(zmq.HEARTBEAT_IVL, 50)
router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 250)
port = router.bind_to_random_port("tcp://127.0.0.1")
print(json.dumps({"port": port, "public": z85.decode(public).hex()}), flush=True)
while True:
    identity, said, *rest = router.recv_multipart()
    size, later = (int(word) for word in said.split())
    router.poll(later)  # milliseconds, in which nothing comes but pings
    router.send_multipart([identity, said, bytes(size), *rest])
