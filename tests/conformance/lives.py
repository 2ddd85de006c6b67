"""Scenarios of processes that end and come back, of names, epochs, silence and goodbyes."""

from weightbus.bus.protocol_limits import PUSH_CHUNKS
from weightbus.tests.conformance.decisions import heard_twice_more
from weightbus.tests.conformance.publishing import SMALL, expect
from weightbus.tests.conformance.rules import hold, lose
from weightbus.tests.conformance.stage import EPOCH, Stage
from weightbus.tests.conformance.weights import noise


def publisher_restart(stage: Stage) -> None:
    """follows a publisher that comes back with a greater epoch, and runs on meanwhile"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    stage.publish(noise(stage.chance, SMALL))
    stage.close_publisher()
    again = stage.open()
    stage.wait_joined_again(worker)
    stage.publish(noise(stage.chance, SMALL))
    worker.wait_applied("m", again.epoch, 1)


def publisher_restart_while_receiving(stage: Stage) -> None:
    """drops what was arriving when the publisher was restarted"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    # However slow this machine is, not all of it arrives before the publisher is gone. With keys
    # what is lost would be fetched past the proxy: so all of it comes, but slowly.
    rest = stage.which("chunk", skip=PUSH_CHUNKS)
    seconds = 0.02 if stage.keys is None else 0.1
    slowly = hold(stage.which("chunk"), seconds)
    stage.proxy.rules = [lose(rest), slowly] if stage.keys is None else [slowly]
    stage.proxy.forget()
    many = 2 * PUSH_CHUNKS * stage.chunk_bytes  # more than can be on the way
    stage.submit(noise(stage.chance, many), require=0, timeout=0.5)
    stage.proxy.wait_seen("chunk", count=3)
    stage.close_publisher()
    stage.proxy.rules = []
    again = stage.open()
    worker.wait_event("joined", epoch=again.epoch)
    stage.publish(noise(stage.chance, SMALL))
    expect(not worker.those("applied", version=2), "a version was applied that never arrived")


def worker_restart(stage: Stage) -> None:
    """is killed, started again under its name, let in, and given the newest version"""
    stage.open()
    first = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    first.wait_applied("m", stage.publisher.epoch, 1)  # said later than it is reported
    stage.proxy.rules = [hold(stage.which("chunk"), 0.02)]
    stage.proxy.forget()
    stage.submit(noise(stage.chance, 3 * SMALL), require=0)
    stage.proxy.wait_seen("chunk", count=3)
    first.kill()
    stage.proxy.rules = []
    again = stage.worker(join=False)
    again.wait_applied("m", stage.publisher.epoch, 2)
    stage.publish(noise(stage.chance, SMALL))


def stale_publisher(stage: Stage) -> None:
    """does not follow a publisher of a lower epoch, and says so"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    stage.close_publisher()
    stale = stage.open(epoch=EPOCH - 500)
    stage.publish(noise(stage.chance, SMALL))
    worker.wait_event("refused", code="stale-epoch")
    expect(not worker.those("applied", epoch=stale.epoch), "an outdated publisher was followed")
    stage.close_publisher()
    again = stage.open()
    worker.wait_event("joined", epoch=again.epoch)
    stage.publish(noise(stage.chance, SMALL))


def name_taken(stage: Stage) -> None:
    """is refused a name that another living worker has, and gets it when that has left"""
    stage.open()
    first = stage.worker()
    second = stage.worker(join=False)
    second.wait_event("refused", code="name-taken")
    stage.publish(noise(stage.chance, SMALL))
    expect(not second.those("applied"), "a worker that was refused applied something")
    first.stop()
    second.wait_applied("m", stage.publisher.epoch, 1)
    stage.publish(noise(stage.chance, SMALL))
    second.wait_applied("m", stage.publisher.epoch, 2)


def silent_publisher(stage: Stage) -> None:
    """notices that the publisher is silent, and joins again when it is back"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    stage.proxy.rules = [lose(stage.which())]
    worker.wait_event("lost")
    stage.proxy.forget()
    stage.proxy.rules = []
    stage.proxy.wait_seen("welcome")
    stage.publish(noise(stage.chance, SMALL))
    worker.wait_applied("m", stage.publisher.epoch, 2)


def publisher_forgets(stage: Stage) -> None:
    """says hello again when it is told that it is unknown"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    stage.proxy.forget()
    expect(stage.proxy.cut("control") > 0, "there was no connection to cut")
    stage.proxy.wait_seen("welcome")
    stage.publish(noise(stage.chance, SMALL))
    worker.wait_applied("m", stage.publisher.epoch, 2)


def goodbye(stage: Stage) -> None:
    """ends on SIGTERM with status 0 and a goodbye, even while it is receiving"""
    stage.open()
    worker, other = stage.worker(), stage.worker("other")
    stage.publish(noise(stage.chance, SMALL))
    heard_twice_more(stage, "w")
    stage.proxy.rules = [hold(stage.which("chunk"), 0.02)]
    stage.proxy.forget()
    stage.submit(noise(stage.chance, 5 * SMALL), require=0)
    stage.proxy.wait_seen("chunk", count=3)
    worker.stop()
    stage.proxy.wait_seen("bye", lambda p: p.worker == "w")
    stage.proxy.rules = []
    stage.wait_forgotten("w")
    other.wait_applied("m", stage.publisher.epoch, 2)
